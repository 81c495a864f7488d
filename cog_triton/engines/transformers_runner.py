"""One step of transformers' continuous batching, with this package's sampling in place of transformers'."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState

from cog_triton.engines.base import GenerationRequest
from cog_triton.engines.token_sampling import History, choose, penalize


class RowParameters:
    """Stands where transformers has its logits processors, and changes no logits.

    For each step it notes the requests whose next token is chosen, in the order of their rows, and
    keeps the history of those that need one.
    """

    tensors_required = 0
    do_processing = False

    def __init__(self, model: Any) -> None:
        self._vocabulary = vocabulary_of(model)
        self._device = model.device
        self._histories: dict[str, History] = {}
        self.rows: list[tuple[GenerationRequest, int]] = []  # and the position of the next token
        self.histories: list[History | None] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Called for each new request; nothing is wrong with what ``submit`` passes."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing to fill: no row of the tensor is asked for."""

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Called before each forward pass with the batch's requests."""
        states = [future.state for future in requests_in_batch if future.has_new_token]
        requests = [state.logit_processor_kwargs["request"] for state in states]
        self.rows = [
            (request, state.position_offset)
            for request, state in zip(requests, states, strict=True)
        ]
        histories = {
            request.key: self._history(request, state)
            for request, state in zip(requests, states, strict=True)
            if not request.sampling.plain
        }
        self.histories = [histories.get(request.key) for request in requests]
        # A request without a new token is still being prefilled and has no history yet.
        self._histories = histories
        return arg_storage

    def _history(self, request: GenerationRequest, state: Any) -> History:
        history = self._histories.get(request.key)
        if history is None:
            history = History(request.input_ids, self._vocabulary, self._device, request.continued)
        # After a reset, tokens generated before it count as prompt in transformers' state.
        earlier = state.initial_tokens[len(request.input_ids) :]
        history.extend(earlier + state.generated_tokens)
        return history


class Runner(ModelRunner):
    """Transformers' model runner with this package's sampling."""

    def __init__(self, *, parameters: RowParameters, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._parameters = parameters

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """The end of a step: chooses the next tokens from the logits, shape [1, rows, vocabulary]."""
        rows = self._parameters.rows
        # Behind those come the rows of prompts that are not yet through, whose logits mean nothing.
        logits = scores[0, : len(rows)]
        ids = _next_tokens(logits, rows, self._parameters.histories)
        output_ids[0, : len(rows)].copy_(ids)
        if any(request.return_log_probs for request, _ in rows):
            log_probs = logits.gather(1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            output_ids[1, : len(rows)].copy_(log_probs.view(dtype=torch.int32))


def _next_tokens(
    logits: torch.Tensor, rows: list[tuple[GenerationRequest, int]], histories: list[History | None]
) -> torch.Tensor:
    """The next token of each row, shape [rows]."""
    if any(histories):
        logits = logits.clone()
        for i, ((request, _), history) in enumerate(zip(rows, histories, strict=True)):
            if history is not None:
                logits[i] = penalize(logits[i], request.sampling, history, request.end_id)
    return choose(
        logits, [request.sampling for request, _ in rows], [position for _, position in rows]
    )


def vocabulary_of(model: Any) -> int:
    """How many token ids a model has."""
    return int(model.config.get_text_config().vocab_size)
