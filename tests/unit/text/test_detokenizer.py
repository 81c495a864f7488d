from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cog_triton.text.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, decode_delta
from tests.late import transformers
from tests.support import split
from tools.demo_model import DIRECTORY

REPLACEMENT = "\ufffd"
SAMPLES = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, déjà vu; Привет, мир! Ελληνικά",
    "你好，世界。日本語の文章です。",
    "emoji 🎉🎉 👩‍👩‍👧‍👦 🏳️‍🌈 and  two  spaces\n\n\tand lines\r\n",
]


@dataclass(frozen=True)
class Kind:
    """A tokenizer and the ids that a property picks from; ``of_byte`` is empty where bytes have none."""

    tokenizer: Any
    vocabulary: tuple[int, ...]
    special: tuple[int, ...]
    of_byte: tuple[int, ...]

    def whole(self, ids: Sequence[int], skip: bool = True) -> str:
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))

    def ids(self, *tokens: str) -> list[int]:
        return list(self.tokenizer.convert_tokens_to_ids(list(tokens)))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def wrap(tokenizer: Tokenizer, byte_tokens: Sequence[str] = ()) -> Kind:
    tokenizer.add_special_tokens(["<s>", "</s>", "<|held|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    wrapped: Any = transformers.PreTrainedTokenizerFast
    fast = wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    vocabulary = fast.get_vocab()
    return Kind(
        tokenizer=fast,
        # Engines pad their vocabulary: a model may emit ids that the tokenizer does not have.
        vocabulary=(*sorted(vocabulary.values()), len(vocabulary) + 7),
        special=tuple(fast.convert_tokens_to_ids(["<s>", "</s>", "<|held|>"])),
        of_byte=tuple(fast.convert_tokens_to_ids(list(byte_tokens))),
    )


def byte_level() -> Kind:
    """The demo model's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    return wrap(tokenizer, [characters[byte] for byte in range(0x100)])


FALLBACK = [f"<0x{byte:02X}>" for byte in range(0x100)]


def sentencepiece() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *FALLBACK]
    tokens += ["▁", "▁▁", "▁▁▁▁", REPLACEMENT, "你", "é", *"abcdefghijklmnopqrstuvwxyz.,!"]
    tokens += ["▁t", "he", "▁the", "▁a"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )


def byte_fallback() -> Kind:
    tokenizer = sentencepiece()
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
    return wrap(tokenizer, FALLBACK)


def metaspace() -> Kind:
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)]
    )
    return wrap(tokenizer, FALLBACK)


def word_piece() -> Kind:
    letters = "abcdefghijklmnopqrstuvwxyzé你,.!'"
    tokens = ["[UNK]", *letters, *("##" + letter for letter in letters), "the", "##ing", "n't"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return wrap(tokenizer)


KINDS = {make.__name__: cache(make) for make in (byte_level, byte_fallback, metaspace, word_piece)}
ALL_KINDS = sorted(KINDS)


class Counting:
    """A tokenizer that counts what it is asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.calls = self.decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.calls += 1
        self.decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, **options))


Stream = Callable[..., list[str]]


def stream(tokenizer: Any, chunks: Sequence[Sequence[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.decode(chunk) for chunk in chunks), detokenizer.flush()]


def stream_stateless(
    tokenizer: Any, chunks: Sequence[Sequence[int]], skip: bool = True
) -> list[str]:
    deltas: list[str] = []
    before: list[int] = []
    for place, chunk in enumerate(chunks, 1):
        final, context = place == len(chunks), before[-CONTEXT_TOKENS:]
        delta = decode_delta(tokenizer, context, chunk, final=final, skip_special_tokens=skip)
        deltas.append(delta)
        before += chunk
    return deltas


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8) | st.just([1]) | st.just([128])
TEXTS = st.lists(
    st.sampled_from([*SAMPLES, " ", "\n", "  ", "🎉", "你", REPLACEMENT, "don't", "."])
    | st.text(max_size=12),
    max_size=6,
).map("".join)


@st.composite
def random_ids(draw: st.DrawFn, kind: Kind) -> list[int]:
    """Ids as no text has them: invalid bytes, special tokens within characters, unknown ids."""
    character = st.sampled_from(["你", "🎉", "é", "\n", REPLACEMENT]).map(
        lambda text: byte_ids(kind, text.encode())
    )
    single = st.sampled_from(kind.vocabulary) | st.sampled_from(kind.special)
    if kind.of_byte:
        single |= st.sampled_from(kind.of_byte)
    pieces = st.lists(single.map(lambda i: [i]) | character, max_size=60)
    return [i for piece in draw(pieces) for i in piece]


