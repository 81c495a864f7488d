"""One step of transformers' continuous batching: the requests in it and the choice of their next tokens."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from cog_triton.adapters.layers import LoadedAdapter, LoraLayers
from cog_triton.engines.base import LEAST_LOG_PROB, GenerationRequest, Sink, TokenLogProb
from cog_triton.engines.structured_output import Guided, Masks, StructuredOutput
from cog_triton.engines.token_sampling import History, choose

PART = 256  # rows of logits whose probabilities are worked out at once


@dataclass(eq=False)
class Row:
    """A running request. From its start on, it belongs to the generation thread.

    Attributes:
        delivered: number of the tokens that the sink has had.
        log_probs: of tokens that have not been delivered yet.
        prompt_log_probs: as far as the prompt has been through the model; see ``Step``.
    """

    request: GenerationRequest
    sink: Sink
    guided: Guided | None = None
    adapter: LoadedAdapter | None = None
    delivered: int = 0
    output: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    history: History | None = None

    def __deepcopy__(self, _: Any) -> Row:
        # Transformers copies a request that it sets back, which continues with this row.
        return self

    @property
    def error(self) -> str | None:
        """The reason why the request cannot continue."""
        if self.adapter is not None and self.adapter.problem is not None:
            return f"lora_task_id {self.request.lora_task_id}: {self.adapter.problem}"
        return self.guided.error if self.guided else None

    @cached_property
    def changes_logits(self) -> bool:
        request = self.request
        given = request.logit_bias or request.allowed_ids or self.guided is not None
        return bool(given) or not request.sampling.plain

    def changed(self, logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Return the logits that are sampled from, shape [vocabulary].

        Args:
            allowed: the tokens that the guide allows, shape [vocabulary].
        """
        request, device, own = self.request, logits.device, logits
        if request.logit_bias:
            ids, values = self._bias
            own = own.index_add(0, ids.to(device), values.to(device))
        if request.allowed_ids:
            only = torch.zeros_like(logits, dtype=torch.bool)
            only[self._allowed_ids.to(device)] = True
            if allowed is None:
                allowed = only
            elif (only & allowed).any():  # else the guide takes precedence
                allowed = only & allowed
        if self.history is not None:
            own = self.history.penalize(own)
        if allowed is None:
            return own
        own = own.masked_fill(~allowed, -torch.inf)
        if self.history is not None and not own.isfinite().any():
            # Bad words or the minimum length exclude all that is allowed, which takes precedence.
            return logits.masked_fill(~allowed, -torch.inf)
        return own

    @cached_property
    def _allowed_ids(self) -> torch.Tensor:
        return torch.tensor(list(self.request.allowed_ids))

    @cached_property
    def _bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.request.logit_bias
        return torch.tensor(list(bias)), torch.tensor(list(bias.values()))


class StepProcessor(ContinuousBatchingLogitsProcessorList):
    """Stands in for transformers' logits processors, which know no seeds, penalties or bad words.

    It is called at three points of a step: before it, around the model's forward pass, and with the logits,
    whose place the chosen tokens take.
    """

    tensors_required = 0
    do_processing = True

    def __init__(
        self, model: Any, structured_output: StructuredOutput | None, lora: LoraLayers | None
    ) -> None:
        self._vocabulary = vocabulary_of(model)
        self._device = model.device
        self._structured_output = structured_output
        self._lora = lora
        self._layers = threading.Lock() if lora is None else lora.lock
        self._rows: list[tuple[Row, int]] = []  # with a next token, and its position
        self._masks: Future[Masks] | None = None
        self._prompts: list[tuple[Row, slice, int]] = []  # place in the step, and in the prompt
        model.forward = wraps(model.forward)(partial(self._forward, model.forward))

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept what ``add_request`` passes."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill nothing: no row of the tensor is required."""

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Note the requests of the step, in the order of their rows."""
        self._rows, self._prompts, parts, at = [], [], [], 0
        for future in requests_in_batch:
            state, length = future.state, future.query_length
            row: Row = state.logit_processor_kwargs["row"]
            prompt = row.request.input_ids
            # A reset puts the output behind the prompt, whose log probabilities have been delivered then.
            first_pass = not state.generated_tokens and len(state.initial_tokens) == len(prompt)
            if row.request.prompt_log_probs and first_pass:
                start = state.position_offset - length
                self._prompts.append((row, slice(at, at + length), start))
            if future.has_new_token:
                self._rows.append((row, state.position_offset))
                if row.changes_logits:
                    row.output = state.initial_tokens[len(prompt) :] + state.generated_tokens
                if not row.request.sampling.plain:
                    row.history = row.history or History(
                        row.request, self._vocabulary, self._device
                    )
                    row.history.extend(row.output)
            parts.append((row.adapter, length))
            at += length
        guided = [(row.guided, row.output) for row, _ in self._rows if row.guided is not None]
        if guided and self._structured_output is not None:  # computed while the model runs
            self._masks = self._structured_output.masks(guided)
        if self._lora is not None:
            self._lora.begin_step(parts)
        return arg_storage

    def __call__(self, _: torch.Tensor, scores: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        """Choose the next tokens; in the scores that are returned, transformers finds no others.

        Args:
            scores: the logits, [rows, vocabulary]. Behind those of the step's rows come those of prompts
                that are not yet through, which mean nothing.
        """
        logits = scores[: len(self._rows)]
        samplings = [row.request.sampling for row, _ in self._rows]
        ids = choose(self._changed(logits), samplings, [position for _, position in self._rows])
        self._note_log_probs(logits, ids)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[: len(ids)].scatter_(1, ids.unsqueeze(-1), 0.0)
        return chosen

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        if not any(row.changes_logits for row, _ in self._rows):
            return logits
        masks = iter(() if self._masks is None else self._masks.result())
        own, self._masks = logits.clone(), None
        for i, (row, _) in enumerate(self._rows):
            if row.changes_logits:
                guided = row.guided is not None
                mask = torch.from_numpy(next(masks)).to(logits.device) if guided else None
                own[i] = row.changed(logits[i], mask)
        return own

    def _note_log_probs(self, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Keep the log probabilities of the chosen tokens, under the model's unchanged distribution."""
        asking = [i for i, (row, _) in enumerate(self._rows) if row.request.return_log_probs]
        if asking:
            rows = [self._rows[i][0] for i in asking]
            count = max(row.request.top_log_probs for row in rows)
            for row, told in zip(rows, log_probs(logits[asking], ids[asking], count), strict=True):
                top = told.top[: row.request.top_log_probs]
                row.log_probs.append(TokenLogProb(told.id, told.log_prob, top))

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._layers:  # no layer changes meanwhile
            if not self._prompts:
                return forward(*args, **kwargs)
            # The logits of all tokens are needed, not only those of the next ones.
            kept = kwargs.pop("logits_to_keep", None)
            output = forward(*args, **kwargs)
        for row, places, start in self._prompts:
            _note_prompt(output.logits[0, places], row, start)
        if kept is not None:
            output.logits = output.logits[:, kept]
        return output


