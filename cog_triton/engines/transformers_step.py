"""One step of transformers' continuous batching: the requests in it and the choice of their next tokens.

The noise of a row is a hash of its seed, its position and the token id, so a request with a seed gives the
same text whatever else is in the batch, on a CPU and on a GPU, as long as the logits are the same: their
rounding depends on the batch's size, and may decide between two that are nearly equal.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching import cb_logits_processors

from cog_triton.adapters.layers import Adapters, LoadedAdapter
from cog_triton.engines import base
from cog_triton.engines.base import GenerationRequest, SamplingParams, TokenLogProb
from cog_triton.engines.guides import Guided, Guides, Masks
from cog_triton.engines.transformers_numbers import FiniteCache, not_finite
from cog_triton.engines.transformers_rope import SequenceRope
from cog_triton.errors import EngineError

# How many rows of logits are made probabilities at once.
PART = 256
# Stands before the number of an attempt, in transformers' ids of requests.
_ATTEMPT = "@"
# 2**32 divided by the golden ratio, odd, as an int32: spreads neighbouring integers.
_GOLDEN = 0x9E3779B1 - (1 << 32)


class History:
    """The changes of one sequence's logits, by its request and its tokens so far."""

    def __init__(self, request: GenerationRequest, vocabulary: int, device: torch.device) -> None:
        self._request = request
        self._penalized = bool(request.sampling.penalties)
        # The last tokens of the prompt may be output of an earlier attempt.
        self._counted = len(request.input_ids) - request.continued
        self._counts = torch.zeros(vocabulary, device=device)
        self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._seen[request.input_ids] = True
        self._only = torch.zeros_like(self._seen)
        self._only[list(request.allowed_ids)] = True
        self._bias = torch.zeros_like(self._counts)
        self._bias[list(request.logit_bias)] = self._bias.new_tensor([*request.logit_bias.values()])

    def change(self, logits: Tensor, tokens: list[int], allowed: Tensor | None = None) -> Tensor:
        """Return the logits to sample from after the tokens so far; ``allowed`` is the guide's mask."""
        request = self._request
        changed = logits + self._bias if request.logit_bias else logits
        if self._penalized:
            changed = self._penalize(changed, tokens)
        excluded = self._excluded(tokens)
        if excluded:
            changed = changed.clone()
            changed[excluded] = -torch.inf
        allowed = self._allowed(allowed)
        if allowed is None:
            return changed
        changed = changed.masked_fill(~allowed, -torch.inf)
        if excluded and not changed.isfinite().any():
            # Only excluded tokens are allowed: the guide takes precedence.
            return logits.masked_fill(~allowed, -torch.inf)
        return changed

    def _excluded(self, tokens: list[int]) -> list[int]:
        """Return the ids that may not come next: the ends of bad words, and too early end tokens."""
        request = self._request
        excluded = []
        for *start, last in request.sampling.bad_words:
            if not start or tokens[-len(start) :] == start:
                excluded.append(last)
        made = len(tokens) - len(request.input_ids)
        if made < request.sampling.min_tokens:
            excluded += request.end_ids
        return excluded

    def _allowed(self, by_guide: Tensor | None) -> Tensor | None:
        """Return the mask of the tokens that may come next; None for all of them."""
        if not self._request.allowed_ids:
            return by_guide
        if by_guide is None:
            return self._only
        both = self._only & by_guide
        # The guide takes precedence.
        return both if both.any() else by_guide

    def _penalize(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """Return the logits with the penalties for the tokens so far, which are counted first."""
        sampling = self._request.sampling
        ids = torch.tensor(tokens[self._counted :], dtype=torch.int64, device=logits.device)
        self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
        self._seen[ids] = True
        self._counted = len(tokens)
        factor = sampling.repetition_penalty
        if factor != 1:
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self._seen, repeated, logits)
        logits = logits - sampling.frequency_penalty * self._counts
        return logits - sampling.presence_penalty * (self._counts > 0)


def request_key(manager_key: str) -> str:
    """Return the key of the request that one of transformers' requests is an attempt at."""
    return manager_key.rpartition(_ATTEMPT)[0]


