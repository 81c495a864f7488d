"""A model's text to blocks: text, thoughts and calls of tools.

However a text is cut, its blocks are the same. What looks like a call and is none is text, with its marks:
nothing that the model wrote is lost. This module has what all forms of calls share.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cog_triton.api.openai.tool_calls.written_call import Schemas, WrittenCall
from cog_triton.generation import Chunk

Kind = Literal["text", "thoughts", "call"]


@dataclass(frozen=True)
class Thoughts:
    """The marks around the thoughts at the beginning of an answer.

    Attributes:
        tokens: the parts of the marks that may be special tokens; if empty, both marks may be.
    """

    opening: str
    closing: str
    tokens: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.tokens or (self.opening, self.closing)


THINK = Thoughts("<think>", "</think>")
# A chat template is searched for them in this order.
_THOUGHTS = (
    THINK,
    Thoughts("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R7B
    Thoughts("<seed:think>", "</seed:think>"),  # Seed-OSS
    Thoughts("<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>")),  # Gemma 4
    Thoughts("<mm:think>", "</mm:think>"),  # MiniMax M3
    Thoughts("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Thoughts("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
)


def thoughts_of(template: str) -> Thoughts | None:
    """Return the marks of thoughts in a chat template; None if its model does not think."""
    for known in _THOUGHTS:
        if known.closing in template:
            return known
    return None


@dataclass(eq=False)
class Block:
    """A run of an answer's text or thoughts, or one call, whose pieces join to its arguments.

    Attributes:
        index: a call's number among those of the answer; also ``id`` and ``name`` are a call's.
        broken: the call cannot be made: the answer ended in it, or its arguments are not JSON.
        written: what the model wrote of a broken call.
    """

    kind: Kind
    index: int = 0
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    broken: bool = False
    written: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


NewId = Callable[[], str]  # returns the id of one more call


@dataclass(frozen=True)
class AnswerStart:
    """What is known of an answer before its first character.

    Attributes:
        prompt: the text before it, which may have opened the thoughts.
        thoughts: the marks of the thoughts that the answer may begin with; None if it has none.
        schemas: those of the tools that the model was offered.
        max_calls: calls behind so many are left out, as in OpenAI's API; None for no limit.
    """

    prompt: str = ""
    thoughts: Thoughts | None = None
    schemas: Schemas = field(default_factory=dict)
    new_id: NewId = str
    max_calls: int | None = None


# The next piece of a block. The first piece of a call is empty: it brings the call's name.
Piece = tuple[Block, str]
# Parsing is written as generators. They yield pieces, and None where they need more of the answer's text.
Pieces = Iterator[Piece | None]
# Returns the mark that was found, which is still in the text; None at the end of the answer.
Search = Generator[Piece | None, None, str | None]
Question = Generator[Piece | None, None, bool]


class Parser:
    """Reads an answer in pieces. This class finds thoughts at the beginning, and the rest is text.

    Subclasses find calls: they override ``_read``, which takes from ``_held``.

    Attributes:
        blocks: the blocks so far; the last may get more pieces.
        calls: how many of them are calls.
        thoughts_ended: whether the closing mark of thoughts has come.
    """

    def __init__(self, start: AnswerStart) -> None:
        self.blocks: list[Block] = []
        self.calls = 0
        self.thoughts_ended = False
        self._start = start
        self._held = ""  # the text that came and is not in a block yet
        self._ended = False  # no more text comes
        self._cut = False  # the answer ended before the model ended it
        self._lead = ""  # white space before the mark that was found
        self._pieces = itertools.chain(self._read_thoughts(), self._read())

    def read(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces that are certain with this chunk."""
        self._held += chunk.text
        self._ended = chunk.finish_reason is not None
        self._cut = chunk.finish_reason == "length" or chunk.stop_sequence is not None
        pieces: list[Piece] = []
        for piece in self._pieces:
            if piece is None:
                break
            if not self._is_left_out(piece[0]):
                pieces.append(piece)
        return pieces

    def _is_left_out(self, block: Block) -> bool:
        is_call = block.kind == "call"
        limit = self._start.max_calls
        return is_call and limit is not None and block.index >= limit

    def text(self, kind: Kind) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def whole_calls(self) -> list[Block]:
        """Return the calls that can be made."""
        calls = [block for block in self.blocks if block.kind == "call" and not block.broken]
        return [call for call in calls if not self._is_left_out(call)]

    def answer_text(self) -> str:
        """Return the text, with what the model wrote of calls that cannot be made in its place."""
        texts = []
        for block in self.blocks:
            if block.kind == "text":
                texts.append(block.text)
            elif block.broken:
                texts.append(block.written)
        return "".join(texts)

    def broken_text(self) -> str:
        """Return what the model wrote of calls that cannot be made."""
        return "".join(block.written for block in self.blocks if block.broken)

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and all of them can be made."""
        return self.calls > 0 and not any(block.broken for block in self.blocks)

    def _read_thoughts(self) -> Pieces:
        """Read the thoughts at the beginning of the answer, if there are any."""
        marks = self._start.thoughts
        if marks is None:
            return
        opened = self._start.prompt.rstrip().endswith(marks.opening)
        while not opened:
            text = self._held.lstrip()
            if text.startswith(marks.opening):
                opened = True
                self._held = text[len(marks.opening) :]
            elif self._ended or not marks.opening.startswith(text):
                return
            else:
                yield None
        yield from self._skip_space()
        mark = yield from self._until("thoughts", (marks.closing, *self._call_marks()))
        if mark == marks.closing:
            self._take(len(marks.closing))
            self.thoughts_ended = True
            yield from self._skip_space()

    def _call_marks(self) -> Sequence[str]:
        """Return the marks of calls, which end thoughts that have no end."""
        return ()

    def _read(self) -> Pieces:
        """Read the answer behind the thoughts."""
        yield from self._read_text()

    def _read_text(self) -> Pieces:
        """Read all that comes as text."""
        while True:
            text = self._take(len(self._held))
            if text:
                yield self._piece("text", text)
            if self._ended:
                return
            yield None

    def _piece(self, kind: Kind, text: str) -> Piece:
        """Add a text to the last block, or to a new one if that is of another kind."""
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        self.blocks[-1].pieces.append(text)
        return self.blocks[-1], text

    def _start_call(self, name: str, call_id: str | None = None) -> Piece:
        block = Block("call", index=self.calls, id=call_id or self._start.new_id(), name=name)
        self.blocks.append(block)
        self.calls += 1
        return self.blocks[-1], ""

    def _whole_calls(self, calls: Sequence[WrittenCall]) -> Pieces:
        for call in calls:
            yield self._start_call(call.name, call.id)
            yield self._piece("call", call.arguments)

    def _take(self, count: int) -> str:
        """Remove so many characters from what is held, and return them."""
        taken = self._held[:count]
        self._held = self._held[count:]
        return taken

    def _skip_space(self) -> Pieces:
        self._held = self._held.lstrip()
        while not self._held and not self._ended:
            yield None
            self._held = self._held.lstrip()

    def _begins(self, _mark: str, _rest: str) -> bool | None:
        """Return whether a mark with this text behind it counts; None if that is not certain yet."""
        return True

    def _until(self, kind: Kind, marks: Sequence[str]) -> Search:
        """Read the text before the first mark that counts, without the space between them.

        Behind calls, the space at the end of the answer is left out as well.
        """
        while True:
            place, mark = first_mark(self._held, marks)
            if not mark:
                size = 0 if self._ended else begun_size(self._held, marks)
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
            shown = self._held[:place].rstrip()
            if begins is None and not self._ended:
                if shown:
                    yield self._piece(kind, self._take(len(shown)))
                yield None
            elif begins:
                if shown:
                    yield self._piece(kind, shown)
                self._lead = self._held[len(shown) : place]
                self._held = self._held[place:]
                return mark
            else:
                yield self._piece(kind, self._take(place + len(mark)))


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first mark in a text, and the mark; an empty one if there is none."""
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(found, default=(len(text), ""))


def is_begun(text: str, mark: str) -> bool | None:
    """Return whether a text begins with a mark; None if the text is the beginning of the mark."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


def any_begun(answers: Iterable[bool | None]) -> bool | None:
    """Return True if one of the answers is, None if one may still become so, else False."""
    known = set(answers)
    if True in known:
        return True
    return None if None in known else False


def begun_size(text: str, marks: Sequence[str]) -> int:
    """Return the size of the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks))
    for size in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[len(text) - size :]) for mark in marks):
            return size
    return 0
