"""Structured output of the engine on transformers: whole answers of the demo model, and what is refused."""

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from cog_triton.engines.base import (
    EngineError,
    EngineUnavailable,
    GenerationRequest,
    SamplingParams,
)
from cog_triton.engines.grammars import grammar, without_others
from cog_triton.engines.guides import Guided, Guides
from cog_triton.request.guide import Guide, GuideKind, engine_guide
from tests.engines import ENGINES, Requests, Stream, request, running
from tests.late import transformers
from tests.support import ROOT

SCHEMA: dict[str, Any] = {
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
PATTERNS = [{"type": "string", "pattern": f".*a{{{i}}}b.*"} for i in range(1, 60)]


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
    last = stream.last()
    assert (stream.ids, type(last.error)) == ([], EngineError)
    return str(last.error)


def test_sampled_answers_are_of_the_schema_and_leave_others_alone(ask: Any, tokenizer: Any) -> None:
    alone = ask().wait().ids

    guided = [ask(JSON_SCHEMA, seed, temperature=1 + seed / 8) for seed in range(8)]
    other = ask()

    answers = [json.loads(text(stream, tokenizer)) for stream in guided]
    for answer in answers:
        jsonschema.validate(answer, SCHEMA)
    assert len({answer["name"] for answer in answers}) > 4
    assert other.wait().ids == alone


@pytest.mark.parametrize(
    ("guide", "pattern", "wish"),
    [
        pytest.param(
            Guide(GuideKind.REGEX, "[0-9]{4}-[0-9]{2}"), r"\d{4}-\d\d", "", id="regular expression"
        ),
        pytest.param(
            Guide(GuideKind.GRAMMAR, 'root ::= i ("," i)?\ni ::= [a-c]'),
            "[a-c](,[a-c])?",
            "",
            id="grammar",
        ),
        pytest.param(
            Guide(GuideKind.CHOICE, '["Rome", "Bonn (DE)"]'), r"Rome|Bonn \(DE\)", "", id="choice"
        ),
        # Classes are ASCII, as Python's re has them with that flag; Unicode's by name.
        pytest.param(Guide(GuideKind.REGEX, r"\d{4}"), "[0-9]{4}", "٣", id="digits"),
        pytest.param(Guide(GuideKind.REGEX, r"\w{4}"), "[a-zA-Z0-9_]{4}", "é", id="letters"),
        pytest.param(Guide(GuideKind.REGEX, r"\p{Lu}{2}"), "[^a-z]{2}", "a", id="class of Unicode"),
        pytest.param(
            Guide(GuideKind.JSON_SCHEMA, r'{"pattern": "^\\d{3}$", "type": "string"}'),
            '"[0-9]{3}"',
            "٣",
            id="pattern in a schema",
        ),
    ],
)
def test_every_kind_of_guide(
    ask: Any, tokenizer: Any, guide: Guide, pattern: str, wish: str
) -> None:
    """With a model that would rather write something else."""
    wished = tokenizer(wish, add_special_tokens=False).input_ids
    bias = dict.fromkeys(wished, 50.0)
    streams = [
        ask(engine_guide(guide), seed, temperature=2.0, logit_bias=bias) for seed in range(4)
    ]
    for stream in streams:
        assert re.fullmatch(pattern, text(stream, tokenizer))


@pytest.mark.parametrize(
    "guide", [JSON_SCHEMA, Guide(GuideKind.JSON), Guide(GuideKind.JSON_SCHEMA, '{"type": "array"}')]
)
def test_white_space_does_not_take_the_answer(ask: Any, tokenizer: Any, guide: Guide) -> None:
    """Of a model that would write nothing else."""
    blank = {i: 60.0 for word, i in tokenizer.get_vocab().items() if not word.strip("ĠĊĉč▁ ")}
    assert len(blank) > 1
    end = {tokenizer.convert_tokens_to_ids(c): 20.0 for c in "}]"}
    answer = text(ask(guide, logit_bias={**end, **blank}), tokenizer)
    assert not re.search(r"\s\s", re.sub('"[^"]*"', '""', answer))
    json.loads(answer)


def test_a_continuation_goes_on_in_its_guide(ask: Any, tokenizer: Any) -> None:
    whole = ask(JSON_SCHEMA, seed=3).wait().ids
    prompt = tokenizer("What is a token?").input_ids

    rest = ask(JSON_SCHEMA, seed=3, prompt=[*prompt, *whole[:7]], continued=7).wait().ids

    assert rest == whole[7:]
    other = tokenizer("no JSON", add_special_tokens=False).input_ids
    stream = ask(JSON_SCHEMA, prompt=[*prompt, *other], continued=len(other))
    assert "does not allow the output that is continued" in refusal(stream)


def test_the_guide_goes_before_bad_words_and_the_minimum(ask: Any, tokenizer: Any) -> None:
    guide = Guide(GuideKind.REGEX, "a")
    a = tuple(tokenizer("a", add_special_tokens=False).input_ids)
    assert text(ask(guide, sampling={"min_tokens": 20, "bad_words": (a,)}), tokenizer) == "a"


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        pytest.param(
            Guide(GuideKind.REGEX, "["),
            "type regex cannot be used: .*unclosed character class",
            id="no regular expression",
        ),
        pytest.param(
            Guide(GuideKind.REGEX, "(?=a)b"), "look-around, .* is not supported", id="look-ahead"
        ),
        pytest.param(
            Guide(GuideKind.JSON_SCHEMA, "{"),
            "type json_schema cannot be used: .*column 1",
            id="no JSON",
        ),
        pytest.param(
            Guide(GuideKind.JSON_SCHEMA, '{"uniqueItems": true}'),
            "Unimplemented keys.*uniqueItems",
            id="keyword that is not known",
        ),
        pytest.param(
            Guide(GuideKind.GRAMMAR, "root ::= other"),
            "ebnf_grammar .* Rule 'other' not found",
            id="rule that is not there",
        ),
        pytest.param(
            Guide(GuideKind.STRUCTURAL_TAG, "{}"),
            "structural_tag .* does not support this type",
            id="structural tag",
        ),
        pytest.param(
            Guide(GuideKind.JSON_SCHEMA, json.dumps({"allOf": PATTERNS})),
            "takes more than 2 s to compile",
            id="schema that takes long",
        ),
        pytest.param(
            Guide(GuideKind.GRAMMAR, "root ::= " + "(" * 9000),
            "nested too deeply",
            id="grammar that is deep",
        ),
    ],
)
def test_what_is_no_guide_is_refused_before_any_token(ask: Any, guide: Guide, reason: str) -> None:
    assert re.search(reason, refusal(ask(guide)))


