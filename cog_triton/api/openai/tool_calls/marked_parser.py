"""The parser of calls between marks, such as ``<tool_call>`` and ``</tool_call>``."""

import re
from collections.abc import Sequence
from functools import cached_property

from cog_triton.api.openai.tool_calls.blocks import (
    Pieces,
    Question,
    any_begun,
    is_begun,
)
from cog_triton.api.openai.tool_calls.format import Marks
from cog_triton.api.openai.tool_calls.json_parser import JsonCallParser
from cog_triton.api.openai.tool_calls.readers import READERS, Reader
from cog_triton.api.openai.tool_calls.written_call import NAME, WrittenCall

# What stands behind a mark that belongs to a call: its name, up to the next mark.
_CALL_HEAD = re.compile(rf"[\"']?(?P<name>{NAME})[\"']?\s{{0,8}}[<>]")
# A text that may become this.
_CALL_HALF = re.compile(r"[\"']?[\w.:/-]{0,128}[\"']?\s{0,8}")
_NAME = re.compile(NAME)
_ARGUMENT_TAG = "<arg_key>"


class MarkedCallParser(JsonCallParser):
    """Reads calls between marks, and the text around them as it comes.

        I will ask. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>

    Models of one family may write JSON between the marks, or another form:

        <tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>

    JSON is passed on as it comes. In another form a call is passed on when it is complete: then the
    format's readers get the text between the marks. What no reader takes is text, with its marks.
    """

    @cached_property
    def _readers(self) -> list[Reader]:
        return [READERS[name] for name in self._format.readers]

    def _call_marks(self) -> Sequence[str]:
        return tuple(self._format.marks_by_opening)

    def _begins(self, mark: str, rest: str) -> bool | None:
        if mark not in self._format.marks_by_opening:
            return True  # the end of thoughts
        if mark != self._format.opening:
            head = _CALL_HEAD.match(rest)
            if head:
                return self._is_call_head(mark, head["name"])
            return None if _CALL_HALF.fullmatch(rest) else False
        body = rest.lstrip()
        if not body:
            return None
        answers = [reader.is_begun(body) for reader in self._readers]
        if self._format.in_json:
            answers.append(self._begins_json(body))
        if "argument_tags" in self._format.readers:
            answers.append(self._begins_with_name(body))
        return any_begun(answers)

    def _is_call_head(self, mark: str, name: str) -> bool:
        """Return whether a mark and a name behind it begin a call.

        A mark that is a special token does. A tag of plain text, such as ``<function=``, may also be in a
        program that the answer shows; there the name must be that of a tool.
        """
        is_token = mark in self._format.special_tokens
        return is_token or self._is_offered(name, marked=False)

    def _begins_with_name(self, body: str) -> bool | None:
        """Return whether a text begins with a tool's name, and its arguments or the end."""
        closing = self._format.closing
        name = _NAME.match(body)
        if name is None:
            return False
        behind = body[name.end() :].lstrip()
        if behind.startswith(closing):
            return name[0] in self._start.schemas  # a call without arguments
        begun = is_begun(behind, _ARGUMENT_TAG)
        return None if begun is False and closing.startswith(behind) else begun

    def _read(self) -> Pieces:
        if (yield from self._is_all_calls()):
            yield from self._read_json_calls(marked=False)
        yield from self._read_marked_calls()

    def _is_all_calls(self) -> Question:
        """Return whether the answer begins as calls do that come without a mark."""
        while True:
            squeezed = "".join(self._held.split())
            starts = self._format.starts
            if squeezed.startswith(starts):
                return True
            if self._ended or not any(start.startswith(squeezed) for start in starts):
                return False
            yield None

    def _read_marked_calls(self) -> Pieces:
        while True:
            mark = yield from self._until("text", self._call_marks())
            if mark is None:
                return
            body = self._held[len(mark) :].lstrip()
            is_json = self._format.in_json and self._begins_json(body)
            if mark == self._format.opening and is_json:
                self._lead += self._take(len(self._held) - len(body))
                yield from self._read_json_calls(marked=True)
            else:
                yield from self._read_between(self._format.marks_by_opening[mark])

    def _read_between(self, marks: Marks) -> Pieces:
        """Read the calls between the mark that is held and the closing one; without any, it is all text.

        A closing mark within the value of an argument is part of the value.
        """
        opening = self._take(len(marks.opening))
        parts: list[str] = []
        first_end: int | None = None  # where the first closing mark stood, if it was within a value
        closing = ""
        while True:
            place = self._held.find(marks.closing) if marks.closing else -1
            if place < 0:
                # All but what may be the beginning of the mark, which is not looked at again.
                kept = 0 if self._ended else max(len(marks.closing) - 1, 0)
                parts.append(self._take(max(len(self._held) - kept, 0)))
                if self._ended:
                    break
                yield None
                continue
            parts.append(self._take(place))
            body = "".join(parts)
            closing = self._take(len(marks.closing))
            if not any(reader.is_open(body) for reader in self._readers):
                break
            first_end = len(body) if first_end is None else first_end
            parts = [body, closing]
            closing = ""
        body = "".join(parts)
        if not closing and first_end is not None and not self._cut:
            # The argument has no end: the first mark was one after all.
            closing = marks.closing
            self._held = body[first_end + len(closing) :] + self._held
            body = body[:first_end]
        calls = self._calls_between(opening, body, closing)
        if calls is None:
            yield self._piece("text", self._lead + opening + body + closing)
            return
        yield from self._whole_calls(calls)
        yield from self._skip_space()
        if opening != self._format.opening:
            yield from self._skip_closing()

    def _calls_between(self, opening: str, body: str, closing: str) -> list[WrittenCall] | None:
        if not closing and self._cut:
            return None
        is_part_of_call = opening != self._format.opening
        written = opening + body + closing if is_part_of_call else body
        for reader in self._readers:
            calls = reader.read(written, self._start.schemas)
            if calls:
                return calls
        return None

    def _skip_closing(self) -> Pieces:
        """Pass over the closing mark of calls whose opening mark the model left out."""
        closing = self._format.closing
        while is_begun(self._held, closing) is None and not self._ended:
            yield None
        if self._held.startswith(closing):
            self._take(len(closing))
            yield from self._skip_space()


class GuidedCallParser(MarkedCallParser):
    """Reads an answer that a guide limits to calls in JSON, whatever the model's format is.

    [{"name": "weather", "arguments": {"city": "Paris"}}]
    """

    def _read(self) -> Pieces:
        self._is_guided = True
        yield from self._read_json_calls(marked=True)
        yield from self._read_marked_calls()


class ListedCallParser(MarkedCallParser):
    """Reads an answer that a guide limits to JSON: a list of calls of offered tools, or else it is text."""

    def _read(self) -> Pieces:
        if (yield from self._is_all_calls()):
            yield from self._read_json_calls(marked=False)
        yield from self._read_text()
