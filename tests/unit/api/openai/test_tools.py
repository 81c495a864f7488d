"""Tool calls and thoughts in a model's text: the same blocks, however the text is cut."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.api.openai.chats.call_guides import call_guide
from cog_triton.api.openai.chats.tool_use import ToolUse, tool_use
from cog_triton.api.openai.chats.turn import Turn
from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.tools import Function, Tool
from cog_triton.api.openai.tool_calls.blocks import THINK, AnswerStart, Block, Parser
from cog_triton.api.openai.tool_calls.format import Format
from cog_triton.api.openai.tool_calls.formats import FORMATS, format_of, new_parser
from cog_triton.engines.grammars import grammar
from cog_triton.generation import Chunk
from cog_triton.request.request import Guide, Request
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import load_tokenizer
from tests.unit.api.openai.support import MESSAGES

HERMES = FORMATS["hermes"]
MISTRAL = FORMATS["mistral"]
PYTHON = FORMATS["python"]
LLAMA = FORMATS["llama"]
END = Chunk("", 0, None, "stop")


@dataclass(frozen=True)
class Call:
    """A call that was read of a text; where the model gave it no id, they are numbered."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Thinking:
    """Thoughts that were read of a text."""

    text: str


Content = str | Thinking | Call
WEATHER = Call("id0", "weather", '{"city": "Paris, {Texas}"}')
TIME = Call("id1", "time", "{}")


def parser(known: Format, prompt: str | None = None, *, guided: bool = False) -> Parser:
    numbers = itertools.count()
    start = AnswerStart(
        prompt=prompt or "",
        thoughts=None if prompt is None else THINK,
        new_id=lambda: f"id{next(numbers)}",
    )
    return new_parser(known, start, "calls" if guided else None)


def feed(reader: Parser, text: str) -> list[str]:
    return [piece for _, piece in reader.read(Chunk(text, 0, None))]


def read(reader: Parser, texts: Iterable[str]) -> list[Content]:
    """What is in an answer that comes in pieces."""
    pieces = [piece for text in texts for piece in reader.read(Chunk(text, 0, None))]
    pieces += reader.read(END)
    assert all(text or block.kind == "call" for block, text in pieces)
    return [content(block) for block in reader.blocks]


def content(block: Block) -> Content:
    if block.kind == "call":
        return Call(block.id, block.name, block.text)
    return block.text if block.kind == "text" else Thinking(block.text)


