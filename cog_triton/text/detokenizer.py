"""Turns token ids into text as they arrive, in pieces that join to the text of all ids.

``tokenizer.decode(ids + more)`` need not start with ``tokenizer.decode(ids)``: three causes, three cures.

* Byte-level BPE spreads a character's bytes over tokens. An incomplete character decodes to one U+FFFD
  at the end of the text, which is held back.
* Byte fallback (SentencePiece's ``<0xE4>`` tokens) decodes a run of byte tokens as a whole: to its
  characters if all of it is UTF-8, else to one U+FFFD for *each* byte. So a run is held back,
  undecoded, until another token closes it; tokenizers.DecodeStream does not.
* The first token is special: SentencePiece decoders drop its leading space, and WordPiece's put no
  space before it. So new ids are decoded behind a window of earlier ones, whose text is cut off again.
  Four tokens are enough: a character has four bytes at most, and a decoder that starts inside one is
  back in step at the next lead byte.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from cog_triton.text.tokenizer import Tokenizer

# How many earlier ids `decode_delta` reads. Beyond the four, there is room for special tokens and for
# byte-fallback runs of up to 15 bytes, for which the text is exact even if they are not UTF-8.
CONTEXT_TOKENS = 16

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# In place of a byte, for ids that add no text.
_NO_TEXT = -1
# When a window has more than _WINDOW_TOKENS, it is cut to its last _KEPT_TOKENS.
_WINDOW_TOKENS = 16
_KEPT_TOKENS = 4


class IncrementalDetokenizer:
    """Turns the ids of one text, as they arrive, into its text.

    However the ids are split into calls, the results of `decode` and the one of `flush` join to
    ``tokenizer.decode(all_ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)``.
    Not for decoders that rewrite across tokens, such as CTC. A call costs one or two of the tokenizer's.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> None:
        """Begin a text.

        Args:
            shown: special tokens that are part of the text. The text between them is decoded by itself.
        """
        self._decoder = _decoder(tokenizer, skip_special_tokens)
        self._shown = {
            token_id: text for token_id, text in self._decoder.skipped.items() if text in shown
        }
        self._window: list[int] = []
        # The byte-fallback tokens behind the window.
        self._run: list[int] = []
        # Characters of the window's text that were returned, and that are held back.
        self._delivered = 0
        self._held = 0

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that became certain with these ids, often empty; all of it with ``final``."""
        if self._shown and not self._shown.keys().isdisjoint(ids):
            return self._decode_with_shown(ids, final=final)
        decoder = self._decoder
        ids = self._run + decoder.visible(ids)
        end = len(ids)
        if not final:
            end -= decoder.open_run(ids, len(self._run))
        self._run = ids[end:]
        ids = ids[:end]
        if not ids and not final:
            return ""
        self._cut_window()
        self._window += ids
        text = decoder.text(self._window)
        certain = text if final else text.removesuffix(_REPLACEMENT)
        delta = certain[self._delivered :]
        if final:
            self._window = []
            self._delivered = 0
            self._held = 0
        else:
            self._delivered += len(delta)
            self._held = len(text) - self._delivered
        return delta

    def pending(self) -> str:
        """Return what `flush` would return now, and leave the text open."""
        if not self._run and not self._held:
            return ""
        return self._decoder.text(self._window + self._run)[self._delivered :]

    def flush(self) -> str:
        """Return the rest of the text. The next `decode` begins another text."""
        return self.decode((), final=True)

    def _decode_with_shown(self, ids: Sequence[int], *, final: bool) -> str:
        """Decode the ids between special tokens that are shown, and put these between the texts."""
        texts = []
        start = 0
        for place, token_id in enumerate(ids):
            if token_id in self._shown:
                texts.append(self.decode(ids[start:place], final=True))
                texts.append(self._shown[token_id])
                start = place + 1
        texts.append(self.decode(ids[start:], final=final))
        return "".join(texts)

    def _cut_window(self) -> None:
        """Cut a long window to its last tokens.

        They must have text: whitespace that a decoder strips counts again once text follows it.
        """
        if len(self._window) <= _WINDOW_TOKENS:
            return
        kept = self._window[-_KEPT_TOKENS:]
        text = self._decoder.text(kept)
        if text:
            self._window = kept
            self._delivered = len(text) - self._held


def decode_delta(
    tokenizer: Tokenizer,
    context_ids: Sequence[int],
    new_ids: Sequence[int],
    *,
    final: bool,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text that ``new_ids`` add to a text, keeping no state between calls.

    The results join to ``tokenizer.decode(all_ids)`` if four ids of each context have text, and if each
    byte-fallback run of `CONTEXT_TOKENS` tokens or more, which is returned a character at a time, is UTF-8.

    Args:
        context_ids: the last `CONTEXT_TOKENS` ids before ``new_ids``, or all if there were fewer.
        final: hold nothing back, not even an incomplete character.
    """
    decoder = _decoder(tokenizer, skip_special_tokens)
    before = list(context_ids)[-CONTEXT_TOKENS:]
    start = 0
    if len(before) == CONTEXT_TOKENS:
        # The context may begin within a character of at most four bytes.
        while start < 3 and decoder.is_continuation(before[start]):
            start += 1
    ids = before + list(new_ids)
    text = decoder.text(ids[start:]) if final else decoder.certain(ids, start)
    return text[len(decoder.certain(before, start)) :]


