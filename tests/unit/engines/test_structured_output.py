"""Structured output of the engine on transformers: whole answers of the demo model, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.engines.base import EngineError, SamplingParams
from cog_triton.engines.guides import Guides, grammar, without_others
from cog_triton.request.request import Guide, GuideKind, engine_guide
from tests.unit.engines.conftest import ENGINES, Requests, Stream, running

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
ENDLESS = json.dumps(
    {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}b.*"} for i in range(1, 60)]}
)


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

    guided = [ask(JSON_SCHEMA, seed, temperature=1 + seed / 8) for seed in range(16)]
    other = ask()

    answers = [json.loads(text(stream, tokenizer)) for stream in guided]
    for answer in answers:
        jsonschema.validate(answer, SCHEMA)
    assert len({answer["name"] for answer in answers}) > 4
    assert other.wait().ids == alone


@pytest.mark.parametrize(
    ("kind", "guide", "pattern", "wish"),
    [
        ("regex", "[0-9]{4}-[0-9]{2}", r"\d{4}-\d\d", ""),
        ("ebnf_grammar", 'root ::= i ("," i)?\ni ::= [a-c]', "[a-c](,[a-c])?", ""),
        ("choice", '["Rome", "Bonn (DE)"]', r"Rome|Bonn \(DE\)", ""),
        # Classes are ASCII, as Python's re has them with that flag; Unicode's by name.
        ("regex", r"\d{4}", "[0-9]{4}", "٣"),
        ("regex", r"\w{4}", "[a-zA-Z0-9_]{4}", "é"),
        ("regex", r"\p{Lu}{2}", "[^a-z]{2}", "a"),
        ("json_schema", r'{"pattern": "^\\d{3}$", "type": "string"}', '"[0-9]{3}"', "٣"),
    ],
)
def test_every_kind_of_guide(
    ask: Any, tokenizer: Any, kind: str, guide: str, pattern: str, wish: str
) -> None:
    """With a model that would rather write something else."""
    bias = dict.fromkeys(tokenizer(wish, add_special_tokens=False).input_ids, 50.0)
    for seed in range(4):
        made = engine_guide(Guide(GuideKind(kind), guide))
        stream = ask(made, seed, temperature=2.0, logit_bias=bias)
        assert re.fullmatch(pattern, text(stream, tokenizer))


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
    stream = ask(guide, sampling={"min_tokens": 20, "bad_words": (a,)})
    assert text(stream, tokenizer) == "a"


@pytest.mark.parametrize(
    ("kind", "guide", "reason"),
    [
        ("regex", "[", "type regex cannot be used: .*unclosed character class"),
        ("regex", "(?=a)b", "look-around, .* is not supported"),
        ("json_schema", "{", "type json_schema cannot be used: .*column 1"),
        ("json_schema", '{"uniqueItems": true}', r"Unimplemented keys.*uniqueItems"),
        ("json_schema", ENDLESS, "takes more than 2 s to compile"),
        ("ebnf_grammar", "root ::= other", "ebnf_grammar .* Rule 'other' not found"),
        ("ebnf_grammar", "root ::= " + "(" * 9000, "nested too deeply"),
        ("structural_tag", "{}", "structural_tag .* does not support this type"),
    ],
)
def test_what_is_no_guide_is_refused_before_anything_is_generated(
    ask: Any, kind: str, guide: str, reason: str
) -> None:
    assert re.search(reason, refusal(ask(Guide(GuideKind(kind), guide))))


def test_an_end_token_that_is_text_is_the_end_alone(ask: Any, tokenizer: Any) -> None:
    guide = Guide(GuideKind.REGEX, "[0-9]{3}")
    five = tokenizer.convert_tokens_to_ids("5")
    ids = ask(guide, end_id=five, logit_bias={five: 50.0}).wait().ids
    assert ids[-1] == five
    assert re.fullmatch("[0-46-9]{3}", tokenizer.decode(ids[:-1]))
    stream = ask(Guide(GuideKind.REGEX, "5"), end_id=five)
    assert "no token can follow" in refusal(stream)


def test_a_guide_needs_an_end_and_a_fast_tokenizer(
    ask: Any, demo_model: Path, tmp_path: Path
) -> None:
    assert "does not go with ignore_eos or end_id -1" in refusal(ask(JSON_SCHEMA, end_id=None))
    with running(ENGINES["transformers"](demo_model), tokenizer_dir=str(tmp_path)) as engine:
        stream = engine.start(guide=JSON_SCHEMA, end_id=2)
        assert "guided_decoding_guide needs a fast tokenizer" in refusal(stream)


def test_a_guide_that_becomes_too_costly_ends_its_request_alone(ask: Any, llm: Requests) -> None:
    optional = {f"p{i}": {"type": "integer"} for i in range(2000)}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": optional}))
    other = ask(max_tokens=100)
    error = ask(guide).last().error
    assert type(error) is EngineError
    assert "guided_decoding_guide: " in str(error)
    assert other.wait().ids
    assert len(llm.engine.running) == 0


def test_the_checks_process_is_started_again_when_it_was_ended(tokenizer: Any) -> None:
    guides, text = Guides(lambda: tokenizer, 1024), grammar(JSON_SCHEMA)
    assert guides._problem(text) == ""
    guides._check.kill()
    assert "to compile" in guides._problem(text)
    assert guides._problem(text) == ""
    guides.close()
    assert guides._check is None


# What of a schema's objects is closed

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    "schema",
    [
        "CITY",
        '{"type": "array", "items": CITY}',
        '{"type": "object", "additionalProperties": CITY}',
        '{"anyOf": [CITY, {"type": "null"}]}',
        '{"allOf": [CITY]}',
        '{"$ref": "#/$defs/City", "$defs": {"City": CITY}}',
        '{"definitions": {"C": CITY}, "prefixItems": [{"$ref": "#/definitions/C"}]}',
        '{"minProperties": 3, "properties": {"properties": CITY, "const": CITY}}',
    ],
)
def test_an_object_has_its_listed_properties_only(schema: str) -> None:
    closed = json.dumps({**CITY, "additionalProperties": False})
    found = without_others(schema.replace("CITY", json.dumps(CITY)))
    assert json.loads(found) == json.loads(schema.replace("CITY", closed))


@pytest.mark.parametrize(
    "schema",
    [
        {**CITY, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {}},
        {**CITY, "required": ["name", "country"]},
        {**CITY, "minProperties": 3},
        {"enum": [CITY], "default": CITY},
        {"allOf": [CITY, {"properties": {"country": {"type": "string"}}}]},
        {**CITY, "anyOf": [{"properties": {"country": {}}}]},
        {**CITY, "$ref": "#/$defs/Other", "$defs": {"Other": CITY}},
        {"anyOf": [CITY], "required": ["country"]},
        {**CITY, "dependentRequired": {"name": ["country"]}},
        {"oneOf": [CITY, {"properties": {"country": {}}}]},
        {"type": "array", "items": {**CITY, "not": {"properties": {"size": {"const": 1}}}}},
        {**CITY, "if": {"properties": {"size": {"const": 1}}}, "then": {"required": ["country"]}},
        {**CITY, "required": 5},
        [CITY],
    ],
)
def test_what_may_have_other_properties_stays_as_it_is(schema: Any) -> None:
    assert json.loads(without_others(json.dumps(schema))) == schema


@pytest.mark.parametrize("text", ["{", "", '{"properties": {"a": {"maximum": 1e999}}}'])
def test_what_is_not_a_schema_stays_as_it_is(text: str) -> None:
    assert without_others(text) == text
