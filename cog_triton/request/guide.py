"""Structured output: the form that a request asks of its answer, and as engines take it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cog_triton.errors import is_unicode


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


# Special in regular expressions of any kind; re.escape knows only Python's.
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/]")
_TOKENS = re.compile(r"\\.|\[\^?|.", re.DOTALL)
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
# With these letters a backslash means the same to every engine, or is refused by name.
_ESCAPES = frozenset("nrtfvxupPbB0")


def check_guide(guide: Guide) -> None:
    """Refuse a guide that is wrong whatever the engine is, with a ValueError."""
    if not guide.text and guide.kind is not GuideKind.JSON:
        raise ValueError(f"a guide of kind {guide.kind.value} must have a text")
    if guide.kind is GuideKind.JSON_SCHEMA and not isinstance(_parsed(guide.text), dict):
        raise ValueError("a JSON schema must be an object")
    engine_guide(guide)


def choices(guide: Guide) -> list[str]:
    """Return the texts of a guide of kind CHOICE, or raise a ValueError."""
    texts = _parsed(guide.text)
    if not isinstance(texts, list) or not texts or not all(map(_is_text, texts)):
        raise ValueError("choice must be a JSON list of texts in Unicode, none of them empty")
    return texts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and is_unicode(value)


def engine_guide(guide: Guide) -> Guide:
    """Return a guide as engines take it: a choice as a regular expression, and classes as ASCII.

    Raises:
        ValueError: as ``choices`` and ``ascii_classes``.
    """
    if guide.kind is GuideKind.REGEX:
        return Guide(guide.kind, ascii_classes(guide.text))
    if guide.kind is not GuideKind.CHOICE:
        return guide
    escaped = (_SPECIAL.sub(r"\\\g<0>", text) for text in choices(guide))
    return Guide(GuideKind.REGEX, "|".join(escaped))


def ascii_classes(expression: str) -> str:
    """Spell out \\d, \\w and \\s as Python's re has them with ASCII; engines differ in what they match.

    Raises:
        ValueError: a backslash before a letter or digit that engines take differently.
    """
    parts, in_class, first = [], False, False
    for token in _TOKENS.findall(expression):
        letter = token[1:] if token[0] == "\\" else ""
        if letter in _ASCII:
            token = _ASCII[letter] if in_class else f"[{_ASCII[letter]}]"
        elif letter.lower() in _ASCII:  # in a class, engines' own: there is no other way to say it
            token = token if in_class else f"[^{_ASCII[letter.lower()]}]"
        elif letter.isascii() and letter.isalnum() and letter not in _ESCAPES:
            raise ValueError(f"{token} is not supported in a regular expression")
        if token[0] == "[" and not letter and not in_class:
            in_class = first = True
        else:
            in_class, first = in_class and (token != "]" or first), False
        parts.append(token)
    return "".join(parts)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the guide is no JSON: {error}") from None
