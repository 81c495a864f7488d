"""Calls as each family of models writes them, however the text is cut, and what only looks like one."""

import itertools
import json
from typing import Any

import pytest

from cog_triton.faces.openai.parsing import DEFAULT_FORMAT, FORMATS, Parser, format_of
from cog_triton.faces.openai.written_calls import typed_value
from cog_triton.generation import Chunk

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "now": {"type": "boolean"},
            "tags": {"type": "array"},
        },
    },
    "time": {"type": "object", "properties": {}},
}
PARIS = ("weather", {"city": "Paris", "days": 2})
TIME: tuple[str, dict[str, Any]] = ("time", {})

# By the name of the format: the answer, the text in it, and the calls.
ANSWERS: list[tuple[str, str, str, str, list[Any]]] = [
    (
        "hermes",
        "Qwen3-Coder",
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "Let me see.",
        [PARIS],
    ),
    (
        "hermes",
        "GLM 4.5",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        "",
        [PARIS, TIME],
    ),
    (
        "hermes",
        "a list of calls behind the mark",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "time", "arguments": {}}]</tool_call>',
        "",
        [PARIS, TIME],
    ),
    (
        "deepseek",
        "V3 and R1",
        "See:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
        "time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "See:",
        [PARIS, TIME],
    ),
    (
        "deepseek",
        "V3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, TIME],
    ),
    (
        "deepseek_tags",
        "V3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [PARIS],
    ),
    (
        "kimi",
        "K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [PARIS, TIME],
    ),
    (
        "minimax",
        "M2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [PARIS],
    ),
    (
        "tool_calls",
        "MiniMax M1, line by line",
        '<tool_calls>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '{"name": "time", "arguments": {}}\n</tool_calls>',
        "",
        [PARIS, TIME],
    ),
    (
        "tool_calls",
        "Hunyuan, a list",
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]</tool_calls>',
        "",
        [PARIS],
    ),
    (
        "piped",
        "Granite 3, without a closing mark",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]',
        "",
        [PARIS],
    ),
    (
        "piped",
        "Phi-4-mini",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]<|/tool_call|>',
        "",
        [PARIS],
    ),
    (
        "nemotron",
        "Nemotron",
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]</TOOLCALL>',
        "",
        [PARIS],
    ),
    (
        "command",
        "Command R7B",
        '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Paris", "days": 2}}\n]<|END_ACTION|>',
        "",
        [PARIS],
    ),
    (
        "command_r",
        "Command R",
        'Action: ```json\n[{"tool_name": "weather", "parameters": {"city": "Paris", "days": 2}}]\n```',
        "",
        [PARIS],
    ),
    (
        "internlm",
        "InternLM",
        "So:<|action_start|><|plugin|>\n"
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}<|action_end|>',
        "So:",
        [PARIS],
    ),
    (
        "function_gemma",
        "FunctionGemma",
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        "",
        [PARIS],
    ),
    (
        "harmony",
        "gpt-oss",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
        "Let me see.",
        [PARIS],
    ),
    (
        "mistral",
        "v11 and later",
        'Well.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]time[ARGS]{}',
        "Well.",
        [PARIS, TIME],
    ),
    (
        "llama",
        "Llama 3.1",
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [PARIS],
    ),
]


def parsed(
    name: str, parts: list[str], reason: Any = "stop", prompt: str | None = None, **chunk: Any
) -> Parser:
    numbers = itertools.count()
    parser = FORMATS[name].parser(lambda: f"id{next(numbers)}", prompt, schemas=SCHEMAS)
    for part in parts:
        parser.read(Chunk(part, 0, None))
    parser.read(Chunk("", 0, None, reason, **chunk))
    return parser


def cuts(text: str) -> list[list[str]]:
    """The text whole, letter by letter, in threes, and cut in two at some places."""
    threes = [text[place : place + 3] for place in range(0, len(text), 3)]
    halves = [[text[:place], text[place:]] for place in range(1, len(text), 7)]
    return [[text], list(text), threes, *halves]


def calls_of(parser: Parser) -> list[Any]:
    return [(block.name, json.loads(block.text)) for block in parser.whole_calls()]


