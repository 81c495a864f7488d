"""One step of transformers' continuous batching, with this package's sampling in place of transformers'."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState

from cog_triton.adapters.layers import LoraLayers
from cog_triton.engines.structured_output import StructuredOutput
from cog_triton.engines.transformers_rows import (
    Allowed,
    Prompts,
    Row,
    Rows,
    next_tokens,
    note_prompts,
    note_top_log_probs,
)


class RowParameters:
    """Stands where transformers has its logits processors, and changes no logits.

    For each step it notes the requests whose next token is chosen, in the order of their rows.
    """

    tensors_required = 0
    do_processing = False

    def __init__(
        self, model: Any, structured_output: StructuredOutput | None, lora: LoraLayers | None
    ) -> None:
        self._vocabulary = vocabulary_of(model)
        self._device = model.device
        self._structured_output = structured_output
        self._lora = lora
        self.rows: Rows = []
        self.prompts: Prompts = []
        self.allowed = Allowed((), None)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept what ``submit`` passes."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing to fill: no row of the tensor is asked for."""

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Note the batch's requests, before each forward pass."""
        states = [future.state for future in requests_in_batch if future.has_new_token]
        self.rows = [
            (state.logit_processor_kwargs["row"], state.position_offset) for state in states
        ]
        for (row, _), state in zip(self.rows, states, strict=True):
            if not row.changes_logits:
                continue
            # After a reset, tokens generated before it count as prompt in transformers' state.
            earlier = state.initial_tokens[len(row.request.input_ids) :]
            row.extend(earlier + state.generated_tokens, self._device, self._vocabulary)
        self.allowed = Allowed(self.rows, self._structured_output)
        if self._lora is not None:
            self._lora.begin_step(
                [
                    (future.state.logit_processor_kwargs["row"].adapter, future.query_length)
                    for future in requests_in_batch
                ]
            )
        self.prompts = _asked(requests_in_batch)
        return arg_storage


def _asked(batch: list[FutureRequestState]) -> Prompts:
    """The parts of prompts in a step whose tokens' log probabilities are asked for."""
    prompts, at = [], 0
    for future in batch:
        state, length = future.state, future.query_length
        row: Row = state.logit_processor_kwargs["row"]
        # After the first token of the output, which a reset puts behind the prompt, they have been told.
        asked = row.request.prompt_log_probs and not state.generated_tokens
        if asked and len(state.initial_tokens) == len(row.request.input_ids):
            prompts.append((row, slice(at, at + length), state.position_offset - length))
        at += length
    return prompts


class Runner(ModelRunner):
    """Transformers' model runner with this package's sampling."""

    def __init__(
        self, *, parameters: RowParameters, lora: LoraLayers | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._parameters = parameters
        self._lock = nullcontext() if lora is None else lora.lock

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """One step, in which no layer changes."""
        prompts = self._parameters.prompts
        noting = (
            model.register_forward_hook(partial(note_prompts, prompts))
            if prompts
            else nullcontext()
        )
        with self._lock, noting:
            super().compute_batch(model, batch_data)

    def supports_logits_to_keep(self, model: Any) -> bool:
        """Return True unless a prompt's logits are asked for: then the model makes all."""
        return not self._parameters.prompts and super().supports_logits_to_keep(model)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """The end of a step: chooses the next tokens from the logits, shape [1, rows, vocabulary]."""
        rows = self._parameters.rows
        # Behind those come the rows of prompts that are not yet through, whose logits mean nothing.
        logits = scores[0, : len(rows)]
        ids = next_tokens(logits, rows, self._parameters.allowed)
        output_ids[0, : len(rows)].copy_(ids)
        if any(row.request.return_log_probs for row, _ in rows):
            totals = logits.logsumexp(-1)
            log_probs = logits.gather(1, ids.unsqueeze(-1)).squeeze(-1) - totals
            note_top_log_probs(logits, totals, rows)
            output_ids[1, : len(rows)].copy_(log_probs.view(dtype=torch.int32))


def vocabulary_of(model: Any) -> int:
    """Return the number of token ids of a model."""
    return int(model.config.get_text_config().vocab_size)