@pytest.mark.parametrize(
    ("known", "text", "contents"),
    [
        pytest.param(
            HERMES,
            (
                "Let me see.\n"
                "\n"
                "<tool_call>\n"
                '{"name": "weather", "arguments": {"city": "Paris, {Texas}"}}\n'
                "</tool_call>\n"
                "<tool_call>\n"
                '{"name": "time", "arguments": {}}\n'
                "</tool_call>\n"
            ),
            [
                "Let me see.",
                Call("id0", "weather", '{"city": "Paris, {Texas}"}'),
                Call("id1", "time", "{}"),
            ],
            id="hermes: text and two calls",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"arguments": {"a": "}"}, "name": "f"}',
            [Call("id0", "f", '{"a": "}"}')],
            id="hermes: arguments before the name",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "f"}</tool_call>',
            [Call("id0", "f", "{}")],
            id="hermes: no arguments",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"a": 1}</tool_call> so',
            ['<tool_call>{"a": 1}</tool_call> so'],
            id="hermes: marks around no call",
        ),
        pytest.param(
            HERMES, "<tool_call>nothing", ["<tool_call>nothing"], id="hermes: mark before no JSON"
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "f", "argu',
            ['<tool_call>{"name": "f", "argu'],
            id="hermes: cut off in a key",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "f", "arguments": {}, "b": "}{"}</tool_call>',
            [Call("id0", "f", "{}")],
            id="hermes: another key behind the arguments",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "f", "arguments": oops}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": oops}</tool_call>'],
            id="hermes: arguments that are no JSON",
        ),
        pytest.param(
            HERMES,
            r'<tool_call>{"name": "\q"}</tool_call>',
            [r'<tool_call>{"name": "\q"}</tool_call>'],
            id="hermes: name that is no JSON",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "b',
            [Call("id0", "f", '{"a": "b')],
            id="hermes: cut off in the arguments",
        ),
        # Thoughts come only at the beginning.
        pytest.param(
            HERMES,
            "<think>\nHm.\n</think>\n\nYes.",
            [Thinking("Hm."), "Yes."],
            id="hermes: thoughts and text",
        ),
        pytest.param(
            HERMES, "Yes, <think>", ["Yes, <think>"], id="hermes: thoughts that come late"
        ),
        pytest.param(
            HERMES,
            "<think>cut off </thi",
            [Thinking("cut off </thi")],
            id="hermes: thoughts that are cut off",
        ),
        pytest.param(HERMES, "<think>\n\n</think>\n\nYes.", ["Yes."], id="hermes: empty thoughts"),
        pytest.param(HERMES, " <", [" <"], id="hermes: beginning of a mark"),
        pytest.param(
            HERMES,
            '<think>Hm.</think>\n<tool_call>{"name": "f"}',
            [Thinking("Hm."), Call("id0", "f", "{}")],
            id="hermes: thoughts and a call",
        ),
        pytest.param(
            MISTRAL,
            (
                '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[}"}}, {"name": "time", '
                '"arguments": {}}]'
            ),
            [Call("id0", "f", '{"a": "[}"}'), Call("id1", "time", "{}")],
            id="mistral: list of calls",
        ),
        # The mark is a special token, which does not come as text.
        pytest.param(
            MISTRAL,
            '[{"name": "f", "arguments": {"a": "[}"}}]',
            [Call("id0", "f", '{"a": "[}"}')],
            id="mistral: list without its mark",
        ),
        pytest.param(
            MISTRAL,
            '[{"city": "Paris"}] is a list',
            ['[{"city": "Paris"}] is a list'],
            id="mistral: list of other objects",
        ),
        # The newer form: names, ids of the model's own, and only the arguments.
        pytest.param(
            MISTRAL,
            'Well.[TOOL_CALLS]f[ARGS]{"a": "[}"}[TOOL_CALLS]time[ARGS]{}',
            ["Well.", Call("id0", "f", '{"a": "[}"}'), Call("id1", "time", "{}")],
            id="mistral: names and arguments",
        ),
        pytest.param(
            MISTRAL,
            '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": "[}"}',
            [Call("abc123", "f", '{"a": "[}"}')],
            id="mistral: id of the model's own",
        ),
        pytest.param(
            MISTRAL,
            '[TOOL_CALLS]get-w.2{"a": "}"}time{}',
            [Call("id0", "get-w.2", '{"a": "}"}'), Call("id1", "time", "{}")],
            id="mistral: names without marks of arguments",
        ),
        pytest.param(
            MISTRAL,
            '[TOOL_CALLS]f[ARGS]{"a": "b',
            [Call("id0", "f", '{"a": "b')],
            id="mistral: cut off in the arguments",
        ),
        pytest.param(
            MISTRAL,
            "[TOOL_CALLS]nothing of it {}",
            ["[TOOL_CALLS]nothing of it {}"],
            id="mistral: mark before no call",
        ),
        pytest.param(
            MISTRAL,
            "[TOOL_CALLS]f[ARGS]",
            ["[TOOL_CALLS]f[ARGS]"],
            id="mistral: name without arguments",
        ),
        pytest.param(
            MISTRAL,
            "[TOOL_CALLS]f[ARGS]{} and so",
            [Call("id0", "f", "{}"), "and so"],
            id="mistral: text behind a call",
        ),
        pytest.param(
            MISTRAL, "weather[ARGS]{}", ["weather[ARGS]{}"], id="mistral: call without its mark"
        ),
        pytest.param(
            LLAMA,
            '{"name": "f", "parameters": {"a": "};{"}}; {"name": "time", "parameters": {}}',
            [Call("id0", "f", '{"a": "};{"}'), Call("id1", "time", "{}")],
            id="llama: two calls",
        ),
        pytest.param(
            LLAMA,
            ' {"type": "function", "name": "f", "parameters": {"a": "}"}}',
            [Call("id0", "f", '{"a": "}"}')],
            id="llama: call with a type",
        ),
        pytest.param(
            LLAMA,
            '<|python_tag|>{"name": "f", "arguments": {"a": "}"}}',
            [Call("id0", "f", '{"a": "}"}')],
            id="llama: mark before a call",
        ),
        pytest.param(
            LLAMA,
            r'{"name": "f", "parameters": "{\"a\": \"é\"}"}',
            [Call("id0", "f", '{"a": "é"}')],
            id="llama: arguments in a text",
        ),
        pytest.param(PYTHON, "[time()]", [Call("id0", "time", "{}")], id="python: no arguments"),
        pytest.param(
            PYTHON,
            ' [ w( city = "Paris, {Texas})]" , days=[1, 2], now=True), a.time ( )]\n',
            [
                Call("id0", "w", '{"city": "Paris, {Texas})]", "days": [1, 2], "now": true}'),
                Call("id1", "a.time", "{}"),
            ],
            id="python: arguments of many kinds, and spaces",
        ),
        pytest.param(
            PYTHON,
            r"[f(a='it\'s', b=-1.5, c={'d': None, 'e': (1, 2)}, f=true, g=null,)]",
            [
                Call(
                    "id0",
                    "f",
                    '{"a": "it\'s", "b": -1.5, "c": {"d": null, "e": [1, 2]}, "f": true, "g": null}',
                )
            ],
            id="python: escapes, and JSON's words",
        ),
    ],
)
def test_a_text_and_its_calls(known: Format, text: str, contents: list[Content]) -> None:
    check_contents(known, text, contents)


