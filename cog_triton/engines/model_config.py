"""What a model's config.json says of the model, without transformers: its context and its family."""

from collections.abc import Iterable, Mapping
from typing import Any

# The names that configurations have for the number of positions.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# RoPE that stretches the positions of training by a factor. Of the others (longrope, llama3, mrope) the
# configuration gives the stretched length.
_STRETCHING = frozenset(("linear", "dynamic", "yarn"))
_NAMES_SHOWN = 3


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the context of a model in tokens; None if its configuration does not say.

    RoPE that is scaled by a factor stretches the context of training. ``max_position_embeddings`` is the
    length before the stretching in some configurations and after it in others, so the greater of the two
    possible lengths is returned.
    """
    config = text_config(config)
    limit = next(filter(None, (_length(config.get(name)) for name in _LENGTHS)), None)
    if limit is None:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return limit
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor")
    if kind not in _STRETCHING or not isinstance(factor, int | float):
        return limit
    original = "original_max_position_embeddings"
    trained = _length(rope.get(original)) or _length(config.get(original)) or limit
    return max(limit, int(factor * trained))


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def context_length(config: Mapping[str, Any], requested: int | None, default: int) -> int:
    """Return the context to serve, or raise ValueError if it is more than the model has.

    Args:
        config: the content of config.json.
        requested: MAX_SEQUENCE_LENGTH, the template variable max_seq_len.
        default: where neither says anything.
    """
    limit = position_limit(config)
    if requested is None:
        return limit or default
    if limit is not None and requested > limit:
        raise ValueError(
            f"MAX_SEQUENCE_LENGTH={requested} (max_seq_len) is more than the {limit} tokens that the "
            "model's config.json allows; for longer texts, add the scaling of RoPE that the model's "
            "authors name (rope_parameters or rope_scaling with its factor) to config.json"
        )
    return requested


def first_names(names: Iterable[str]) -> str:
    """Return the first of the names of weights, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    more = len(ordered) - _NAMES_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"
