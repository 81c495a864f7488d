"""A model's text to blocks: text, thoughts and calls of tools.

However a text is cut, its blocks are the same. What looks like a call and is none is text, with its marks:
nothing that the model wrote is lost. Knows no I/O. This module has what all formats share; those of calls
are in ``call_parsers``.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cog_triton.api.openai.tool_calls.written_calls import WrittenCall
from cog_triton.generation import Chunk

Kind = Literal["text", "thoughts", "call"]


@dataclass(frozen=True)
class Thoughts:
    """The marks around the thoughts at the beginning of an answer."""

    opening: str
    closing: str
    tokens: tuple[
        str, ...
    ] = ()  # those of the marks that may be special; both, if there are none here

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.tokens or (self.opening, self.closing)


THINK = Thoughts("<think>", "</think>")
# In the order in which a chat template is searched for them.
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

    def __init__(
        self, prompt: str | None = None, new_id: NewId = str, thoughts: Thoughts = THINK
    ) -> None:
        """Begin an answer; with a ``prompt``, it may begin with thoughts, which that may have opened."""
        self.blocks: list[Block] = []
        self.calls = 0
        self.thoughts_ended = False  # by their closing mark
        self.most_calls: int | None = None  # those behind them are left out, as OpenAI's API has it
        self._new_id = new_id
        self._thoughts = thoughts
        self._held = ""
        self._ended = False
        self._cut = False  # the answer ended before the model ended it
        self._lead = ""  # white space before the mark that was found
        before: Pieces = iter(()) if prompt is None else self._read_thoughts(prompt)
        self._pieces = itertools.chain(before, self._read())

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
        return is_call and self.most_calls is not None and block.index >= self.most_calls

    def text(self, kind: Kind) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def whole_calls(self) -> list[Block]:
        """Return the calls that can be made."""
        calls = [block for block in self.blocks if block.kind == "call" and not block.broken]
        return [call for call in calls if not self._is_left_out(call)]

    def answer_text(self) -> str:
        """Return the text, with what the model wrote of calls that cannot be made in its place."""
        texts = [block.text if block.kind == "text" else block.written for block in self.blocks]
        is_shown = [block.kind == "text" or block.broken for block in self.blocks]
        return "".join(itertools.compress(texts, is_shown))

    def broken_text(self) -> str:
        """Return what the model wrote of calls that cannot be made."""
        return "".join(block.written for block in self.blocks if block.broken)

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and all of them can be made."""
        return self.calls > 0 and not any(block.broken for block in self.blocks)

    def _read_thoughts(self, prompt: str) -> Pieces:
        opening, closing = self._thoughts.opening, self._thoughts.closing
        opened = prompt.rstrip().endswith(opening)
        while not opened:
            start = self._held.lstrip()
            if start.startswith(opening):
                opened = True
                self._held = start[len(opening) :]
            elif self._ended or not opening.startswith(start):
                return
            else:
                yield None
        yield from self._space()
        mark = yield from self._until("thoughts", self._marks_of_thoughts())
        if mark == closing:
            self._take(len(closing))
            self.thoughts_ended = True
            yield from self._space()

    def _marks_of_thoughts(self) -> Sequence[str]:
        """Return the marks that end thoughts."""
        return (self._thoughts.closing,)

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


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first mark in a text, and the mark; an empty one if there is none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=(len(text), ""))


def begun_size(text: str, marks: Sequence[str]) -> int:
    """Return the size of the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks))
    for size in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[len(text) - size :]) for mark in marks):
            return size
    return 0