def test_an_end_token_that_is_text_is_the_end_alone(ask: Any, tokenizer: Any) -> None:
    guide = Guide(GuideKind.REGEX, "[0-9]{3}")
    five = tokenizer.convert_tokens_to_ids("5")
    ids = ask(guide, end_id=five, logit_bias={five: 50.0}).wait().ids
    assert ids[-1] == five
    assert re.fullmatch("[0-46-9]{3}", tokenizer.decode(ids[:-1]))
    assert "no token can follow" in refusal(ask(Guide(GuideKind.REGEX, "5"), end_id=five))


def test_any_end_token_is_allowed_where_the_guide_ends_and_only_there(
    ask: Any, tokenizer: Any
) -> None:
    guide = Guide(GuideKind.REGEX, "[0-9]{3}")
    five = tokenizer.convert_tokens_to_ids("5")
    ids = ask(guide, other_end_ids=(five,), logit_bias={five: 50.0}).wait().ids
    assert ids[-1] == five
    assert re.fullmatch("[0-46-9]{3}", tokenizer.decode(ids[:-1]))


def test_a_guide_needs_an_end_and_a_tokenizer(ask: Any, demo_model: Path, tmp_path: Path) -> None:
    assert "cannot be combined with ignore_eos or end_id -1" in refusal(
        ask(JSON_SCHEMA, end_id=None)
    )
    with running(ENGINES["transformers"](demo_model), tokenizer_dir=str(tmp_path)) as engine:
        stream = engine.start(guide=JSON_SCHEMA, end_id=2)
        assert "guided_decoding_guide: the model's tokenizer cannot be loaded" in refusal(stream)


