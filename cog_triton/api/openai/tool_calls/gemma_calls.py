"""Gemma's calls: ``call:weather{city:<|"|>Paris<|"|>,days:2}``, which is JSON with other quotes."""

import re
from collections.abc import Mapping
from typing import Any

from cog_triton.api.openai.tool_calls.argument_values import (
    mapping_or_empty,
    properties_of,
    typed_value,
    types_of,
)
from cog_triton.api.openai.tool_calls.written_call import NAME, Schemas, WrittenCall, dumps

_GEMMA_HEAD = re.compile(rf"\s*call:({NAME})\{{")
_GEMMA_QUOTES = ("<escape>", '<|"|>')
_GEMMA_KEY = re.compile(r"\s*(?P<quote><\|\"\|>|<escape>)?([^:{}\[\],]+?)(?(quote)(?P=quote))\s*:")
_GEMMA_BARE = re.compile(r"[^,{}\[\]]*")
_GEMMA_SPACE = re.compile(r"\s*")


def gemma_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read calls one behind another; texts stand between ``<escape>`` or ``<|"|>``."""
    calls = []
    place = 0
    while place < len(text.rstrip()):
        head = _GEMMA_HEAD.match(text, place)
        if head is None:
            return None
        reader = _GemmaReader(text, head.end())
        try:
            values = reader.read_object(properties_of(head[1], schemas))
        except (ValueError, RecursionError):
            return None
        calls.append(WrittenCall(head[1], dumps(values)))
        place = reader.place
    return calls or None


class _GemmaReader:
    """Reads values from a place in a text on, or raises ValueError where there is none."""

    def __init__(self, text: str, place: int) -> None:
        self.place = place
        self._text = text

    def read_object(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        """Read what follows an opening brace, with the closing one."""
        values: dict[str, Any] = {}
        while not self._skip("}"):
            key = _GEMMA_KEY.match(self._text, self.place)
            if key is None:
                raise ValueError("no key")
            self.place = key.end()
            values[key[2]] = self._read_value(properties.get(key[2]))
            self._skip(",")
        return values

    def _read_list(self) -> list[Any]:
        values = []
        while not self._skip("]"):
            start = self.place
            values.append(self._read_value(None))
            if not self._skip(",") and self.place == start:
                raise ValueError("no value")
        return values

    def _read_value(self, schema: Any) -> Any:
        for quote in _GEMMA_QUOTES:
            if self._skip(quote):
                end = self._text.find(quote, self.place)
                if end < 0:
                    raise ValueError("a text without an end")
                value = self._text[self.place : end]
                self.place = end + len(quote)
                return typed_value(value, schema) if types_of(schema) else value
        if self._skip("{"):
            return self.read_object(mapping_or_empty(mapping_or_empty(schema).get("properties")))
        if self._skip("["):
            return self._read_list()
        bare = _GEMMA_BARE.match(self._text, self.place)
        assert bare is not None  # it matches the empty text
        self.place = bare.end()
        return typed_value(bare[0].strip(), schema)

    def _skip(self, text: str) -> bool:
        """Pass over white space and a text; return False where another text stands."""
        space = _GEMMA_SPACE.match(self._text, self.place)
        start = space.end() if space else self.place
        if not self._text.startswith(text, start):
            if start >= len(self._text):
                raise ValueError("the text ends")
            return False
        self.place = start + len(text)
        return True
