"""Structured output of the engine on transformers: whole answers of the demo model, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.engines.base import EngineError, EngineUnavailable, SamplingParams, create_engine
from cog_triton.engines.guides import GuideCheck, grammar
from cog_triton.engines.transformers import TransformersEngine
from cog_triton.request.request import Guide, GuideKind, engine_guide
from cog_triton.text.tokenizer import load_tokenizer
from tests.unit.engines.test_engines import ENGINES, Crowded, Requests, Stream

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "count", "colours"],
    "additionalProperties": False,
}
JSON_SCHEMA = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
# Patterns that must all match: no limit of llguidance's ends its compiler.
ENDLESS = Guide(
    GuideKind.JSON_SCHEMA,
    json.dumps({"allOf": [{"type": "string", "pattern": f".*a{{{i}}}b.*"} for i in range(1, 60)]}),
)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[Requests]:
    parameters = ENGINES["transformers"](demo_model)
    engine = create_engine({**parameters, "tokenizer_dir": str(demo_model)})
    yield Requests(engine)
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


@pytest.fixture
def ask(llm: Requests, tokenizer: Any) -> Any:
    """Starts the answer to a question, sampled with a seed."""
    prompt = tokenizer("What is a token?").input_ids

    def start(guide: Guide | None = None, seed: int = 0, **values: Any) -> Stream:
        temperature = values.pop("temperature", 1.0)
        sampling = SamplingParams(temperature, top_p=1.0, seed=seed, **values.pop("sampling", {}))
        end_id = values.pop("end_id", tokenizer.eos_token_id)
        values = {"max_tokens": 200, "sampling": sampling, "end_id": end_id, **values}
        return llm.start(values.pop("prompt", prompt), guide=guide, **values)

    return start


def text(stream: Stream, tokenizer: Any) -> str:
    """Of an answer that came to its end."""
    ids = stream.wait().ids
    assert ids[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(ids[:-1]))


def refusal(stream: Stream) -> str:
    (tokens,) = [stream.next()]
    assert tokens.ids == []
    assert (tokens.finished, tokens.refused) == (True, True)
    return str(tokens.error)


@pytest.mark.parametrize("seed", range(5))
def test_an_object_has_no_properties_but_those_listed(ask: Any, tokenizer: Any, seed: int) -> None:
    """As most clients send their schemas, without additionalProperties."""
    schema = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
    stream = ask(guide, seed=seed, max_tokens=300).wait()
    answer = tokenizer.decode(stream.ids, skip_special_tokens=True)
    assert list(json.loads(answer)) == ["name", "count", "colours"]


def test_sampled_answers_are_of_the_schema_and_leave_others_alone(ask: Any, tokenizer: Any) -> None:
    alone = [ask(seed=seed).wait().ids for seed in range(8)]

    guided = [ask(JSON_SCHEMA, seed, temperature=1 + seed / 8) for seed in range(16)]
    others = [ask(seed=seed) for seed in range(8)]

    answers = [json.loads(text(stream, tokenizer)) for stream in guided]
    for answer in answers:
        jsonschema.validate(answer, SCHEMA)
    assert len({answer["name"] for answer in answers}) > 4
    assert [stream.wait().ids for stream in others] == alone


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        (Guide(GuideKind.REGEX, "[0-9]{4}-[0-9]{2}"), r"\d{4}-\d\d"),
        (Guide(GuideKind.GRAMMAR, 'root ::= item ("," item)?\nitem ::= [a-c]'), "[a-c](,[a-c])?"),
        (Guide(GuideKind.CHOICE, '["Rome", "Bonn (DE)"]'), r"Rome|Bonn \(DE\)"),
    ],
)
def test_every_kind_of_guide(ask: Any, tokenizer: Any, guide: Guide, pattern: str) -> None:
    for seed in range(4):
        answer = text(ask(engine_guide(guide), seed, temperature=2.0), tokenizer)
        assert re.fullmatch(pattern, answer)


@pytest.mark.parametrize(
    "guide",
    [JSON_SCHEMA, Guide(GuideKind.JSON), Guide(GuideKind.JSON_SCHEMA, '{"type": "array"}')],
)
def test_white_space_does_not_take_the_answer(ask: Any, tokenizer: Any, guide: Guide) -> None:
    """Of a model that would write nothing else."""
    blank = {i: 60.0 for word, i in tokenizer.get_vocab().items() if not word.strip("ĠĊĉč▁ ")}
    assert len(blank) > 1
    end = {tokenizer.convert_tokens_to_ids(c): 20.0 for c in "}]"}
    answer = text(ask(guide, logit_bias={**end, **blank}), tokenizer)
    assert not re.search(r"\s\s", re.sub('"[^"]*"', '""', answer))
    json.loads(answer)


@pytest.mark.parametrize(
    ("expression", "wanted", "other"),
    [(r"\d{4}", r"[0-9]{4}", "٣"), (r"\w{4}", "[a-zA-Z0-9_]{4}", "é"), (r"\p{Lu}{2}", None, "a")],
)
def test_classes_of_expressions(
    ask: Any, tokenizer: Any, expression: str, wanted: str | None, other: str
) -> None:
    """ASCII, as Python's re has them with that flag; Unicode's by name."""
    wish = dict.fromkeys(tokenizer(other, add_special_tokens=False).input_ids, 50.0)
    stream = ask(engine_guide(Guide(GuideKind.REGEX, expression)), logit_bias=wish)
    answer = text(stream, tokenizer)
    assert answer.isupper() if wanted is None else re.fullmatch(wanted, answer)


def test_patterns_of_a_schema_are_ascii_as_well(ask: Any, tokenizer: Any) -> None:
    wish = dict.fromkeys(tokenizer("٣", add_special_tokens=False).input_ids, 50.0)
    schema = {"type": "string", "pattern": r"^\d{3}$"}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
    assert re.fullmatch('"[0-9]{3}"', text(ask(guide, logit_bias=wish), tokenizer))


def test_any_json_object(ask: Any, tokenizer: Any) -> None:
    # The model is no writer of JSON: it takes a bracket or the end wherever the guide allows one.
    brackets = {tokenizer.convert_tokens_to_ids(token): 1000.0 for token in "{}"}
    bias = {**brackets, tokenizer.eos_token_id: 1000.0}
    assert text(ask(Guide(GuideKind.JSON), logit_bias=bias), tokenizer) == "{}"


def test_an_answer_that_is_cut_off_is_the_beginning_of_one(ask: Any, tokenizer: Any) -> None:
    stream = ask(JSON_SCHEMA, max_tokens=5).wait()
    assert len(stream.ids) == 5
    assert text(ask(JSON_SCHEMA), tokenizer).startswith(tokenizer.decode(stream.ids))


def test_a_continuation_goes_on_in_its_guide(ask: Any, tokenizer: Any) -> None:
    whole = ask(JSON_SCHEMA, seed=3).wait().ids
    prompt = tokenizer("What is a token?").input_ids

    rest = ask(JSON_SCHEMA, seed=3, prompt=[*prompt, *whole[:7]], continued=7).wait().ids

    assert rest == whole[7:]
    other = tokenizer("no JSON", add_special_tokens=False).input_ids
    stream = ask(JSON_SCHEMA, prompt=[*prompt, *other], continued=len(other))
    assert "does not allow the output that is continued" in refusal(stream)


def test_a_request_that_is_set_back_goes_on_in_its_guide(
    demo_model: Path, tokenizer: Any, llm: Requests
) -> None:
    crowded = Crowded(demo_model, tokenizer_dir=str(demo_model))
    prompt, end_id = tokenizer("What is a token?").input_ids * 4, tokenizer.eos_token_id
    values: dict[str, Any] = {
        "input_ids": prompt,
        "guide": Guide(GuideKind.REGEX, "([a-z]{1,4}, )*[a-z]{1,4}[.]"),
        "max_tokens": 150,
        "end_id": end_id,
        "logit_bias": {end_id: -30.0, tokenizer.convert_tokens_to_ids("."): -30.0},
    }
    samplings = [SamplingParams(top_p=1.0, seed=seed) for seed in range(5)]
    streams = [crowded.requests.start(**values, sampling=s) for s in samplings]
    wanted = [llm.start(**values, sampling=s) for s in samplings]

    for stream, other in zip(streams, wanted, strict=True):
        answer = tokenizer.decode(stream.wait().ids)
        assert re.fullmatch("([a-z]{1,4}, )*[a-z]{0,4},? ?", answer)
        assert stream.ids == other.wait().ids
    assert crowded.resets > 0
    crowded.engine.close()


def test_the_guide_goes_before_bad_words_and_the_minimum(ask: Any, tokenizer: Any) -> None:
    guide = Guide(GuideKind.REGEX, "a")
    a = tuple(tokenizer("a", add_special_tokens=False).input_ids)
    stream = ask(guide, sampling={"min_tokens": 20, "bad_words": (a,)})
    assert text(stream, tokenizer) == "a"


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(GuideKind.REGEX, "["), "type regex cannot be used: .*unclosed character class"),
        (Guide(GuideKind.REGEX, "(?=a)b"), "look-around, .* is not supported"),
        (Guide(GuideKind.JSON_SCHEMA, "{"), "type json_schema cannot be used: .*column 1"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "rhyme"}'), "Invalid type: rhyme"),
        (Guide(GuideKind.JSON_SCHEMA, '{"uniqueItems": true}'), r"Unimplemented keys.*uniqueItems"),
        (Guide(GuideKind.GRAMMAR, "root ::= other"), "ebnf_grammar .* Rule 'other' not found"),
        (Guide(GuideKind.GRAMMAR, "root ::= " + "(" * 9000), "nested too deeply"),
        (Guide(GuideKind.STRUCTURAL_TAG, "{}"), "structural_tag .* does not support this type"),
        (ENDLESS, "takes more than 2 s to compile"),
    ],
)
def test_what_is_no_guide_is_refused_before_anything_is_generated(
    ask: Any, guide: Guide, reason: str
) -> None:
    assert re.search(reason, refusal(ask(guide)))


def test_an_end_token_that_is_text_is_the_end_alone(ask: Any, tokenizer: Any) -> None:
    guide = Guide(GuideKind.REGEX, "[0-9]{3}")
    five = tokenizer.convert_tokens_to_ids("5")
    ids = ask(guide, end_id=five, logit_bias={five: 50.0}).wait().ids
    assert ids[-1] == five
    assert re.fullmatch("[0-46-9]{3}", tokenizer.decode(ids[:-1]))
    stream = ask(Guide(GuideKind.REGEX, "5"), end_id=five)
    assert "no token can follow" in refusal(stream)


def test_a_guide_needs_an_end(ask: Any) -> None:
    assert "does not go with ignore_eos or end_id -1" in refusal(ask(JSON_SCHEMA, end_id=None))


def test_a_guide_that_becomes_too_costly_ends_its_request_alone(ask: Any, llm: Requests) -> None:
    optional = {f"p{i}": {"type": "integer"} for i in range(2000)}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": optional}))
    other = ask(max_tokens=100)
    stream = ask(guide)
    while not (last := stream.next()).finished:
        pass
    assert last.refused
    assert "guided_decoding_guide: " in str(last.error)
    assert other.wait().ids
    assert llm.engine.active() == 0


def test_an_abort_while_a_guide_is_compiled(llm: Requests, ask: Any) -> None:
    stream = ask(Guide(ENDLESS.kind, ENDLESS.text + " "), key="aborted")
    llm.engine.abort("aborted")
    assert llm.engine.active() == 0
    ask(JSON_SCHEMA).wait()  # compiled after it
    assert stream.all == []


def test_without_a_tokenizer_there_are_no_guides(demo_model: Path) -> None:
    engine = create_engine(ENGINES["transformers"](demo_model))
    assert isinstance(engine, TransformersEngine)
    assert "guided_decoding" not in engine.features
    with pytest.raises(EngineError, match="does not support guided_decoding_guide"):
        Requests(engine).start(guide=JSON_SCHEMA, end_id=2)
    engine.close()


def test_a_closed_engine_takes_no_guides(demo_model: Path) -> None:
    parameters = ENGINES["transformers"](demo_model)
    engine = create_engine({**parameters, "tokenizer_dir": str(demo_model)})
    engine.close()
    with pytest.raises(EngineUnavailable, match="the engine has stopped"):
        Requests(engine).start(guide=JSON_SCHEMA, end_id=2)


def test_a_tokenizer_that_cannot_be_used_is_the_reason(demo_model: Path, tmp_path: Path) -> None:
    parameters = ENGINES["transformers"](demo_model)
    engine = create_engine({**parameters, "tokenizer_dir": str(tmp_path)})
    stream = Requests(engine).start(guide=JSON_SCHEMA, end_id=2)
    assert "guided_decoding_guide needs a fast tokenizer" in refusal(stream)
    engine.close()


def test_the_checks_process_is_started_again_when_it_was_ended() -> None:
    check = GuideCheck()
    assert check.problem(grammar(JSON_SCHEMA)) == ""
    assert check._process is not None
    check._process.kill()
    assert "to compile" in check.problem(grammar(JSON_SCHEMA))
    assert check.problem(grammar(JSON_SCHEMA)) == ""
    check.close()
    assert check._process is None