@dataclass(eq=False)
class Row:
    """A running request. From its start on, it belongs to the generation thread."""

    request: GenerationRequest
    sink: base.Sink
    # The prompt, and the tokens that the sink has had.
    tokens: list[int]
    guided: Guided | None = None
    adapter: LoadedAdapter | None = None
    history: History | None = None
    # This and the next have not been delivered yet.
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    # Why this sequence cannot go on.
    failure: EngineError | None = None
    # The number of tokens that transformers began this attempt with.
    begun_with: int = 0
    # How often transformers has begun anew.
    attempt: int = 0

    def __deepcopy__(self, _: Any) -> "Row":
        # Transformers copies a request that it sets back, which continues with this row.
        return self

    @property
    def manager_key(self) -> str:
        """The id that transformers knows this attempt by."""
        return f"{self.request.key}{_ATTEMPT}{self.attempt}"

    @cached_property
    def changes_logits(self) -> bool:
        request = self.request
        if request.logit_bias or request.allowed_ids or request.guide:
            return True
        return not request.sampling.plain

    @property
    def error(self) -> EngineError | None:
        if self.failure is not None:
            return self.failure
        if self.adapter and self.adapter.problem:
            return EngineError(f"lora_task_id {self.request.lora_task_id}: {self.adapter.problem}")
        return self.guided.error if self.guided else None


