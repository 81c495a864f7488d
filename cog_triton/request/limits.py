"""Limits of a request's texts, checked by their lengths before anything is built of them; and inputs."""

import re
from dataclasses import dataclass
from typing import TypeVar

from cog_triton.errors import InvalidParameter, PromptTooLong
from cog_triton.web import bodies

T = TypeVar("T", dict, list)  # type: ignore[type-arg]

# Of a prompt, in characters: two million tokens of eight characters each, whatever the model.
MOST_CHARACTERS = 2**24
# The same where only the engine knows the context length, 131,072 tokens, which take two seconds and 180 MB
# to tokenize; and of a prompt that comes as token ids.
UNKNOWN_CHARACTERS = 2**20
UNKNOWN_TOKENS = 2**20
# Of a prompt template, which is read on the event loop, in a few milliseconds. The prompt's place has two
# braces, and so has a literal one, which is doubled.
TEMPLATE_CHARACTERS = 2**18
TEMPLATE_BRACES = 4096
# The worst case compares as many starts with as many sequences for each piece of the output: a millisecond.
STOP_SEQUENCES = 64
STOP_CHARACTERS = 256
# Of the list that they come in, with a comma for each and every character escaped.
STOP_TEXT_CHARACTERS = STOP_SEQUENCES * (2 * STOP_CHARACTERS + 1)
# Bad, stop or biased words of a prompt on Triton's own ports, and the bytes of a request's. Each is
# tokenized twice while other prompts wait. As token ids, a byte is one at most.
WORDS = 1024
WORDS_BYTES = 2**14
WORD_IDS = 4 * WORDS_BYTES
# OpenAI takes 300, vLLM any number. A vocabulary has more than a thousand tokens with digits. These are
# checked in some milliseconds, on the event loop.
LOGIT_BIASES = 2**12
# In a chat; and tools.
MESSAGES = 4096
GUIDE_CHARACTERS = 2**17
# Of an adapter's name.
NAME_CHARACTERS = 256
# About the largest vocabularies.
ALLOWED_IDS = 2**18
# Alternatives at each place: as in OpenAI's API.
TOP_LOG_PROBS = 20

_STOP = re.compile(r"(?:\\[\\,]|[^,])+")
_ESCAPED = re.compile(r"\\([\\,])")


@dataclass(frozen=True)
class TextLimits:
    """Maximum number of characters of a deployment's prompts, and where that number comes from."""

    characters: int = UNKNOWN_CHARACTERS
    source: str = (
        ", since only the engine knows the model's context length; set MAX_SEQUENCE_LENGTH"
    )

    def check(self, what: str, characters: int) -> None:
        """Refuse a text with more characters than the context's tokens can stand for: PromptTooLong."""
        if characters > self.characters:
            raise PromptTooLong(
                f"{what} has {characters} characters; the limit is {self.characters}{self.source}"
            )


def parse_json(name: str, text: str, kind: type[T]) -> T:
    """Parse a JSON object (dict), or a list of them, or raise InvalidParameter."""
    try:
        value = bodies.parse_json(text.encode())
    except UnicodeEncodeError:
        raise InvalidParameter(f"{name} must be valid Unicode") from None
    except bodies.BadBody as error:
        raise InvalidParameter(f"{name} {error}") from None
    objects = value if isinstance(value, list) else [value]
    if not isinstance(value, kind) or not all(isinstance(each, dict) for each in objects):
        what = "list of objects" if kind is list else "object"
        raise InvalidParameter(f"{name} must be a JSON {what}")
    return value


def parse_stop_sequences(text: str | None, name: str = "stop_sequences") -> tuple[str, ...]:
    r"""Split a comma-separated list of stop sequences, or of other texts.

    Empty entries are dropped; whitespace belongs to its entry. ``\,`` stands for a comma that does
    not separate, ``\\`` for a backslash; any other backslash is just one. A list longer than the longest
    stop sequences make it is an InvalidParameter.
    """
    if text is not None and len(text) > STOP_TEXT_CHARACTERS:
        raise InvalidParameter(
            f"{name} must have at most {STOP_TEXT_CHARACTERS} characters, not {len(text)}"
        )
    return tuple(_ESCAPED.sub(r"\1", piece) for piece in _STOP.findall(text or ""))
