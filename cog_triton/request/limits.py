"""How large the texts of a request may be: checked by their lengths, before anything is built of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cog_triton.errors import InvalidParameter, PromptTooLong

MOST_CHARACTERS = 2**24
"""Of a prompt, whatever the model: two million tokens of eight characters each. A vocabulary with very long
tokens would allow more."""

UNKNOWN_CHARACTERS = 2**20
"""Of a prompt where only the engine knows the context length: 131,072 tokens of eight characters each. To
tokenize so much takes about two seconds, and 180 MB."""

UNKNOWN_TOKENS = 2**20
"""Of a prompt that comes as token ids, where only the engine knows the context length."""

TEMPLATE_CHARACTERS = 2**18
"""Of a prompt template. It is read on the event loop, and so much of it takes a few milliseconds."""

TEMPLATE_BRACES = 4096
"""In a prompt template: a place for the prompt has two, and so has a literal brace, which is doubled."""

STOP_SEQUENCES, STOP_CHARACTERS = 64, 256
"""How many stop sequences a request may have, and how long one may be. For each piece of the output, in the
worst case, as many starts are compared with as many sequences: about a millisecond."""

STOP_TEXT_CHARACTERS = STOP_SEQUENCES * (2 * STOP_CHARACTERS + 1)
"""Of the list that they come in, with a comma for each and every character escaped."""

WORDS, WORDS_BYTES = 1024, 2**14
"""How many bad words, stop words or biased words a prompt may have on Triton's own ports, and the bytes of
a request's together: they are tokenized, each of them twice, while other prompts wait."""

MESSAGES = 4096
"""In a chat, and tools."""

GUIDE_CHARACTERS = 2**17
"""Of a JSON schema, a regular expression, a grammar or a list of choices."""

NAME_CHARACTERS = 256
"""Of an adapter's name."""

ALLOWED_IDS = 2**18
"""Token ids of which an output may be: about as many as the largest vocabularies have."""

TOP_LOG_PROBS = 20
"""Alternatives that log probabilities may have at each place: the most that OpenAI's API has."""

JSON_STRINGS, JSON_CONTAINERS, JSON_VALUES, JSON_DEPTH = 2**17, 2**16, 2**20, 128
"""Of one JSON text: its strings, names among them; its objects and lists; its values, by their commas; and
how deep it is nested. So much is parsed in less than 0.1 s."""

WORD_IDS = 4 * WORDS_BYTES
"""Of one such list as token ids: a byte is one at most, and each word is there twice."""


@dataclass(frozen=True)
class TextLimits:
    """What one deployment's prompts may have; see ``cog_triton.text.tokenizer.text_limits``.

    Attributes:
        characters: most of a prompt, a system prompt, and a template filled in.
        source: where that number comes from.
    """

    characters: int = UNKNOWN_CHARACTERS
    source: str = " without MAX_SEQUENCE_LENGTH, where only the engine knows the model's"

    def check(self, what: str, characters: int) -> None:
        """Refuses a text that is too long whatever its tokens are.

        Raises:
            PromptTooLong: it has more characters than that many tokens can stand for.
        """
        if characters > self.characters:
            raise PromptTooLong(
                f"{what} has {characters} characters; {self.characters} are the most{self.source}"
            )


def check_stop_sequences(stops: Sequence[str]) -> None:
    """Refuses too many of them, or one that is too long.

    Raises:
        InvalidParameter: naming the limit.
    """
    check_texts("stop_sequences", stops, STOP_SEQUENCES, STOP_CHARACTERS)


def check_texts(name: str, texts: Sequence[str], count: int, characters: int) -> None:
    """Refuses a list of too many texts, or with one that is too long.

    Raises:
        InvalidParameter: naming the list and the limit.
    """
    if len(texts) > count:
        raise InvalidParameter(f"{name} must be at most {count}, not {len(texts)}")
    longest = max(map(len, texts), default=0)
    if longest > characters:
        raise InvalidParameter(
            f"{name} must be of at most {characters} characters each, not {longest}"
        )


def check_json(name: str, text: str) -> None:
    """Refuse a JSON text of too many values, which are counted without being made.

    Raises:
        InvalidParameter: naming the text and the limit.
    """
    quoted = text.replace("\\\\", "").replace('\\"', "") if "\\" in text else text
    counts = {"strings": (quoted.count('"') // 2, JSON_STRINGS)}
    if counts["strings"][0] <= JSON_STRINGS:
        outside = "".join(quoted.split('"')[::2])
        containers = outside.count("{") + outside.count("[")
        counts["objects and lists"] = (containers, JSON_CONTAINERS)
        counts["values"] = (outside.count(","), JSON_VALUES)
        if JSON_DEPTH < containers <= JSON_CONTAINERS:
            steps = (1 if mark in "{[" else -1 for mark in re.findall(r"[{}\[\]]", outside))
            counts["levels of nesting"] = (max(accumulate(steps)), JSON_DEPTH)
    for what, (count, most) in counts.items():
        if count > most:
            raise InvalidParameter(f"{name} must have at most {most} {what}")
