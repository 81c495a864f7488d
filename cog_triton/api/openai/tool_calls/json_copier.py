"""JSON out of a text that comes in parts, without the mistakes that models make in it. Knows no I/O."""

import json
import re
from typing import NamedTuple

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")  # characters that a string may have unescaped
_UNICODE_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}")
_UNICODE_ESCAPE_SIZE = 6
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's words and JSON's
_LONGEST_WORD = max(map(len, _JSON_WORDS))


class Step(NamedTuple):
    """How many characters of a text are taken, and the JSON that they become."""

    size: int
    written: str


class JsonCopier:
    """Copies one JSON object or list out of a text that comes in parts, and mends what models get wrong.

    Control characters in strings are escaped, and so are backslashes that begin no escape. Python's names
    and quotes become JSON's. Commas before a closing bracket are left out. Brackets that are missing before
    a mark, or at the end of an answer that was not cut off, are added.
    """

    def __init__(self, closing: str) -> None:
        """Begin with the first bracket; ``closing`` is the mark behind the JSON, if there is one."""
        self.complete = False
        self.mended = False  # brackets at the end were missing
        self._closing = closing
        self._open: list[str] = []  # the brackets that will close what is open
        self._quote = ""  # the quote that will close the open string; empty outside strings

    def copy(self, text: str, *, ended: bool, cut: bool) -> Step:
        """Take what can be taken of a text now."""
        written: list[str] = []
        place = 0
        while place < len(text) and not self.complete:
            step = self._step(text, place, ended=ended)
            if step is None:
                break
            place += step.size
            written.append(step.written)
        if ended and not cut and not self._quote and not self.complete and self._open:
            place = len(text)
            written.append(self._close())
        return Step(place, "".join(written))

    def _step(self, text: str, place: int, *, ended: bool) -> Step | None:
        """Return the characters that are taken and what they become; None where more must come."""
        if self._quote:
            return self._step_in_string(text, place, ended=ended)
        if self._closing:
            if text.startswith(self._closing, place):
                return Step(0, self._close())
            if not ended and self._closing.startswith(text[place : place + len(self._closing)]):
                return None
        letter = text[place]
        if letter == ",":
            return self._step_over_comma(text, place, ended=ended)
        if letter in "\"'":
            self._quote = letter
            return Step(1, '"')
        if letter in "{[":
            self._open.append("}" if letter == "{" else "]")
            return Step(1, letter)
        if letter in "}]":
            return Step(1, self._close_to(letter))
        return self._step_over_word(text, place, ended=ended)

    def _step_over_word(self, text: str, place: int, *, ended: bool) -> Step | None:
        word = _WORD.match(text, place)
        if word is not None:
            if word.end() == len(text) and not ended and len(word[0]) < _LONGEST_WORD:
                return None
            return Step(len(word[0]), _JSON_WORDS.get(word[0], word[0]))
        return Step(1, text[place])

    def _step_over_comma(self, text: str, place: int, *, ended: bool) -> Step | None:
        space = _SPACE.match(text, place + 1)
        behind = space.end() if space else place + 1
        if behind == len(text):
            return Step(1, "") if ended else None
        if text[behind] in "}]":
            return Step(1, "")
        following = text[behind : behind + len(self._closing)]
        if self._closing and self._closing.startswith(following):
            return Step(1, "") if following == self._closing or ended else None
        return Step(1, ",")

    def _step_in_string(self, text: str, place: int, *, ended: bool) -> Step | None:
        plain = _PLAIN.match(text, place)
        if plain is not None:
            return Step(len(plain[0]), plain[0])
        letter = text[place]
        if letter == "\\":
            return self._step_over_escape(text, place, ended=ended)
        if letter == self._quote:
            self._quote = ""
            return Step(1, '"')
        if letter == "'":
            return Step(1, letter)
        # It is a control character, or a double quote in a string in single quotes.
        return Step(1, json.dumps(letter)[1:-1])

    def _step_over_escape(self, text: str, place: int, *, ended: bool) -> Step | None:
        escape = text[place : place + _UNICODE_ESCAPE_SIZE]
        if len(escape) == 1:
            return Step(1, "") if ended else None
        if escape[1] in _SIMPLE_ESCAPES:
            return Step(2, escape[:2])
        if escape[1] == "'":
            return Step(2, "'")
        if escape[1] == "u":
            if _UNICODE_ESCAPE.fullmatch(escape):
                return Step(len(escape), escape)
            if len(escape) < _UNICODE_ESCAPE_SIZE and not ended:
                return None
        return Step(1, "\\\\")

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


def mended_json(text: str, closing: str = "") -> str | None:
    """Return one JSON object or list without the mistakes; None if it does not end, or text follows it."""
    copier = JsonCopier(closing)
    copied = copier.copy(text, ended=True, cut=False)
    return copied.written if copier.complete and not text[copied.size :].strip() else None