def check_contents(known: Format, text: str, contents: list[Content]) -> None:
    """Check what is read of a text that comes at once, and letter by letter."""
    assert read(parser(known, ""), [text]) == contents
    assert read(parser(known, ""), text) == contents


@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_a_text_without_calls(known: Format) -> None:
    for text in ("Just text, <tool or not.\n", '{"answer": 42}', 'In {"name": "x"} there is', "["):
        check_contents(known, text, [text])


@pytest.mark.parametrize(
    "text",
    [
        "  ",
        "[]",
        "[1, 2]",
        "[a link](http://x)",
        "[f](x)",
        "[f(x)]",
        "[f(1)]",
        "f(a=1)",
        "[f(a=b)]",
        "[f(a=1+x)]",
        "[f(**{})]",
        "[f(a=g())]",
        "[f(a={1})]",
        "[f(a=b'x')]",
        "[f(a=1e999)]",
        "[f(a=)]",
        "[f(a=1)",
        "[f(a='x",
        "[f(a=1)] is a call",
        "[f(a=1}]",
        "[f()]\n\n[g()]",
        "Call [f()]",
        "[for(a=1)]",
        "[f(a=1)]]",
        "[the (old) man]",
        pytest.param(f"[f(a={'(' * 5000}{')' * 5000})]", id="deep nesting"),
        pytest.param(f"[f(a={'9' * 5000})]", id="long number"),
    ],
)
def test_a_text_that_is_no_list_of_calls_in_python(text: str) -> None:
    check_contents(PYTHON, text, [text])


def test_thoughts_that_the_prompt_began() -> None:
    opened = parser(HERMES, "<|assistant|><think>\n")
    assert read(opened, "Hm. </think>Yes.") == [Thinking("Hm."), "Yes."]
    assert read(parser(HERMES), "<think>Hm.") == ["<think>Hm."]  # of a model that does not think


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    reader = parser(HERMES)
    assert feed(reader, '<tool_call>{"name": "f", "arg') == []
    assert feed(reader, 'uments": {"a": 1') == ["", '{"a": 1']
    assert feed(reader, '2, "b"') == ['2, "b"']
    reader = parser(PYTHON)
    assert feed(reader, "[see") == []
    assert feed(reader, " the") == ["[see the"]
    assert feed(reader, "[f()]") == ["[f()]"]
    assert reader.read(END) == []


def test_marks_that_are_special_tokens_are_read(demo_model: Path) -> None:
    """As Mistral's tokenizers have them: what skips special tokens loses them."""
    tokenizer = load_tokenizer(str(demo_model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MISTRAL.special_tokens)})
    text = (
        f"Well.[TOOL_CALLS]weather[ARGS]{WEATHER.arguments}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{{}}"
    )
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    detokenizer = IncrementalDetokenizer(tokenizer, shown=MISTRAL.special_tokens)
    pieces = [detokenizer.decode([token]) for token in ids] + [detokenizer.flush()]
    assert read(parser(MISTRAL), pieces) == ["Well.", WEATHER, Call("abc", "time", "{}")]
    assert "[ARGS]" not in IncrementalDetokenizer(tokenizer).decode(ids, final=True)


@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_a_guided_text_is_all_calls(known: Format) -> None:
    """The guide is JSON whatever the model writes by itself; a text that was cut off is no text."""
    calls = [
        f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in (WEATHER, TIME)
    ]
    text = f"[{', '.join(calls)}]"
    assert read(parser(known, guided=True), text) == [WEATHER, TIME]
    one = calls[0].replace("arguments", "parameters")
    assert read(parser(known, guided=True), [one]) == [WEATHER]
    for end in range(len(text)):
        blocks = read(parser(known, guided=True), [text[:end]])
        assert all(isinstance(block, Call) for block in blocks), text[:end]
    # Of an engine that does not keep to the guide.
    text = f"Well.<tool_call>{calls[0]}</tool_call>"
    assert read(parser(HERMES, guided=True), text) == ["Well.", WEATHER]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"),
        *("[ARGS]", "[CALL_ID]", "abc123xyz", "[f(", "a=", "'", ")", ",", "g()"),
        *('{"name": "f"', ', "arguments": {"a": [1, "}"]}', ', "parameters": {}', "}", "{", "["),
        *("]", ";", " ", "\n", "text", "<", "\\", '"', "é"),
    ]
)
PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: parser(HERMES),
    "mistral": lambda: parser(MISTRAL),
    "llama3": lambda: parser(LLAMA),
    "python": lambda: parser(PYTHON),
    "guided": lambda: parser(LLAMA, guided=True),
    "thinking": lambda: Parser(AnswerStart(thoughts=THINK)),
    "thinking and calls": lambda: parser(HERMES, "<think>\n"),
}


