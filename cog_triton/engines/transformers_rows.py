"""One request in transformers' batch: what its next token depends on, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cog_triton.adapters.layers import LoadedAdapter
from cog_triton.engines.base import LEAST_LOG_PROB, GenerationRequest, TopLogProbs
from cog_triton.engines.structured_output import Guided, Masks, StructuredOutput
from cog_triton.engines.token_sampling import History, choose, penalize

PART = 256  # rows of logits whose probabilities are worked out at once


@dataclass(eq=False)
class Row:
    """A running request. It belongs to the generation thread.

    Attributes:
        output: what it has generated so far.
        new: of that, what it had not before the last step.
        top_log_probs: of tokens that have not been handed on yet.
        prompt_log_probs: as far as the prompt has been through the model; see ``Tokens``.
    """

    request: GenerationRequest
    guided: Guided | None = None
    adapter: LoadedAdapter | None = None
    output: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[TopLogProbs] = field(default_factory=list)
    history: History | None = None

    def __deepcopy__(self, _: Any) -> Row:
        # Transformers copies a request that it sets back, and this goes on with it.
        return self

    @property
    def error(self) -> str | None:
        """The reason why the request cannot continue."""
        if self.adapter is not None and self.adapter.problem is not None:
            return f"lora_task_id {self.request.lora_task_id}: {self.adapter.problem}"
        return self.guided.error if self.guided else None

    @cached_property
    def changes_logits(self) -> bool:
        """True if its logits are not used as they are."""
        request = self.request
        given = request.logit_bias or request.allowed_ids or self.guided is not None
        return bool(given) or not request.sampling.plain

    def extend(self, output: list[int], device: torch.device, vocabulary: int) -> None:
        """Add the tokens of ``output``, all of them so far, that are new."""
        self.new, self.output = output[len(self.output) :], output
        if self.request.sampling.plain:
            return
        if self.history is None:
            request = self.request
            self.history = History(request.input_ids, vocabulary, device, request.continued)
        self.history.extend(output)

    def changed(self, logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """The logits that are sampled from, shape [vocabulary]."""
        own = self._biased(logits)
        if self.request.allowed_ids:
            only = torch.zeros_like(logits, dtype=torch.bool)
            only[self._allowed_ids.to(logits.device)] = True
            if allowed is None or (only & allowed).any():  # else the guide goes first
                allowed = only if allowed is None else only & allowed
        if self.history is not None:
            own = penalize(own, self.request.sampling, self.history, self.request.end_id)
        if allowed is None:
            return own
        own = own.masked_fill(~allowed, -torch.inf)
        if self.history is not None and not own.isfinite().any():
            # Bad words or the minimum length leave nothing of what is allowed, which goes first.
            return logits.masked_fill(~allowed, -torch.inf)
        return own

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.request.logit_bias:
            return logits
        ids, values = self._bias
        return logits.index_add(0, ids.to(logits.device), values.to(logits.device))

    @cached_property
    def _allowed_ids(self) -> torch.Tensor:
        return torch.tensor(list(self.request.allowed_ids))

    @cached_property
    def _bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.request.logit_bias
        return torch.tensor(list(bias)), torch.tensor(list(bias.values()))


Rows = Sequence[tuple[Row, int]]  # and the position of the next token
# Parts of prompts: whose, where in a step, and the place in the prompt.
Prompts = list[tuple[Row, slice, int]]


class Allowed:
    """The tokens that the guides of a batch's rows allow next, computed while the model runs."""

    def __init__(self, rows: Rows, structured_output: StructuredOutput | None) -> None:
        self._places = [i for i, (row, _) in enumerate(rows) if row.guided is not None]
        guided = [row for row, _ in rows if row.guided is not None]
        self._masks: Future[Masks] | None = None
        if guided and structured_output is not None:
            sequences = [row.guided for row in guided if row.guided is not None]
            self._masks = structured_output.masks(sequences, [row.new for row in guided])

    def by_row(self, device: torch.device, vocabulary: int) -> dict[int, torch.Tensor]:
        """The tokens that are allowed, shape [vocabulary], of each row with a guide."""
        if self._masks is None:
            return {}
        words = torch.from_numpy(self._masks.result()).to(device)
        bits = (words.unsqueeze(-1) >> torch.arange(32, device=device)) & 1
        return dict(zip(self._places, bits.bool().flatten(1)[:, :vocabulary], strict=True))


def next_tokens(logits: torch.Tensor, rows: Rows, allowed: Allowed) -> torch.Tensor:
    """The next token of each row, shape [rows].

    Args:
        logits: [rows, vocabulary]; they are left as they are.
    """
    if any(row.changes_logits for row, _ in rows):
        masks = allowed.by_row(logits.device, logits.shape[-1])
        own = logits.clone()
        for i, (row, _) in enumerate(rows):
            if row.changes_logits:
                own[i] = row.changed(logits[i], masks.get(i))
        logits = own
    samplings = [row.request.sampling for row, _ in rows]
    return choose(logits, samplings, [position for _, position in rows])


def note_prompts(prompts: Prompts, _: object, __: object, output: Any) -> None:
    """The end of a forward pass that made the logits of all tokens: rows keep those of their prompts."""
    for row, places, start in prompts:
        _note_prompt(output.logits[0, places], row, start)


def _note_prompt(logits: torch.Tensor, row: Row, start: int) -> None:
    """Keep the log probabilities of a row's prompt, as far as they are new.

    Args:
        logits: [tokens, vocabulary], behind the prompt's tokens from the place ``start`` on.
    """
    ids, known = row.request.input_ids, row.prompt_log_probs
    if not known:
        known.append(((ids[0], 0.0),))
    begin = len(known) - 1 - start
    for part in torch.split(logits[begin : len(ids) - 1 - start], PART):
        told = part.float().log_softmax(-1).clamp_(min=LEAST_LOG_PROB)
        own = ids[len(known) : len(known) + len(told)]
        values = told.gather(1, torch.tensor(own, device=told.device).unsqueeze(-1)).squeeze(-1)
        top = told.topk(min(row.request.top_log_probs, told.shape[-1]))
        for token, value, others, theirs in zip(
            own, values.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        ):
            known.append(((token, value), *zip(others, theirs, strict=True)))


def note_top_log_probs(logits: torch.Tensor, totals: torch.Tensor, rows: Rows) -> None:
    """Keep the most likely tokens of the model's unchanged distribution for the rows that want them.

    Args:
        totals: the logits' logsumexp, shape [rows].
    """
    places = [i for i, (row, _) in enumerate(rows) if row.request.top_log_probs]
    if not places:
        return
    most = min(max(rows[i][0].request.top_log_probs for i in places), logits.shape[-1])
    top = logits[places].topk(most)
    log_probs = (top.values - totals[places].unsqueeze(-1)).clamp_(min=LEAST_LOG_PROB)
    for i, ids, values in zip(places, top.indices.tolist(), log_probs.tolist(), strict=True):
        row = rows[i][0]
        pairs = tuple(zip(ids, values, strict=True))[: row.request.top_log_probs]
        row.top_log_probs.append(pairs)
