"""Loads a Hugging Face tokenizer without loading PyTorch.

Importing ``transformers`` imports torch when it is installed: 3 s and 200 MB for a process that only
tokenizes. The processes that never run a model call ``without_torch()`` first.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from cog_triton import remote_code
from cog_triton.errors import ConfigurationError
from cog_triton.request.limits import MOST_CHARACTERS, TextLimits

_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "tekken.json", "*.tiktoken")

Tokenizer = Any  # transformers.PreTrainedTokenizerBase; the name would import transformers


@contextmanager
def _torch_hidden() -> Iterator[None]:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] == "torch" else find_spec(name, package)

    with mock.patch.object(importlib.util, "find_spec", find):
        yield


def without_torch() -> None:
    """Makes transformers believe, for the life of this process, that torch is not installed.

    It asks once and remembers the answer, so torch stays usable by everything else.
    """
    # It would announce that models are not available, which is the point.
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch" not in record.getMessage())
    with _torch_hidden():
        from transformers.utils import is_torch_available

        is_torch_available()
        from transformers import AutoTokenizer  # noqa: F401


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a local directory or a Hugging Face id.

    Args:
        trust_remote_code: whether Python code that the tokenizer brings may be run.

    Raises:
        ConfigurationError: there is no tokenizer there, it cannot be loaded, or it needs its own code
            and that is not trusted.
    """
    if trust_remote_code:
        return _load_with_its_code(name)
    try:
        return _load(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if remote_code.was_refused(error):
            raise ConfigurationError(remote_code.refusal("tokenizer", name)) from error
        raise ConfigurationError(_why_not(name, error)) from error


def _why_not(name: str, error: Exception) -> str:
    """Why there is no tokenizer to be had by a name."""
    directory = Path(name)
    if directory.is_dir() and not any(any(directory.glob(pattern)) for pattern in _FILES):
        return f"{name} holds no tokenizer: there is no tokenizer.json, tokenizer.model or the like"
    if not directory.is_dir() and name.startswith(("/", ".")):
        return f"no tokenizer could be loaded from {name!r}, which is no directory"
    hint = "" if directory.is_dir() else " (it is no local directory, so it was taken as an id)"
    return f"no tokenizer could be loaded from {name!r}{hint}: {' '.join(str(error).split())}"


@lru_cache(maxsize=8)
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()))


def max_characters(tokenizer: Tokenizer, tokens: int) -> int:
    """The most characters that a text of this many tokens can have.

    No token stands for more than the vocabulary's longest has. (Byte-level vocabularies are written in one
    character a byte, so that theirs are counted in bytes, which are at least as many.) A tokenizer that
    takes many characters for one, all white space say, may get by with fewer tokens; a text that leans on
    that is taken for too long.
    """
    return tokens * _longest_token(tokenizer)


def text_limits(tokenizer: Tokenizer, context_length: int | None) -> TextLimits:
    """How long a prompt may be before it is worth tokenizing.

    Args:
        context_length: the most tokens that prompt and output may have together; None if only the engine
            knows.
    """
    if context_length is None:
        return TextLimits()
    characters = max_characters(tokenizer, context_length)
    if characters > MOST_CHARACTERS:
        return TextLimits(MOST_CHARACTERS, "")
    return TextLimits(characters, f" that the model's {context_length} tokens can stand for")


def _load_with_its_code(name: str) -> Tokenizer:
    try:
        with remote_code.one_process_at_a_time():
            return _load(name, trust_remote_code=True)
    except Exception as error:  # that code may raise anything
        raise ConfigurationError(
            f"no tokenizer could be loaded from {name!r}, whose own code may be run "
            f"(TRUST_REMOTE_CODE): {type(error).__name__}: {error}"
        ) from error


def _load(name: str, *, trust_remote_code: bool) -> Tokenizer:
    import transformers

    options = {"trust_remote_code": trust_remote_code, "clean_up_tokenization_spaces": False}
    if int(transformers.__version__.partition(".")[0]) < 5:
        # Version 4, which TensorRT-LLM 1.2 brings, does not know what version 5 saves.
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        config = get_tokenizer_config(name)
        if config.get("tokenizer_class") == "TokenizersBackend":
            return transformers.PreTrainedTokenizerFast.from_pretrained(
                name,
                extra_special_tokens={},
                additional_special_tokens=config.get("extra_special_tokens") or [],
                **options,
            )
    return transformers.AutoTokenizer.from_pretrained(name, **options)
