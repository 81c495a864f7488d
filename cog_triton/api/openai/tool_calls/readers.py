"""Readers of the text between two marks, by the names that ``formats.yaml`` has for them."""

from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.api.openai.tool_calls.blocks import any_begun, is_begun
from cog_triton.api.openai.tool_calls.gemma_calls import gemma_calls
from cog_triton.api.openai.tool_calls.json_calls import fenced_json_calls
from cog_triton.api.openai.tool_calls.python_calls import python_calls
from cog_triton.api.openai.tool_calls.tag_calls import (
    argument_tag_calls,
    function_tag_calls,
    invoke_tag_calls,
    minimax_tag_calls,
    named_tag_calls,
)
from cog_triton.api.openai.tool_calls.token_calls import deepseek_calls, kimi_calls, solar_calls
from cog_triton.api.openai.tool_calls.written_call import Schemas, WrittenCall


@dataclass(frozen=True)
class ArgumentMarks:
    """The texts around the value of an argument, in which a closing mark of the call is just text.

    Some are parts of a tag, so that they match it with each of its prefixes.
    """

    opening: str
    closing: str

    def is_open(self, text: str) -> bool:
        """Return whether a text ends within a value."""
        return text.rfind(self.opening) > text.rfind(self.closing)


@dataclass(frozen=True)
class Reader:
    """Reads calls in one form.

    Attributes:
        read: returns the calls of a text, or None if it is not of this form.
        begins: the possible beginnings of such a text. With the empty one, any text may be of this form.
        argument: the marks around an argument, if it may contain the mark behind the call.
    """

    read: Callable[[str, Schemas], list[WrittenCall] | None]
    begins: tuple[str, ...] = ("",)
    argument: ArgumentMarks | None = None

    def is_begun(self, text: str) -> bool | None:
        """Return whether a text begins as this form does; None if that is not certain yet."""
        return any_begun(is_begun(text, beginning) for beginning in self.begins)

    def is_open(self, text: str) -> bool:
        """Return whether a text ends within an argument."""
        return self.argument is not None and self.argument.is_open(text)


READERS: dict[str, Reader] = {
    "fenced_json": Reader(fenced_json_calls, begins=("```",)),
    "function_tags": Reader(
        function_tag_calls,
        begins=("<function",),
        argument=ArgumentMarks("<param", "</param"),
    ),
    # The tool's name comes first: see MarkedCallParser._begins_with_name.
    "argument_tags": Reader(
        argument_tag_calls,
        begins=(),
        argument=ArgumentMarks("<arg_value>", "</arg_value>"),
    ),
    "named_tags": Reader(
        named_tag_calls,
        begins=("<tool_call:",),
        argument=ArgumentMarks("<arg_value:", "</arg_value:"),
    ),
    "invoke_tags": Reader(
        invoke_tag_calls,
        begins=("<invoke", "<｜DSML｜invoke", "<｜tool_call_begin｜>", "<steptml:invoke"),
        argument=ArgumentMarks("parameter name=", "parameter>"),
    ),
    "minimax_tags": Reader(minimax_tag_calls, begins=("]<]minimax[>[<invoke",)),
    "deepseek": Reader(deepseek_calls, begins=("<｜tool▁call▁begin｜>",)),
    "kimi": Reader(kimi_calls, begins=("<|tool_call_begin|>",)),
    "solar": Reader(solar_calls, begins=("<|tool_call:begin|>",)),
    "gemma": Reader(gemma_calls, begins=("call:",)),
    "python": Reader(python_calls),
}
