"""The choice of a batch's next tokens, each row by its own parameters.

The noise of a row is a hash of its seed, its position and the token id, so a request with a seed gives the
same text whatever else is in the batch, on a CPU and on a GPU, as long as the logits are the same: their
rounding depends on the batch's size, and may decide between two that are nearly equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cog_triton.engines.base import GenerationRequest, SamplingParams


class History:
    """The tokens of one sequence so far, as the penalties need them."""

    def __init__(self, request: GenerationRequest, vocabulary: int, device: torch.device) -> None:
        self._request = request
        self._prompt, self.output = request.input_ids, list[int]()
        self.counts = torch.zeros(vocabulary, device=device)
        self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.seen[torch.tensor(self._prompt, device=device)] = True
        # The last tokens of the prompt may be output of an earlier attempt.
        self._count(self._prompt[len(self._prompt) - request.continued :])

    def extend(self, output: Sequence[int]) -> None:
        """Add the tokens of ``output``, all of them so far, that are new."""
        self._count(output[len(self.output) :])
        self.output += output[len(self.output) :]

    def _count(self, new: Sequence[int]) -> None:
        if new:
            ids = torch.tensor(new, device=self.counts.device)
            self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
            self.seen[ids] = True

    def penalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape [vocabulary], after penalties, minimum length and bad words."""
        sampling, end_id = self._request.sampling, self._request.end_id
        factor = sampling.repetition_penalty
        if factor != 1:
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self.seen, repeated, logits)
        logits = logits - sampling.frequency_penalty * self.counts
        logits = logits - sampling.presence_penalty * (self.counts > 0)
        if end_id is not None and len(self.output) < sampling.min_tokens:
            logits[end_id] = -torch.inf
        for *start, last in sampling.bad_words:
            if not start or (self._prompt + self.output)[-len(start) :] == start:
                logits[last] = -torch.inf
        return logits


def choose(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Return the chosen token ids, shape [rows].

    Args:
        logits: [rows, vocabulary], float32.
        positions: each row's place in its sequence, on which the noise depends beside the seed.
    """
    sampled = [i for i, sampling in enumerate(samplings) if not sampling.greedy]
    if not sampled:
        return logits.argmax(dim=-1)
    if len(sampled) == len(samplings):
        return _sample(logits, samplings, positions)
    ids = logits.argmax(dim=-1)
    ids[sampled] = choose(
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


def _sample(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Return a random token of each row, shape [rows].

    When each token arrives after an exponential time whose rate is its probability, each is the first with
    its probability. That holds among those within top_k and top_p, too, and spares sorting the vocabulary:
    the first of all is nearly always one of them.
    """
    temperatures = torch.tensor([s.temperature for s in samplings], device=logits.device)
    keys = [noise_key(s.seed, p) for s, p in zip(samplings, positions, strict=True)]
    # Proportional to the probabilities; the greatest is 1, so that no temperature is too low.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures.unsqueeze(-1)).exp_()
    noise = _exponential(torch.tensor(keys, device=logits.device), logits.shape[-1])
    speeds = torch.div(weights, noise, out=noise)
    if any(sampling.min_p for sampling in samplings):
        # The greatest weight is 1. Whatever is likelier than a token that remains remains as well.
        least = torch.tensor([s.min_p for s in samplings], device=logits.device)
        speeds *= weights >= least.unsqueeze(-1)
    if not any(sampling.limited for sampling in samplings):
        return speeds.argmax(dim=-1)
    return _first_within(speeds, weights, *_limits(weights, samplings))


def _limits(
    weights: torch.Tensor, samplings: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of the tokens likelier than a chosen one, shapes [rows].

    They are their number, from top_k, and the sum of their weights, from top_p, which is a share of the
    weight that top_k leaves.
    """
    device, vocabulary = weights.device, weights.shape[-1]
    numbers = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    # With a top_k given, TensorRT-LLM takes a top_p of 0 as none.
    shares = [sampling.top_p if 0 < sampling.top_p < 1 else torch.inf for sampling in samplings]
    number, share = torch.tensor(numbers, device=device), torch.tensor(shares, device=device)
    total = weights.sum(dim=-1)
    both = [i for i, n in enumerate(numbers) if n < vocabulary and shares[i] < 1]
    if both:
        most = weights[both].topk(max(numbers[i] for i in both)).values.cumsum(dim=-1)
        total[both] = most.gather(-1, number[both].unsqueeze(-1) - 1).squeeze(-1)
    return number, share * total


def _first_within(
    speeds: torch.Tensor, weights: torch.Tensor, number: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return the fastest token of each row within its limits, shape [rows]; see ``_limits``.

    Of tokens that are equally likely, the lower id counts as the likelier.
    """
    chosen = speeds.argmax(dim=-1, keepdim=True)
    own = weights.gather(-1, chosen)
    likelier = weights > own
    lower = torch.arange(weights.shape[-1], device=weights.device) < chosen
    likelier |= (weights == own) & lower
    count = likelier.sum(dim=-1)
    outside = (count >= number) | ((weights * likelier).sum(dim=-1) >= weight)
    outside &= count > 0  # the likeliest is always within, rounding or not
    chosen = chosen.squeeze(-1)
    if outside.any():
        # A token that is less likely than one outside is outside, too: only the likelier remain.
        chosen[outside] = _first_within(
            speeds[outside] * likelier[outside], weights[outside], number[outside], weight[outside]
        )
    return chosen


def _exponential(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return exponential noise of mean 1, shape [rows, vocabulary], from keys of shape [rows, 2].

    All of it is finite and greater than 0: a uniform number that rounds to 0 or 1 would let any token win,
    however unlikely. It is finest near 0, where the winners are.
    """
    keys = keys.to(torch.int32)
    token = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) * _GOLDEN
    bits = _mix_(_mix_(token ^ keys[:, :1]).bitwise_xor_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer in place, on int32, whose products wrap around."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x85EBCA6B))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(number: int) -> int:
    """The int32 that has the bits of a 32-bit number."""
    return number - (1 << 32) if number >> 31 else number


# 2**32 divided by the golden ratio, odd: spreads neighbouring integers.
_GOLDEN = _signed(0x9E3779B1)
