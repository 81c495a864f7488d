"""Turns token ids into text as they arrive, in pieces that join to the text of all ids.

``tokenizer.decode(ids + more)`` need not start with ``tokenizer.decode(ids)``, and
``tokenizer.decode(more)`` need not be the text it adds. Three causes, and what is done about each:

* A character's bytes are spread over tokens. With byte-level BPE an incomplete character decodes
  to one U+FFFD at the end of the text, which is held back.
* Byte fallback (SentencePiece's ``<0xE4>`` tokens) decodes a run of byte tokens as a whole: to its
  characters if all of it is UTF-8, else to one U+FFFD for *each* byte. So a run is held back,
  undecoded, until another token closes it.
* The first token is special: SentencePiece decoders drop its leading space, and WordPiece's put no
  space before it. So new ids are decoded behind a window of earlier ones, and the text of that
  window is cut off again.

Four tokens are window enough: a character has four bytes at most, and a decoder that starts inside
one is back in step at the next lead byte. Ids that have no text are left out before anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, Protocol

CONTEXT_TOKENS = 16
"""Number of earlier ids that `decode_delta` needs and reads.

Four would do for byte-level BPE. The others leave room for special tokens among them, and for
byte-fallback runs of up to 15 bytes, for which the text is exact even if they are not UTF-8.
"""

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TEXT = -1
_KEPT_TOKENS = 4
_WINDOW_TOKENS = 16
_FAST_TOKENIZERS = (  # in version 5, in version 4
    "transformers.tokenization_utils_tokenizers",
    "transformers.tokenization_utils_fast",
)


class TokenDecoder(Protocol):
    """The part of a tokenizer that is used; those of transformers, fast and slow, have it.

    ``convert_ids_to_tokens`` and ``added_tokens_decoder`` are used as well, if they are there.
    Without them no token is taken for a byte-fallback or special token.
    """

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> Any: ...

    def __hash__(self) -> int: ...


class IncrementalDetokenizer:
    """Turns the ids of one text, as they arrive, into its text.

    However the ids are split into calls, the results of `decode` and the one of `flush` join to
    ``tokenizer.decode(all_ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)``.

    This holds for byte-level BPE, SentencePiece with or without byte fallback, Metaspace, WordPiece
    and BPE with a word suffix; not for decoders that rewrite across tokens, such as CTC. A call costs
    one or two calls of ``tokenizer.decode``.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        shown: Sequence[str] = (),
    ) -> None:
        """Begin a text.

        Args:
            shown: texts of special tokens that are not skipped. The text between them is decoded by itself.
        """
        self._decoder = _decoder(tokenizer, skip_special_tokens)
        self._shown = {i: text for i, text in self._decoder.skipped.items() if text in shown}
        self._start_over()

    def _start_over(self) -> None:
        self._window: list[int] = []
        self._delivered = 0  # characters of the window's text
        self._run: list[int] = []  # byte-fallback tokens behind the window

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that became certain with these ids, often empty.

        With ``final`` nothing is held back, and the next call begins another text.
        """
        if self._shown and not self._shown.keys().isdisjoint(ids):
            return self._decode_around_shown(ids, final)
        ids = self._run + self._decoder.visible(ids)
        end = len(ids) if final else len(ids) - self._decoder.open_run(ids, len(self._run))
        ids, self._run = ids[:end], ids[end:]
        if not ids and not final:
            return ""
        if len(self._window) > _WINDOW_TOKENS:
            self._shrink_window()
        self._window += ids
        text = self._decoder.text(self._window)
        delta = _certain(text, final)[self._delivered :]
        self._delivered += len(delta)
        self._held = len(text) - self._delivered
        if final:
            self._start_over()
        return delta

    def flush(self) -> str:
        """Return the rest of the text. The next `decode` begins another text."""
        return self.decode((), final=True)

    def _decode_around_shown(self, ids: Sequence[int], final: bool) -> str:
        texts, start = [], 0
        for place, token_id in enumerate(ids):
            if token_id in self._shown:
                texts += [self.decode(ids[start:place], final=True), self._shown[token_id]]
                start = place + 1
        return "".join(texts) + self.decode(ids[start:], final=final)

    def _shrink_window(self) -> None:
        kept = self._window[-_KEPT_TOKENS:]
        # Whitespace that a decoder strips counts again once text follows.
        if text := self._decoder.text(kept):
            self._window, self._delivered = kept, len(text) - self._held


def decode_delta(
    tokenizer: TokenDecoder,
    context_ids: Sequence[int],
    new_ids: Sequence[int],
    *,
    final: bool,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text that ``new_ids`` add to a text, keeping no state between calls.

    Args:
        context_ids: the last `CONTEXT_TOKENS` ids before ``new_ids``, or all if there were fewer.
        final: hold nothing back. Otherwise an incomplete character at the end is returned by the
            call that gets the rest of it.

    The results join to ``tokenizer.decode(all_ids)``, like those of `IncrementalDetokenizer`, if four
    ids of each context have text, and if each byte-fallback run of `CONTEXT_TOKENS` tokens or more is
    UTF-8 as a whole. Such a long run is returned a character at a time: if it turns out invalid later,
    the characters already returned stay.
    """
    decoder = _decoder(tokenizer, skip_special_tokens)
    before = list(context_ids)[-CONTEXT_TOKENS:]
    start = 0
    if len(before) == CONTEXT_TOKENS:  # it may begin within a character
        start = len(list(takewhile(decoder.is_continuation, before[:3])))
    after = [*before, *new_ids]
    text = decoder.certain(after, start, final=final)
    return text[len(decoder.certain(before, start)) :]


