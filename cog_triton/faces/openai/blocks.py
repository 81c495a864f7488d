"""A model's text to blocks: text, thoughts and calls of tools, in the formats that models write.

However a text is cut, its blocks are the same. What looks like a call and is none is text, with its marks:
nothing that the model wrote is lost. Knows no I/O.
"""

import ast
import itertools
import json
import re
import secrets
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import TypeAdapter

from cog_triton.faces.openai import written_calls
from cog_triton.faces.openai.errors import table
from cog_triton.faces.openai.written_calls import Reader, Schemas, WrittenCall
from cog_triton.generation import Chunk

Kind = Literal["text", "thoughts", "call"]
OPENING, CLOSING = "<think>", "</think>"  # of thoughts
NO_TOOLS: Schemas = {}
LISTED_CALLS = '[{"name":'  # begins calls in JSON, without white space


@dataclass(eq=False)
class Block:
    """A run of an answer's text or thoughts, or one call, whose pieces join to its arguments.

    A call is ``broken`` if the answer ended in it, or if its arguments are no JSON; ``written`` is what the
    model wrote of it.
    """

    kind: Kind
    index: int = 0  # of a call among those of the answer
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    broken: bool = False
    written: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


# The next piece of a block; the first of a call is empty, and comes with its name.
Piece = tuple[Block, str]
Pieces = Iterator[Piece | None]  # None where those that follow need more of the text
# The pieces before a mark, and in the end the mark, which is still held; None at the end of the answer.
Search = Generator[Piece | None, None, str | None]
Question = Generator[Piece | None, None, bool]
NewId = Callable[[], str]  # returns the id of one more call


class Parser:
    """Reads an answer in pieces; by itself, all but the thoughts at the beginning is text."""

    def __init__(self, prompt: str | None = None, new_id: NewId = str) -> None:
        """Begin an answer; with a ``prompt``, it may begin with thoughts, which that may have opened."""
        self.blocks: list[Block] = []
        self.calls = 0
        self._new_id = new_id
        self._held = ""
        self._ended = False
        self._cut = False  # the answer ended before the model ended it
        self._lead = ""  # white space before the mark that was found
        thoughts: Pieces = iter(()) if prompt is None else self._read_thoughts(prompt)
        self._pieces = itertools.chain(thoughts, self._read())

    def read(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces that are certain with this chunk."""
        self._held += chunk.text
        self._ended = chunk.finish_reason is not None
        self._cut = chunk.finish_reason == "length" or chunk.stop_sequence is not None
        pieces: list[Piece] = []
        for piece in self._pieces:
            if piece is None:
                break
            pieces.append(piece)
        return pieces

    def text(self, kind: Kind) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def whole_calls(self) -> list[Block]:
        """Return the calls that can be made."""
        return [block for block in self.blocks if block.kind == "call" and not block.broken]

    def broken_text(self) -> str:
        """Return what the model wrote of calls that cannot be made."""
        return "".join(block.written for block in self.blocks if block.broken)

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and all of them can be made."""
        return self.calls > 0 and not any(block.broken for block in self.blocks)

    def _read_thoughts(self, prompt: str) -> Pieces:
        opened = prompt.rstrip().endswith(OPENING)
        while not opened:
            start = self._held.lstrip()
            if start.startswith(OPENING):
                opened, self._held = True, start[len(OPENING) :]
            elif self._ended or not OPENING.startswith(start):
                return
            else:
                yield None
        yield from self._space()
        mark = yield from self._until("thoughts", self._marks_of_thoughts())
        if mark == CLOSING:
            self._take(len(CLOSING))
            yield from self._space()

    def _marks_of_thoughts(self) -> Sequence[str]:
        """Return the marks that end thoughts."""
        return (CLOSING,)

    def _read(self) -> Pieces:
        while True:
            if text := self._take(len(self._held)):
                yield self._piece("text", text)
            if self._ended:
                return
            yield None

    def _piece(self, kind: Kind, text: str) -> Piece:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        self.blocks[-1].pieces.append(text)
        return self.blocks[-1], text

    def _start(self, name: str, call_id: str | None = None) -> Piece:
        self.blocks.append(Block("call", self.calls, call_id or self._new_id(), name))
        self.calls += 1
        return self.blocks[-1], ""

    def _whole_calls(self, calls: Sequence[WrittenCall]) -> Pieces:
        for call in calls:
            yield self._start(call.name, call.id)
            yield self._piece("call", call.arguments)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _space(self) -> Pieces:
        while not (text := self._held.lstrip()) and not self._ended:
            yield None
        self._held = text

    def _begins(self, _mark: str, _rest: str) -> bool | None:
        """Return whether a mark with this text behind it counts; None if that is not certain yet."""
        return True

    def _until(self, kind: Kind, marks: Sequence[str]) -> Search:
        """Read the text before the first mark that counts, without the space between them.

        Behind calls, the space at the end of the answer is left out as well.
        """
        while True:
            place, mark = _first(self._held, marks)
            if not mark:
                size = 0 if self._ended else _begun_size(self._held, marks)
                shown = self._held[: len(self._held) - size]
                if not self._ended or (kind == "text" and self.calls):
                    shown = shown.rstrip()
                if shown:
                    yield self._piece(kind, shown)
                self._held = self._held[len(shown) :]
                if self._ended:
                    self._held = ""
                    return None
                yield None
                continue
            begins = self._begins(mark, self._held[place + len(mark) :])
            if begins is None and not self._ended:
                if shown := self._held[:place].rstrip():
                    yield self._piece(kind, self._take(len(shown)))
                yield None
            elif begins:
                if shown := self._held[:place].rstrip():
                    yield self._piece(kind, shown)
                self._lead = self._held[len(shown) : place]
                self._held = self._held[place:]
                return mark
            else:
                yield self._piece(kind, self._take(place + len(mark)))


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first mark in a text, and the mark; an empty one if there is none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=(len(text), ""))


