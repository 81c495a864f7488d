"""Calls as each family of models writes them, however the text is cut, and what only looks like one."""

import itertools
import json
from typing import Any

import pytest

from cog_triton.api.openai.tool_calls.argument_values import typed_value
from cog_triton.api.openai.tool_calls.blocks import (
    _THOUGHTS,
    THINK,
    AnswerStart,
    Parser,
    Thoughts,
    thoughts_of,
)
from cog_triton.api.openai.tool_calls.formats import (
    DEFAULT_FORMAT,
    FORMATS,
    format_of,
    new_parser,
)
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
    (
        "function_tags",
        "Qwen3-Coder without the mark before a call",
        "So.\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "So.",
        [PARIS, TIME],
    ),
    (
        "function_tags",
        "Functionary v3.1",
        '<function=weather>{"city": "Paris", "days": 2}</function><function=time>{}</function>',
        "",
        [PARIS, TIME],
    ),
    (
        "function_tags",
        "MiniCPM5",
        '<function name="weather"><param name="city"><![CDATA[Paris]]></param>'
        '<param name="days">2</param></function>\n<function name="time"></function>',
        "",
        [PARIS, TIME],
    ),
    (
        "seed",
        "Seed-OSS",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        "",
        [PARIS],
    ),
    (
        "gemma",
        "Gemma 4",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:time{}<tool_call|>",
        "",
        [PARIS, TIME],
    ),
    (
        "gemma",
        "Gemma 4, values in values",
        '<|tool_call>call:f{a:{b:[<|"|>x, }<|"|>,1,true],<|"|>c<|"|>:null}}<tool_call|>',
        "",
        [("f", {"a": {"b": ["x, }", 1, True], "c": None}})],
    ),
    (
        "deepseek",
        "without the mark before the calls",
        "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [PARIS],
    ),
    (
        "deepseek_v4",
        "V4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        [PARIS],
    ),
    (
        "kimi",
        "without the mark before the calls",
        '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris", "days": 2}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [PARIS],
    ),
    (
        "solar",
        "Solar Open",
        "<|tool_calls|><|tool_call:begin|>abc<|tool_call:name|>weather<|tool_call:args|>"
        '{"city": "Paris", "days": 2}<|tool_call:end|><|calls|>',
        "",
        [PARIS],
    ),
    (
        "step",
        "Step 3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
        '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="days">2'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        "",
        [PARIS],
    ),
    (
        "minimax_m3",
        "M3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Paris'
        "]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
        "]<]minimax[>[</tool_call>",
        "",
        [PARIS],
    ),
    (
        "hunyuan",
        "Hunyuan 3",
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris"
        "</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>time<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "",
        [PARIS, TIME],
    ),
    (
        "apertus",
        "Apertus",
        '<|tools_prefix|>[{"weather": {"city": "Paris", "days": 2}}, {"time": {}}]<|tools_suffix|>',
        "",
        [PARIS, TIME],
    ),
    (
        "lfm",
        "LFM 2",
        "<|tool_call_start|>[weather(city='Paris', days=2), time()]<|tool_call_end|>Done.",
        "Done.",
        [PARIS, TIME],
    ),
    (
        "olmo",
        "OLMo 3",
        "<function_calls>\nweather(city='Paris', days=2)\ntime()\n</function_calls>",
        "",
        [PARIS, TIME],
    ),
    (
        "longcat",
        "LongCat",
        '<longcat_tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
        "</longcat_tool_call>",
        "",
        [PARIS],
    ),
    (
        "functools",
        "Phi-4-mini, by vLLM's template",
        'functools[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]',
        "",
        [PARIS],
    ),
    (
        "function_call",
        "Granite 20B",
        '<function_call> {"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '<function_call> {"name": "time", "arguments": {}}',
        "",
        [PARIS, TIME],
    ),
    (
        "gigachat",
        "GigaChat 3.1",
        '<|function_call|>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}',
        "",
        [PARIS],
    ),
    (
        "command_r_plus",
        "Command R+",
        'Plan.\nAction:\n```json\n[\n{"tool_name": "weather", '
        '"parameters": {"city": "Paris", "days": 2}}\n]```',
        "Plan.",
        [PARIS],
    ),
    (
        "functionary",
        "v3.2",
        '>>>all\nLet me >>> see.>>>weather\n{"city": "Paris", "days": 2}>>>time\n{}',
        "Let me >>> see.",
        [PARIS, TIME],
    ),
    (
        "harmony",
        "gpt-oss, with the recipient first",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}<|call|>',
        "",
        [PARIS],
    ),
    (
        "python",
        "Llama 4, with a line break and a value without its name",
        "[weather('Paris', days=2), time()]",
        "",
        [PARIS, TIME],
    ),
    (
        "llama",
        "Llama 3.1, a list",
        '[{"name": "weather", "parameters": {"city": "Paris", "days": 2}}, '
        '{"name": "time", "parameters": {}}]',
        "",
        [PARIS, TIME],
    ),
    (
        "unknown",
        "xLAM",
        '[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "time", "arguments": {}}]',
        "",
        [PARIS, TIME],
    ),
]


