"""Loads a Hugging Face tokenizer without PyTorch, and bounds texts by it.

Importing ``transformers`` imports torch when it is installed: 3 s and 200 MB for a process that only
tokenizes. The processes that never run a model call ``without_torch()`` first.
"""

import codecs
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from cog_triton.errors import ConfigurationError
from cog_triton.processes import locked, without_collections
from cog_triton.request.limits import MOST_CHARACTERS, TextLimits
from cog_triton.text.transformers_import import list_models_once

_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "tekken.json", "*.tiktoken")
# 0.1 cannot be imported with protobuf 4 or later, and 0.2.3 needs protobuf 7.
_SENTENCEPIECE = "sentencepiece>=0.2,<0.2.2"

# A transformers.PreTrainedTokenizerBase, whose name would import transformers.
Tokenizer = Any


def without_torch() -> None:
    """Make transformers, which looks once, take torch for not installed; others can still import it."""
    # It would announce that models are not available, which is the point.
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch" not in record.getMessage())
    modules: dict[str, Any] = sys.modules
    torch = {"torch": modules["torch"]} if "torch" in modules else {}
    modules["torch"] = None
    try:
        with without_collections():
            list_models_once()
            from transformers import AutoTokenizer  # noqa: F401
            from transformers.utils import is_torch_available

            is_torch_available()
    finally:
        del modules["torch"]
        modules.update(torch)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a local directory or a Hugging Face id, or raise ConfigurationError."""
    import transformers

    kind: Any = transformers.AutoTokenizer
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        with remote_code_lock() if trust_remote_code else nullcontext():
            if int(transformers.__version__.partition(".")[0]) < 5:
                # Version 4, which TensorRT-LLM 1.2 brings, does not know the names that version 5 saves.
                from transformers.models.auto.tokenization_auto import get_tokenizer_config

                config = get_tokenizer_config(name)
                if config.get("tokenizer_class") == "TokenizersBackend":
                    kind = transformers.PreTrainedTokenizerFast
                    options["extra_special_tokens"] = {}
                    options["additional_special_tokens"] = config.get("extra_special_tokens") or []
            tokenizer = kind.from_pretrained(name, clean_up_tokenization_spaces=False, **options)
    except Exception as error:
        # That code may raise anything.
        if trust_remote_code:
            text = (
                f"the tokenizer of {name!r}, whose code was run because of TRUST_REMOTE_CODE, could not be "
                f"loaded: {type(error).__name__}: {error}"
            )
        elif isinstance(error, OSError | ValueError | KeyError | TypeError):
            text = remote_code_refusal(error, "tokenizer", name) or _problem(name, error)
        else:
            raise
        raise ConfigurationError(text) from error
    _complete_chat_templates(tokenizer, Path(name))
    return tokenizer


def _complete_chat_templates(tokenizer: Tokenizer, directory: Path) -> None:
    """Add the chat templates in files beside a tokenizer that transformers did not read.

    Processors save chat_template.json. A file may begin with a byte order mark, which is not part of it.
    """
    found = getattr(tokenizer, "chat_template", None)
    templates = dict(found) if isinstance(found, dict) else {"default": found} if found else {}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates.setdefault(file.stem, _read_text(file))
    jinja = directory / "chat_template.jinja"
    if "default" not in templates and jinja.is_file():
        templates["default"] = _read_text(jinja)
    if "default" not in templates:
        templates = _templates_of_json(directory / "chat_template.json") | templates
    templates = {name: text.removeprefix("\ufeff") for name, text in templates.items()}
    if templates:
        only_default = templates.keys() == {"default"}
        tokenizer.chat_template = templates["default"] if only_default else templates


def _templates_of_json(file: Path) -> dict[str, str]:
    """Return the templates of a processor's file by their names: one text, or a list of named ones."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
        template = content["chat_template"] if isinstance(content, dict) else content
        if isinstance(template, list):
            return {str(each["name"]): str(each["template"]) for each in template}
    except (ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{file} is not a chat template: {reason}") from None
    if not isinstance(template, str):
        raise ConfigurationError(f"{file} is not a chat template: chat_template must be a string")
    return {"default": template}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None


def _problem(name: str, error: Exception) -> str:
    directory = Path(name)
    if not directory.is_dir() and name.startswith(("/", ".")):
        return f"no tokenizer could be loaded from {name!r}: the directory does not exist"
    if directory.is_dir() and not any(any(directory.glob(pattern)) for pattern in _FILES):
        return f"{name} contains no tokenizer (tokenizer.json, tokenizer.model or similar); set TOKENIZER"
    if (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").exists():
        try:
            from sentencepiece import sentencepiece_model_pb2  # noqa: F401
        except Exception as problem:
            # Protobuf has several errors for versions that do not go together.
            return (
                f"{name} has a tokenizer.model but no tokenizer.json; to read it, install sentencepiece "
                f"and protobuf ({' '.join(str(problem).split())}): "
                f"pip install '{_SENTENCEPIECE}' 'protobuf>=4.25'"
            )
    marked = [file for file in directory.glob("*.json") if _has_byte_order_mark(file)]
    if marked:
        return (
            f"{marked[0]} begins with a byte order mark, which transformers does not support; "
            "save it as UTF-8 without one"
        )
    hint = "" if directory.is_dir() else " (not a local directory, so taken as a Hugging Face id)"
    return f"no tokenizer could be loaded from {name!r}{hint}: {' '.join(str(error).split())}"


def _has_byte_order_mark(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return False


def remote_code_refusal(error: BaseException, kind: str, name: str) -> str:
    """Return the text for transformers' error that a model's own code is not trusted; "" for others."""
    if "trust_remote_code" not in str(error):
        return ""
    return (
        f"the {kind} {name!r} requires its own Python code to run. Review its .py files, then set "
        "TRUST_REMOTE_CODE=1 (in a repository filled by fill_template.py, trust_remote_code:true) to run "
        "them with this user's permissions"
    )


@contextmanager
def remote_code_lock() -> Iterator[None]:
    """Lock transformers' copies of code: processes that start together would read half of one."""
    from transformers.utils import HF_MODULES_CACHE

    directory = Path(HF_MODULES_CACHE)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, waiting=lambda: None):
        yield


@lru_cache(maxsize=8)
def _longest_token(tokenizer: Tokenizer) -> int:
    # One more for the space before a token, which some vocabularies leave out.
    return max(map(len, tokenizer.get_vocab())) + 1


def text_limits(tokenizer: Tokenizer, context_length: int | None) -> TextLimits:
    """Return the limits of a text: a longer one cannot fit the context, so it is not worth tokenizing.

    The longest token bounds the characters of a text. (Byte-level vocabularies count bytes, which are at
    least as many.) A tokenizer may take more characters for one token, all white space say; a text that
    relies on that is taken for too long.

    Args:
        context_length: in tokens; None if only the engine knows it.
    """
    if context_length is None:
        return TextLimits()
    characters = context_length * _longest_token(tokenizer)
    if characters > MOST_CHARACTERS:
        return TextLimits(MOST_CHARACTERS, "")
    return TextLimits(
        characters, f", as the model's maximum context length is {context_length} tokens"
    )


def vocabulary_size(directory: str) -> int | None:
    """Return the vocab_size in the config.json of a checkpoint or a TensorRT-LLM engine; None without."""
    try:
        config = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    for part in (config.get("pretrained_config"), config.get("text_config"), config):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return None
