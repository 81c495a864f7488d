from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cog_triton.text.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, decode_delta
from tests.unit.text.support import split

REPLACEMENT = "\ufffd"
SAMPLES = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, déjà vu; Привет, мир! Ελληνικά",
    "你好，世界。日本語の文章です。",
    "emoji 🎉🎉 👩‍👩‍👧‍👦 🏳️‍🌈 and  two  spaces\n\n\tand lines\r\n",
]
HELD_SPECIAL = "<|held|>"


@dataclass(frozen=True)
class Kind:
    """A tokenizer and the ids that a property picks from."""

    tokenizer: Any
    vocabulary: tuple[int, ...]
    special: tuple[int, ...]
    raw_bytes: tuple[int, ...]

    def whole(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def ids(self, *tokens: str) -> list[int]:
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(list(tokens))
        return ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def no_bytes(_token: str) -> bool:
    return False


def wrap(tokenizer: Tokenizer, raw_bytes: Callable[[str], bool] = no_bytes) -> Kind:
    tokenizer.add_special_tokens(["<s>", "</s>", HELD_SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    wrapped: Any = PreTrainedTokenizerFast
    fast = wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    vocabulary = fast.get_vocab()
    return Kind(
        tokenizer=fast,
        # Engines pad their vocabulary: a model may emit ids that the tokenizer does not have.
        vocabulary=(*sorted(vocabulary.values()), len(vocabulary) + 7),
        special=tuple(fast.convert_tokens_to_ids(["<s>", "</s>", HELD_SPECIAL])),
        raw_bytes=tuple(i for token, i in sorted(vocabulary.items()) if raw_bytes(token)),
    )


def byte_level() -> Kind:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return wrap(tokenizer, raw_bytes=lambda token: token in alphabet)


def sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "▁▁▁▁", REPLACEMENT, "你", "é", *"abcdefghijklmnopqrstuvwxyz.,!"]
    tokens += ["▁t", "he", "▁the", "▁a"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a")]
    return {token: i for i, token in enumerate(tokens)}, merges


def byte_fallback() -> Kind:
    vocabulary, merges = sentencepiece_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return wrap(tokenizer, raw_bytes=lambda token: token.startswith("<0x"))


def metaspace() -> Kind:
    vocabulary, merges = sentencepiece_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)]
    )
    return wrap(tokenizer, raw_bytes=lambda token: token.startswith("<0x"))


def word_piece() -> Kind:
    letters = "abcdefghijklmnopqrstuvwxyzé你,.!'"
    tokens = ["[UNK]", *letters, *("##" + letter for letter in letters), "the", "##ing", "n't"]
    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return wrap(tokenizer)


def word_suffix() -> Kind:
    letters = "abcdefghijklmnopqrstuvwxyz,."
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], end_of_word_suffix="</w>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return wrap(tokenizer)


KINDS = {
    make.__name__: cache(make)
    for make in (byte_level, byte_fallback, metaspace, word_piece, word_suffix)
}
ALL_KINDS = sorted(KINDS)
SPLIT_CHARACTERS = ["byte_level", "byte_fallback", "metaspace"]


class Counting:
    """A tokenizer that counts what it is asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.calls = 0
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.calls += 1
        self.decoded += len(token_ids)
        text: str = self._tokenizer.decode(token_ids, **options)
        return text

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        tokens: list[str | None] = self._tokenizer.convert_ids_to_tokens(ids)
        return tokens


class DecodeOnly:
    """The least that a tokenizer can be."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], **options: Any) -> str:
        text: str = self._tokenizer.decode(token_ids, **options)
        return text


def stream(tokenizer: Any, chunks: Sequence[Sequence[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.decode(chunk) for chunk in chunks), detokenizer.flush()]


def stream_stateless(
    tokenizer: Any, chunks: Sequence[Sequence[int]], skip: bool = True
) -> list[str]:
    deltas: list[str] = []
    before: list[int] = []
    for i, chunk in enumerate(chunks):
        deltas.append(
            decode_delta(
                tokenizer,
                before[-CONTEXT_TOKENS:],
                chunk,
                final=i == len(chunks) - 1,
                skip_special_tokens=skip,
            )
        )
        before += chunk
    return deltas


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8) | st.just([1]) | st.just([128])
TEXTS = st.lists(
    st.sampled_from([*SAMPLES, " ", "\n", "  ", "🎉", "你", REPLACEMENT, "don't", "."])
    | st.text(max_size=12),
    max_size=6,
).map("".join)