def parsed(
    name: str, parts: list[str], reason: Any = "stop", prompt: str | None = None, **chunk: Any
) -> Parser:
    numbers = itertools.count()
    start = AnswerStart(
        prompt=prompt or "",
        thoughts=None if prompt is None else THINK,
        schemas=SCHEMAS,
        new_id=lambda: f"id{next(numbers)}",
    )
    parser = new_parser(FORMATS[name], start)
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
        pytest.param(
            "{'city': 'it\\'s \"x\"', 'now': True}", {"city": 'it\'s "x"', "now": True}, id="Python"
        ),
        pytest.param(
            '{"now": None, "tags": [False]}', {"now": None, "tags": [False]}, id="its names"
        ),
        pytest.param('{"city": "\\u12 \\u00e9"}', {"city": "\\u12 é"}, id="half of an escape"),
        pytest.param(
            '{"city": "</tool_call> <|im_end|>"}', {"city": "</tool_call> <|im_end|>"}, id="marks"
        ),
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


@pytest.mark.parametrize("arguments", ['{"city": "Paris" "days": 2}', '{"city": "say "hi" now"}'])
def test_arguments_that_are_no_json_make_no_call(arguments: str) -> None:
    text = f'So: <tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    parser = parsed("hermes", [text])
    assert parser.whole_calls() == []
    assert parser.answer_text() == text
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


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("function_tags", "<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>"),
        ("hermes", "weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"),
    ],
)
def test_marks_within_an_argument_are_text(name: str, argument: str) -> None:
    value = 'x = "</tool_call><tool_call>"\n\n</function>\n  é'
    text = "<tool_call>" + argument.format(value) + "</tool_call> So."
    for parts in cuts(text):
        parser = parsed(name, parts)
        assert calls_of(parser) == [("weather", {"city": value})]
        assert parser.text("text") == "So."


def test_an_argument_without_an_end_ends_with_the_call() -> None:
    text = "<tool_call><function=weather><parameter=city>Paris</function></tool_call> So."
    for parts in cuts(text):
        parser = parsed("function_tags", parts)
        assert calls_of(parser) == [("weather", {"city": "Paris"})]
        assert parser.text("text") == "So."


@pytest.mark.parametrize("known", _THOUGHTS, ids=lambda known: known.opening)
def test_thoughts_between_the_marks_of_a_family(known: Thoughts) -> None:
    assert thoughts_of(f"{{{{ x }}}}{known.opening}{known.closing}") is known
    text = f"{known.opening}\nHm.\n{known.closing}\nYes."
    for parts in cuts(text):
        parser = new_parser(FORMATS["hermes"], AnswerStart(thoughts=known))
        for part in parts:
            parser.read(Chunk(part, 0, None))
        parser.read(Chunk("", 0, None, "stop"))
        assert parser.text("thoughts") == "Hm."
        assert parser.text("text") == "Yes."


@pytest.mark.parametrize("name", ["hermes", "function_tags", "piped", "lfm", "python", "harmony"])
def test_the_time_for_a_long_answer_grows_with_its_length(name: str) -> None:
    """What is held is looked at with each piece, so that little may be."""
    text = next(row[2] for row in ANSWERS if row[0] == name)
    held = 0
    parser = new_parser(FORMATS[name], AnswerStart(schemas=SCHEMAS))
    long = "x" * 5_000
    for part in cuts(text.replace("Paris", long))[2]:
        parser.read(Chunk(part, 0, None))
        held = max(held, len(parser._held))
    parser.read(Chunk("", 0, None, "stop"))
    assert calls_of(parser)[0] == ("weather", {"city": long, "days": 2})
    assert held < 1000


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "time", "arguments": {}}}',
        '\n```json\n{"name": "time", "arguments": {}}\n```\n',
        "{'name': 'time', 'arguments': {}}",
        '{"arguments": "{}", "name": "time"}',
    ],
    ids=["a brace too many", "a block of code", "Python", "arguments as a text"],
)
def test_calls_that_are_written_almost_as_they_should_be(written: str) -> None:
    for parts in cuts(f"<tool_call>{written}</tool_call>"):
        parser = parsed("hermes", parts)
        assert calls_of(parser) == [TIME]
        assert parser.text("text") == ""


def test_a_tag_without_a_tools_name_is_text_in_thoughts() -> None:
    text = "I could write <function=x> or <tool_call>.</think>Yes."
    for parts in cuts(text):
        parser = parsed("function_tags", parts, prompt="<think>")
        assert parser.text("thoughts") == "I could write <function=x> or <tool_call>."
        assert parser.text("text") == "Yes."


def test_calls_behind_the_first_are_left_out_where_only_one_is_asked_for() -> None:
    parser = new_parser(FORMATS["hermes"], AnswerStart(schemas=SCHEMAS, max_calls=1))
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    pieces = parser.read(Chunk(call + call, 0, None, "stop"))
    assert {block.index for block, _ in pieces} == {0}
    assert calls_of(parser) == [TIME]
    assert parser.ends_with_calls


def test_half_of_a_surrogate_pair_can_be_sent() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>weather:0"
        '<|tool_call_argument_begin|>{"city": "\\ud83d"}'
    )
    (call,) = parsed("kimi", [text]).whole_calls()
    assert call.text.encode() == b'{"city": "\\ud83d"}'


@pytest.mark.parametrize("value", ["NaN", "1e999", "Infinity"])
def test_numbers_that_json_does_not_have_are_texts(value: str) -> None:
    assert typed_value(value, {"type": "number"}) == value


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


def test_a_template_without_a_sign_is_taken_for_hermes_or_bare_json() -> None:
    assert format_of("{{ tools }}") is DEFAULT_FORMAT is FORMATS["unknown"]
    assert format_of("{{ messages }}") is None
