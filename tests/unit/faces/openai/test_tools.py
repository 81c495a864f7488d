"""Tool calls and thoughts in a model's text: the same events, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.engines.guides import grammar
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.fields import ChatBody
from cog_triton.faces.openai.parsing import (
    HERMES,
    LLAMA,
    MISTRAL,
    PYTHON,
    Arguments,
    CallStart,
    Event,
    Format,
    Parser,
    Reasoning,
    ReasoningParser,
    Text,
    format_of,
)
from cog_triton.faces.openai.turns import call_guide, tool_use
from cog_triton.request.request import Guide
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import load_tokenizer

WEATHER = '{"city": "Paris, {Texas}", "days": [1, 2]}'


def parser(known: Format, *, guided: bool = False) -> Parser:
    numbers = itertools.count()
    return known.parser(lambda: f"id{next(numbers)}", guided=guided)


def python_parser() -> Parser:
    return parser(PYTHON)


def read(reader: Parser, pieces: Sequence[str]) -> list[Event]:
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined([*events, *reader.flush()])


def joined(events: Sequence[Event]) -> list[Event]:
    """The events, with neighbours of one kind as one."""
    result: list[Event] = []
    for event in events:
        assert isinstance(event, CallStart) or event.text
        last = result[-1] if result else None
        if type(last) is type(event) and not isinstance(event, CallStart):
            result[-1] = replace(last, text=last.text + event.text)  # type: ignore
        else:
            result.append(event)
    return result


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, f"id{index}", name), Arguments(index, arguments)]


TWO = [*call(0, "weather", WEATHER), *call(1, "time", "{}")]
WEATHER_CALL = f'{{"name": "weather", "arguments": {WEATHER}}}'
TIME_CALL = '{"name": "time", "arguments": {}}'
CUT: list[Event] = [CallStart(0, "id0", "f"), Arguments(0, '{"a": "b')]
PLAIN = ["Just text, <tool or not.\n", '{"answer": 42}', 'In {"name": "x"} there is', "["]
CASES: dict[Format, list[tuple[str, list[Event]]]] = {
    HERMES: [
        (
            f"Let me see.\n\n<tool_call>\n{WEATHER_CALL}\n</tool_call>\n"
            f"<tool_call>\n{TIME_CALL}\n</tool_call>\n",
            [Text("Let me see."), *TWO],
        ),
        ('<tool_call>{"arguments": {"a": "}"}, "name": "f"}', call(0, "f", '{"a": "}"}')),
        ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"a": 1}</tool_call> so', [Text('{"a": 1} so')]),
        ("<tool_call>nothing", [Text("nothing")]),
        ('<tool_call>{"name": "f", "argu', [CallStart(0, "id0", "f")]),
        ('<tool_call>{"name": "f", "arguments": {}, "b": "}{"}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": oops}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "\\q"}</tool_call>', [Text('{"name": "\\q"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', CUT),
    ],
    MISTRAL: [
        (f"[TOOL_CALLS] [{WEATHER_CALL}, {TIME_CALL}]", TWO),
        # The marker is a special token, which does not come as text.
        (f"[{WEATHER_CALL}]", call(0, "weather", WEATHER)),
        ('[{"city": "Paris"}] is a list', [Text('[{"city": "Paris"}] is a list')]),
        # Mistral's newer form: names, ids of the model's own, and only the arguments.
        (
            f"Let me see.[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]time[ARGS]{{}}",
            [Text("Let me see."), *TWO],
        ),
        (
            f"[TOOL_CALLS]weather[CALL_ID]abc123xyz[ARGS]{WEATHER}",
            [CallStart(0, "abc123xyz", "weather"), Arguments(0, WEATHER)],
        ),
        (
            '[TOOL_CALLS]get-w.2{"a": "}"}time{}',
            [*call(0, "get-w.2", '{"a": "}"}'), *call(1, "time", "{}")],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": "b', CUT),
        ("[TOOL_CALLS]nothing of it {}", [Text("nothing of it {}")]),
        ("[TOOL_CALLS]f[ARGS]", [Text("f[ARGS]")]),
        ("[TOOL_CALLS]f[ARGS]{} and so", [*call(0, "f", "{}"), Text("and so")]),
        ("weather[ARGS]{}", [Text("weather[ARGS]{}")]),
    ],
    LLAMA: [
        (f"{WEATHER_CALL}; {TIME_CALL}".replace("arguments", "parameters"), TWO),
        (
            f' {{"type": "function", "name": "weather", "parameters": {WEATHER}}}',
            call(0, "weather", WEATHER),
        ),
        (f"<|python_tag|>{WEATHER_CALL}", call(0, "weather", WEATHER)),
        ('{"name": "f", "parameters": "{\\"a\\": \\"é\\"}"}', call(0, "f", '{"a": "é"}')),
    ],
}


@pytest.mark.parametrize(
    ("known", "text", "events"),
    [
        *((known, text, events) for known, cases in CASES.items() for text, events in cases),
        *((known, text, [Text(text)]) for known in CASES for text in PLAIN),
    ],
)
def test_a_text_and_its_calls(known: Format, text: str, events: list[Event]) -> None:
    assert read(parser(known), [text]) == events
    assert read(parser(known), list(text)) == events


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[time()]", [("time", {})]),
        (
            ' [ weather( city = "Paris, {Texas})]" , days=[1, 2], now=True), a.time ( )]\n',
            [
                ("weather", {"city": "Paris, {Texas})]", "days": [1, 2], "now": True}),
                ("a.time", {}),
            ],
        ),
        (
            "[f(a='it\\'s', b=-1.5, c={'d': None, 'e': (1, 2)}, f=true, g=null,)]",
            [("f", {"a": "it's", "b": -1.5, "c": {"d": None, "e": [1, 2]}, "f": True, "g": None})],
        ),
    ],
)
def test_calls_written_as_python(text: str, calls: list[tuple[str, Any]]) -> None:
    events = [
        event
        for index, (name, arguments) in enumerate(calls)
        for event in call(index, name, json.dumps(arguments))
    ]
    assert read(python_parser(), [text]) == read(python_parser(), list(text)) == events


NOT_CALLS = (
    *("", "  ", "[", "[]", "[1, 2]", "[a link](http://x)", "[f](x)", "[f(x)]", "[f(1)]", "f(a=1)"),
    *("[f(a=b)]", "[f(a=1+x)]", "[f(**{})]", "[f(a=g())]", "[f(a={1})]", "[f(a=b'x')]"),
    *("[f(a=1e999)]", "[f(a=)]", "[f(a=1)", "[f(a='x", "[f(a=1)] is a call", "[f(a=1}]"),
    *("[f()]\n\n[g()]", "Call [f()]", "[for(a=1)]", "[f(a=1)]]", "[the (old) man]"),
    *(f"[f(a={'(' * 5000}{')' * 5000})]", f"[f(a={'9' * 5000})]"),
)


@pytest.mark.parametrize("text", NOT_CALLS)
def test_what_is_no_python_call_is_text(text: str) -> None:
    expected = [Text(text)] if text else []
    assert read(python_parser(), [text]) == read(python_parser(), list(text)) == expected


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    reader = python_parser()
    assert reader.feed("[see") == []
    assert reader.feed(" the") == [Text("[see the")]
    assert reader.feed("[f()]") == [Text("[f()]")]
    assert reader.flush() == []


LITERALS = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from([0, 1, -7, 2**70, 0.25, True, False, None]),
    lambda value: (
        st.lists(value, max_size=3) | st.dictionaries(st.text(max_size=3), value, max_size=3)
    ),
    max_leaves=5,
)
CALLS = st.tuples(
    st.sampled_from(["f", "get_weather", "a.b"]),
    st.dictionaries(st.sampled_from(["a", "b_1", "city"]), LITERALS),
)


@settings(deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), data=st.data())
def test_python_calls_come_as_they_were_meant(
    calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    events = read(python_parser(), data.draw(cuts(f"[{', '.join(written)}]")))
    starts = [event.name for event in events if isinstance(event, CallStart)]
    values = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    assert list(zip(starts, values, strict=True)) == calls


def test_marks_that_are_special_tokens_are_read(demo_model: Path) -> None:
    """As Mistral's tokenizers have them: what skips special tokens loses them."""
    tokenizer = load_tokenizer(str(demo_model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MISTRAL.marks)})
    text = f"Well.[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]time[CALL_ID]abc123xyz[ARGS]{{}}"
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    detokenizer = IncrementalDetokenizer(tokenizer, shown=MISTRAL.marks)
    pieces = [detokenizer.decode([token]) for token in ids] + [detokenizer.flush()]
    assert read(parser(MISTRAL), pieces) == [
        Text("Well."),
        *call(0, "weather", WEATHER),
        CallStart(1, "abc123xyz", "time"),
        Arguments(1, "{}"),
    ]
    assert "[ARGS]" not in IncrementalDetokenizer(tokenizer).decode(ids, final=True)


