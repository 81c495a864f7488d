"""The parser of calls that are JSON objects, one behind another or in a list."""

import json
import re
from collections.abc import Generator

from cog_triton.api.openai.tool_calls.blocks import (
    AnswerStart,
    Parser,
    Piece,
    Pieces,
    Question,
)
from cog_triton.api.openai.tool_calls.format import Format
from cog_triton.api.openai.tool_calls.json_calls import has_arguments, object_call
from cog_triton.api.openai.tool_calls.json_copier import JsonCopier
from cog_triton.api.openai.tool_calls.json_values import json_value_or_none
from cog_triton.api.openai.tool_calls.written_call import NAME, WrittenCall

# The beginning of a call in Mistral's newer form: weather[ARGS]{ or weather[CALL_ID]a1b2c3d4e[ARGS]{
_NAMED_HEAD = re.compile(
    r"(?P<name>[\w.-]{1,128})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{"
)
# A text that may become one.
_NAMED_HALF = re.compile(r"[\w.-]{1,128}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?(\[[A-Z_]{0,7})?")
# The beginning of a call that is an object, up to its arguments.
_OBJECT_HEAD = re.compile(
    rf'\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"(arguments|parameters)"\s*:\s*[{{\[]'
)


class JsonCallParser(Parser):
    """Reads calls that are JSON objects.

        {"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}

    The arguments are passed on as they come, if the name stands before them; otherwise at their end. In
    Mistral's form, a call is its name and its arguments:

        weather[ARGS]{"city": "Paris"}

    Where such calls may stand is up to the subclasses, which call ``_read_json_calls``.
    """

    def __init__(self, start: AnswerStart, format: Format) -> None:
        super().__init__(start)
        self._format = format
        self._is_guided = False  # a guide allows nothing but calls, so what is cut off is not text

    def _begins_json(self, body: str) -> bool | None:
        """Return whether a text begins as a call in JSON, or a list of them."""
        if self._format.named:
            if _NAMED_HEAD.match(body):
                return True
            if _NAMED_HALF.fullmatch(body):
                return None
        if body.startswith("["):
            body = body[1:].lstrip(" \t\r\n[")
        if not body:
            return None
        return body.startswith("{")

    def _read_json_calls(self, *, marked: bool) -> Pieces:
        """Read calls that follow one another, up to what is not a call.

        Args:
            marked: a mark stands before them, so that they need not be calls of tools that were offered.
        """
        lead = self._lead
        self._lead = ""
        while True:
            lead += yield from self._read_separators("[,;")
            if not (yield from self._read_call(lead, marked=marked)):
                return
            if self.blocks[-1].broken:
                return  # what follows is text as it is
            following = yield from self._skip_to_next_call()
            if following is None:
                return
            lead = following

    def _read_separators(self, separators: str) -> Generator[Piece | None, None, str]:
        """Take white space and separators, and return them."""
        taken = ""
        while True:
            rest = self._held.lstrip(" \t\r\n" + separators)
            taken += self._take(len(self._held) - len(rest))
            if rest or self._ended:
                return taken
            yield None

    def _read_call(self, lead: str, *, marked: bool) -> Question:
        """Read one call; return False where there is none, and what was taken for one is text."""
        while self._format.named and not self._held.startswith("{"):
            head = _NAMED_HEAD.match(self._held)
            if head:
                written = lead + self._take(head.end() - 1)
                yield self._start_call(head["name"], head["id"])
                yield from self._read_arguments(written)
                return True
            if self._ended or not _NAMED_HALF.fullmatch(self._held):
                break
            yield None
        if self._held.startswith("{"):
            return (yield from self._read_object(lead, marked=marked))
        if self._is_guided and not self._held:
            return False  # the answer was cut off between two calls
        self._is_guided = False  # the engine does not hold the text to the guide
        if lead.strip():
            yield self._piece("text", lead)
        return False

    def _skip_to_next_call(self) -> Generator[Piece | None, None, str | None]:
        """Take what stands between a call and the next one, and return it; None if no call follows."""
        opening = self._format.opening
        closing = self._format.closing
        between = yield from self._read_separators("]},;")  # a brace too many is a common mistake
        while not self._ended and any(
            mark.startswith(self._held) for mark in (opening, closing) if mark
        ):
            yield None
        if closing and self._held.startswith(closing):
            self._take(len(closing))
            yield from self._skip_space()
            return None
        while self._held.startswith(opening):  # looked at again until it is certain what follows
            body = self._held[len(opening) :].lstrip()
            begins = self._begins_json(body)
            if begins is None and not self._ended:
                yield None
                continue
            return between + self._take(len(self._held) - len(body)) if begins else None
        while self._format.named and not self._ended and _NAMED_HALF.fullmatch(self._held):
            yield None
        is_next = self._held[:1] in ("{", "[") or (
            self._format.named and _NAMED_HEAD.match(self._held)
        )
        return between if is_next else None

    def _read_object(self, lead: str, *, marked: bool) -> Question:
        """Read an object; return False if it is no call; it is text then."""
        copier = JsonCopier(self._format.closing)
        seen = ""  # the object so far, as the model wrote it
        mended: list[str] = []  # the same without mistakes
        while True:
            copied = copier.copy(self._held, ended=self._ended, cut=self._cut)
            seen += self._take(copied.size)
            mended.append(copied.written)
            head = _OBJECT_HEAD.match(seen)
            if head and self._is_offered(head[1], marked=marked):
                self._held = seen[head.end() - 1 :] + self._held
                yield self._start_call(head[1])
                yield from self._read_arguments(lead + seen[: head.end() - 1])
                yield from self._skip_rest_of_object()
                return True
            if copier.complete or self._ended:
                break
            yield None
        call = self._call_of_object("".join(mended), marked=marked) if copier.complete else None
        if call is not None:
            yield from self._whole_calls([call])
            return True
        seen += self._take(len(self._held)) if self._ended and not copier.complete else ""
        whole = copier.complete and not copier.mended
        if whole or not self._is_guided:
            yield self._piece("text", lead + seen)
        return False

    def _is_offered(self, name: str, *, marked: bool) -> bool:
        """Return whether a call may have this name: behind a mark any, otherwise only that of a tool."""
        return marked or not self._start.schemas or name in self._start.schemas

    def _call_of_object(self, written: str, *, marked: bool) -> WrittenCall | None:
        """Return the call that a JSON object is, or None.

        Without a mark before it, an object with a name may also be an answer in JSON. It is a call if the
        name is that of a tool and there are arguments.
        """
        value = json_value_or_none(written)
        call = object_call(value, self._start.schemas)
        if call is None or marked:
            return call
        is_offered = self._is_offered(call.name, marked=False)
        return call if is_offered and has_arguments(value) else None

    def _read_arguments(self, written: str) -> Pieces:
        """Read the arguments of the call that has begun; ``written`` is what came before them."""
        block = self.blocks[-1]
        copier = JsonCopier(self._format.closing)
        while True:
            copied = copier.copy(self._held, ended=self._ended, cut=self._cut)
            written += self._take(copied.size)
            if copied.written:
                yield self._piece("call", copied.written)
            if copier.complete or self._ended:
                break
            yield None
        if not copier.complete:
            written += self._take(len(self._held))
        block.written = written
        block.broken = not copier.complete or not _is_json(block.text)

    def _skip_rest_of_object(self) -> Pieces:
        """Pass over what stands behind the arguments of a call, up to the end of its object."""
        if self.blocks[-1].broken:
            return
        copier = JsonCopier(self._format.closing)
        copier.copy("{", ended=False, cut=False)
        while True:
            copied = copier.copy(self._held, ended=self._ended, cut=self._cut)
            self._take(copied.size)
            if copier.complete or self._ended:
                return
            yield None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