def _begun_size(text: str, marks: Sequence[str]) -> int:
    """Return the size of the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks))
    for size in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[len(text) - size :]) for mark in marks):
            return size
    return 0


@dataclass(frozen=True)
class Format:
    """The form in which a family of models writes calls."""

    signs: tuple[str, ...]  # texts by which a chat template is known to ask for this format
    opening: str  # mark before calls
    closing: str = ""  # mark behind each of them
    # Beginnings, without white space, of a text that is all calls; also where the text comes without
    # its special tokens, as NVIDIA's postprocessing sends it.
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"  # their key in a call
    short_ids: bool = False  # of nine letters, as Mistral's templates want it
    named: bool = False  # a call may be its name and then only the arguments; see _NAMED_HEAD
    python: bool = False  # the calls are a list in Python
    harmony: bool = False  # gpt-oss's channels
    marks: tuple[str, ...] = ()  # special tokens of calls, which the text has to have
    readers: tuple[str, ...] = ()  # of what stands between the marks, by their names in READERS

    def new_id(self, prefix: str = "call_", letters: str = "") -> str:
        """Return an id of a call, with the prefix unless the format has its own form."""
        letters = letters or secrets.token_hex(12)
        return letters[:9] if self.short_ids else prefix + letters

    def parser(
        self,
        new_id: NewId,
        prompt: str | None = None,
        *,
        guided: bool = False,
        guided_either: bool = False,
        schemas: Schemas = NO_TOOLS,
    ) -> Parser:
        """Return the parser of one answer.

        Args:
            guided: a guide allows nothing but calls in JSON.
            guided_either: a guide allows nothing but a list of calls in JSON, or an answer in JSON.
            schemas: of the parameters of the tools that are offered, by their names.
        """
        if guided_either:
            listed = replace(self, starts=(LISTED_CALLS,), named=False)
            return ListedCallParser(prompt, new_id, listed, guided=False, schemas=schemas)
        if self.harmony and not guided:
            return HarmonyParser(new_id)
        if self.python and not guided:
            return PythonCallParser(prompt, new_id)
        if self.readers and not guided:
            return MarkedCallParser(prompt, new_id, self, schemas)
        return CallParser(prompt, new_id, self, guided, schemas)


FORMATS = TypeAdapter(dict[str, Format]).validate_python(table("formats.yaml"))
DEFAULT_FORMAT = FORMATS["hermes"]  # of templates without any sign
HARMONY = FORMATS["harmony"]
READERS: dict[str, Reader] = {
    "json": written_calls.json_calls,
    "function_tags": written_calls.function_tag_calls,
    "argument_tags": written_calls.argument_tag_calls,
    "invoke_tags": written_calls.invoke_tag_calls,
    "deepseek": written_calls.deepseek_calls,
    "kimi": written_calls.kimi_calls,
    "gemma": written_calls.gemma_calls,
}


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    for known in FORMATS.values():
        if any(sign in template for sign in known.signs):
            return known
    return DEFAULT_FORMAT


# The beginning of a call in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
_NAMED_HEAD = re.compile(
    r"(?P<name>[\w.-]{1,128})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{"
)
# A text that may become one.
_NAMED_HALF = re.compile(r"[\w.-]{1,128}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?(\[[A-Z_]{0,7})?")
# The beginning of a call that is an object, up to its arguments.
_OBJECT_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(arguments|parameters)"\s*:\s*[{\[]'
)
# The beginnings of calls in tags behind Hermes' mark, and what may become one.
_FUNCTION_TAG = "<function="
_NAME = re.compile(r"[\w.:-]{1,128}")
_ARGUMENT_TAG = "<arg_key>"
_VALID_ESCAPES = frozenset('"\\/bfnrtu')


def _is_begun(text: str, mark: str) -> bool | None:
    """Return whether a text begins with a mark; None if it is the beginning of one."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