def byte_ids(kind: Kind, data: bytes) -> list[int]:
    """One token for each byte, for the kinds that have those."""
    return [kind.of_byte[byte] for byte in data] if kind.of_byte else []


# Pieces join to the whole text


@pytest.mark.parametrize("name", ALL_KINDS)
@pytest.mark.parametrize("way", [stream, stream_stateless])
@given(text=TEXTS, sizes=SIZES, skip=st.booleans())
def test_pieces_join(name: str, way: Stream, text: str, sizes: list[int], skip: bool) -> None:
    kind = KINDS[name]()
    ids = kind.encode(text)
    assert "".join(way(kind.tokenizer, split(ids, sizes), skip)) == kind.whole(ids, skip)


@pytest.mark.parametrize("name", ALL_KINDS)
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_pieces_of_any_ids_join_to_their_text(
    name: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    kind = KINDS[name]()
    ids = data.draw(random_ids(kind))
    assert "".join(stream(kind.tokenizer, split(ids, sizes), skip)) == kind.whole(ids, skip)
    without_state = drop_long_runs(kind, ids)
    pieces = stream_stateless(kind.tokenizer, split(without_state, sizes))
    assert "".join(pieces) == kind.whole(without_state)


def drop_long_runs(kind: Kind, ids: Sequence[int]) -> list[int]:
    """Keep to what `decode_delta` asks for: four ids of a context have text, and runs are short."""
    byte_tokens = set(kind.ids(*FALLBACK))
    textless = {*kind.special, kind.vocabulary[-1]}
    kept: list[int] = []
    for token_id in ids:
        tail = kept[-CONTEXT_TOKENS:]
        run = list(takewhile(lambda i: i in byte_tokens | textless, reversed(kept)))
        many = token_id in textless and sum(i in textless for i in tail) >= CONTEXT_TOKENS - 4
        if not many and not (token_id in byte_tokens and len(run) >= 3):
            kept.append(token_id)
    return kept


@pytest.mark.parametrize("size", [1, 3, 40])
def test_stripped_whitespace_counts_once_text_follows(size: int) -> None:
    """As SentencePiece tokenizers without a decoder of their own do."""

    class Stripping:
        def decode(self, token_ids: list[int], **_options: Any) -> str:
            return "".join(("▁", "a", "▁b")[i] for i in token_ids).replace("▁", " ").strip()

    ids = [1, *[0] * 50, 2, *[0] * 50, 1, 0]
    assert "".join(stream(Stripping(), split(ids, [size]))) == Stripping().decode(ids)


def test_flush_begins_a_new_text() -> None:
    kind = KINDS["byte_fallback"]()
    detokenizer = IncrementalDetokenizer(kind.tokenizer)
    for _ in range(2):
        assert detokenizer.decode(kind.ids("▁the", "<0xC3>")) == "the"
        assert [detokenizer.flush(), detokenizer.flush()] == [REPLACEMENT, ""]
        assert detokenizer.decode([]) == ""


# Characters of several tokens


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("between", [0, 1, 40])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("🎉".encode(), "🎉"),
        (b"\xef\xbf\xbd" * 9, REPLACEMENT * 9),  # the model's own is text
        (b"\xff" * 50, REPLACEMENT * 50),
        (b"\x80\xe4\xbd", None),  # decoders differ in how many replace it
        (b"\xf0\x9f\x8e", None),
    ],
)
def test_bytes_and_special_tokens(name: str, between: int, data: bytes, text: str | None) -> None:
    """Incomplete and invalid bytes are replaced, and not dropped."""
    kind = KINDS[name]()
    spread = [i for token in byte_ids(kind, data) for i in (token, *[kind.special[1]] * between)]
    ids = [*kind.encode("a"), *spread, *kind.encode("b"), *spread]
    whole = kind.whole(ids)
    assert whole.count(text or REPLACEMENT) >= 2
    for size in (1, 3, 50):
        assert "".join(stream(kind.tokenizer, split(ids, [size]))) == whole


@given(data=st.data(), skip=st.booleans())
def test_byte_level_holds_back_no_more_than_one_character(data: st.DataObject, skip: bool) -> None:
    kind = KINDS["byte_level"]()
    ids = data.draw(random_ids(kind))
    detokenizer = IncrementalDetokenizer(kind.tokenizer, skip_special_tokens=skip)
    delivered = ""
    for i, token_id in enumerate(ids, start=1):
        delivered += detokenizer.decode([token_id])
        assert delivered == kind.whole(ids[:i], skip).removesuffix(REPLACEMENT)


