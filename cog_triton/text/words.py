"""Words of a request to the token ids that a model writes for them.

Engines match words by token ids, and a word has several spellings in ids. Tokenizers of the SentencePiece
kind put a space before a text, so tokenizing the word alone gives the ids of the word behind a space. Those
of the WordPiece kind have other tokens for the rest of a longer word. So a word is tokenized behind other
text, whose ids are then cut off; tokens that contain the whole word are looked up in the vocabulary.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice

from cog_triton.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

# Texts before a word: a line break, punctuation, letters of which few words are made, and a digit.
CONTEXTS = ("\n", ".", "x", "q", "0")
# Tokens that contain a word, such as "\n\n" for "\n": at most so many are looked for.
TOKENS_AROUND_WORD = 512
# Variants of a spelling with a longer first and a longer last token: at most so many are made.
LONGER_AT_BOTH_ENDS = 64
# The vocabulary's texts are searched as one. No word that people write has it.
_SEPARATOR = "\U0010ffff"


class WordTokenizer:
    """Finds the ids that words have in a text, wherever they stand in it.

    Args:
        after_space: also find the ids of the word behind a space.
    """

    def __init__(self, tokenizer: Tokenizer, *, after_space: bool = True) -> None:
        self._tokenizer = tokenizer
        self._after_space = after_space
        self._tokens_with = lru_cache(maxsize=1024)(self._search)

    def spellings(self, words: Sequence[str]) -> list[list[Ids]]:
        """Return for each word its sequences of ids, in the middle of a text first; none for ""."""
        spellings = self._in_contexts(words)
        if self._after_space:
            behind_space = self._in_contexts([f" {word}" if word else "" for word in words])
            spellings = [
                _distinct([*middle, *behind])
                for middle, behind in zip(spellings, behind_space, strict=True)
            ]
        return spellings

    def stop_spellings(self, words: Sequence[str]) -> list[list[Ids]]:
        """Return the spellings, and those in which other text shares a token with the word.

        Those are tokens that contain the word, and spellings whose first or last token is a longer one,
        such as "\\n\\n" and "User" for "\\nUser". A word may have other spellings still: token ids cannot
        do what a search in the text does.
        """
        found: list[list[Ids]] = []
        for word, spellings in zip(words, self.spellings(words), strict=True):
            longer = [self._with_longer_ends(ids) for ids in spellings]
            tokens = [(token,) for token in self.tokens_with(word)]
            found.append(_distinct([*spellings, *tokens, *chain.from_iterable(longer)]))
        return found

    def bad_spellings(self, words: Sequence[str]) -> list[list[Ids]]:
        """Return the spellings, and the tokens that contain the word as a word.

        A word of letters is not looked for within longer ones: without "ass" there is still "class".
        """
        return [
            _distinct([*spellings, *((token,) for token in self.tokens_with(word, whole=True))])
            for word, spellings in zip(words, self.spellings(words), strict=True)
        ]

    def tokens_of(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each word in its spellings, but for those that are only a space."""
        return [
            sorted({token for ids in spellings for token in ids if not self._is_space(token, word)})
            for word, spellings in zip(words, self.spellings(words), strict=True)
        ]

    def tokens_with(self, word: str, *, whole: bool = False) -> Sequence[int]:
        """Return tokens whose text contains a word; with ``whole``, not as a part of a longer word."""
        if not self._after_space or not word.strip(_SEPARATOR):
            return ()
        return self._tokens_with(word, whole)

    def _search(self, word: str, whole: bool) -> Sequence[int]:
        """Return tokens whose text contains a word, or, with a separator, begins or ends with one."""
        tokens: list[int] = []
        place = self._texts.find(word)
        while place >= 0 and len(tokens) < TOKENS_AROUND_WORD:
            token = bisect_right(self._starts, place) - 1
            end = place + len(word)
            if not whole or not _within_word(self._texts, place, end):
                tokens.append(token)
                place = self._texts.find(word, self._starts[token + 1])
            else:
                place = self._texts.find(word, place + 1)
        return tuple(tokens)

    def _with_longer_ends(self, ids: Ids) -> list[Ids]:
        """Return variants of a spelling that begin or end with a token that has other text as well."""
        texts = [self._text_of(token) for token in ids]
        if len(ids) < 2 or not all(texts) or "\ufffd" in "".join(texts):
            return []
        variants: list[Ids] = []
        for count in range(1, len(ids)):
            beginning = "".join(texts[:count])
            for token in self.tokens_with(beginning + _SEPARATOR):
                variants.append((token, *ids[count:]))
            end = "".join(texts[count:])
            for token in self.tokens_with(_SEPARATOR + end):
                variants.append((*ids[:count], token))
        begins = self.tokens_with(texts[0] + _SEPARATOR)
        ends = self.tokens_with(_SEPARATOR + texts[-1])
        both = ((begin, *ids[1:-1], end) for begin in begins for end in ends)
        return [*variants, *islice(both, LONGER_AT_BOTH_ENDS)]

    def _in_contexts(self, words: Sequence[str]) -> list[list[Ids]]:
        """Return the ids of each word behind each context that keeps its ids before the word."""
        found: list[list[Ids]] = []
        pieces = [word for word in words if word]
        texts = [context + word for word in pieces for context in CONTEXTS]
        tokenized = iter(self._ids([*texts, *pieces]) if pieces else [])
        contexts = self._contexts
        in_texts = {word: [next(tokenized) for _ in contexts] for word in pieces}
        alone = {word: next(tokenized) for word in pieces}
        for word in words:
            spellings: list[Ids] = []
            for context, ids in zip(contexts, in_texts.get(word, ()), strict=False):
                rest = ids[len(context) :]
                if rest and ids[: len(context)] == context and not self._is_unknown(rest, word):
                    spellings.append(tuple(rest))
            if word and not spellings and not self._is_unknown(alone[word], word):
                spellings.append(tuple(alone[word]))
            found.append([ids for ids in _distinct(spellings) if ids])
        return found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids

    def _is_unknown(self, ids: Sequence[int], word: str) -> bool:
        """Return whether the tokenizer could not spell a word: its unknown token stands for any text."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return unknown in ids and str(self._tokenizer.unk_token) not in word

    def _is_space(self, token: int, word: str) -> bool:
        """Return whether a token is only the space before a word that does not consist of spaces."""
        text = self._text_of(token)
        return bool(text) and not text.strip(" ") and bool(word.strip(" "))

    def _text_of(self, token: int) -> str:
        return self._texts_of_tokens[token] if token < len(self._texts_of_tokens) else ""

    @cached_property
    def _contexts(self) -> list[list[int]]:
        return self._ids(CONTEXTS)

    @cached_property
    def _texts_of_tokens(self) -> list[str]:
        """The text of each token in the middle of a text, by its id; none of a special token."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return []
        context = self._contexts[CONTEXTS.index("x")]
        vocabulary = self._tokenizer.get_vocab()
        before = backend.decode(context, skip_special_tokens=True)
        sequences = [[*context, token] for token in range(1 + max(vocabulary.values()))]
        texts = backend.decode_batch(sequences, skip_special_tokens=True)
        return [text[len(before) :] if text.startswith(before) else "" for text in texts]

    @cached_property
    def _texts(self) -> str:
        return _SEPARATOR + "".join(text + _SEPARATOR for text in self._texts_of_tokens)

    @cached_property
    def _starts(self) -> list[int]:
        """The place of the separator before each token's text in ``_texts``, and that of the last one."""
        return [0, *accumulate(len(text) + 1 for text in self._texts_of_tokens)]


def _distinct(sequences: Sequence[Ids]) -> list[Ids]:
    return list(dict.fromkeys(sequences))


def _within_word(text: str, start: int, end: int) -> bool:
    """Return whether text[start:end] begins or ends within a word of letters or digits.

    Scripts without upper and lower case, such as Chinese, are taken to have no space between words.
    """
    before = start > 0 and _joins(text[start - 1], text[start])
    return before or (end < len(text) and _joins(text[end - 1], text[end]))


def _joins(left: str, right: str) -> bool:
    return all(
        character.isdigit() or character.lower() != character.upper() for character in left + right
    )
