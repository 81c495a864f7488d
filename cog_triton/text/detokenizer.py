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

# Earlier ids that `decode_delta` reads. Beyond the four, room for special tokens among them, and for
# byte-fallback runs of up to 15 bytes, for which the text is exact even if they are not UTF-8.
CONTEXT_TOKENS = 16

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TEXT = -1
_KEPT_TOKENS, _WINDOW_TOKENS = 4, 16


class IncrementalDetokenizer:
    """Turns the ids of one text, as they arrive, into its text.

    However the ids are split into calls, the results of `decode` and the one of `flush` join to
    ``tokenizer.decode(all_ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)``.
    Not for decoders that rewrite across tokens, such as CTC. A call costs one or two of the tokenizer's.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> None:
        """Begin a text, with the special tokens ``shown``; the text between them is decoded by itself."""
        self._decoder = _decoder(tokenizer, skip_special_tokens)
        self._shown = {i: text for i, text in self._decoder.skipped.items() if text in shown}
        self._window: list[int] = []
        self._run: list[int] = []  # byte-fallback tokens behind the window
        self._delivered = self._held = 0  # characters of the window's text

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that became certain with these ids, often empty; all of it with ``final``."""
        if self._shown and not self._shown.keys().isdisjoint(ids):
            texts, start = [], 0
            for place, token_id in enumerate(ids):
                if token_id in self._shown:
                    texts += [self.decode(ids[start:place], final=True), self._shown[token_id]]
                    start = place + 1
            return "".join(texts) + self.decode(ids[start:], final=final)
        decoder = self._decoder
        ids = self._run + decoder.visible(ids)
        end = len(ids) if final else len(ids) - decoder.open_run(ids, len(self._run))
        ids, self._run = ids[:end], ids[end:]
        if not ids and not final:
            return ""
        # Not to tokens without text: whitespace that a decoder strips counts again once text follows.
        kept = self._window[-_KEPT_TOKENS:]
        if len(self._window) > _WINDOW_TOKENS and (text := decoder.text(kept)):
            self._window, self._delivered = kept, len(text) - self._held
        self._window += ids
        text = decoder.text(self._window)
        delta = (text if final else text.removesuffix(_REPLACEMENT))[self._delivered :]
        self._delivered += len(delta)
        self._held = len(text) - self._delivered
        if final:
            self._window, self._delivered, self._held = [], 0, 0
        return delta

    def pending(self) -> str:
        """Return what `flush` would return now, and leave the text open."""
        if not self._run and not self._held:
            return ""
        return self._decoder.text(self._window + self._run)[self._delivered :]

    def flush(self) -> str:
        """Return the rest of the text. The next `decode` begins another text."""
        return self.decode((), final=True)


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
    if len(before) == CONTEXT_TOKENS:  # it may begin within a character
        while start < 3 and 0x80 <= (decoder[before[start]] or 0) < 0xC0:
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
        self.skipped: dict[int, str] = {i: str(t) for i, t in added.items() if t.special}
        super().__init__(dict.fromkeys(self.skipped, _NO_TEXT))
        decode: Any = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        # What transformers puts around the decoding of its fast tokenizers takes twice as long as the
        # decoding: where it is not overridden, it is left out.
        backend, kind = getattr(tokenizer, "backend_tokenizer", None), type(tokenizer)
        if backend is not None and all(
            function.__module__.startswith("transformers.tokenization_utils")
            for function in (kind.decode, kind._decode)
        ):
            decode = backend.decode
        self.text: Callable[[list[int]], str]
        self.text = partial(decode, skip_special_tokens=skip_special_tokens)

    def __missing__(self, token_id: int) -> int | None:
        token = self._to_tokens([token_id])[0]
        match = _BYTE_TOKEN.fullmatch(token or "")
        return self.setdefault(token_id, _NO_TEXT if token is None else match and int(match[1], 16))

    def visible(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if self[i] != _NO_TEXT]

    def open_run(self, ids: Sequence[int], known: int = 0) -> int:
        """Return the length of the byte-fallback run at the end; the first ``known`` ids are of one."""
        for i in reversed(range(known, len(ids))):
            if self[ids[i]] is None:
                return len(ids) - 1 - i
        return len(ids)

    def certain(self, ids: list[int], start: int) -> str:
        """Return the text of ids from a place on, as far as the last `CONTEXT_TOKENS` make it certain."""
        visible, tail = self.visible(ids[start:]), self.visible(ids[-CONTEXT_TOKENS:])
        held = self.open_run(tail)
        if held == len(tail) and len(ids) >= CONTEXT_TOKENS:  # a run that may begin before them
            utf8 = getincrementaldecoder("utf-8")("replace")
            utf8.decode(bytes(self[i] or 0 for i in tail[-3:]))
            held = len(utf8.getstate()[0])  # of a character that is not complete
        return self.text(visible[: max(0, len(visible) - held)]).removesuffix(_REPLACEMENT)


_decoder = lru_cache(maxsize=8)(_Decoder)
