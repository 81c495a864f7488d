"""A model's text to blocks: text, thoughts and calls of tools, in the formats that models write.

However a text is cut, its blocks are the same. Knows no I/O.
"""

import ast
import itertools
import json
import re
import secrets
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from cog_triton.faces.openai.errors import table
from cog_triton.generation import Chunk

Kind = Literal["text", "thoughts", "call"]
OPENING, CLOSING = "<think>", "</think>"  # of thoughts


@dataclass(eq=False)
class Block:
    """A run of an answer's text or thoughts, or one call, whose pieces join to its arguments."""

    kind: Kind
    index: int = 0  # of a call among those of the answer
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


# The next piece of a block; the first of a call is empty, and comes with its name.
Piece = tuple[Block, str]
Pieces = Iterator[Piece | None]  # None where those that follow need more of the text
# The pieces before something, and in the end if it was found.
Search = Generator[Piece | None, None, bool]
NewId = Callable[[], str]  # returns the id of one more call


class Parser:
    """Reads an answer in pieces; by itself, all but the thoughts at the beginning is text."""

    def __init__(self, prompt: str | None = None, new_id: NewId = str) -> None:
        """Begin an answer; with a ``prompt``, it may begin with thoughts, which that may have opened."""
        self.blocks: list[Block] = []
        self.calls = 0
        self._new_id, self._held, self._ended = new_id, "", False
        thoughts = () if prompt is None else self._read_thoughts(prompt)
        self._pieces = itertools.chain(thoughts, self._read())

    def read(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces that are certain with this chunk."""
        self._held += chunk.text
        self._ended = chunk.finish_reason is not None
        pieces: list[Piece] = []
        for piece in self._pieces:
            if piece is None:
                break
            pieces.append(piece)
        return pieces

    def text(self, kind: Kind) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

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
        if (yield from self._until(CLOSING, "thoughts")):
            yield from self._space()

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

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _space(self) -> Pieces:
        while not (text := self._held.lstrip()) and not self._ended:
            yield None
        self._held = text

    def _until(self, mark: str, kind: Kind, *, strips: int = 0) -> Search:
        """Read the text before a mark, without the space between them, or at the end if it ``strips``."""
        while True:
            text, found, rest = self._held.partition(mark)
            if not found and not self._ended:  # its end may be the beginning of the mark
                sizes = range(min(len(text), len(mark)), 0, -1)
                size = next((n for n in sizes if text.endswith(mark[:n])), 0)
                text, rest = text[: len(text) - size], text
            shown = text if self._ended and not found and not strips else text.rstrip()
            self._held = rest if found else rest[len(shown) :]
            if shown:
                yield self._piece(kind, shown)
            if found or self._ended:
                return bool(found)
            yield None


@dataclass(frozen=True)
class Format:
    """The form in which a family of models writes calls."""

    sign: str  # text by which a chat template is known to ask for this format
    opening: str  # mark before calls
    closing: str = ""  # mark behind each of them
    # Beginnings, without white space, of a text that is all calls; also where the text comes without
    # its special tokens, as NVIDIA's postprocessing sends it.
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"  # their key in a call
    short_ids: bool = False  # of nine letters, as Mistral's templates want it
    named: bool = False  # a call may be its name and then only the arguments; see _NAMED_HEAD
    python: bool = False  # the calls are a list in Python
    marks: tuple[str, ...] = ()  # special tokens of calls, which the text has to have

    def new_id(self, prefix: str = "call_", letters: str = "") -> str:
        """Return an id of a call, with the prefix unless the format has its own form."""
        letters = letters or secrets.token_hex(12)
        return letters[:9] if self.short_ids else prefix + letters

    def parser(self, new_id: NewId, prompt: str | None = None, *, guided: bool = False) -> Parser:
        """Return the parser of one answer; ``guided``: a guide allows nothing but calls in JSON."""
        if self.python and not guided:
            return PythonCallParser(prompt, new_id)
        return CallParser(prompt, new_id, self, guided)


FORMATS = TypeAdapter(dict[str, Format]).validate_python(table("formats.yaml"))


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    known = FORMATS.values()
    return next((format for format in known if format.sign in template), next(iter(known)))


# The beginning of a call in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
_NAMED_HEAD = re.compile(
    r"(?P<name>[\w.-]{1,64})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{"
)
# A text that may become one.
_NAMED_HALF = re.compile(r"[\w.-]{1,64}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?(\[[A-Z_]{0,7})?")
# The beginning of a call that is an object, up to its name and up to its arguments.
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"')
_OBJECT_HEAD = re.compile(rf'{_NAME.pattern}\s*,\s*"(arguments|parameters)"\s*:\s*[{{\[]')
# What matters to the end of an object or a list.
_JSON_MARK = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)


class CallParser(Parser):
    """Reads calls in JSON, and the text around them.

    Arguments behind the name are sent as they come, others at the object's end. One without a name is text.
    """

    def __init__(self, prompt: str | None, new_id: NewId, known: Format, guided: bool) -> None:
        super().__init__(prompt, new_id)
        self._format, self._guided = known, guided

    def _read(self) -> Pieces:
        calls = self._guided or (yield from self._is_all_calls())
        while calls or (yield from self._until(self._format.opening, "text", strips=self.calls)):
            yield from self._read_calls()
            calls = False

    def _is_all_calls(self) -> Search:
        while True:
            squeezed, starts = "".join(self._held.split()), self._format.starts
            if squeezed.startswith(starts):
                return True
            if self._ended or not any(start.startswith(squeezed) for start in starts):
                return False
            yield None

    def _read_calls(self) -> Pieces:
        """Read calls behind an opening, up to the closing or to what cannot be a call."""
        opening, closing, named = self._format.opening, self._format.closing, self._format.named
        while True:
            yield from self._space()
            if not (held := self._held):
                return
            if held.startswith(opening):
                self._take(len(opening))
            elif closing and held.startswith(closing):
                self._take(len(closing))
                return
            elif not self._ended and (opening.startswith(held) or closing.startswith(held)):
                yield None
            elif held[0] in "[],;":
                self._take(1)
            elif held[0] == "{":
                yield from self._read_object()
            elif self._guided:
                self._guided = False  # the engine does not hold the text to the guide
            elif named and (head := _NAMED_HEAD.match(held)):
                self._take(head.end() - 1)
                yield self._start(head["name"], head["id"])
                yield from self._read_arguments()
            elif named and not self._ended and _NAMED_HALF.fullmatch(held):
                yield None
            else:
                return

    def _read_object(self) -> Pieces:
        """Read a call; one that is cut off before its arguments has none."""
        seen = ""
        for piece in self._json():
            if piece is None:
                yield None
                continue
            seen += piece
            if head := _OBJECT_HEAD.match(seen):
                self._held = seen[head.end() - 1 :] + self._held
                yield self._start(head[1])
                yield from self._read_arguments()
                yield from (None for piece in self._json(depth=1) if piece is None)
                return
        if call := object_call(seen):
            yield self._start(call[0])
            if self._complete:
                yield self._piece("call", call[1])
        elif self._complete or not self._guided:
            yield self._piece("text", seen)

    def _read_arguments(self) -> Pieces:
        for piece in self._json():
            yield None if piece is None else self._piece("call", piece)

    def _json(self, depth: int = 0) -> Iterator[str | None]:
        """Take an object or a list as it comes, up to the end of its ``depth`` open brackets."""
        self._complete = quoted = False
        while True:
            size = len(self._held)
            for mark in _JSON_MARK.finditer(self._held):
                if mark[0] == "\\" and not self._ended:
                    size = mark.start()  # what it escapes is to come
                elif mark[0] == '"':
                    quoted = not quoted
                elif not quoted and len(mark[0]) == 1:
                    depth += 1 if mark[0] in "{[" else -1
                    if depth <= 0:
                        self._complete, size = True, mark.end()
                        break
            if size:
                yield self._take(size)
            if self._complete or self._ended:
                return
            yield None


def object_call(text: str) -> tuple[str, str] | None:
    """Return the name of a call that is an object, and its arguments as JSON; None if it is not a call."""
    try:
        value = json.loads(text, strict=False)
        arguments = value.get("arguments", value.get("parameters"))
        # Some models write the arguments as a text that has them.
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (ValueError, RecursionError):
        named = _NAME.match(text)
        return (named[1], "{}") if named else None
    if not isinstance(name := value.get("name"), str):
        return None
    return name, written if isinstance(arguments, str | dict | list) else "{}"


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
