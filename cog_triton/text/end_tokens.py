"""The end tokens of a model: the token ids after which an output is complete.

A model may have several. Chat models end a turn with one token and a document with another, and
``generation_config.json`` lists both, while a tokenizer names only one. All of them end an output, as with
vLLM and Hugging Face's ``generate()``.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Where the files of a model name end tokens, in the order of their weight.
_FILES = ("generation_config.json", "config.json")
# Parts of a config.json that describe the language model inside a model of several kinds of input.
_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end an output unless a request has an ``end_id``."""

    # Engines with room for one token get the first.
    ids: tuple[int, ...] = ()
    # Whether each request has to name the first one, because the server's preprocessing has another.
    named_in_requests: bool = False

    @property
    def first(self) -> int | None:
        return self.ids[0] if self.ids else None

    def for_request(self, end_id: int | None) -> tuple[int, ...]:
        """Return the ids that end the output of a request with this ``end_id``; below 0, none does."""
        if end_id is None or (self.named_in_requests and end_id == self.first):
            return self.ids
        return (end_id,) if end_id >= 0 else ()


def end_ids(
    configured: Sequence[int],
    directories: Iterable[str | Path],
    eos_token_id: int | None,
    vocabulary: int | None = None,
) -> tuple[int, ...]:
    """Return the ids of all tokens that end an output, the tokenizer's first.

    Args:
        configured: the user's, which replace all others.
        directories: of the model and its tokenizer; those that do not exist are skipped.
        eos_token_id: the tokenizer's end of sequence.
        vocabulary: the number of ids that the model has, if it is known.

    Raises:
        ConfigurationError: a configured id is not in the vocabulary.
    """
    if configured:
        return _checked(configured, vocabulary)
    found: list[int] = [] if eos_token_id is None else [eos_token_id]
    for directory in directories:
        found += declared_end_ids(Path(directory))
    known = []
    for token in dict.fromkeys(found):
        if vocabulary is not None and token >= vocabulary:
            logger.warning(
                "end token %d is ignored: the model's vocabulary has %d ids", token, vocabulary
            )
        else:
            known.append(token)
    if not known:
        logger.warning(
            "the model has no known end token, so every output runs to max_tokens; set END_ID to the id of "
            "one (neither the tokenizer nor generation_config.json nor config.json specifies it)"
        )
    return tuple(known)


def _checked(configured: Sequence[int], vocabulary: int | None) -> tuple[int, ...]:
    for token in configured:
        if vocabulary is not None and token >= vocabulary:
            raise ConfigurationError(
                f"END_ID: {token} is not a token id of the model; its ids are 0 to {vocabulary - 1}"
            )
    return tuple(dict.fromkeys(configured))


def declared_end_ids(directory: Path) -> list[int]:
    """Return the end tokens that a model's files name; a file that cannot be read is skipped."""
    found: list[int] = []
    for name in _FILES:
        file = directory / name
        content = _read_object(file)
        sections = [content, *(content.get(nested) for nested in _NESTED)]
        for section in sections:
            if isinstance(section, dict) and section.get("eos_token_id") is not None:
                found += _ids(section["eos_token_id"], file)
    return found


def tokenizer_end_id(directory: Path) -> int | None:
    """Return a tokenizer's end of sequence by its files, None if it has none.

    Reading them takes a fraction of the time of loading the tokenizer.

    Raises:
        LookupError, TypeError, ValueError: the files do not say, or have another form; the tokenizer has to
            be loaded.
    """
    config = _read_object(directory / "tokenizer_config.json")
    token = config["eos_token"]
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    added = config.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        for number, entry in added.items():
            if isinstance(entry, Mapping) and entry.get("content") == token:
                return int(number)
    for number, content in _tokenizer_json_tokens(directory / "tokenizer.json"):
        if content == token:
            return number
    raise LookupError(f"{directory} does not define the id of the token {token!r}")


def _tokenizer_json_tokens(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the ids and texts of a tokenizer.json, added tokens first; raise TypeError without a model."""
    content = _read_object(file)
    for entry in content.get("added_tokens") or ():
        yield entry["id"], entry["content"]
    model = content.get("model")
    if not isinstance(model, Mapping):
        raise TypeError(f"the model in {file} is not an object")
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        for text, number in vocabulary.items():
            yield number, text
    else:
        # A Unigram model has pairs of a text and its score.
        for number, (text, _) in enumerate(vocabulary):
            yield number, text


def _ids(value: Any, file: Path) -> list[int]:
    """Return an ``eos_token_id``, which is a number or a list of them."""
    ids = []
    for token in value if isinstance(value, list) else [value]:
        if type(token) is int and token >= 0:
            ids.append(token)
        else:
            logger.warning("%s: eos_token_id %r is not a token id and is ignored", file, token)
    return ids


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read and is ignored: %s", file, error)
        return {}
    if not isinstance(content, dict):
        logger.warning("%s is ignored: it is not a JSON object", file)
        return {}
    return content
