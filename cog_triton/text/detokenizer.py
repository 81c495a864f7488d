"""Turns token ids into text as they arrive, in pieces that join to the text of all ids.

``tokenizer.decode(ids + more)`` need not start with ``tokenizer.decode(ids)``, and
``tokenizer.decode(more)`` need not be what it adds. Three causes, and what is done about each:

* A character's bytes are spread over tokens. With byte-level BPE an incomplete character decodes
  to one U+FFFD at the end of the text, and only that can still change. So one trailing U+FFFD is
  held back, whatever it came from.
* Byte fallback (SentencePiece's ``<0xE4>`` tokens) decodes a run of adjacent byte tokens as a
  whole: to its characters if all of it is UTF-8, else to one U+FFFD for *each* byte, those of
  complete characters and of line feeds included. None of a run's text is certain before a token of
  another kind has closed it, so the run is held back, undecoded.
* The first token is special: SentencePiece decoders drop its leading space, and WordPiece's put no
  space before it. So new ids are decoded behind a window of earlier ones, and the text of that
  window is cut off again.

The window must let the decoder find the character boundaries that it would find in the whole text.
Four tokens that have bytes are enough for that: a character has four bytes at most, and a decoder
that starts inside one is back in step at the next lead byte. The work per token thus does not
depend on how many came before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any, Protocol

CONTEXT_TOKENS = 16
"""How many earlier ids `decode_delta` needs and reads.

