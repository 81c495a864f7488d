"""Tool calls and thoughts in a model's text: the same blocks, however the text is cut."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.api.openai.chats.call_guides import call_guide
from cog_triton.api.openai.chats.tool_use import tool_use
from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.tool_calls.blocks import Block, Parser
from cog_triton.api.openai.tool_calls.formats import FORMATS, Format, format_of
from cog_triton.engines.grammars import grammar
from cog_triton.generation import Chunk
from cog_triton.request.request import Guide
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import load_tokenizer
from tests.support import load_cases
from tests.unit.api.openai.support import MESSAGES

TABLES = load_cases(__file__, "calls.yaml")
OLDER = ("hermes", "mistral", "python", "llama")  # those in calls.yaml
HERMES, MISTRAL, PYTHON, LLAMA = (FORMATS[name] for name in OLDER)
WEATHER, TIME = ["id0", "weather", '{"city": "Paris, {Texas}"}'], ["id1", "time", "{}"]
END = Chunk("", 0, None, "stop")


def parser(known: Format, prompt: str | None = None, *, guided: bool = False) -> Parser:
    numbers = itertools.count()
    return known.parser(lambda: f"id{next(numbers)}", prompt, guided=guided)


def feed(reader: Parser, text: str) -> list[str]:
    return [piece for _, piece in reader.read(Chunk(text, 0, None))]


def read(reader: Parser, texts: Iterable[str]) -> list[Any]:
    """The blocks of an answer that comes in pieces, as calls.yaml has them."""
    pieces = [piece for text in texts for piece in reader.read(Chunk(text, 0, None))]
    pieces += reader.read(END)
    assert all(text or block.kind == "call" for block, text in pieces)
    return [written(block) for block in reader.blocks]


def written(block: Block) -> Any:
    if block.kind == "call":
        return [block.id, block.name, block.text]
    return block.text if block.kind == "text" else {"thoughts": block.text}


HUGE = [f"[f(a={'(' * 5000}{')' * 5000})]", f"[f(a={'9' * 5000})]"]
ANSWERS = [
    *((name, *row) for name in OLDER for row in TABLES[name]),
    *((name, text, [text]) for name in FORMATS for text in TABLES["texts"]),
    *(("python", text, [text]) for text in TABLES["python_texts"] + HUGE),
]


@pytest.mark.parametrize(("name", "text", "blocks"), ANSWERS)
def test_a_text_and_its_calls(name: str, text: str, blocks: list[Any]) -> None:
    assert read(parser(FORMATS[name], ""), [text]) == blocks
    assert read(parser(FORMATS[name], ""), text) == blocks


def test_thoughts_that_the_prompt_began() -> None:
    opened = parser(HERMES, "<|assistant|><think>\n")
    assert read(opened, "Hm. </think>Yes.") == [{"thoughts": "Hm."}, "Yes."]
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
    text = f"Well.[TOOL_CALLS]weather[ARGS]{WEATHER[2]}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{{}}"
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    detokenizer = IncrementalDetokenizer(tokenizer, shown=MISTRAL.special_tokens)
    pieces = [detokenizer.decode([token]) for token in ids] + [detokenizer.flush()]
    assert read(parser(MISTRAL), pieces) == ["Well.", WEATHER, ["abc", "time", "{}"]]
    assert "[ARGS]" not in IncrementalDetokenizer(tokenizer).decode(ids, final=True)


@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_a_guided_text_is_all_calls(known: Format) -> None:
    """The guide is JSON whatever the model writes by itself; a text that was cut off is no text."""
    calls = [f'{{"name": "{name}", "arguments": {given}}}' for _, name, given in (WEATHER, TIME)]
    text = f"[{', '.join(calls)}]"
    assert read(parser(known, guided=True), text) == [WEATHER, TIME]
    one = calls[0].replace("arguments", "parameters")
    assert read(parser(known, guided=True), [one]) == [WEATHER]
    for end in range(len(text)):
        blocks = read(parser(known, guided=True), [text[:end]])
        assert all(isinstance(block, list) for block in blocks), text[:end]
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
    "thinking": lambda: Parser(""),
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


TOOLS = [{"type": "function", "function": tool} for tool in TABLES["tools"]]


def body(**fields: object) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": MESSAGES, **fields})


def guide(known: Format, **fields: object) -> Guide:
    asked = body(tools=TOOLS, **fields)
    return call_guide(tool_use(asked), known, parallel=asked.parallel_tool_calls is not False)


def valid(asked: Guide, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(json.loads(asked.text)).is_valid(value))


@pytest.mark.parametrize(("name", "arguments", "right"), TABLES["required"])
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