class JsonCopier:
    """Copies one JSON object or list out of a text that comes in parts, and mends what models get wrong.

    Control characters in strings are escaped, commas before a closing bracket are left out, and brackets
    that are missing before a mark, or at the end of an answer that was not cut off, are added.
    """

    def __init__(self, closing: str) -> None:
        self.complete = False
        self.mended = False  # brackets at the end were missing
        self._closing = closing
        self._open: list[str] = []  # the brackets that will close what is open
        self._quoted = False

    def copy(self, text: str, *, ended: bool, cut: bool) -> tuple[int, str]:
        """Return how many characters are taken of the text, and the JSON that they become."""
        written: list[str] = []
        place = 0
        while place < len(text) and not self.complete:
            step = self._step(text, place, ended=ended)
            if step is None:
                break
            size, piece = step
            place += size
            written.append(piece)
        if ended and not cut and not self._quoted and not self.complete and self._open:
            place = len(text)
            written.append(self._close())
        return place, "".join(written)

    def _step(self, text: str, place: int, *, ended: bool) -> tuple[int, str] | None:
        """Return the characters that are taken and what they become; None where more must come."""
        letter = text[place]
        if self._quoted:
            return self._step_in_string(text, place, ended=ended)
        rest = text[place : place + len(self._closing)]
        if self._closing and rest == self._closing:
            return 0, self._close()
        if self._closing and self._closing.startswith(rest) and not ended:
            return None
        if letter == ",":
            behind = text[place + 1 :].lstrip()
            if not behind and not ended:
                return None
            dropped = (
                not behind
                or behind[0] in "}]"
                or (bool(self._closing) and self._closing.startswith(behind[: len(self._closing)]))
            )
            return 1, "" if dropped else letter
        if letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._open.append("}" if letter == "{" else "]")
        elif letter in "}]":
            return 1, self._close_to(letter)
        return 1, letter

    def _step_in_string(self, text: str, place: int, *, ended: bool) -> tuple[int, str] | None:
        letter = text[place]
        if letter == "\\":
            if place + 1 == len(text):
                return (1, "") if ended else None
            escaped = text[place + 1]
            if escaped in _VALID_ESCAPES:
                return 2, letter + escaped
            return 1, "\\\\"
        if letter == '"':
            self._quoted = False
        elif letter < " ":
            return 1, json.dumps(letter)[1:-1]
        return 1, letter

    def _close_to(self, bracket: str) -> str:
        """Return a closing bracket, with those before it that are missing; nothing if none is open."""
        if bracket not in self._open:
            return ""
        closers = ""
        while not closers.endswith(bracket):
            closers += self._open.pop()
        self.complete = not self._open
        return closers

    def _close(self) -> str:
        closers = "".join(reversed(self._open))
        self._open.clear()
        self.complete = True
        self.mended = True
        return closers


