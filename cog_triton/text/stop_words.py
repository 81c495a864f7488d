"""Finds stop words in the text of an output, whichever token ids the model writes them with.

Engines match words by token ids. A word has more spellings in ids than can be listed: it may begin within
one token and end within another, as "\\n" does in "\\n\\n". The text has all of them.
"""

from collections.abc import Sequence

from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"


class StopWordSearch:
    """Searches the text of one output for stop words, a token at a time."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str]) -> None:
        """Begin a text; special tokens are part of it as far as words have them."""
        self._words = frozenset(filter(None, words))
        self._longest = max(map(len, self._words), default=0)
        # The lengths of the words by their last character. To look for each word would take 0.1 ms a token,
        # with as many words as a request may have.
        self._lengths: dict[str, set[int]] = {}
        for word in self._words:
            self._lengths.setdefault(word[-1], set()).add(len(word))
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = [str(token) for token in added if token.special]
        shown = [text for text in special if any(text in word for word in self._words)]
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown=shown)
        # The end of the text, in which a word may have begun.
        self._end_of_text = ""
        # How many characters of the last token's text stand behind the word that was found.
        self.characters_behind = 0

    def feed(self, token: int) -> bool:
        """Add a token to the text; return whether a word is complete with it."""
        before = len(self._end_of_text)
        text = self._end_of_text + self._detokenizer.decode([token])
        # Text that the detokenizer holds back, because the next token may change it. A word may end in it,
        # such as a line break that came as a byte, but not in a character that is incomplete.
        pending = self._detokenizer.pending()
        if _INCOMPLETE in pending:
            pending = ""
        end = self._end_of_word(text + pending, before)
        self._end_of_text = text[max(0, len(text) - self._longest + 1) :]
        if end is None:
            return False
        self.characters_behind = len(text + self._detokenizer.flush()) - end
        return True

    def _end_of_word(self, text: str, before: int) -> int | None:
        """Return where the first word ends that is complete behind the place ``before``."""
        for end in range(before + 1, len(text) + 1):
            for length in self._lengths.get(text[end - 1], ()):
                if length <= end and text[end - length : end] in self._words:
                    return end
        return None
