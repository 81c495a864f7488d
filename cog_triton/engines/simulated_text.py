"""The token ids that the simulated engine generates: those of a text, for any tokenizer."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from cog_triton.text.tokenizer import load_tokenizer

TEXT = (
    "A simulated engine needs no model and no GPU. It reads these sentences again and again, at the "
    "pace it was told, so that everything around an engine can be measured: the ensemble, the "
    "network, the predictor. Il sait même écrire en français, auf Deutsch mit ä, ö und ü, 和中文,"
    "日本語も、and with emoji 🚀🙂. "
)
# How many tokens of the vocabulary are repeated if the tokenizer does not know the text.
VOCABULARY_TOKENS = 256


def text_ids(parameters: Mapping[str, str]) -> list[int]:
    """Return the ids of ``simulated_text``, or else of ``TEXT``; raise ValueError if there are none."""
    name = parameters["tokenizer_dir"]
    text = parameters.get("simulated_text", TEXT)
    tokenizer = _load(name, trust_remote_code=parameters.get("trust_remote_code") == "true")
    ids = _known_ids(tokenizer, text)
    if not ids and "simulated_text" not in parameters:
        ids = _ids_with_text(tokenizer)
    if not ids:
        # In ASCII, because Triton's log may take nothing else.
        raise ValueError(
            f"simulated_text {text!a} has no tokens that make text in {name}; "
            "set SIMULATED_TEXT to words that its tokenizer knows"
        )
    return ids


def _load(name: str, *, trust_remote_code: bool) -> Any:
    """Load a tokenizer: by the library tokenizers if it can, which takes much less time."""
    file = Path(name) / "tokenizer.json"
    if file.is_file():
        return tokenizers.Tokenizer.from_file(str(file))
    return load_tokenizer(name, trust_remote_code=trust_remote_code)


def _known_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text but for the unknown token; none if they make no text."""
    try:
        ids = _encoded(tokenizer, text)
    except Exception:
        # A tokenizer without an unknown token refuses a text with unknown words.
        ids = []
        for word in text.split():
            with suppress(Exception):
                ids += _encoded(tokenizer, word)
    unknown = _unknown_id(tokenizer)
    known = [token for token in ids if token != unknown]
    return known if tokenizer.decode(known, skip_special_tokens=True).strip() else []


def _encoded(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's unknown token; None without one."""
    unknown: int | None
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        unknown = tokenizer.unk_token_id
        return unknown
    model: Any = tokenizer.model
    token = getattr(model, "unk_token", None)
    if token is None:
        return getattr(model, "unk_id", None)
    unknown = tokenizer.token_to_id(token)
    return unknown


def _ids_with_text(tokenizer: Any) -> list[int]:
    """Return the first tokens of a vocabulary that make text, for a tokenizer that does not know TEXT."""
    unknown = _unknown_id(tokenizer)
    found: list[int] = []
    for token in sorted(tokenizer.get_vocab().values()):
        makes_text = tokenizer.decode([token], skip_special_tokens=True).strip()
        if makes_text and token != unknown:
            found.append(token)
        if len(found) == VOCABULARY_TOKENS:
            break
    return found