class MarkedCallParser(Parser):
    """Reads calls between marks, each when it is complete; the text around them as it comes."""

    def __init__(self, prompt: str | None, new_id: NewId, known: Format, schemas: Schemas) -> None:
        super().__init__(prompt, new_id)
        self._format = known
        self._schemas = schemas
        self._reader = written_calls.first_of(*(READERS[name] for name in known.readers))

    def _marks_of_thoughts(self) -> Sequence[str]:
        return (CLOSING, self._format.opening)

    def _read(self) -> Pieces:
        while (yield from self._until("text", (self._format.opening,))):
            yield from self._read_marked(self._reader)

    def _read_marked(self, reader: Reader) -> Pieces:
        """Read the calls from the opening that is held to its closing, or give all of it as text."""
        opening, closing = self._format.opening, self._format.closing
        while True:
            end = self._held.find(closing, len(opening)) if closing else -1
            if end >= 0 or self._ended:
                break
            yield None
        closed = end >= 0
        body = self._held[len(opening) : end] if closed else self._held[len(opening) :]
        written = self._take(end + len(closing) if closed else len(self._held))
        calls = reader(body, self._schemas) if closed or not self._cut else None
        if not calls:
            yield self._piece("text", self._lead + written)
            return
        yield from self._whole_calls(calls)


class CallParser(MarkedCallParser):
    """Reads calls in JSON, and the text around them.

    Arguments behind the name are sent as they come, others at the object's end. Behind Hermes' mark calls
    may be in tags as well: models of one template write both.
    """

    def __init__(
        self,
        prompt: str | None,
        new_id: NewId,
        known: Format,
        guided: bool,
        schemas: Schemas = NO_TOOLS,
    ) -> None:
        super().__init__(prompt, new_id, known, schemas)
        self._guided = guided
        self._reader = written_calls.first_of(
            written_calls.function_tag_calls, written_calls.argument_tag_calls
        )

    def _begins(self, mark: str, rest: str) -> bool | None:
        body = rest.lstrip()
        if mark != self._format.opening:
            return True
        if not body:
            return None
        if body[0] in "{[":
            return True
        if self._format.named:
            return self._begins_named(body)
        return self._begins_tags(body) if self._format.closing else False

    def _begins_named(self, body: str) -> bool | None:
        if _NAMED_HEAD.match(body):
            return True
        return None if _NAMED_HALF.fullmatch(body) else False

    def _begins_tags(self, body: str) -> bool | None:
        closing = self._format.closing
        name = _NAME.match(body)
        if name is None:
            return _is_begun(body, _FUNCTION_TAG)
        behind = body[name.end() :].lstrip()
        if behind.startswith(closing):
            return name[0] in self._schemas  # a call without arguments
        begun = _is_begun(behind, _ARGUMENT_TAG)
        return None if begun is False and closing.startswith(behind) else begun

    def _read(self) -> Pieces:
        if self._guided or (yield from self._is_all_calls()):
            yield from self._read_calls(marked=self._guided)
        while (yield from self._until("text", (self._format.opening,))):
            body = self._held[len(self._format.opening) :].lstrip()
            if body[0] in "{[" or self._format.named:
                self._lead += self._take(len(self._held) - len(body))
                yield from self._read_calls(marked=True)
            else:
                yield from self._read_marked(self._reader)
                if self.blocks[-1].kind == "call":
                    yield from self._space()

    def _is_all_calls(self) -> Question:
        """Return whether the answer begins as calls do that come without a mark."""
        while True:
            squeezed, starts = "".join(self._held.split()), self._format.starts
            if squeezed.startswith(starts):
                return True
            if self._ended or not any(start.startswith(squeezed) for start in starts):
                return False
            yield None

    def _read_calls(self, *, marked: bool) -> Pieces:
        """Read calls in JSON that follow one another; what is none of them is text."""
        lead, self._lead = self._lead, ""
        while True:
            lead += yield from self._read_separators("[,;")
            if not (yield from self._read_call(lead, marked=marked)):
                return
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
        between = yield from self._read_separators("],;")
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
            begins = self._begins(opening, body)
            if begins is None and not self._ended:
                yield None
                continue
            if begins and (body[0] in "{[" or self._format.named):
                return between + self._take(len(self._held) - len(body))
            return None
        while self._format.named and not self._ended and _NAMED_HALF.fullmatch(self._held):
            yield None
        follows = self._held[:1] in ("{", "[") or (
            self._format.named and _NAMED_HEAD.match(self._held)
        )
        return between if follows else None

    def _read_object(self, lead: str, *, marked: bool) -> Question:
        """Read an object; return False where it is no call, and has been given as text."""
        copier = JsonCopier(self._format.closing)
        seen = ""  # of the object, as it was written
        while True:
            taken, _ = copier.copy(self._held, ended=self._ended, cut=self._cut)
            seen += self._take(taken)
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
        calls = written_calls.json_calls(seen, self._schemas) if copier.complete else None
        if calls and (marked or self._has_arguments(seen, calls[0])):
            yield from self._whole_calls(calls)
            return True
        seen += self._take(len(self._held)) if self._ended and not copier.complete else ""
        whole = copier.complete and not copier.mended
        if whole or not self._guided:
            yield self._piece("text", lead + seen)
        return False

    def _is_offered(self, name: str, *, marked: bool) -> bool:
        """Return whether a name is that of a call: behind a mark any is, else that of a tool."""
        return marked or not self._schemas or name in self._schemas

    def _has_arguments(self, written: str, call: WrittenCall) -> bool:
        """Return whether an object without a mark is a call: an answer in JSON may have a name, too."""
        has_key = any(f'"{key}"' in written for key in written_calls.ARGUMENT_KEYS)
        return has_key and self._is_offered(call.name, marked=False)

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