Four would do for byte-level BPE. The others leave room for special tokens among them, which have no
text, and for byte-fallback runs of up to 15 bytes (three emoji, five CJK characters), for which the
text is exact even if they are no UTF-8.
"""

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KEPT_TOKENS = 4
_WINDOW_TOKENS = 16
_FAST_TOKENIZERS = (  # in version 5, in version 4
    "transformers.tokenization_utils_tokenizers",
    "transformers.tokenization_utils_fast",
)


class TokenDecoder(Protocol):
    """What is used of a tokenizer; those of transformers, fast and slow, have it.

    ``convert_ids_to_tokens(ids) -> list[str | None]`` is used as well, if there is one. Without it
    no token is taken for a byte-fallback token, and ids outside the vocabulary count as tokens.
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

    This holds for decoders whose text for some tokens changes under later ones only in the ways
    that the module describes, and that see no further back than the previous character: byte-level
    BPE, SentencePiece with or without byte fallback, Metaspace, WordPiece and BPE with a word
    suffix. It does not hold for decoders that merge or rewrite across tokens, such as CTC.

    A call costs one or two calls of ``tokenizer.decode``, and two short ones more if byte-fallback
    or special tokens have to be told apart. What is held back, after any call, is one U+FFFD at
    most and the byte-fallback run at the end.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        shown: Sequence[str] = (),
    ) -> None:
        """At the beginning of a text.

        Args:
            shown: texts of special tokens that are not skipped. What is between them is decoded by itself.
        """
        self._decoder = _decoder(tokenizer, skip_special_tokens)
        self._shown = self._decoder.hidden_ids(shown)
        self._start_over()

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that became certain with these ids, often empty.

        With ``final`` nothing is held back, and the next call begins another text.
        """
        if self._shown and not self._shown.keys().isdisjoint(ids):
            return self._decode_around(ids, final=final)
        if not final:
            return self._advance(self._closed_by(list(ids)))
        delta = self._advance([*self._open_run, *ids], final=True)
        self._start_over()
        return delta

    def flush(self) -> str:
        """Return the rest of the text. The next `decode` begins another text."""
        return self.decode((), final=True)

    def _decode_around(self, ids: Sequence[int], *, final: bool) -> str:
        """Decode ids among which are special tokens that are shown: each ends a text."""
        texts, start = [], 0
        for place, token_id in enumerate(ids):
            if token_id in self._shown:
                texts += [self.decode(ids[start:place], final=True), self._shown[token_id]]
                start = place + 1
        return "".join(texts) + self.decode(ids[start:], final=final)

    def _start_over(self) -> None:
        self._window: list[int] = []
        self._delivered = 0  # characters of the window's text
        self._held = 0  # characters at its end: those that are not delivered
        self._open_run: list[int] = []

    def follow(self, context: list[int]) -> None:
        """Go on behind the last `CONTEXT_TOKENS` ids of a text, or all of them if there are fewer.

        Their text counts as returned, but for what `decode` and `release_long_run` hold back.
        """
        start = 0
        if len(context) == CONTEXT_TOKENS:
            start = self._decoder.split_character_length(context)
        self.decode(context[start:])
        self.release_long_run(context)

    def release_long_run(self, ids: list[int]) -> str:
        """Return the part of the run held back that `follow` would not hold back after these ids.

        It is called with the same `CONTEXT_TOKENS` at their end. A run that begins before them is
        held back no further than its last character, if that is incomplete.
        """
        if not self._open_run:
            return ""
        tail = ids[-CONTEXT_TOKENS:]
        held = len(tail) - self._decoder.open_run_start(tail)
        if held == CONTEXT_TOKENS:
            held = self._decoder.incomplete_character_length(tail)
        end = max(0, len(self._open_run) - held)
        released, self._open_run = self._open_run[:end], self._open_run[end:]
        return self._advance(released)

    def _closed_by(self, new: list[int]) -> list[int]:
        """Add to the ids held back, and return those that no longer are."""
        if not self._open_run:
            start = self._decoder.open_run_start(new)
            self._open_run = new[start:]
            return new[:start]
        # One byte stands for the run, so that a long one is not gone through again and again.
        start = self._decoder.open_run_start([self._open_run[0], *new])
        if start == 0:
            self._open_run.extend(new)
            return []
        closed = [*self._open_run, *new[: start - 1]]
        self._open_run = new[start - 1 :]
        return closed

    def _advance(self, ids: list[int], *, final: bool = False) -> str:
        if not ids and not final:
            return ""
        if len(self._window) > _WINDOW_TOKENS:
            self._shrink_window()
        self._window.extend(ids)
        text = self._decoder.text(self._window)
        end = len(text) - (not final and text.endswith(_REPLACEMENT))
        delta = text[self._delivered : end]
        self._delivered = max(self._delivered, end)
        self._held = len(text) - self._delivered
        return delta

    def _shrink_window(self) -> None:
        kept = self._window[-_KEPT_TOKENS:]
        text = self._decoder.text(kept)
        if not text.strip(_REPLACEMENT):
            # Nothing tells that the decoder is in step here: these may be special tokens, or pieces
            # of characters, of which it takes four.
            visible = self._decoder.without_skipped(self._window, at_most=_KEPT_TOKENS)
            text = self._decoder.text(visible)
            if not text:  # all of it is whitespace and stripped, which ends when something follows
                visible = self._decoder.without_skipped(self._window)
                text = self._decoder.text(visible)
            kept = visible
        self._window = kept
        self._delivered = len(text) - self._held


def decode_delta(
    tokenizer: TokenDecoder,
    context_ids: Sequence[int],
    new_ids: Sequence[int],
    *,
    final: bool,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text that ``new_ids`` add to a text, keeping no state between calls.

    This is `IncrementalDetokenizer.decode` where the state of the calls before is made again from
    the last ids of the text.

    ``context_ids`` are the last `CONTEXT_TOKENS` ids before ``new_ids``, or all of them if there
    were fewer; of more, the last ones are used. An incomplete character at the end is held back, to
    be returned by the call that gets the rest of it, unless ``final``.

    The results of the calls for one text, of which the last has ``final``, join to what
    ``tokenizer.decode`` makes of all its ids, like those of `IncrementalDetokenizer`, if

    * of each context of `CONTEXT_TOKENS` ids four at least have text, i.e. are neither special
      tokens to be skipped nor outside the vocabulary, and
    * each byte-fallback run of `CONTEXT_TOKENS` tokens or more is UTF-8 as a whole and has no
      skipped tokens inside. Shorter runs are held back until closed and may be anything; longer
      ones are returned a character at a time. A long one that turns out invalid, or in which the
      text ends within a character, keeps the characters already returned, where
      ``tokenizer.decode`` has U+FFFD for each of their bytes.

    A single call with no context and ``final`` is always exact.
    """
    context = list(context_ids)[-CONTEXT_TOKENS:]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    detokenizer.follow(context)
    delta = detokenizer.decode(new_ids, final=final)
    return delta + detokenizer.release_long_run([*context, *new_ids])


@lru_cache(maxsize=8)
def _decoder(tokenizer: TokenDecoder, skip_special_tokens: bool) -> _Decoder:
    """Shared by all texts of a tokenizer: what it learns about an id holds for all of them."""
    return _Decoder(tokenizer, skip_special_tokens)