def _note_prompt(logits: torch.Tensor, row: Row, start: int) -> None:
    """Keep the log probabilities of a row's prompt, as far as they are new.

    Args:
        logits: [tokens, vocabulary], behind the prompt's tokens from the place ``start`` on.
    """
    ids, known = row.request.input_ids, row.prompt_log_probs
    if not known:
        known.append(TokenLogProb(ids[0], 0.0))
    begin = len(known) - 1 - start
    for part in torch.split(logits[begin : len(ids) - 1 - start], PART):
        own = torch.tensor(ids[len(known) : len(known) + len(part)], device=part.device)
        known += log_probs(part, own, row.request.top_log_probs)


def log_probs(logits: torch.Tensor, ids: torch.Tensor, top: int) -> list[TokenLogProb]:
    """Return each row's log probability of its token, with the ``top`` most likely tokens'."""
    known = logits.float().log_softmax(-1).clamp_(min=LEAST_LOG_PROB)
    own = known.gather(1, ids.unsqueeze(-1)).squeeze(-1)
    best = known.topk(min(top, known.shape[-1]))
    others = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogProb(token, value, tuple(zip(*pairs, strict=True)))
        for token, value, pairs in zip(ids.tolist(), own.tolist(), others, strict=True)
    ]


def keep_adapters_apart(cache: Any, row_of: Callable[[str], Row | None]) -> None:
    """Make a ``PagedAttentionCache`` share blocks under one adapter, or under none, not between them.

    Blocks of equal tokens are shared by a hash of the tokens, each chained to the one before it. So that it
    depends on the adapter too, a number below 0 stands for the first token and the adapter in the hash.

    Args:
        row_of: the request of an id; None when it is cancelled, which shares nothing then.
    """
    numbers: dict[tuple[int, int], int] = {}
    search, mark = cache.search_prefix_match, cache.mark_complete_blocks

    def marked(ids: Sequence[int], adapter: LoadedAdapter) -> list[int]:
        first = (adapter.number, ids[0])
        return [numbers.setdefault(first, -1 - len(numbers)), *ids[1:]]

    def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
        row = row_of(request_id)
        # A prompt whose log probabilities are asked for goes through the model, all of it.
        if row is None or row.request.prompt_log_probs:
            return 0
        ids = prompt_ids if row.adapter is None else marked(prompt_ids, row.adapter)
        return int(search(request_id, ids))

    def mark_complete_blocks(state: RequestState, complete_blocks: dict[str, int]) -> None:
        adapter = state.logit_processor_kwargs["row"].adapter
        if complete_blocks and adapter is not None:
            state = copy.copy(state)
            state.initial_tokens = marked(state.initial_tokens, adapter)
        mark(state, complete_blocks)

    cache.search_prefix_match = search_prefix_match
    cache.mark_complete_blocks = mark_complete_blocks


def vocabulary_of(model: Any) -> int:
    """Return the number of token ids of a model."""
    return int(model.config.get_text_config().vocab_size)
