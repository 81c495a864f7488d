"""Parsers of answers with calls of tools, one for each way in which a model marks them. Knows no I/O."""

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cog_triton.api.openai.tool_calls import written_calls
from cog_triton.api.openai.tool_calls.blocks import (
    Kind,
    NewId,
    Parser,
    Piece,
    Pieces,
    Question,
    Thoughts,
    begun_size,
    first_mark,
)
from cog_triton.api.openai.tool_calls.json_copier import JsonCopier
from cog_triton.api.openai.tool_calls.written_calls import NAME, Schemas, WrittenCall

if TYPE_CHECKING:
    from cog_triton.api.openai.tool_calls.formats import Format, Marks

# --- Readers of what stands between marks


@dataclass(frozen=True)
class Reader:
    """Reads calls in one form.

    Attributes:
        read: returns the calls of a text, or None where it is not of this form.
        begins: the beginnings of such a text; any text may be one without them.
        argument: the marks around an argument, in which a closing mark is text.
    """

    read: Callable[[str, Schemas], list[WrittenCall] | None]
    begins: tuple[str, ...] = ("",)
    argument: tuple[str, str] | None = None

    def is_begun(self, text: str) -> bool | None:
        """Return whether a text begins as this form does; None if that is not certain yet."""
        answers = [is_begun(text, beginning) for beginning in self.begins]
        if True in answers:
            return True
        return None if None in answers else False

    def is_open(self, text: str) -> bool:
        """Return whether a text ends within an argument."""
        if self.argument is None:
            return False
        opening, closing = self.argument
        if opening == closing:
            return text.count(opening) % 2 == 1
        return text.rfind(opening) > text.rfind(closing)


READERS: dict[str, Reader] = {
    "fenced_json": Reader(written_calls.fenced_json_calls, ("```",)),
    "function_tags": Reader(
        written_calls.function_tag_calls, ("<function",), ("<param", "</param")
    ),
    # Their name comes first: see MarkedCallParser._begins_with_name.
    "argument_tags": Reader(written_calls.argument_tag_calls, (), ("<arg_value>", "</arg_value>")),
    "named_tags": Reader(
        written_calls.named_tag_calls, ("<tool_call:",), ("<arg_value:", "</arg_value:")
    ),
    "invoke_tags": Reader(
        written_calls.invoke_tag_calls,
        ("<invoke", "<｜DSML｜invoke", "<｜tool_call_begin｜>", "<steptml:invoke"),
        ("parameter name=", "parameter>"),
    ),
    "minimax_tags": Reader(written_calls.minimax_tag_calls, ("]<]minimax[>[<invoke",)),
    "deepseek": Reader(written_calls.deepseek_calls, ("<｜tool▁call▁begin｜>",)),
    "kimi": Reader(written_calls.kimi_calls, ("<|tool_call_begin|>",)),
    "solar": Reader(written_calls.solar_calls, ("<|tool_call:begin|>",)),
    "gemma": Reader(written_calls.gemma_calls, ("call:",)),
    "python": Reader(written_calls.python_calls),
}