@pytest.mark.parametrize(
    ("name", "text", "shown", "calls"),
    [pytest.param(row[0], *row[2:], id=f"{row[0]}: {row[1]}") for row in ANSWERS],
)
def test_calls_of_a_family(name: str, text: str, shown: str, calls: list[Any]) -> None:
    for parts in cuts(text):
        parser = parsed(name, parts)
        assert calls_of(parser) == calls
        assert parser.text("text") == shown
        assert parser.ends_with_calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(row[0], row[3][: len(row[3]) * 3 // 4], id=f"{row[0]}: {row[1]}")
        for row in ANSWERS
        if row[4] == [PARIS]
    ],
)
def test_a_call_that_is_cut_off_is_no_call(name: str, text: str) -> None:
    for parts in cuts(text):
        for reason, stop in (("length", None), ("stop", "x")):
            parser = parsed(name, parts, reason, stop_sequence=stop)
            assert calls_of(parser) == []
            assert not parser.ends_with_calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "A call begins with <tool_call> and ends with </tool_call> here."),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"a": 1}</tool_call> so'),
        ("hermes", "<tool_call>unknown\n</tool_call>"),
        ("hermes", "<tool_call><function=weather>x</function> and more</tool_call>"),
        ("mistral", "The mark [TOOL_CALLS] begins calls."),
        ("mistral", '[{"name": "Ada"}, {"name": "Alan"}]'),
        ("llama", '{"name": "Ada", "born": 1815}'),
        ("llama", '{"name": "Ada", "parameters": {"born": 1815}}'),
        ("kimi", "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
        ("tool_calls", "<tool_calls>see below</tool_calls> ok"),
        ("harmony", "Plain text, without channels."),
    ],
)
def test_what_is_no_call_is_text_as_it_was_written(name: str, text: str) -> None:
    for parts in cuts(text):
        parser = parsed(name, parts)
        assert parser.text("text") == text
        assert parser.calls == 0


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        pytest.param('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}, id="line feeds and tabs"),
        pytest.param('{"city": "Paris",}', {"city": "Paris"}, id="a comma too many"),
        pytest.param('{"tags": [1, 2,], "days": 2}', {"tags": [1, 2], "days": 2}, id="in a list"),
        pytest.param('{"tags": [1, 2', {"tags": [1, 2]}, id="brackets that are missing"),
        pytest.param('{"city": "\\q"}', {"city": "\\q"}, id="an escape that JSON does not know"),
        pytest.param('{"city": "a, ]} b"}', {"city": "a, ]} b"}, id="brackets in a text"),
    ],
)
@pytest.mark.parametrize("outer", ["}", ""], ids=["closed", "not closed"])
def test_small_mistakes_are_mended(written: str, arguments: Any, outer: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {written}{outer}</tool_call> So.'
    for parts in cuts(text):
        parser = parsed("hermes", parts)
        assert calls_of(parser) == [("weather", arguments)]
        assert parser.text("text") == "So."


def test_arguments_that_are_no_json_make_no_call() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris" "days": 2}}</tool_call>'
    parser = parsed("hermes", [text])
    assert parser.whole_calls() == []
    assert parser.broken_text() + parser.text("text") == text
    assert not parser.ends_with_calls


def test_a_call_ends_thoughts_that_were_left_open() -> None:
    text = 'I need it.\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for parts in cuts(text):
        parser = parsed("hermes", parts, prompt="<think>\n")
        assert parser.text("thoughts") == "I need it."
        assert calls_of(parser) == [TIME]
    mention = "I could write <tool_call> here.</think>Yes."
    for parts in cuts(mention):
        parser = parsed("hermes", parts, prompt="<think>\n")
        assert parser.text("thoughts") == "I could write <tool_call> here."
        assert parser.text("text") == "Yes."


def test_channels_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, <b>.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes."
    )
    for parts in cuts(text):
        parser = parsed("harmony", parts)
        assert parser.text("thoughts") == "Hm, <b>."
        assert parser.text("text") == "Yes."


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("2", {"type": "integer"}, 2),
        ("2", {"type": "string"}, "2"),
        ("2", {"type": ["string", "null"]}, "2"),
        ("null", {"type": ["string", "null"]}, None),
        ("True", {"type": "boolean"}, True),
        ("2.5", {"anyOf": [{"type": "number"}, {"type": "null"}]}, 2.5),
        ("None", {"anyOf": [{"type": "number"}, {"type": "null"}]}, None),
        ('["a"]', {"type": "array"}, ["a"]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("Paris", {"type": "integer"}, "Paris"),
        ("Paris", None, "Paris"),
        ("2", None, 2),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
    ],
)
def test_a_text_becomes_a_value_of_the_schemas_type(text: str, schema: Any, value: Any) -> None:
    assert typed_value(text, schema) == value
    assert type(typed_value(text, schema)) is type(value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_is_known_by_a_sign(name: str) -> None:
    for sign in FORMATS[name].signs:
        assert format_of(f"{{{{ tools }}}} {sign}") is FORMATS[name]


def test_a_template_without_a_sign_is_taken_for_hermes() -> None:
    assert format_of("{{ tools }}") is DEFAULT_FORMAT is FORMATS["hermes"]
    assert format_of("{{ messages }}") is None
