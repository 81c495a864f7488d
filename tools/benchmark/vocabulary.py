"""The tokenizer of the model that is measured, loaded the quick way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the token that ends an output.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer``.
        end_id: None if the model has none.
    """

    tokenizer: Any
    end_id: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids as preprocessing makes them, with those that begin a text."""
        return list(self.tokenizer.encode(text).ids)

    def count(self, texts: list[str]) -> list[int]:
        """Count the tokens of each text, special tokens aside."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [len(encoding.ids) for encoding in encodings]


def load_vocabulary(name: str) -> Vocabulary:
    """The tokenizer of a directory or a Hugging Face id.

    A directory's tokenizer.json is read by itself: transformers takes seconds to import.

    Raises:
        ConfigurationError: there is none.
    """
    directory = Path(name)
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return Vocabulary(tokenizer, _end_id(directory, tokenizer))
    from cog_triton.errors import ConfigurationError
    from cog_triton.text.tokenizer import load_tokenizer, without_torch

    without_torch()
    loaded = load_tokenizer(name)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigurationError(f"{name} has no fast tokenizer, which the benchmark needs")
    return Vocabulary(backend, loaded.eos_token_id)


def _end_id(directory: Path, tokenizer: Any) -> int | None:
    file = directory / "tokenizer_config.json"
    token = (
        json.loads(file.read_text(encoding="utf-8")).get("eos_token") if file.is_file() else None
    )
    if isinstance(token, dict):  # as transformers 4 saved it
        token = token["content"]
    token_id: int | None = tokenizer.token_to_id(token) if token else None
    return token_id