class StepProcessor(cb_logits_processors.ContinuousBatchingLogitsProcessorList):
    """Stands in for transformers' logits processors, which know no seeds, penalties or bad words.

    It is called before a step, around the forward pass, and with the logits, which chosen tokens replace.
    """

    def __init__(self, model: Any, guides: Guides | None, adapters: Adapters | None) -> None:
        super().__init__(LogitsProcessorList())
        # Transformers reads this and the next.
        self.do_processing = True
        self.supported_keys = {"row": Row}
        self._guides = guides
        self._adapters = adapters
        # The rows that get a next token in this step.
        self._rows: list[Row] = []
        self._masks: Future[Masks] | None = None
        # Requests that want log probabilities of their prompts: place in the step, and in the prompt.
        self._prompts: list[tuple[Row, slice, int]] = []
        # The place of each request's tokens in the step.
        self._places: list[tuple[Row, slice]] = []
        self._finite = FiniteCache(None)
        self._marks: dict[tuple[int, int, int], int] = {}
        self._numbers = count(-1, -1)
        # Places in the step where a number below 0 stands for a token, and these tokens.
        self._marked: list[tuple[int, int]] = []
        self.rope = SequenceRope(model)
        model.forward = wraps(model.forward)(partial(self._forward, model.forward))

    def watch(self, cache: Any) -> None:
        """Watch the cache's updates, so that a sequence whose numbers are not finite stays apart."""
        self._finite = FiniteCache(cache)

    def prompt(self, row: Row) -> list[int]:
        """Return a row's prompt as transformers is to have it, which shares blocks of equal tokens.

        They are not to be shared between adapters, between lengths that RoPE tells apart, nor with a prompt
        whose log probabilities are asked for, all of which goes through the model: a number below 0 takes
        the place of the first token there.
        """
        first, *others = row.tokens
        variant = self.rope.variant(len(row.tokens))
        if row.request.prompt_log_probs or variant is None:
            return [next(self._numbers), *others]
        adapter = 0 if row.adapter is None else row.adapter.number
        if (adapter, variant) == (0, 0):
            return row.tokens.copy()
        key = adapter, variant, first
        if key not in self._marks:
            self._marks[key] = next(self._numbers)
        return [self._marks[key], *others]

    def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: Any) -> Any:
        """Note the requests of the step, a list of FutureRequestState in the order of their rows."""
        self._rows = []
        self._prompts = []
        self._marked = []
        self._places = []
        parts: list[tuple[LoadedAdapter | None, int]] = []
        lengths: list[tuple[Row, int]] = []
        at = 0
        for future in requests_in_batch:
            state = future.state
            length = future.query_length
            row: Row = state.logit_processor_kwargs["row"]
            start = state.position_offset - length
            if start == 0 and state.initial_tokens[0] < 0:
                self._marked.append((at, row.tokens[0]))
            if row.request.prompt_log_probs and len(row.tokens) == len(row.request.input_ids):
                self._prompts.append((row, slice(at, at + length), start))
            if future.has_new_token:
                self._rows.append(row)
            parts.append((row.adapter, length))
            lengths.append((row, length))
            self._places.append((row, slice(at, at + length)))
            at += length
        self._begin_masks()
        self.rope.begin_step([(length, len(row.tokens)) for row, length in lengths])
        if self._adapters is not None:
            self._adapters.begin_step(parts)
        self._finite.begin_step()
        return arg_storage

    def begin_rows(self, rows: list[Row]) -> None:
        """Note the requests whose next tokens are chosen next, outside of continuous batching."""
        self._rows = rows
        self._begin_masks()

    def _begin_masks(self) -> None:
        """Start to compute the masks of the rows with a guide, while the model runs."""
        guided = [row.guided for row in self._rows if row.guided is not None]
        self._masks = None
        if guided and self._guides is not None:
            self._masks = self._guides.submit_masks(guided)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model on a step; with the real tokens, and with all logits if a prompt needs them."""
        for place, token in self._marked:
            kwargs["input_ids"][0, place] = token
        # For a prompt the logits of all tokens are needed, not only those of the next ones.
        kept = kwargs.pop("logits_to_keep", None) if self._prompts else None
        output = forward(*args, **kwargs)
        for row, places, start in self._prompts:
            _note_prompt(output.logits[0, places], row, start)
        if kept is not None:
            output.logits = output.logits[:, kept]
        return output

    def __call__(self, _: Tensor, scores: Tensor, __: Tensor) -> Tensor:
        """Choose the next tokens; in the scores that are returned, transformers finds no others.

        The scores are the logits, [rows, vocabulary]. Behind those of the step's rows come those of prompts
        that are not yet through, which mean nothing.
        """
        logits = scores[: len(self._rows)]
        if self._fail_rows(logits):
            # The rows that failed are dropped, so any token will do.
            logits = torch.nan_to_num(logits)
        changed = self._changed(logits)
        samplings = [row.request.sampling for row in self._rows]
        ids = choose(changed, samplings, [len(row.tokens) for row in self._rows])
        self._note_log_probs(logits, ids)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[: len(ids)].scatter_(1, ids.unsqueeze(-1), 0.0)
        return chosen

    def _changed(self, logits: Tensor) -> Tensor:
        """Return the logits to sample from; a row whose logits cannot be changed fails alone."""
        if not any(row.changes_logits for row in self._rows):
            return logits
        changed = logits.clone()
        masks = self._masks_by_row(logits.device)
        for place, row in enumerate(self._rows):
            if not row.changes_logits or row.failure is not None:
                continue
            try:
                if row.history is None:
                    row.history = History(row.request, logits.shape[-1], logits.device)
                changed[place] = row.history.change(logits[place], row.tokens, masks.get(row))
            except Exception as error:
                row.failure = base.failed_request(error, row.request)
        return changed

    def _masks_by_row(self, device: torch.device) -> dict[Row, Tensor]:
        """Return the mask of each row with a guide, [vocabulary]. If there are none, those rows fail."""
        guided = [row for row in self._rows if row.guided is not None]
        if self._masks is None:
            return {}
        try:
            masks = self._masks.result()
        except Exception as error:
            for row in guided:
                row.failure = base.failed_request(error, row.request)
            return {}
        return {
            row: torch.from_numpy(mask).to(device) for row, mask in zip(guided, masks, strict=True)
        }

    def _note_log_probs(self, logits: Tensor, ids: Tensor) -> None:
        """Keep the log probabilities of the chosen ids for the requests that want them."""
        places = [place for place, row in enumerate(self._rows) if row.request.return_log_probs]
        if not places:
            return
        rows = [self._rows[place] for place in places]
        top = max(row.request.top_log_probs for row in rows)
        found = log_probs(logits[places], ids[places], top)
        for row, token in zip(rows, found, strict=True):
            row.log_probs.append(replace(token, top=token.top[: row.request.top_log_probs]))

    def _fail_rows(self, logits: Tensor) -> bool:
        """Mark the sequences of the step whose numbers are not finite; return whether there are any."""
        failed = self._finite.failed(logits)
        if failed is None:
            return False
        of_tokens, of_rows = failed
        for row, place in self._places:
            if any(of_tokens[place]):
                row.failure = not_finite()
        for row, is_failed in zip(self._rows, of_rows, strict=True):
            if is_failed:
                row.failure = not_finite()
        return True


def _note_prompt(logits: Tensor, row: Row, start: int) -> None:
    """Keep the log probabilities of a row's prompt that are new: ``logits`` are those from ``start`` on."""
    ids = row.request.input_ids
    known = row.prompt_log_probs
    if not known:
        known.append(TokenLogProb(ids[0], 0.0))
    for part in torch.split(logits[len(known) - 1 - start : len(ids) - 1 - start], PART):
        new_ids = torch.tensor(ids[len(known) : len(known) + len(part)], device=part.device)
        known += log_probs(part, new_ids, row.request.top_log_probs)


def log_probs(logits: Tensor, ids: Tensor, top: int) -> list[TokenLogProb]:
    """Return each row's log probability of its token, with the ``top`` most likely tokens'."""
    known = logits.float().log_softmax(-1).clamp_(min=base.LEAST_LOG_PROB)
    chosen = known.gather(1, ids.unsqueeze(-1)).squeeze(-1)
    best = known.topk(min(top, known.shape[-1]))
    alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogProb(token, value, tuple(zip(*pairs, strict=True)))
        for token, value, pairs in zip(ids.tolist(), chosen.tolist(), alternatives, strict=True)
    ]