@lru_cache(maxsize=8)
def _decoder(tokenizer: TokenDecoder, skip_special_tokens: bool) -> _Decoder:
    return _Decoder(tokenizer, skip_special_tokens)


class _Bytes(dict[int, int | None]):
    """The byte of each byte-fallback token, `_NO_TEXT` for ids without text, None for all others."""

    def __init__(self, tokenizer: TokenDecoder, skipped: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(skipped, _NO_TEXT))
        self._to_tokens: Any = getattr(tokenizer, "convert_ids_to_tokens", None)

    def __missing__(self, token_id: int) -> int | None:
        token = self._to_tokens([token_id])[0] if self._to_tokens else ""
        match = _BYTE_TOKEN.fullmatch(token or "")
        self[token_id] = _NO_TEXT if token is None else match and int(match[1], 16)
        return self[token_id]


class _Decoder:
    """A tokenizer, the way in which it decodes, and facts about its ids; shared by all texts."""

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool) -> None:
        self._decode = _decode_function(tokenizer)
        self._skip = skip_special_tokens
        added: Any = getattr(tokenizer, "added_tokens_decoder", {}) if skip_special_tokens else {}
        self.skipped: dict[int, str] = {i: str(t) for i, t in added.items() if t.special}
        self._bytes = _Bytes(tokenizer, self.skipped)

    def text(self, ids: list[int]) -> str:
        return self._decode(ids, self._skip) if ids else ""

    def visible(self, ids: Sequence[int]) -> list[int]:
        values = self._bytes
        return [i for i in ids if values[i] != _NO_TEXT]

    def open_run(self, ids: Sequence[int], known: int = 0) -> int:
        """Return the length of the byte-fallback run at the end.

        Args:
            ids: visible ones.
            known: number of ids at the beginning that are known to be such tokens.
        """
        for i in reversed(range(known, len(ids))):
            if self._bytes[ids[i]] is None:
                return len(ids) - 1 - i
        return len(ids)

    def is_continuation(self, token_id: int) -> bool:
        return 0x80 <= (self._bytes[token_id] or 0) < 0xC0

    def certain(self, ids: list[int], start: int, *, final: bool = False) -> str:
        """Return the text of ids from a place on, as far as the last `CONTEXT_TOKENS` make it certain."""
        visible = self.visible(ids[start:])
        if final:
            return self.text(visible)
        tail = self.visible(ids[-CONTEXT_TOKENS:])
        held = self.open_run(tail)
        if held == len(tail) and len(ids) >= CONTEXT_TOKENS:  # a run that may begin before them
            held = self._incomplete_character(tail)
        return _certain(self.text(visible[: max(0, len(visible) - held)]), False)

    def _incomplete_character(self, run: Sequence[int]) -> int:
        """Return the number of ids at the end that begin a character without ending it."""
        for length, token_id in enumerate(reversed(run[-3:]), start=1):
            if not self.is_continuation(token_id):
                return length if length < _character_length(self._bytes[token_id] or 0) else 0
        return 0


def _decode_function(tokenizer: TokenDecoder) -> Callable[[list[int], bool], str]:
    """Return a function of ids and of whether to skip special tokens.

    What transformers puts around the decoding of its fast tokenizers takes twice as long as the
    decoding: where it is not overridden, it is left out.
    """
    kind: Any = type(tokenizer)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if (
        backend is not None
        and kind.decode.__module__ == "transformers.tokenization_utils_base"
        and kind._decode.__module__ in _FAST_TOKENIZERS
    ):
        return lambda ids, skip: backend.decode(ids, skip_special_tokens=skip)
    return lambda ids, skip: tokenizer.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


def _certain(text: str, final: bool) -> str:
    return text if final else text.removesuffix(_REPLACEMENT)


def _character_length(lead: int) -> int:
    """Return the number of bytes of the UTF-8 character that starts with this one; 1 if none does."""
    if 0xC2 <= lead <= 0xDF:
        return 2
    if 0xE0 <= lead <= 0xEF:
        return 3
    return 4 if 0xF0 <= lead <= 0xF4 else 1