@pytest.mark.parametrize("known", [HERMES, LLAMA, MISTRAL, PYTHON])
def test_a_guided_text_is_all_calls(known: Format) -> None:
    """The guide is JSON whatever the model writes by itself; a text that was cut off is no text."""
    text = f'[{{"name": "weather", "arguments": {WEATHER}}}, {{"name": "time", "arguments": {{}}}}]'
    assert read(parser(known, guided=True), list(text)) == TWO
    one = f'{{"name": "weather", "parameters": {WEATHER}}}'
    assert read(parser(known, guided=True), [one]) == call(0, "weather", WEATHER)
    for end in range(len(text)):
        events = read(parser(known, guided=True), [text[:end]])
        assert not [event for event in events if isinstance(event, Text)], text[:end]


def test_a_guide_that_the_engine_does_not_keep_to() -> None:
    text = f'Well.<tool_call>{{"name": "weather", "arguments": {WEATHER}}}</tool_call>'
    assert read(parser(HERMES, guided=True), list(text)) == [
        Text("Well."),
        *call(0, "weather", WEATHER),
    ]


def test_a_calls_name_comes_before_its_arguments_are_complete() -> None:
    reader = parser(HERMES)
    assert reader.feed('<tool_call>{"name": "f", "arg') == []
    assert reader.feed('uments": {"a": 1') == [CallStart(0, "id0", "f"), Arguments(0, '{"a": 1')]
    assert reader.feed('2, "b"') == [Arguments(0, '2, "b"')]


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    places = st.lists(st.integers(0, len(text)), max_size=12).map(lambda p: sorted({0, *p}))
    return places.map(
        lambda starts: [text[a:b] for a, b in itertools.pairwise([*starts, len(text)])]
    )


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"),
        *("[ARGS]", "[CALL_ID]", "abc123xyz", "[f(", "a=", "'", ")", ",", "g()"),
        *('{"name": "f"', ', "arguments": {"a": [1, "}"]}', ', "parameters": {}', "}", "{", "["),
        *("]", ";", " ", "\n", "text", "<", "\\", '"', "é"),
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: parser(HERMES),
    "mistral": lambda: parser(MISTRAL),
    "llama3": lambda: parser(LLAMA),
    "python": python_parser,
    "guided": lambda: parser(LLAMA, guided=True),
    "thinking": lambda: ReasoningParser("", Parser()),
    "thinking and calls": lambda: ReasoningParser("<think>\n", parser(HERMES)),
}


