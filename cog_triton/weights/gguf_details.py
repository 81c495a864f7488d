"""What a GGUF file says of its model and transformers does not read.

Without it, the model would answer with other rotary frequencies than it was trained with, or run on after
the end of a turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# What ends a turn of a chat, where the chat template has it. Many files name the end of a document alone.
_ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# In gpt-oss's format an <|end|> ends a message, and another follows in the same answer.
_END_OF_ANSWER = "<|return|>"
_TOKENS = "tokenizer.ggml.tokens"
_SCALINGS = ("linear", "yarn")
# Of Llama 3.1 to 3.3, whose factors llama.cpp computes when it writes a file. Those of other families are
# not made this way.
_LLAMA3_ARCHITECTURES = ("llama", "deci")
_LLAMA3_CONTEXT = 8192
_LLAMA3_LOW_FREQUENCIES = 1.0
_LLAMA3_HIGH_FREQUENCIES = 4.0

Numbers = npt.NDArray[np.float64]


class UnreadableDetailError(Exception):
    """A file says something that has no counterpart in a Hugging Face configuration."""


@dataclass(frozen=True)
class Details:
    """What a file adds to the model that transformers makes of it."""

    # The rope_parameters; None leaves them as they are.
    rope: dict[str, Any] | None
    end_tokens: tuple[int, ...]
    has_biases: bool


def read_details(file: Path) -> Details:
    """Read the details of a whole file, or raise UnreadableDetailError."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name != _TOKENS}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    template = str(fields.get("tokenizer.chat_template") or "")
    tokens = reader.fields[_TOKENS].contents() if _TOKENS in reader.fields else []
    factors = {
        name: np.asarray(tensors[f"rope_{name}.weight"], dtype=np.float64)
        for name in ("freqs", "factors_short", "factors_long")
        if f"rope_{name}.weight" in tensors
    }
    return Details(
        rope=_rope(fields, factors),
        end_tokens=_end_tokens(fields, tokens, template),
        has_biases=any(name.endswith(".bias") for name in tensors),
    )


def _rope(fields: dict[str, Any], factors: dict[str, Numbers]) -> dict[str, Any] | None:
    """Return the rope_parameters that a file scales its rotary embedding by; None without a scaling."""
    architecture = fields["general.architecture"]

    def value(name: str) -> Any:
        return fields.get(f"{architecture}.{name}")

    base = {"rope_theta": float(value("rope.freq_base") or 10000.0)}
    original = value("rope.scaling.original_context_length")
    if "factors_short" in factors and "factors_long" in factors:
        parameters = {
            **base,
            "rope_type": "longrope",
            "short_factor": factors["factors_short"].tolist(),
            "long_factor": factors["factors_long"].tolist(),
            "original_max_position_embeddings": original or value("context_length"),
        }
        attention = value("rope.scaling.attn_factor")
        if attention:
            parameters["attention_factor"] = float(attention)
        return parameters
    if "freqs" in factors and architecture in _LLAMA3_ARCHITECTURES:
        heads = value("attention.head_count")
        size = value("rope.dimension_count") or value("embedding_length") // heads
        return _llama3_rope(base["rope_theta"], size, original, factors["freqs"])
    kind = value("rope.scaling.type")
    factor = value("rope.scaling.factor") or value("rope.scale_linear")
    if kind is None and value("rope.scale_linear"):
        kind = "linear"
    if kind in (None, "none") or factor in (None, 0.0, 1.0):
        return None
    if kind not in _SCALINGS:
        raise UnreadableDetailError(f"its rotary embedding has the scaling {kind!r}")
    scaled = {**base, "rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = original or value("context_length")
    return scaled


def _llama3_rope(
    theta: float, size: int, original: int | None, factors: Numbers
) -> dict[str, Any] | None:
    """Return the parameters that the factors of a file were computed from."""
    largest = float(factors.max())
    if np.all(factors == 1):
        return None
    context = original or _LLAMA3_CONTEXT
    expected = _llama3_factors(theta, size, context, largest)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-3):
        raise UnreadableDetailError(
            "its rope_freqs.weight scales the rotary embedding differently from Llama 3"
        )
    return {
        "rope_theta": theta,
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": _LLAMA3_LOW_FREQUENCIES,
        "high_freq_factor": _LLAMA3_HIGH_FREQUENCIES,
        "original_max_position_embeddings": context,
    }


def _llama3_factors(theta: float, size: int, context: int, factor: float) -> Numbers:
    """Return what Llama 3 divides each frequency by: 1 for the highest, ``factor`` for the lowest."""
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    # The number of turns in the original context.
    turns = context * frequencies / (2 * np.pi)
    width = _LLAMA3_HIGH_FREQUENCIES - _LLAMA3_LOW_FREQUENCIES
    smooth = np.clip((turns - _LLAMA3_LOW_FREQUENCIES) / width, 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _end_tokens(fields: dict[str, Any], tokens: Sequence[str], template: str) -> tuple[int, ...]:
    """Return all tokens that end an answer, the file's end of sequence first."""
    named = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = [token for token in named if token is not None]
    if _END_OF_ANSWER not in tokens:
        texts = {text for text in _ENDS_OF_TURNS if text in template}
        ends += [token for token, text in enumerate(tokens) if text in texts]
    return tuple(dict.fromkeys(ends))