@st.composite
def random_ids(draw: st.DrawFn, kind: Kind, max_size: int = 60) -> list[int]:
    """Ids as no text has them: invalid bytes, special tokens within characters, unknown ids."""
    character = st.sampled_from(["你", "🎉", "é", "\n", REPLACEMENT]).map(
        lambda text: byte_ids(kind, text.encode())
    )
    single = st.sampled_from(kind.vocabulary) | st.sampled_from(kind.special)
    if kind.raw_bytes:
        single |= st.sampled_from(kind.raw_bytes)
    pieces = st.lists(single.map(lambda i: [i]) | character, max_size=max_size)
    return [i for piece in draw(pieces) for i in piece]


def byte_ids(kind: Kind, data: bytes) -> list[int]:
    """One token for each byte, for the kinds that have those."""
    if not kind.raw_bytes:
        return []
    if kind.tokenizer.convert_tokens_to_ids("<0x41>") in kind.raw_bytes:
        return kind.ids(*(f"<0x{byte:02X}>" for byte in data))
    return kind.ids(*(byte_level_character(byte) for byte in data))


@cache
def byte_level_characters() -> dict[int, str]:
    """Byte-level BPE's stand-in for each byte: itself if printable, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def byte_level_character(byte: int) -> str:
    return byte_level_characters()[byte]


@pytest.mark.parametrize("name", ALL_KINDS)
class TestPiecesJoinToTheWholeText:
    @settings(max_examples=150, deadline=None)
    @given(text=TEXTS, sizes=SIZES, skip=st.booleans())
    def test_of_encoded_text(self, name: str, text: str, sizes: list[int], skip: bool) -> None:
        kind = KINDS[name]()
        ids = kind.encode(text)

        pieces = stream(kind.tokenizer, split(ids, sizes), skip)

        assert "".join(pieces) == kind.whole(ids, skip)

    @settings(max_examples=150, deadline=None)
    @given(data=st.data(), sizes=SIZES, skip=st.booleans())
    def test_of_any_ids(self, name: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
        kind = KINDS[name]()
        ids = data.draw(random_ids(kind))

        pieces = stream(kind.tokenizer, split(ids, sizes), skip)

        assert "".join(pieces) == kind.whole(ids, skip)

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
    def test_of_long_runs_without_text_between_two_tokens(self, name: str, size: int) -> None:
        kind = KINDS[name]()
        first, last = kind.encode("a b")[0], kind.encode("a b")[-1]
        for filler in (kind.special[0], kind.vocabulary[-1]):
            ids = [first, *([filler] * 100), last, *([filler] * 100), last]

            assert "".join(stream(kind.tokenizer, split(ids, [size]))) == kind.whole(ids)


@pytest.mark.parametrize("name", SPLIT_CHARACTERS)
class TestSplitCharacters:
    def test_are_held_back_until_complete(self, name: str) -> None:
        kind = KINDS[name]()
        ids = [*kind.encode("a"), *byte_ids(kind, "🎉".encode()), *kind.encode("b")]

        pieces = stream(kind.tokenizer, split(ids, [1]))

        assert "".join(pieces) == kind.whole(ids)
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert any("🎉" in piece for piece in pieces)

    @pytest.mark.parametrize("cut", [1, 2, 3])
    @pytest.mark.parametrize("between", [1, 3, 7, 40])
    def test_survive_special_tokens_inside(self, name: str, cut: int, between: int) -> None:
        kind = KINDS[name]()
        inside = [kind.special[1]] * between
        data = byte_ids(kind, "🎉".encode())
        parts = [*data[:cut], *inside, data[cut], *inside, *data[cut + 1 :]]
        ids = [*kind.encode("a"), *parts, *kind.encode("b")] * 3

        assert kind.whole(ids).count("🎉") == 3
        for size in (1, 3, 50):
            assert "".join(stream(kind.tokenizer, split(ids, [size]))) == kind.whole(ids)

    def test_are_kept_as_replacements_if_the_text_ends_inside(self, name: str) -> None:
        kind = KINDS[name]()
        ids = [*kind.encode("a"), *byte_ids(kind, "🎉🎉".encode())[:-1]]

        pieces = stream(kind.tokenizer, split(ids, [1]))

        assert "".join(pieces) == kind.whole(ids)
        assert pieces[-1].endswith(REPLACEMENT)

    @pytest.mark.parametrize("invalid", [b"\xff", b"\x80", b"\xe4\xbd", b"\xf0\x9f\x8e", b"\xc0"])
    @pytest.mark.parametrize("times", [1, 3, 7, 50])
    def test_invalid_bytes_are_replaced_and_not_dropped(
        self, name: str, invalid: bytes, times: int
    ) -> None:
        kind = KINDS[name]()
        data = ("é".encode() + invalid * times) * 2
        ids = [*kind.encode("a"), *byte_ids(kind, data), *kind.encode("b")]

        for size in (1, 2, 7, 1000):
            pieces = stream(kind.tokenizer, split(ids, [size]))

            assert "".join(pieces) == kind.whole(ids)
            assert "".join(pieces).count(REPLACEMENT) >= 2 * times

    def test_a_replacement_character_of_the_model_is_text(self, name: str) -> None:
        kind = KINDS[name]()
        ids = byte_ids(kind, (REPLACEMENT * 9).encode())

        assert "".join(stream(kind.tokenizer, split(ids, [1]))) == REPLACEMENT * 9


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_holds_back_no_more_than_one_character(data: st.DataObject, skip: bool) -> None:
    kind = KINDS["byte_level"]()
    ids = data.draw(random_ids(kind))
    detokenizer = IncrementalDetokenizer(kind.tokenizer, skip_special_tokens=skip)
    delivered = ""
    for i, token_id in enumerate(ids, start=1):
        delivered += detokenizer.decode([token_id])

        assert delivered == kind.whole(ids[:i], skip).removesuffix(REPLACEMENT)


class TestByteFallback:
    def test_a_run_is_held_back_until_another_token_closes_it(self) -> None:
        kind = KINDS["byte_fallback"]()
        ids = kind.ids("▁a", *["<0x0A>"] * 2, "b", "<0xC3>", "<0xA9>", "▁a")

        pieces = stream(kind.tokenizer, split(ids, [1]))

        assert pieces == ["a", "", "", "\n\nb", "", "", "é a", ""]

    def test_a_later_byte_can_spoil_the_characters_before_it(self) -> None:
        kind = KINDS["byte_fallback"]()
        ids = kind.ids("▁a", "<0x0A>", "<0xC3>", "<0xA9>", "<0xFF>", "b")

        assert kind.whole(ids) == f"a{REPLACEMENT * 4}b"
        assert "".join(stream(kind.tokenizer, split(ids, [1]))) == f"a{REPLACEMENT * 4}b"

    def test_only_the_first_space_of_the_text_is_dropped(self) -> None:
        kind = KINDS["byte_fallback"]()
        ids = [kind.special[0], *kind.ids("▁", "▁the", "▁", "▁the"), kind.special[1]]
        ids += kind.ids("▁the")

        assert "".join(stream(kind.tokenizer, split(ids, [1]))) == " the  the the"


def test_flush_begins_a_new_text() -> None:
    kind = KINDS["byte_fallback"]()
    detokenizer = IncrementalDetokenizer(kind.tokenizer)
    ids = kind.ids("▁the", "<0xC3>")
    for _ in range(2):
        assert detokenizer.decode(ids) == "the"
        assert detokenizer.flush() == REPLACEMENT
        assert detokenizer.flush() == ""


def test_no_ids_are_no_text() -> None:
    kind = KINDS["byte_level"]()

    assert stream(kind.tokenizer, [[], []]) == ["", "", ""]
    assert decode_delta(kind.tokenizer, [], [], final=True) == ""


class Stripping:
    """As SentencePiece tokenizers without a decoder of their own do: whitespace is stripped."""

    TOKENS = ("▁", "a", "▁b")

    def decode(self, token_ids: list[int], **_options: Any) -> str:
        return "".join(self.TOKENS[i] for i in token_ids).replace("▁", " ").strip()


@pytest.mark.parametrize("size", [1, 3, 40])
def test_stripped_whitespace_counts_once_text_follows(size: int) -> None:
    ids = [1, *[0] * 50, 2, *[0] * 50, 1, 0]

    assert "".join(stream(Stripping(), split(ids, [size]))) == Stripping().decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "word_piece", "word_suffix"])
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, sizes=SIZES)
def test_decode_alone_is_enough_of_a_tokenizer(name: str, text: str, sizes: list[int]) -> None:
    kind = KINDS[name]()
    ids = kind.encode(text)

    assert "".join(stream(DecodeOnly(kind.tokenizer), split(ids, sizes))) == kind.whole(ids)


def unbroken(kind: Kind, length: int) -> dict[str, list[int]]:
    """Ids of which the text may never come to a point at which nothing is held back."""
    cases = {
        "special": [kind.special[0]] * length,
        "unknown": [kind.vocabulary[-1]] * length,
        "word": (kind.encode("the quick brown fox") * length)[:length],
    }
    if kind.raw_bytes:
        cases |= {
            "invalid": byte_ids(kind, b"\xff" * length),
            "continuation": byte_ids(kind, b"\x80" * length),
            "replacement": byte_ids(kind, REPLACEMENT.encode() * (length // 3)),
            "special within a character": [
                *byte_ids(kind, b"\xf0"),
                *[kind.special[0]] * length,
                *byte_ids(kind, b"\x9f\x8e\x89"),
            ],
            "unknown among invalid": byte_ids(kind, b"\x80")
            + [kind.vocabulary[-1], *byte_ids(kind, b"\x80")] * (length // 2),
        }
    return cases


@pytest.mark.parametrize("name", ALL_KINDS)
class TestWork:
    def test_per_token_does_not_grow_with_the_text(self, name: str) -> None:
        kind = KINDS[name]()
        for case, ids in unbroken(kind, 2000).items():
            counting = Counting(kind.tokenizer)

            pieces = stream(counting, split(ids, [1]))

            assert "".join(pieces) == kind.whole(ids), case
            assert counting.calls <= 2 * len(ids) + 5, case
            assert counting.decoded <= 24 * len(ids), case

    def test_of_many_ids_at_once_is_that_of_one_decode(self, name: str) -> None:
        kind = KINDS[name]()
        ids = (kind.encode("the quick brown fox. ") * 64)[:512]
        counting = Counting(kind.tokenizer)

        stream(counting, split(ids, [128]))

        assert counting.calls <= 2 * 4 + 1
        assert counting.decoded <= len(ids) + 100

    def test_of_the_stateless_way_is_two_decodes_of_the_context(self, name: str) -> None:
        kind = KINDS[name]()
        ids = (kind.encode("the quick brown fox. ") * 20)[:100]
        counting = Counting(kind.tokenizer)

        stream_stateless(counting, split(ids, [1]))

        assert counting.calls <= 2 * len(ids)
        assert counting.decoded <= (2 * CONTEXT_TOKENS + 1) * len(ids)


def drop_long_runs(kind: Kind, ids: Sequence[int], without_text: int, fallback: int) -> list[int]:
    """Keep to what `decode_delta` asks for: so many such ids within a context, and no more."""
    byte_tokens = set(byte_ids(kind, bytes(range(256)))) if has_fallback(kind) else set()
    textless = {*kind.special, kind.vocabulary[-1]}
    kept: list[int] = []
    for token_id in ids:
        tail = kept[-CONTEXT_TOKENS:]
        if token_id in textless and sum(i in textless for i in tail) >= without_text:
            continue
        run = 0
        for earlier in reversed(kept):
            if earlier not in byte_tokens | textless:
                break
            run += 1
        if token_id in byte_tokens and run >= fallback:
            continue
        kept.append(token_id)
    return kept


def has_fallback(kind: Kind) -> bool:
    return kind.tokenizer.convert_tokens_to_ids("<0x41>") in kind.raw_bytes


@pytest.mark.parametrize("name", ALL_KINDS)
class TestStatelessPiecesJoinToTheWholeText:
    @settings(max_examples=100, deadline=None)
    @given(text=TEXTS, sizes=SIZES, skip=st.booleans())
    def test_of_encoded_text(self, name: str, text: str, sizes: list[int], skip: bool) -> None:
        kind = KINDS[name]()
        ids = kind.encode(text)

        pieces = stream_stateless(kind.tokenizer, split(ids, sizes), skip)

        assert "".join(pieces) == kind.whole(ids, skip)

    @settings(max_examples=150, deadline=None)
    @given(data=st.data(), sizes=SIZES)
    def test_of_ids_without_long_runs(
        self, name: str, data: st.DataObject, sizes: list[int]
    ) -> None:
        kind = KINDS[name]()
        limit = CONTEXT_TOKENS - 4
        ids = drop_long_runs(kind, data.draw(random_ids(kind)), limit, CONTEXT_TOKENS - 1 - limit)

        pieces = stream_stateless(kind.tokenizer, split(ids, sizes))

        assert "".join(pieces) == kind.whole(ids)


class TestStatelessByteFallback:
    @settings(max_examples=150, deadline=None)
    @given(
        invalid=st.lists(
            st.binary(min_size=1, max_size=CONTEXT_TOKENS - 1), min_size=1, max_size=5
        ),
        sizes=SIZES,
    )
    def test_short_runs_may_be_anything(self, invalid: list[bytes], sizes: list[int]) -> None:
        kind = KINDS["byte_fallback"]()
        ids = [i for run in invalid for i in [*byte_ids(kind, run), *kind.ids("a")]]

        assert "".join(stream_stateless(kind.tokenizer, split(ids, sizes))) == kind.whole(ids)

    @settings(max_examples=150, deadline=None)
    @given(text=st.text(alphabet="\néあ你🎉" + REPLACEMENT, max_size=60), sizes=SIZES)
    def test_long_runs_of_characters(self, text: str, sizes: list[int]) -> None:
        kind = KINDS["byte_fallback"]()
        ids = [*kind.ids("▁a"), *byte_ids(kind, text.encode()), *kind.ids("▁a")]

        assert "".join(stream_stateless(kind.tokenizer, split(ids, sizes))) == f"a{text} a"

    def test_a_character_of_a_long_run_is_returned_with_its_last_byte(self) -> None:
        kind = KINDS["byte_fallback"]()
        text = "\n" * CONTEXT_TOKENS + "éあ🎉\n"
        ids = byte_ids(kind, text.encode())

        pieces = stream_stateless(kind.tokenizer, [*split(ids, [1]), []])

        expected = [part for c in text for part in [*[""] * (len(c.encode()) - 1), c]]
        assert pieces[CONTEXT_TOKENS:-1] == expected[CONTEXT_TOKENS:]

    def test_a_spoiled_long_run_keeps_what_was_returned(self) -> None:
        kind = KINDS["byte_fallback"]()
        ids = [*kind.ids("▁a"), *byte_ids(kind, ("🎉" * 6).encode() + b"\xff"), *kind.ids("b")]

        assert "".join(stream_stateless(kind.tokenizer, split(ids, [1]))).startswith("a🎉🎉🎉🎉")
        assert kind.whole(ids) == f"a{REPLACEMENT * 25}b"

    def test_context_beyond_what_is_needed_is_ignored(self) -> None:
        kind = KINDS["byte_fallback"]()
        ids = [*kind.ids("▁a"), *byte_ids(kind, b"\xff")]
        ids += [*byte_ids(kind, ("🎉" * 9).encode()), *kind.ids("▁a")]
        for cut in range(CONTEXT_TOKENS, len(ids)):
            needed = ids[cut - CONTEXT_TOKENS : cut]

            expected = decode_delta(kind.tokenizer, needed, ids[cut:], final=False)

            assert decode_delta(kind.tokenizer, ids[:cut], ids[cut:], final=False) == expected