# Runs of byte-fallback tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Held back until another token closes the run: a later byte can spoil the characters before it.
        ("▁a <0x0A> <0x0A> b <0xC3> <0xA9> ▁a", ["a", "", "", "\n\nb", "", "", "é a", ""]),
        ("▁a <0x0A> <0xC3> <0xA9> <0xFF> b", ["a", "", "", "", "", f"{REPLACEMENT * 4}b", ""]),
        # Only the first space of the text is dropped.
        ("<s> ▁ ▁the ▁ ▁the </s> ▁the", ["", "", " the", " ", " the", "", " the", ""]),
    ],
)
def test_pieces_of_byte_fallback(tokens: str, expected: list[str]) -> None:
    kind = KINDS["byte_fallback"]()
    ids = kind.ids(*tokens.split())
    assert stream(kind.tokenizer, split(ids, [1])) == expected
    assert "".join(expected) == kind.whole(ids)


@given(
    runs=st.lists(st.binary(min_size=1, max_size=CONTEXT_TOKENS - 1), min_size=1, max_size=5),
    text=st.text(alphabet="\néあ你🎉" + REPLACEMENT, max_size=60),
    sizes=SIZES,
)
def test_without_state_runs_are_exact_if_they_are_short_or_utf8(
    runs: list[bytes], text: str, sizes: list[int]
) -> None:
    kind = KINDS["byte_fallback"]()
    ids = [i for run in [*runs, text.encode()] for i in [*byte_ids(kind, run), *kind.ids("a")]]
    assert "".join(stream_stateless(kind.tokenizer, split(ids, sizes))) == kind.whole(ids)


def test_without_state_a_long_run_comes_a_character_at_a_time() -> None:
    kind = KINDS["byte_fallback"]()
    text = "\n" * CONTEXT_TOKENS + "éあ🎉\n"
    ids = byte_ids(kind, text.encode())
    pieces = stream_stateless(kind.tokenizer, [*split(ids, [1]), []])
    expected = [part for c in text for part in [*[""] * (len(c.encode()) - 1), c]]
    assert pieces[CONTEXT_TOKENS:-1] == expected[CONTEXT_TOKENS:]
    # What was returned stays, also if the run is spoiled.
    ids = [*kind.ids("▁a"), *byte_ids(kind, ("🎉" * 6).encode() + b"\xff"), *kind.ids("b")]
    assert "".join(stream_stateless(kind.tokenizer, split(ids, [1]))).startswith("a🎉🎉🎉🎉")


@pytest.mark.parametrize("name", ALL_KINDS)
@pytest.mark.parametrize(
    "case", ["special", "between", "word", "invalid", "within a character", "unknown"]
)
def test_work_per_token_does_not_grow_with_the_text(name: str, case: str) -> None:
    """Nor where the text never comes to a point at which nothing is held back."""
    kind = KINDS[name]()
    special, unknown = [kind.special[0]] * 2000, [kind.vocabulary[-1]] * 2000
    first, rest = (byte_ids(kind, data) for data in (b"\xf0", b"\x9f\x8e\x89"))
    ids = {
        "special": special,
        "between": [*kind.encode("a b"), *special[:100], *kind.encode("b"), *unknown[:100]] * 3,
        "word": kind.encode("the quick brown fox") * 100,
        "invalid": byte_ids(kind, b"\xff" * 2000),
        "within a character": [*first, *special, *rest],
        "unknown": [i for pair in zip(unknown, rest * 2000, strict=False) for i in pair] or unknown,
    }[case]
    counting = Counting(kind.tokenizer)
    assert "".join(stream(counting, split(ids, [1]))) == kind.whole(ids)
    assert counting.calls <= 2 * len(ids) + 5
    assert counting.decoded <= 24 * len(ids)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_work_of_many_ids_at_once_is_that_of_one_decode(name: str) -> None:
    kind = KINDS[name]()
    ids = (kind.encode("the quick brown fox. ") * 64)[:512]
    counting, without_state = Counting(kind.tokenizer), Counting(kind.tokenizer)
    stream(counting, split(ids, [128]))
    assert counting.calls <= 2 * 4 + 1
    assert counting.decoded <= len(ids) + 100
    stream_stateless(without_state, split(ids[:100], [1]))
    assert without_state.calls <= 2 * 100
    assert without_state.decoded <= (2 * CONTEXT_TOKENS + 1) * 100


def test_special_tokens_that_are_shown_stand_between_the_texts() -> None:
    kind = KINDS["byte_level"]()
    hidden, shown = kind.ids("<s>", "<|held|>")
    ids = [hidden, *kind.encode("one"), shown, *kind.encode("two"), shown, shown]
    for size in (1, 2, len(ids)):
        detokenizer = IncrementalDetokenizer(kind.tokenizer, shown=["<|held|>"])
        pieces = [
            detokenizer.decode(ids[start : start + size]) for start in range(0, len(ids), size)
        ]
        assert "".join(pieces) + detokenizer.flush() == "one<|held|>two<|held|><|held|>"