class _Decoder:
    """A tokenizer, the way in which it is to decode, and what can be asked about single ids."""

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._decode = _decode_function(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._to_tokens: Callable[[list[int]], list[str | None]] | None = getattr(
            tokenizer, "convert_ids_to_tokens", None
        )
        self._skipped: dict[int, bool] = {}
        self._bytes: dict[int, int | None] = {}

    def text(self, ids: list[int]) -> str:
        return self._decode(ids, self._skip_special_tokens) if ids else ""

    def without_skipped(self, ids: list[int], at_most: int | None = None) -> list[int]:
        """The last ``at_most`` ids that are not skipped, in order."""
        visible = (token_id for token_id in reversed(ids) if not self._is_skipped(token_id))
        return list(islice(visible, at_most))[::-1]

    def hidden_ids(self, texts: Sequence[str]) -> dict[int, str]:
        """The ids of tokens with these texts, as far as they are hidden."""
        names: Any = getattr(self._tokenizer, "convert_tokens_to_ids", lambda _: None)
        ids = {text: names(text) for text in texts}
        return {
            token_id: text
            for text, token_id in ids.items()
            if token_id is not None
            and self._decode([token_id], False).strip() == text
            and self._is_hidden(token_id)
        }

    def open_run_start(self, ids: list[int]) -> int:
        """Where the byte-fallback run starts that the next id may extend; ``len(ids)`` if none."""
        start = len(ids)
        values = self._fallback_bytes(ids)
        if values.count(None) == len(values):
            return start
        for i in reversed(range(len(ids))):
            if values[i] is not None:
                start = i
            elif not self._is_skipped(ids[i]):
                break
        return start

    def incomplete_character_length(self, ids: list[int]) -> int:
        """How many ids at the end hold the first bytes of a character whose last ones are missing.

        Only ids of a byte-fallback run may be among the last ones.
        """
        seen = 0
        for back, value in enumerate(reversed(self._fallback_bytes(ids)), start=1):
            if value is None:
                continue
            seen += 1
            if not _is_continuation(value):
                return back if seen < _character_length(value) else 0
            if seen == 3:
                break
        return 0

    def split_character_length(self, ids: list[int]) -> int:
        """How many byte-fallback ids at the start may belong to a character begun before them."""
        return len(list(takewhile(_is_continuation, self._fallback_bytes(ids[:3]))))

    def _fallback_bytes(self, ids: list[int]) -> list[int | None]:
        """The byte that each id stands for, None if it is no byte-fallback token."""
        try:
            return [self._bytes[token_id] for token_id in ids]
        except KeyError:
            self._bytes.update((token_id, self._fallback_byte(token_id)) for token_id in ids)
            return [self._bytes[token_id] for token_id in ids]

    def _fallback_byte(self, token_id: int) -> int | None:
        token = self._to_tokens([token_id])[0] if self._to_tokens is not None else None
        match = _BYTE_TOKEN.fullmatch(token or "")
        return int(match[1], 16) if match else None

    def _is_skipped(self, token_id: int) -> bool:
        """Whether the id is dropped before decoding: tokens around it count as adjacent."""
        if token_id not in self._skipped:
            self._skipped[token_id] = self._is_unknown(token_id) or self._is_hidden(token_id)
        return self._skipped[token_id]

    def _is_unknown(self, token_id: int) -> bool:
        return self._to_tokens is not None and self._to_tokens([token_id]) == [None]

    def _is_hidden(self, token_id: int) -> bool:
        # An empty text is not enough: a SentencePiece space has one, too, when decoded alone.
        return (
            self._skip_special_tokens
            and self._decode([token_id], True) == ""
            and self._decode([token_id], False) != ""
        )


def _decode_function(tokenizer: TokenDecoder) -> Callable[[list[int], bool], str]:
    """Decodes without cleaning up spaces; the second argument skips special tokens.

    What transformers puts around the decoding of its fast tokenizers takes twice as long as the
    decoding: where nothing of it is overridden, it is left out.
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


def _is_continuation(value: int | None) -> bool:
    return value is not None and 0x80 <= value < 0xC0


def _character_length(lead: int) -> int:
    """How many bytes the UTF-8 character has that starts with this one; 1 if none does."""
    if 0xC2 <= lead <= 0xDF:
        return 2
    if 0xE0 <= lead <= 0xEF:
        return 3
    return 4 if 0xF0 <= lead <= 0xF4 else 1