def unreadable(tokenizer: Any) -> str:
    guides = Guides(lambda: tokenizer, 1024)
    try:
        with pytest.raises(EngineError) as caught:
            guides.begin(GenerationRequest("a", [1], 5, end_id=2, guide=JSON_SCHEMA), [1])
    finally:
        guides.close()
    return str(caught.value)


def test_a_tokenizer_that_guides_cannot_read_is_named_with_the_reason() -> None:
    no_decoder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=no_decoder, eos_token="</s>")
    error = unreadable(fast)
    assert "llguidance cannot read the model's tokenizer (" in error
    assert "fast tokenizer" not in error
    slow = SimpleNamespace(is_fast=False)
    assert "guides need a fast tokenizer, one with a tokenizer.json" in unreadable(slow)


def test_a_guide_that_becomes_too_costly_ends_its_request_alone(ask: Any, llm: Requests) -> None:
    optional = {f"p{i}": {"type": "integer"} for i in range(2000)}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": optional}))
    other = ask(max_tokens=100)
    error = ask(guide).last().error
    assert type(error) is EngineError
    assert "guided_decoding_guide: " in str(error)
    assert other.wait().ids
    assert len(llm.engine.running) == 0


def test_a_trial_keeps_within_the_hard_limits_of_its_process() -> None:
    """As in a job of Slurm or after ulimit: raising a hard limit takes the rights of root."""
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (50, 100))\n"
        "from cog_triton.engines import grammar_trials\n"
        "grammar_trials.main()\n"
        "assert resource.getrlimit(resource.RLIMIT_CPU)[1] == 100\n"
    )
    command = [sys.executable, "-c", program]
    text = json.dumps('start: "a"')
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == '""'


def test_the_checks_process_is_started_again_when_it_was_ended(tokenizer: Any) -> None:
    guides, text = Guides(lambda: tokenizer, 1024), grammar(JSON_SCHEMA)
    trials = guides._trials
    assert trials.problem(text) == ""
    (process,) = trials._idle
    process.kill()
    assert "to compile" in trials.problem(text)
    assert trials.problem(text) == ""
    guides.close()
    assert trials._idle == []


def test_no_guide_waits_while_another_is_compiled(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guides = Guides(lambda: tokenizer, 1024)
    slow, quick = Guide(GuideKind.REGEX, "slow"), Guide(GuideKind.REGEX, "quick")
    began, may_end = threading.Event(), threading.Event()
    problem, tried = guides._trials.problem, list[str]()

    def trial(text: str) -> str:
        tried.append(text)
        if "slow" in text:
            began.set()
            assert may_end.wait(60)
        return problem(text)

    monkeypatch.setattr(guides._trials, "problem", trial)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(guides.begin, request(end_id=2, guide=slow), [5]) for _ in range(2)]
        assert began.wait(60)
        try:
            for _ in range(2):
                guides.begin(request(end_id=2, guide=quick), [5])
            assert not any(future.done() for future in waiting)
        finally:
            may_end.set()
        assert all(future.result(60).matcher for future in waiting)
    assert len(tried) == 2  # each once
    guides.close()


def test_a_guide_whose_compilation_broke_is_compiled_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guides = Guides(lambda: tokenizer, 1024)
    with monkeypatch.context() as patch:
        patch.setattr(guides._trials, "problem", Mock(side_effect=OSError(12, "Cannot allocate")))
        with pytest.raises(OSError, match="Cannot allocate"):
            guides.begin(request(end_id=2, guide=JSON_SCHEMA), [5])
    assert guides.begin(request(end_id=2, guide=JSON_SCHEMA), [5]).matcher
    guides.close()