@pytest.mark.parametrize("make", PARSERS.values(), ids=PARSERS)
@settings(deadline=None)
@given(data=st.data(), text=TEXTS)
def test_the_cuts_of_a_text_change_nothing(
    make: Callable[[], Parser], data: st.DataObject, text: str
) -> None:
    whole = read(make(), [text])
    assert read(make(), data.draw(cuts(text))) == whole
    assert read(make(), list(text)) == whole


@settings(deadline=None)
@given(value=st.recursive(st.text() | st.integers(), lambda v: st.dictionaries(st.text(), v)))
def test_arguments_come_as_they_were_written(value: object) -> None:
    arguments = json.dumps({"value": value})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(parser(HERMES), list(text)) == call(0, "f", arguments)


THOUGHTS: list[tuple[str, str, list[Event]]] = [
    ("", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
    ("<|assistant|><think>\n", "Hm. </think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
    ("", "Yes, <think>", [Text("Yes, <think>")]),
    ("", "<think>cut off </thi", [Reasoning("cut off </thi")]),
    ("", "<think>\n\n</think>\n\nYes.", [Text("Yes.")]),
    ("", " <", [Text(" <")]),
]


@pytest.mark.parametrize(("prompt", "text", "events"), THOUGHTS)
def test_thoughts_are_told_from_the_answer(prompt: str, text: str, events: list[Event]) -> None:
    assert read(ReasoningParser(prompt, Parser()), [text]) == events
    assert read(ReasoningParser(prompt, Parser()), list(text)) == events


def test_calls_behind_thoughts() -> None:
    text = '<think>Hm.</think>\n<tool_call>{"name": "f"}</tool_call>'
    events = [Reasoning("Hm."), *call(0, "f", "{}")]
    assert read(ReasoningParser("", parser(HERMES)), list(text)) == events


def test_the_format_is_that_of_the_chat_template() -> None:
    assert format_of("{{ messages }}") is None
    assert format_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of("{{ tools }}[AVAILABLE_TOOLS] [TOOL_CALLS]") is MISTRAL
    assert format_of("{{ tools }}[func_name1(params_name1=params_value1)]") is PYTHON
    assert format_of('{{ tools }}{"name": f, "parameters": {}}') is LLAMA


def test_an_id_is_what_the_models_template_takes() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_")
    assert HERMES.new_id() != HERMES.new_id()


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": None}},
]


def body(**fields: object) -> ChatBody:
    messages = [{"role": "user", "content": "Hello"}]
    return ChatBody.model_validate({"model": "m", "messages": messages, **fields})


def guide(asked: ChatBody, known: Format) -> Guide:
    return call_guide(tool_use(asked), known, parallel=asked.parallel_tool_calls is not False)


def valid(schema: str, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(json.loads(schema)).is_valid(value))


def test_a_required_call_is_one_of_the_tools() -> None:
    schema = guide(body(tools=TOOLS, tool_choice="required"), HERMES).text
    weather = {"name": "weather", "arguments": {"city": "Paris"}}
    time = {"name": "time", "arguments": {}}
    assert valid(schema, [weather])
    assert valid(schema, [weather, time])
    for wrong in ([], weather, [{"name": "other", "arguments": {}}], [{"name": "weather"}]):
        assert not valid(schema, wrong)
    assert not valid(schema, [{"name": "weather", "arguments": {"city": 1}}])
    alone = body(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not valid(guide(alone, HERMES).text, [weather, time])


def test_a_named_call_is_that_tool_with_the_names_of_the_models_format() -> None:
    schema = guide(body(tools=TOOLS, tool_choice=TOOLS[0]), LLAMA).text
    assert valid(schema, {"name": "weather", "parameters": {"city": "Paris"}})
    assert not valid(schema, {"name": "time", "parameters": {}})


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_tools_whose_schemas_refer_to_parts_of_themselves(place: str) -> None:
    tree = {
        "type": "object",
        "properties": {"size": {"$ref": f"#/{place}/City"}, "below": {"$ref": "#"}},
        "additionalProperties": False,
        place: {"City": {"type": "integer"}},
    }
    other = {"type": "function", "function": {"name": "other", "parameters": tree}}
    calls = guide(body(tools=[TOOLS[0], other], tool_choice="required"), HERMES)

    for name, arguments, right in (
        ("weather", {"city": "Paris"}, True),
        ("other", {"size": 3, "below": {"size": 4}}, True),
        ("other", {"size": "Paris"}, False),
        ("other", {"below": {"size": "Paris"}}, False),
    ):
        assert valid(calls.text, [{"name": name, "arguments": arguments}]) is right
    # The embedded engine takes them.
    assert llguidance.LLMatcher.validate_grammar(grammar(calls)) == ""


def test_a_schema_that_is_nested_too_deep() -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "deep"}}]
    asked = body(tools=tools, tool_choice="required")
    assert asked.tools
    asked.tools[1].function.parameters = schema
    with pytest.raises(ApiError, match="nested too deep") as raised:
        guide(asked, HERMES)
    assert raised.value.param == "tools"


def test_which_tools_are_offered() -> None:
    assert len(tool_use(body(tools=TOOLS)).offered) == 2
    for asked in (body(tools=TOOLS, tool_choice="none"), body(), body(tool_choice="none")):
        assert tool_use(asked).offered == []
    assert not tool_use(body(tools=TOOLS, tool_choice="auto")).enforced
    other = {"type": "function", "function": {"name": "other"}}
    for wrong in (body(tool_choice="required"), body(tools=TOOLS, tool_choice=other)):
        with pytest.raises(ApiError, match="tool_choice") as raised:
            tool_use(wrong)
        assert raised.value.param == "tool_choice"