def is_begun(text: str, mark: str) -> bool | None:
    """Return whether a text begins with a mark; None if it is the beginning of one."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


# --- Calls in JSON

# The beginning of a call in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
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
    """Reads calls in JSON, each with its arguments as they come; those before the name at the end."""

    def __init__(
        self,
        prompt: str | None,
        new_id: NewId,
        known: "Format",
        schemas: Schemas,
        thoughts: Thoughts,
    ) -> None:
        super().__init__(prompt, new_id, thoughts)
        self._format = known
        self._schemas = schemas
        self._guided = False  # what is cut off is no text

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
        """Read calls in JSON that follow one another; what is none of them is text."""
        lead, self._lead = self._lead, ""
        while True:
            lead += yield from self._read_separators("[,;")
            if not (yield from self._read_call(lead, marked=marked)):
                return
            if self.blocks[-1].broken:
                return  # what follows is text as it is
            following = yield from self._behind_call()
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
            if head := _NAMED_HEAD.match(self._held):
                written = lead + self._take(head.end() - 1)
                yield self._start(head["name"], head["id"])
                yield from self._read_arguments(written)
                return True
            if self._ended or not _NAMED_HALF.fullmatch(self._held):
                break
            yield None
        if self._held.startswith("{"):
            return (yield from self._read_object(lead, marked=marked))
        if self._guided and not self._held:
            return False  # the answer was cut off between two calls
        self._guided = False  # the engine does not hold the text to the guide
        if lead.strip():
            yield self._piece("text", lead)
        return False

    def _behind_call(self) -> Generator[Piece | None, None, str | None]:
        """Return what stands between a call and the next; None if no call follows."""
        opening, closing = self._format.opening, self._format.closing
        between = yield from self._read_separators("]},;")  # a brace too many is a common mistake
        while not self._ended and any(
            mark.startswith(self._held) for mark in (opening, closing) if mark
        ):
            yield None
        if closing and self._held.startswith(closing):
            self._take(len(closing))
            yield from self._space()
            return None
        while self._held.startswith(opening):
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
        """Read an object; return False where it is no call, and has been given as text."""
        copier = JsonCopier(self._format.closing)
        seen = ""  # of the object, as it was written
        mended: list[str] = []
        while True:
            taken, piece = copier.copy(self._held, ended=self._ended, cut=self._cut)
            seen += self._take(taken)
            mended.append(piece)
            head = _OBJECT_HEAD.match(seen)
            if head and self._is_offered(head[1], marked=marked):
                self._held = seen[head.end() - 1 :] + self._held
                yield self._start(head[1])
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
        if whole or not self._guided:
            yield self._piece("text", lead + seen)
        return False

    def _is_offered(self, name: str, *, marked: bool) -> bool:
        """Return whether a name is that of a call: behind a mark any is, else that of a tool."""
        return marked or not self._schemas or name in self._schemas

    def _call_of_object(self, written: str, *, marked: bool) -> WrittenCall | None:
        """Return the call that an object is. An answer in JSON without a mark may have a name, too."""
        value = written_calls.json_value(written)
        call = written_calls.object_call(value, self._schemas)
        if call is None or marked:
            return call
        is_offered = self._is_offered(call.name, marked=False)
        return call if is_offered and written_calls.has_arguments(value) else None

    def _read_arguments(self, written: str) -> Pieces:
        """Read the arguments of the call that has begun; ``written`` is what came before them."""
        block = self.blocks[-1]
        copier = JsonCopier(self._format.closing)
        while True:
            taken, piece = copier.copy(self._held, ended=self._ended, cut=self._cut)
            written += self._take(taken)
            if piece:
                yield self._piece("call", piece)
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
            taken, _ = copier.copy(self._held, ended=self._ended, cut=self._cut)
            self._take(taken)
            if copier.complete or self._ended:
                return
            yield None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# --- Calls between marks

# What stands behind a mark that belongs to a call: its name, up to the next mark.
_CALL_HEAD = re.compile(rf"[\"']?(?P<name>{NAME})[\"']?\s{{0,8}}[<>]")
# A text that may become this.
_CALL_HALF = re.compile(r"[\"']?[\w.:/-]{0,128}[\"']?\s{0,8}")
_NAME = re.compile(NAME)
_ARGUMENT_TAG = "<arg_key>"


class MarkedCallParser(JsonCallParser):
    """Reads calls between marks, and the text around them as it comes.

    Calls in JSON come piece by piece, others each when it is complete: models of one template write both.
    """

    def __init__(
        self,
        prompt: str | None,
        new_id: NewId,
        known: "Format",
        schemas: Schemas,
        thoughts: Thoughts,
    ) -> None:
        super().__init__(prompt, new_id, known, schemas, thoughts)
        self._readers = [READERS[name] for name in known.readers]
        self._takes_names = "argument_tags" in known.readers
        self._marks = {marks.opening: marks for marks in (known.marks, *known.call_marks)}

    def _marks_of_thoughts(self) -> Sequence[str]:
        return (self._thoughts.closing, *self._marks)

    def _begins(self, mark: str, rest: str) -> bool | None:
        if mark not in self._marks:
            return True
        if mark != self._format.opening:
            if head := _CALL_HEAD.match(rest):
                return self._is_call_head(mark, head["name"])
            return None if _CALL_HALF.fullmatch(rest) else False
        body = rest.lstrip()
        if not body:
            return None
        answers = [reader.is_begun(body) for reader in self._readers]
        if self._format.in_json:
            answers.append(self._begins_json(body))
        if self._takes_names:
            answers.append(self._begins_with_name(body))
        if True in answers:
            return True
        return None if None in answers else False

    def _is_call_head(self, mark: str, name: str) -> bool:
        """Return whether a mark and a name behind it begin a call; a tag that is no token may be text."""
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
            return name[0] in self._schemas  # a call without arguments
        begun = is_begun(behind, _ARGUMENT_TAG)
        return None if begun is False and closing.startswith(behind) else begun

    def _read(self) -> Pieces:
        if (yield from self._is_all_calls()):
            yield from self._read_json_calls(marked=False)
        yield from self._read_marked_calls()

    def _is_all_calls(self) -> Question:
        """Return whether the answer begins as calls do that come without a mark."""
        while True:
            squeezed, starts = "".join(self._held.split()), self._format.starts
            if squeezed.startswith(starts):
                return True
            if self._ended or not any(start.startswith(squeezed) for start in starts):
                return False
            yield None

    def _read_marked_calls(self) -> Pieces:
        while True:
            mark = yield from self._until("text", tuple(self._marks))
            if mark is None:
                return
            body = self._held[len(mark) :].lstrip()
            is_json = self._format.in_json and self._begins_json(body)
            if mark == self._format.opening and is_json:
                self._lead += self._take(len(self._held) - len(body))
                yield from self._read_json_calls(marked=True)
            else:
                yield from self._read_between(self._marks[mark])

    def _read_between(self, marks: "Marks") -> Pieces:
        """Read the calls from the mark that is held to the one behind them, or give all of it as text."""
        opening = self._take(len(marks.opening))
        parts: list[str] = []
        first_end: int | None = None  # of the body, where a mark stood within an argument
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
        yield from self._space()
        if opening != self._format.opening:
            yield from self._skip_closing()

    def _calls_between(self, opening: str, body: str, closing: str) -> list[WrittenCall] | None:
        if not closing and self._cut:
            return None
        is_part_of_call = opening != self._format.opening
        written = opening + body + closing if is_part_of_call else body
        for reader in self._readers:
            calls = reader.read(written, self._schemas)
            if calls:
                return calls
        return None

    def _skip_closing(self) -> Pieces:
        """Pass over the mark behind calls, of which the one before them was missing."""
        closing = self._format.closing
        while is_begun(self._held, closing) is None and not self._ended:
            yield None
        if self._held.startswith(closing):
            self._take(len(closing))
            yield from self._space()


class GuidedCallParser(MarkedCallParser):
    """Reads an answer that a guide holds to a list of calls in JSON, whatever the model's format is."""

    def _read(self) -> Pieces:
        self._guided = True
        yield from self._read_json_calls(marked=True)
        yield from self._read_marked_calls()