class ListedCallParser(CallParser):
    """Reads an answer in JSON that is a list of calls of offered tools, or else is text."""

    def _read(self) -> Pieces:
        if (yield from self._is_all_calls()):
            yield from self._read_calls(marked=False)
        yield from Parser._read(self)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# gpt-oss: <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary
# to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,128})")
_HEADER_STARTS = ("<|channel|>", "<|start|>", "assistant")
_MESSAGE = "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class HarmonyParser(Parser):
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
        while True:
            place, mark = _first(self._held, (*_MESSAGE_ENDS, "<|start|>"))
            if mark or self._ended:
                break
            yield None
        written = self._take(place)
        calls = None
        if mark or not self._cut:
            named = f'{{"name": {json.dumps(name)}, "arguments": {written or "{}"}}}'
            calls = written_calls.json_calls(named, NO_TOOLS)
        if calls:
            yield from self._whole_calls(calls)
        elif written:
            yield self._piece("text", written)

    def _skip_end(self) -> Pieces:
        """Pass over the mark of a message's end."""
        while (
            not self._ended
            and self._held
            and _begun_size(self._held, _MESSAGE_ENDS) == len(self._held)
        ):
            if self._held in _MESSAGE_ENDS:
                break
            yield None
        for mark in _MESSAGE_ENDS:
            if self._held.startswith(mark):
                self._take(len(mark))
                return


_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*")
# The beginning of a list of calls, or what may become one. Bounded, because it is looked at again.
_PYTHON_START = re.compile(r"\s*(\[\s{0,8}([A-Za-z_][\w.]{0,255}\s{0,8}(?P<call>\()?)?)?")


class PythonCallParser(Parser):
    """Reads a text that is calls in a Python list: ``[weather(city="Paris", days=2), time()]``.

    A text that begins so is held until its end: only Python can say where a value ends.
    """

    def _read(self) -> Pieces:
        while (start := _PYTHON_START.match(self._held)) and not self._ended:
            if not start["call"] and start.end() < len(self._held):
                break
            yield None
        calls = python_calls(self._held) if self._ended else None
        for name, arguments in calls or ():
            yield self._start(name)
            yield self._piece("call", arguments)
        if calls is None:
            yield from super()._read()


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the names of calls in a list and their arguments as JSON; None if the text is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            body = ast.parse(text.strip(), mode="eval").body
        return [_python_call(node) for node in body.elts] if isinstance(body, ast.List) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) and not node.args else ""
    if not isinstance(node, ast.Call) or not _PYTHON_NAME.fullmatch(name):
        raise ValueError("not a call by keywords")
    values = {word.arg: ast.literal_eval(_JsonNames().visit(word.value)) for word in node.keywords}
    if None in values:
        raise ValueError("keywords of a dictionary")
    return name, json.dumps(values, allow_nan=False)


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names of values for Python's."""

    NAMES = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node