class _Decoder(dict[int, int | None]):
    """A tokenizer, and what its ids are; shared by all texts.

    It maps each byte-fallback token to its byte, ids without text to `_NO_TEXT`, and all others to None.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._to_tokens = getattr(tokenizer, "convert_ids_to_tokens", lambda _: [""])
        added: Any = getattr(tokenizer, "added_tokens_decoder", {}) if skip_special_tokens else {}
        self.skipped: dict[int, str] = {
            token_id: str(token) for token_id, token in added.items() if token.special
        }
        super().__init__(dict.fromkeys(self.skipped, _NO_TEXT))
        decode: Any = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and _decodes_as_transformers(type(tokenizer)):
            # What transformers puts around the decoding takes twice as long as the decoding.
            decode = backend.decode
        self.text: Callable[[list[int]], str]
        self.text = partial(decode, skip_special_tokens=skip_special_tokens)

    def __missing__(self, token_id: int) -> int | None:
        token = self._to_tokens([token_id])[0]
        kind: int | None = None
        if token is None:
            kind = _NO_TEXT
        else:
            match = _BYTE_TOKEN.fullmatch(token)
            if match is not None:
                kind = int(match[1], 16)
        return self.setdefault(token_id, kind)

    def is_continuation(self, token_id: int) -> bool:
        """Return whether an id is a byte of a character, but not its first."""
        byte = self[token_id]
        return byte is not None and 0x80 <= byte < 0xC0

    def visible(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that may have text."""
        return [token_id for token_id in ids if self[token_id] != _NO_TEXT]

    def open_run(self, ids: Sequence[int], known: int = 0) -> int:
        """Return the length of the byte-fallback run at the end; the first ``known`` ids are of one."""
        for place in reversed(range(known, len(ids))):
            if self[ids[place]] is None:
                return len(ids) - 1 - place
        return len(ids)

    def certain(self, ids: list[int], start: int) -> str:
        """Return the text of ids from a place on, as far as the last `CONTEXT_TOKENS` make it certain."""
        visible = self.visible(ids[start:])
        tail = self.visible(ids[-CONTEXT_TOKENS:])
        held = self.open_run(tail)
        if held == len(tail) and len(ids) >= CONTEXT_TOKENS:
            # The run may begin before the tail: only a character that is not complete is held back.
            utf8 = getincrementaldecoder("utf-8")("replace")
            utf8.decode(bytes(self[token_id] or 0 for token_id in tail[-3:]))
            incomplete, _ = utf8.getstate()
            held = len(incomplete)
        return self.text(visible[: max(0, len(visible) - held)]).removesuffix(_REPLACEMENT)


def _decodes_as_transformers(kind: type[Any]) -> bool:
    """Return whether a class of tokenizers decodes by the functions of transformers' base class."""
    return all(
        function.__module__.startswith("transformers.tokenization_utils")
        for function in (kind.decode, kind._decode)
    )


_decoder = lru_cache(maxsize=8)(_Decoder)