class ListedCallParser(MarkedCallParser):
    """Reads an answer in JSON that is a list of calls of offered tools, or else is text."""

    def _read(self) -> Pieces:
        if (yield from self._is_all_calls()):
            yield from self._read_json_calls(marked=False)
        yield from Parser._read(self)


# --- Messages with a channel or a recipient

# gpt-oss: <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary
# to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,128})")
_HEADER_STARTS = ("<|channel|>", "<|start|>", "assistant", "to=functions.")
_MESSAGE = "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class ChannelParser(Parser):
    """Reads gpt-oss's channels.

    Analysis is thoughts, a message to a function is its call, and all else is text.
    """

    def __init__(self, new_id: NewId) -> None:
        super().__init__(None, new_id)

    def _read(self) -> Pieces:
        while not (self._ended and not self._held):
            if not self._held or self._is_header_begun():
                if not self._ended:
                    yield None
                    continue
                if not self._held.lstrip().startswith("<|"):
                    yield self._piece("text", self._held)
                self._held = ""  # the answer was cut off in a header, which says nothing
                return
            header, mark, rest = self._held.partition(_MESSAGE)
            if not mark or not header.lstrip().startswith(_HEADER_STARTS):
                yield from self._until("text", ("<|channel|>", "<|start|>"))
                continue
            self._held = rest
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            if recipient:
                yield from self._read_call(recipient[1])
            else:
                is_analysis = channel is not None and channel[1] == "analysis"
                kind: Kind = "thoughts" if is_analysis else "text"
                yield from self._until(kind, (*_MESSAGE_ENDS, "<|start|>", "<|channel|>"))
            yield from self._skip_end()

    def _is_header_begun(self) -> bool:
        """Return whether what is held may be the beginning of a header."""
        start = self._held.lstrip()
        if _MESSAGE in start:
            return False
        return start.startswith(_HEADER_STARTS) or any(
            mark.startswith(start) for mark in _HEADER_STARTS
        )

    def _read_call(self, name: str) -> Pieces:
        parts: list[str] = []
        ends = (*_MESSAGE_ENDS, "<|start|>")
        while True:
            place, mark = first_mark(self._held, ends)
            if mark or self._ended:
                break
            parts.append(self._take(len(self._held) - begun_size(self._held, ends)))
            yield None
        written = "".join([*parts, self._take(place)])
        call = None
        if mark or not self._cut:
            call = written_calls.named_call(name, written)
        if call is not None:
            yield from self._whole_calls([call])
        elif written:
            yield self._piece("text", written)

    def _skip_end(self) -> Pieces:
        """Pass over the mark of a message's end."""
        while (
            not self._ended
            and self._held
            and begun_size(self._held, _MESSAGE_ENDS) == len(self._held)
        ):
            if self._held in _MESSAGE_ENDS:
                break
            yield None
        for mark in _MESSAGE_ENDS:
            if self._held.startswith(mark):
                self._take(len(mark))
                return


