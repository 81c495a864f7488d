"""Structured output: the form that a request asks for, as every engine takes it."""

import json
import re
from enum import Enum

from pydantic.dataclasses import dataclass

from cog_triton.errors import InvalidParameter, is_unicode

# Special in regular expressions of any kind; re.escape knows only Python's.
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/]")
# An escaped character, the beginning of a class, or a character.
_TOKENS = re.compile(r"\\.|\[\^?|.", re.DOTALL)
# What stands in a class for these letters behind a backslash.
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
# With these letters a backslash means the same to every engine, or is refused by name.
_ESCAPES = frozenset("nrtfvxupPbB0")


class GuideKind(str, Enum):
    """The language of a guide; the values but CHOICE are those of ``guided_decoding_guide_type``."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "ebnf_grammar"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"


@dataclass(frozen=True)
class Guide:
    """The form of an output; ``text`` of CHOICE is a JSON list of texts, and of JSON empty."""

    kind: GuideKind
    text: str = ""


def choose_guide(**inputs: str | None) -> Guide | None:
    """Return the guide of the one input that is set: json_schema, regex, grammar or choice."""
    texts = {name: text for name, text in inputs.items() if text is not None}
    if len(texts) > 1:
        raise InvalidParameter(f"{' and '.join(texts)} cannot be combined: set only one of them")
    if not texts:
        return None
    ((name, text),) = texts.items()
    return Guide(GuideKind[name.upper()], text)


def engine_guide(guide: Guide) -> Guide:
    """Return a guide as engines take it, or raise ValueError.

    A choice becomes a regular expression, and the classes of an expression become ASCII.
    """
    if not guide.text and guide.kind is not GuideKind.JSON:
        raise ValueError(f"a guide of kind {guide.kind.value} must not be empty")
    if guide.kind is GuideKind.JSON_SCHEMA:
        if not isinstance(_parsed(guide.text), dict):
            raise ValueError("a JSON schema must be an object")
        return guide
    if guide.kind is GuideKind.CHOICE:
        return Guide(GuideKind.REGEX, _one_of(_parsed(guide.text)))
    if guide.kind is GuideKind.REGEX:
        return Guide(GuideKind.REGEX, ascii_classes(guide.text))
    return guide


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the guide is not JSON: {error}") from None


def _one_of(texts: object) -> str:
    """Return a regular expression that matches one of some texts."""
    if not isinstance(texts, list) or not texts or not all(map(_is_choice, texts)):
        raise ValueError("choice must be a JSON list of texts in Unicode, none of them empty")
    return "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)


def _is_choice(text: object) -> bool:
    return isinstance(text, str) and bool(text) and is_unicode(text)


def ascii_classes(expression: str) -> str:
    """Spell out \\d, \\w and \\s as Python's re has them with ASCII; engines differ in what they match.

    ValueError names a backslash before a letter or digit that engines take differently.
    """
    parts: list[str] = []
    in_class = False
    # Whether the next token is the first in its class, where "]" ends none.
    is_first = False
    for token in _TOKENS.findall(expression):
        letter = token[1:] if token[0] == "\\" else ""
        parts.append(_spelled_out(token, letter, in_class=in_class))
        if token[0] == "[" and not in_class:
            in_class = True
            is_first = True
        else:
            in_class = in_class and (token != "]" or is_first)
            is_first = False
    return "".join(parts)


def _spelled_out(token: str, letter: str, *, in_class: bool) -> str:
    """Return a token of an expression; ``letter`` is what a backslash stands before, if one does."""
    if letter in _ASCII:
        return _ASCII[letter] if in_class else f"[{_ASCII[letter]}]"
    if letter.lower() in _ASCII:
        # In a class it means what the engine means by it: there is no other way to write it.
        return token if in_class else f"[^{_ASCII[letter.lower()]}]"
    if letter.isascii() and letter.isalnum() and letter not in _ESCAPES:
        raise ValueError(f"{token} is not supported in a regular expression")
    return token