@pytest.mark.parametrize("make", PARSERS.values(), ids=PARSERS)
@given(parts=st.lists(st.lists(PIECES, max_size=4).map("".join), max_size=4))
def test_the_cuts_of_a_text_change_nothing(make: Callable[[], Parser], parts: list[str]) -> None:
    assert read(make(), parts) == read(make(), "".join(parts)) == read(make(), ["".join(parts)])


def test_the_format_is_that_of_the_chat_template() -> None:
    assert format_of("{{ messages }}") is None
    assert format_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of("{{ tools }}[AVAILABLE_TOOLS] [TOOL_CALLS]") is MISTRAL
    assert format_of("{{ tools }}[func_name1(params_name1=params_value1)]") is PYTHON
    assert format_of('{{ tools }}{"name": f, "parameters": {}}') is LLAMA
    assert len(MISTRAL.new_id()) == 9  # as its template takes them
    assert HERMES.new_id().startswith("call_")


# Some of their schemas refer to parts of themselves.
WEATHER_TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "$defs": {"City": {"type": "string"}},
    },
}
TIME_TOOL = {"name": "time"}
TREE_TOOL = {
    "name": "tree",
    "parameters": {
        "type": "object",
        "properties": {"size": {"$ref": "#/definitions/Size"}, "below": {"$ref": "#"}},
        "additionalProperties": False,
        "definitions": {"Size": {"type": "integer"}},
    },
}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER_TOOL, TIME_TOOL, TREE_TOOL)]


def body(**fields: object) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": MESSAGES, **fields})


def guide(known: Format, **fields: object) -> Guide:
    asked = body(tools=TOOLS, **fields)
    return call_guide(tool_use(asked), known, parallel=asked.parallel_tool_calls is not False)


def valid(asked: Guide, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(json.loads(asked.text)).is_valid(value))


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        pytest.param("weather", {"city": "Paris"}, True, id="right arguments"),
        pytest.param("weather", {"city": 1}, False, id="argument of another type"),
        pytest.param("time", {}, True, id="tool without parameters"),
        pytest.param("other", {}, False, id="unknown tool"),
        pytest.param(
            "tree", {"size": 3, "below": {"size": 4}}, True, id="right arguments by references"
        ),
        pytest.param(
            "tree",
            {"below": {"size": "Paris"}},
            False,
            id="argument of another type by a reference",
        ),
    ],
)
def test_a_required_call_is_one_of_the_tools(name: str, arguments: object, right: bool) -> None:
    asked = guide(HERMES, tool_choice="required")
    one, time = {"name": name, "arguments": arguments}, {"name": "time", "arguments": {}}
    assert valid(asked, [one]) is valid(asked, [one, time]) is right
    assert not valid(asked, [])
    assert not valid(asked, one)
    assert not valid(guide(HERMES, tool_choice="required", parallel_tool_calls=False), [one, time])
    assert llguidance.LLMatcher.validate_grammar(grammar(asked)) == ""  # the embedded engine's


def test_a_named_call_is_that_tool_with_the_names_of_the_models_format() -> None:
    asked = guide(LLAMA, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert valid(asked, {"name": "weather", "parameters": {"city": "Paris"}})
    assert not valid(asked, {"name": "time", "parameters": {}})


def test_which_tools_are_offered() -> None:
    assert len(tool_use(body(tools=TOOLS)).offered) == 3
    for asked in (body(tools=TOOLS, tool_choice="none"), body(), body(tool_choice="none")):
        assert tool_use(asked).offered == []
    assert not tool_use(body(tools=TOOLS, tool_choice="auto")).enforced
    other = {"type": "function", "function": {"name": "other"}}
    for wrong in (body(tool_choice="required"), body(tools=TOOLS, tool_choice=other)):
        with pytest.raises(ApiError, match="tool_choice") as raised:
            tool_use(wrong)
        assert raised.value.param == "tool_choice"


def test_functionary_gets_its_first_recipient_where_the_prompt_ends() -> None:
    """The template ends the prompt with the mark of a message; the answer begins with the recipient."""
    tool = Tool(type="function", function=Function(name="weather"))
    turn = Turn(
        request=Request(prompt="…<|start_header_id|>assistant<|end_header_id|>\n\n>>>", seed=None),
        use=ToolUse([tool]),
        call_format=FORMATS["functionary"],
        thoughts=None,
    )
    reader = turn.parser()
    reader.read(Chunk('weather\n{"city": "Paris"}', 0, None, "stop"))
    assert [(block.name, block.text) for block in reader.whole_calls()] == [
        ("weather", '{"city": "Paris"}')
    ]