class RecipientParser(Parser):
    r"""Reads Functionary's messages: ``all\nHello.>>>weather\n{"city": "Paris"}``.

    The mark before the first is the end of the prompt.
    """

    MARK = ">>>"
    ALL = "all"

    def __init__(self, new_id: NewId, prompt: str, schemas: Schemas) -> None:
        super().__init__(None, new_id)
        self._recipients = (self.ALL, *schemas)
        self._unwritten = prompt.rstrip().endswith(self.MARK)  # the mark, by the model
        if self._unwritten:
            self._held = self.MARK

    def _piece(self, kind: Kind, text: str) -> Piece:
        if self._unwritten and text.startswith(self.MARK):
            text = text.removeprefix(self.MARK)
        self._unwritten = False
        return super()._piece(kind, text)

    def _begins(self, _mark: str, rest: str) -> bool | None:
        answers = [is_begun(rest, recipient + "\n") for recipient in self._recipients]
        if True in answers:
            return True
        return None if None in answers else False

    def _read(self) -> Pieces:
        while True:
            mark = yield from self._until("text", (self.MARK,))
            if mark is None:
                return
            head, _, self._held = self._held.partition("\n")
            recipient = head.removeprefix(self.MARK)
            if recipient != self.ALL:
                yield from self._read_call(recipient, head + "\n")

    def _read_call(self, name: str, head: str) -> Pieces:
        parts: list[str] = []
        while True:
            place = self._held.find(self.MARK)
            if place >= 0 and self._begins(self.MARK, self._held[place + len(self.MARK) :]):
                break
            if self._ended:
                place = len(self._held)
                break
            # No text of JSON holds the mark for long, and one that does is looked at again.
            kept = len(self.MARK) - 1 if place < 0 else len(self._held) - place
            parts.append(self._take(max(len(self._held) - kept, 0)))
            yield None
        written = "".join([*parts, self._take(place)])
        is_cut = self._cut and not self._held
        call = None if is_cut else written_calls.named_call(name, written)
        if call is None:
            yield self._piece("text", head + written)
        else:
            yield from self._whole_calls([call])


# --- Calls in Python

# The beginning of a list of calls, or what may become one. Bounded, because it is looked at again.
_PYTHON_START = re.compile(r"\s*(\[\s{0,8}([A-Za-z_][\w.]{0,255}\s{0,8}(?P<call>\()?)?)?")


class PythonCallParser(Parser):
    """Reads a text that is calls in a Python list: ``[weather(city="Paris", days=2), time()]``.

    A text that begins so is held until its end: only Python can say where a value ends.
    """

    def __init__(
        self, prompt: str | None, new_id: NewId, schemas: Schemas, thoughts: Thoughts
    ) -> None:
        super().__init__(prompt, new_id, thoughts)
        self._schemas = schemas

    def _read(self) -> Pieces:
        while not self._ended:
            start = _PYTHON_START.match(self._held)
            if start is None or start["call"] or start.end() < len(self._held):
                break
            yield None
        start = _PYTHON_START.match(self._held)
        parts: list[str] = []
        if start is not None and start["call"]:
            while not self._ended:
                parts.append(self._take(len(self._held)))
                yield None
            self._held = "".join([*parts, self._held])
            calls = written_calls.python_calls(self._held, self._schemas, one_list=True)
            if calls is not None:
                self._held = ""
                yield from self._whole_calls(calls)
        yield from super()._read()
