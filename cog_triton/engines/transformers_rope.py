"""RoPE whose frequencies depend on a sequence's length (LongRoPE, dynamic NTK), for each by itself.

Transformers chooses the frequencies once a step, by its greatest position, which in continuous batching is
that of the longest sequence beside. Here each token gets those of its own sequence's length.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# For each sequence of a step: its tokens in the step, and the length that sets the frequencies.
SequenceLengths = list[tuple[int, int]]
_BY_LENGTH = ("longrope", "dynamic")


@dataclass(frozen=True)
class _Kind:
    """One set of frequencies of a module: of all its layers, or of those of one type."""

    rope_type: str
    # The number of tokens up to which the frequencies are those of training.
    trained: int
    layer_type: str | None

    @property
    def buffer(self) -> str:
        return "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"


class SequenceRope:
    """Has the rotary embeddings of a model look at the length of each sequence in a step."""

    def __init__(self, model: Any) -> None:
        self._lengths: SequenceLengths = []
        self._trained: set[int] = set()
        self._dynamic = False
        for module in model.modules():
            self._patch(module)

    @property
    def active(self) -> bool:
        return bool(self._trained)

    def begin_step(self, lengths: SequenceLengths) -> None:
        """Note the sequences of a step, in the order of their tokens."""
        self._lengths = lengths

    def variant(self, length: int) -> int | None:
        """Return a number; prompts with the same one may share cached keys, and with None may not."""
        beyond = [trained for trained in sorted(self._trained) if length > trained]
        if beyond and self._dynamic:
            return None
        return len(beyond)

    def outgrown(self, before: int, after: int) -> bool:
        """Return whether a sequence is computed anew, as its cached keys have other frequencies.

        ``generate()`` does so for LongRoPE, and keeps the old keys with dynamic NTK.
        """
        return not self._dynamic and any(before <= trained < after for trained in self._trained)

    def _patch(self, module: nn.Module) -> None:
        """Replace the forward pass of a rotary embedding whose frequencies depend on a length."""
        rope_types = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        if config is None or rope_types is None:
            return
        by_layer = rope_types if isinstance(rope_types, dict) else {None: rope_types}
        kinds = {}
        for layer_type, rope_type in by_layer.items():
            if rope_type in _BY_LENGTH:
                kinds[layer_type] = _Kind(rope_type, _trained(config, layer_type), layer_type)
        if not kinds:
            return
        self._trained |= {kind.trained for kind in kinds.values()}
        self._dynamic |= any(kind.rope_type == "dynamic" for kind in kinds.values())
        forward = module.forward
        # The function inside the decorator that chooses frequencies by the greatest position.
        plain = inspect.unwrap(type(module).forward)

        def forward_by_sequence(
            x: Tensor, position_ids: Tensor, layer_type: str | None = None
        ) -> Any:
            kind = kinds.get(layer_type)
            options = {} if layer_type is None else {"layer_type": layer_type}
            if kind is None:
                return forward(x, position_ids, **options)
            return self._forward(module, plain, kind, x, position_ids, options)

        module.forward = forward_by_sequence

    @torch.no_grad()
    def _forward(
        self,
        module: Any,
        plain: Callable[..., Any],
        kind: _Kind,
        x: Tensor,
        position_ids: Tensor,
        options: dict[str, str],
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each token's with the frequencies of its sequence's length."""
        groups = self._groups(kind, position_ids.shape[-1])
        cosines = []
        sines = []
        for start, end, length in groups:
            values, scaling = ROPE_INIT_FUNCTIONS[kind.rope_type](
                module.config, x.device, seq_len=length, layer_type=kind.layer_type
            )
            setattr(module, kind.buffer, values)
            if kind.layer_type is None:
                module.attention_scaling = scaling
            cosine, sine = plain(module, x, position_ids[..., start:end], **options)
            cosines.append(cosine)
            sines.append(sine)
        return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)

    def _groups(self, kind: _Kind, tokens: int) -> list[tuple[int, int, int]]:
        """Return the parts of a step with the same frequencies: start, end, the length that sets them."""
        groups: list[tuple[int, int, int]] = []
        start = 0
        for count, length in self._lengths:
            # Up to the length of training all are the same; of LongRoPE, all beyond it, too.
            setting = max(length, kind.trained)
            if kind.rope_type == "longrope":
                setting = min(setting, kind.trained + 1)
            if groups and groups[-1][2] == setting:
                groups[-1] = (groups[-1][0], start + count, setting)
            else:
                groups.append((start, start + count, setting))
            start += count
        # The padding of a step, or a forward pass outside of a step.
        if start < tokens:
            groups.append((start, tokens, kind.trained))
        return groups


def _trained(config: Any, layer_type: str | None) -> int:
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    if parameters["rope_type"] == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings)