@pytest.mark.parametrize("broken", ["one sequence", "all masks"])
def test_masks_that_cannot_be_computed_end_the_requests_with_guides_alone(
    ask: Any, llm: Requests, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.ids(max_tokens=40)
    target = Guided if broken == "one sequence" else Guides
    method = "consume_new_tokens" if broken == "one sequence" else "masks"
    with monkeypatch.context() as patch:
        patch.setattr(target, method, Mock(side_effect=RuntimeError("llguidance broke")))
        guided = ask(JSON_SCHEMA)
        plain = llm.start(max_tokens=40)
        error = guided.last().error
        assert plain.wait().ids == expected
    assert type(error) is EngineUnavailable
    assert "llguidance broke" in str(error)
    assert ask(JSON_SCHEMA).wait()
    assert not llm.engine.running


# What of a schema's objects is closed


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(CITY, id="alone"),
        pytest.param({"type": "array", "items": CITY}, id="in a list"),
        pytest.param({"type": "object", "additionalProperties": CITY}, id="as any property"),
        pytest.param({"anyOf": [CITY, {"type": "null"}]}, id="or null"),
        pytest.param({"allOf": [CITY]}, id="alone of all"),
        pytest.param({"$ref": "#/$defs/City", "$defs": {"City": CITY}}, id="by reference"),
        pytest.param(
            {"definitions": {"C": CITY}, "prefixItems": [{"$ref": "#/definitions/C"}]},
            id="by reference in a list",
        ),
        pytest.param(
            {"minProperties": 3, "properties": {"properties": CITY, "const": CITY}},
            id="of properties with names of keywords",
        ),
    ],
)
def test_an_object_has_its_listed_properties_only(schema: Any) -> None:
    text = json.dumps(schema)
    closed = {**CITY, "additionalProperties": False}
    expected = text.replace(json.dumps(CITY), json.dumps(closed))
    assert json.loads(without_others(text)) == json.loads(expected)


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(
            {**CITY, "additionalProperties": {"type": "string"}}, id="properties of another type"
        ),
        pytest.param({"type": "object", "properties": {}}, id="no properties"),
        pytest.param(
            {**CITY, "required": ["name", "country"]}, id="required property that is not listed"
        ),
        pytest.param({**CITY, "minProperties": 3}, id="more properties than are listed"),
        pytest.param({"enum": [CITY], "default": CITY}, id="values and defaults"),
        pytest.param(
            {"allOf": [CITY, {"properties": {"country": {"type": "string"}}}]}, id="all of two"
        ),
        pytest.param(
            {**CITY, "anyOf": [{"properties": {"country": {}}}]}, id="any of others beside it"
        ),
        pytest.param(
            {**CITY, "$ref": "#/$defs/Other", "$defs": {"Other": CITY}}, id="reference beside it"
        ),
        pytest.param(
            {"anyOf": [CITY], "required": ["country"]}, id="required property outside of it"
        ),
        pytest.param(
            {**CITY, "dependentRequired": {"name": ["country"]}},
            id="property that another requires",
        ),
        pytest.param({"oneOf": [CITY, {"properties": {"country": {}}}]}, id="one of two"),
        pytest.param(
            {"type": "array", "items": {**CITY, "not": {"properties": {"size": {"const": 1}}}}},
            id="what it must not be",
        ),
        pytest.param(
            {
                **CITY,
                "if": {"properties": {"size": {"const": 1}}},
                "then": {"required": ["country"]},
            },
            id="conditions",
        ),
        pytest.param({**CITY, "required": 5}, id="required that is no list"),
        pytest.param([CITY], id="list in place of a schema"),
    ],
)
def test_what_may_have_other_properties_stays_as_it_is(schema: Any) -> None:
    assert json.loads(without_others(json.dumps(schema))) == schema


@pytest.mark.parametrize("text", ["{", "", '{"properties": {"a": {"maximum": 1e999}}}'])
def test_what_is_not_a_schema_stays_as_it_is(text: str) -> None:
    assert without_others(text) == text


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("path", "any/text at all", True),
        ("password", "x", True),
        ("cuid2", "x", True),
        ("date", "2026-11-28", True),
        ("date", "tomorrow", False),
    ],
)
def test_a_format_that_is_not_known_is_an_annotation(name: str, text: str, fits: bool) -> None:
    properties = {"a": {"type": "string", "format": name}}
    nested = {"type": "object", "properties": properties}
    defined = {"$defs": properties, **properties["a"]}
    for schema in (nested, defined):
        compiled = grammar(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
        assert LLMatcher.validate_grammar(compiled) == ""
    string = json.dumps(properties["a"])
    matcher = LLMatcher(LLTokenizer("byte"), grammar(Guide(GuideKind.JSON_SCHEMA, string)))
    assert matcher.consume_tokens(list(json.dumps(text).encode())) is fits
