"""Stop words in the text of token ids, with tokenizers of the kinds that models have."""

import random
from collections.abc import Sequence
from functools import cache

import pytest

from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.stop_words import StopWordSearch
from cog_triton.text.tokenizer import Tokenizer
from tests import tokenizers

TEXTS = [
    "the cat\n\nUser: stop the hen",
    "so... then he stops.\n\n\nUser: 你好吗\n",
    "a 你好 b ### <he>, the end|>",
]
WORDS = [
    "\n",
    "\n\n",
    ".",
    "...",
    "e",
    "he",
    "top",
    "r: s",
    "\nUser:",
    "好",
    "你好",
    "##",
    "t",
    " b",
]


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


@cache
def spellings(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """Return ids of a text: the tokenizer's, and others, made of pieces of the text."""
    made = [tokenizer(text, add_special_tokens=False).input_ids]
    for seed in range(5):
        pick = random.Random(seed)
        places = sorted(pick.sample(range(1, len(text)), pick.randint(1, 6)))
        pieces = [
            text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)
        ]
        ids: list[int] = []
        for piece in pieces:
            ids += tokenizer(piece, add_special_tokens=False).input_ids
        made.append(ids)
    return made


def stopped(tokenizer: Tokenizer, ids: Sequence[int], words: Sequence[str]) -> tuple[int, str]:
    """Return how many ids a search takes, and their text without the characters behind the word."""
    search = StopWordSearch(tokenizer, words)
    for count, token in enumerate(ids, 1):
        if search.feed(token):
            text = tokenizer.decode(ids[:count], skip_special_tokens=True)
            return count, text[: len(text) - search.characters_behind]
    return len(ids), tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_a_word_stops_whatever_its_ids(kind: Tokenizer, text: str) -> None:
    for ids in spellings(kind, text):
        whole = kind.decode(ids, skip_special_tokens=True)
        for word in WORDS:
            count, found = stopped(kind, ids, [word])
            if word not in whole:
                assert (count, found) == (len(ids), whole)
                continue
            # Bytes of a character that is not complete may be undecided until then.
            assert found == whole[: whole.index(word) + len(word)], kind.convert_ids_to_tokens(ids)
            before = kind.decode(ids[: count - 1], skip_special_tokens=True)
            assert word not in before, kind.convert_ids_to_tokens(ids)


def test_the_word_that_is_complete_first_stops() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer("the cat and the hen").input_ids
    assert stopped(tokenizer, ids, ["cat and the", "at a", "hen", ""])[1] == "the cat a"


def test_a_line_break_of_a_byte_token_stops_at_once() -> None:
    tokenizer = tokenizer_of("prepending")
    ids = tokenizer.convert_tokens_to_ids(["▁a", "<0x0A>", "<0x0A>", "a"])
    assert stopped(tokenizer, ids, ["\n"]) == (2, "a\n")


@pytest.mark.parametrize(("word", "expected"), [("</s>", 2), ("e</s>h", 3), ("</s>n", 0)])
def test_special_tokens_are_part_of_the_text_where_words_have_them(
    word: str, expected: int
) -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.convert_tokens_to_ids(["the", "</s>", "he", "n"])
    search = StopWordSearch(tokenizer, [word])
    counts = [count for count, token in enumerate(ids, 1) if search.feed(token)]
    assert [*counts, 0][0] == expected


def test_the_text_of_a_word_is_flushed_only_once() -> None:
    """What is pending is what a flush returns, and stays pending."""
    tokenizer = tokenizer_of("prepending")
    detokenizer = IncrementalDetokenizer(tokenizer)
    (line_break,) = tokenizer.convert_tokens_to_ids(["<0x0A>"])
    assert detokenizer.pending() == ""
    assert detokenizer.decode([line_break]) == ""
    assert detokenizer.pending() == detokenizer.pending() == "\n"
    assert detokenizer.flush() == "\n"
    assert detokenizer.pending() == ""
