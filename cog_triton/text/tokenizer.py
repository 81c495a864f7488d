"""Loads a Hugging Face tokenizer without PyTorch, and bounds texts by it.

Importing ``transformers`` imports torch when it is installed: 3 s and 200 MB for a process that only
tokenizes. The processes that never run a model call ``without_torch()`` first.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from cog_triton.errors import ConfigurationError
from cog_triton.request.limits import MOST_CHARACTERS, TextLimits
from cog_triton.text import remote_code

_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "tekken.json", "*.tiktoken")
# 0.1 cannot be imported with protobuf 4 or later, and 0.2.3 needs protobuf 7.
_SENTENCEPIECE = "sentencepiece>=0.2,<0.2.2"

Tokenizer = Any  # transformers.PreTrainedTokenizerBase; the name would import transformers


def without_torch() -> None:
    """Make transformers, which looks once, take torch for not installed; others can still import it."""
    # It would announce that models are not available, which is the point.
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch" not in record.getMessage())
    modules: dict[str, Any] = sys.modules
    torch = {"torch": modules["torch"]} if "torch" in modules else {}
    modules["torch"] = None
    try:
        from transformers import AutoTokenizer  # noqa: F401
        from transformers.utils import is_torch_available

        is_torch_available()
    finally:
        del modules["torch"]
        modules.update(torch)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a local directory or a Hugging Face id.

    Raises:
        ConfigurationError: it cannot be loaded, or needs Python code of its own and that is not trusted.
    """
    try:
        with remote_code.one_process_at_a_time() if trust_remote_code else nullcontext():
            return _load(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        if trust_remote_code:  # that code may raise anything
            text = (
                f"no tokenizer could be loaded from {name!r}, whose own code may be run "
                f"(TRUST_REMOTE_CODE): {type(error).__name__}: {error}"
            )
        elif not isinstance(error, OSError | ValueError | KeyError):
            raise
        elif remote_code.was_refused(error):
            text = remote_code.refusal("tokenizer", name)
        else:
            text = _why_not(name, error)
        raise ConfigurationError(text) from error


def _load(name: str, *, trust_remote_code: bool) -> Tokenizer:
    import transformers

    options = {"trust_remote_code": trust_remote_code, "clean_up_tokenization_spaces": False}
    if int(transformers.__version__.partition(".")[0]) < 5:
        # Version 4, which TensorRT-LLM 1.2 brings, does not know the names that version 5 saves.
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


def _why_not(name: str, error: Exception) -> str:
    directory = Path(name)
    if not directory.is_dir() and name.startswith(("/", ".")):
        return f"no tokenizer could be loaded from {name!r}, which is no directory"
    if directory.is_dir() and not any(any(directory.glob(pattern)) for pattern in _FILES):
        return f"{name} holds no tokenizer: there is no tokenizer.json, tokenizer.model or the like"
    if (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").exists():
        try:
            from sentencepiece import sentencepiece_model_pb2  # noqa: F401
        except Exception as problem:  # protobuf has several for versions that do not go together
            return (
                f"{name} has a tokenizer.model and no tokenizer.json, which takes sentencepiece and "
                f"protobuf to read: {' '.join(str(problem).split())}. "
                f"Install them with pip install '{_SENTENCEPIECE}' 'protobuf>=4.25'"
            )
    hint = "" if directory.is_dir() else " (it is not a local directory, so it was taken as an id)"
    return f"no tokenizer could be loaded from {name!r}{hint}: {' '.join(str(error).split())}"


@lru_cache(maxsize=8)
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()))


def max_characters(tokenizer: Tokenizer, tokens: int) -> int:
    """Return the most characters that a text of this many tokens can have, by the longest token.

    (Byte-level vocabularies count bytes, which are at least as many.) A tokenizer may take more characters
    for one token, all white space say; a text that relies on that is taken for too long.
    """
    return tokens * _longest_token(tokenizer)


def text_limits(tokenizer: Tokenizer, context_length: int | None) -> TextLimits:
    """Return the limits of a prompt that is worth tokenizing; None if only the engine knows its length."""
    if context_length is None:
        return TextLimits()
    characters = max_characters(tokenizer, context_length)
    if characters > MOST_CHARACTERS:
        return TextLimits(MOST_CHARACTERS, "")
    return TextLimits(characters, f" that the model's {context_length} tokens can stand for")