def choose(logits: Tensor, samplings: list[SamplingParams], positions: list[int]) -> Tensor:
    """Return the ids chosen by logits, float32 [rows, vocabulary], and each row's seed and place."""
    sampled = [i for i, sampling in enumerate(samplings) if not sampling.greedy]
    if sampled and len(sampled) == len(samplings):
        return _sample(logits, samplings, positions)
    ids = logits.argmax(dim=-1)
    if sampled:
        ids[sampled] = _sample(
            logits[sampled], [samplings[i] for i in sampled], [positions[i] for i in sampled]
        )
    return ids


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Return two 32-bit numbers for a 64-bit seed and a position (Steele's SplitMix64)."""
    mask = (1 << 64) - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    return x >> 32, x & 0xFFFFFFFF


def _sample(logits: Tensor, samplings: list[SamplingParams], positions: list[int]) -> Tensor:
    """Return a random token of each row, shape [rows].

    When each token arrives after an exponential time whose rate is its probability, each is the first with
    its probability. That holds among those within top_k and top_p, too, and spares sorting the vocabulary:
    the first of all is nearly always one of them.
    """
    temperatures = torch.tensor([s.temperature for s in samplings], device=logits.device)
    keys = [noise_key(s.seed or 0, p) for s, p in zip(samplings, positions, strict=True)]
    # Proportional to the probabilities; the greatest is 1, so that no temperature is too low.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures.unsqueeze(-1)).exp_()
    noise = _exponential(torch.tensor(keys, device=logits.device), logits.shape[-1])
    speeds = torch.div(weights, noise, out=noise)
    if any(sampling.min_p for sampling in samplings):
        # The greatest weight is 1. Whatever is likelier than a token that remains remains as well.
        least = torch.tensor([s.min_p for s in samplings], device=logits.device)
        speeds *= weights >= least.unsqueeze(-1)
    if not any(s.top_k > 0 or 0 < s.top_p < 1 for s in samplings):
        return speeds.argmax(dim=-1)
    number, weight = _limits(weights, samplings)
    return _first_within(speeds, weights, number, weight)


def _limits(weights: Tensor, samplings: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return the limits of each row, [rows]: of the number of likelier tokens, and of their weights' sum.

    A token may be chosen if it is below both. The number is top_k, and the sum is top_p, as a share of the
    weights that top_k leaves. With a top_k, TensorRT-LLM takes a top_p of 0 as none.
    """
    device = weights.device
    vocabulary = weights.shape[-1]
    numbers = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    shares = [sampling.top_p if 0 < sampling.top_p < 1 else torch.inf for sampling in samplings]
    number = torch.tensor(numbers, device=device)
    total = weights.sum(dim=-1)
    both = [i for i, n in enumerate(numbers) if n < vocabulary and shares[i] < 1]
    if both:
        sums = weights[both].topk(max(numbers[i] for i in both)).values.cumsum(dim=-1)
        total[both] = sums.gather(-1, number[both].unsqueeze(-1) - 1).squeeze(-1)
    return number, torch.tensor(shares, device=device) * total


def _first_within(speeds: Tensor, weights: Tensor, number: Tensor, weight: Tensor) -> Tensor:
    """Return each row's fastest token within its limits, [rows]; of equals the lower id is likelier."""
    chosen = speeds.argmax(dim=-1, keepdim=True)
    weight_of_chosen = weights.gather(-1, chosen)
    likelier = weights > weight_of_chosen
    likelier |= (weights == weight_of_chosen) & (
        torch.arange(weights.shape[-1], device=weights.device) < chosen
    )
    count = likelier.sum(dim=-1)
    outside = (count >= number) | ((weights * likelier).sum(dim=-1) >= weight)
    # The likeliest token is always within, whatever the rounding.
    outside &= count > 0
    chosen = chosen.squeeze(-1)
    if outside.any():
        # A token that is less likely than one outside is outside, too: only the likelier remain.
        speeds = speeds[outside] * likelier[outside]
        chosen[outside] = _first_within(speeds, weights[outside], number[outside], weight[outside])
    return chosen


def _exponential(keys: Tensor, vocabulary: int) -> Tensor:
    """Return exponential noise of mean 1, shape [rows, vocabulary], from keys of shape [rows, 2].

    All of it is finite and greater than 0: a uniform number that rounds to 0 or 1 would let any token win,
    however unlikely. It is finest near 0, where the winners are.
    """
    keys = keys.to(torch.int32)
    token = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) * _GOLDEN
    bits = _mix_(_mix_(token ^ keys[:, :1]).bitwise_xor_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix_(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer in place, on int32, whose products wrap around."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
