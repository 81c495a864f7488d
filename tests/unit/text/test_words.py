"""Words to the ids that they have in a text, with tokenizers of the kinds that models have."""

from collections.abc import Sequence
from functools import cache

import pytest

from cog_triton.text.tokenizer import Tokenizer
from cog_triton.text.words import WordTokenizer
from tests import tokenizers

WORDS = ["\n", ".", "he", "the", "stop", "User:", "\nUser:", "你", "###", "<|im_end|>"]
# Before and behind a word.
AROUND = [("", ""), ("x", ""), ("a ", " b"), ("\n", "\n"), ("so. ", "."), ("是", "好")]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return tokenizers.KINDS[kind]()


@pytest.fixture(
    scope="module",
    params=[*tokenizers.KINDS, "sentencepiece", "sentencepiece without a prefix"],
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param.startswith("sentencepiece"):
        pytest.importorskip("sentencepiece")
        dummy_prefix = request.param == "sentencepiece"
        directory = tmp_path_factory.mktemp("tokenizer")
        return tokenizers.sentencepiece(directory, dummy_prefix=dummy_prefix)
    return tokenizer_of(request.param)


def matches(ids: Sequence[int], words: Sequence[Sequence[int]]) -> bool:
    return any(
        tuple(ids[start : start + len(word)]) == tuple(word)
        for word in words
        for start in range(len(ids))
    )


def test_a_word_stops_whatever_stands_around_it(kind: Tokenizer) -> None:
    for word, spellings in zip(WORDS, WordTokenizer(kind).stop_spellings(WORDS), strict=True):
        for before, behind in AROUND:
            text = f"{before}{word}{behind}"
            # What a model writes follows other text.
            ids = kind(f"q: {text}", add_special_tokens=False).input_ids
            if word in kind.decode(ids).removeprefix("q:"):
                assert matches(ids, spellings), (text, kind.convert_ids_to_tokens(ids))


def test_other_texts_do_not_stop(kind: Tokenizer) -> None:
    words = ["\n", "the", "stop", "User:"]
    spellings = [ids for each in WordTokenizer(kind).stop_spellings(words) for ids in each]
    ids = kind("a b c, and tie to sop, Use. : #", add_special_tokens=False).input_ids
    assert spellings
    assert not matches(ids, spellings)


@pytest.mark.parametrize("kind_with_prefix", ["prepending", "metaspace first", "metaspace always"])
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("\n", [["<0x0A>"], ["▁", "<0x0A>"]]),
        (".", [["."], ["▁", "."]]),
        ("he", [["he"], ["▁", "he"]]),
        ("the", [["t", "he"], ["▁the"]]),
        ("她", [["<0xE5>", "<0xA5>", "<0xB9>"], ["▁", "<0xE5>", "<0xA5>", "<0xB9>"]]),
        ("</s>", [["</s>"], ["▁", "</s>"]]),
    ],
)
def test_the_space_before_a_text_is_not_part_of_a_word(
    kind_with_prefix: str, word: str, expected: list[list[str]]
) -> None:
    tokenizer = tokenizer_of(kind_with_prefix)
    (found,) = WordTokenizer(tokenizer).spellings([word])
    assert [tokenizer.convert_ids_to_tokens(list(ids)) for ids in found] == expected


def test_a_word_of_letters_is_allowed_within_longer_words() -> None:
    tokenizer = tokenizer_of("prepending")
    he, line_break = WordTokenizer(tokenizer).bad_spellings(["he", "."])
    the = tokenizer.convert_tokens_to_ids("▁the")
    dots = tokenizer.convert_tokens_to_ids("...")
    assert (the,) not in he
    assert (dots,) in line_break


def test_the_tokens_of_a_word_are_without_those_of_a_space() -> None:
    tokenizer = tokenizer_of("prepending")
    tokens = WordTokenizer(tokenizer).tokens_of(["the", "he", "\n", ""])
    found = [set(tokenizer.convert_ids_to_tokens(ids)) for ids in tokens]
    assert found == [{"t", "he", "▁the"}, {"he"}, {"<0x0A>"}, set()]


def test_the_unknown_token_is_no_word() -> None:
    tokenizer = tokenizer_of("word piece")
    words = WordTokenizer(tokenizer)
    assert words.stop_spellings(["🚀", ""]) == [[], []]
    assert words.spellings(["[UNK]"]) == [[(tokenizer.unk_token_id,)]]
