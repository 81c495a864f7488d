from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cog_triton.engines import token_sampling as module
from cog_triton.engines.base import GenerationRequest, SamplingParams
from cog_triton.engines.token_sampling import History, choose, noise_key

Array = npt.NDArray[Any]

MAX_SEED = 2**64 - 1
CPU = torch.device("cpu")
RANDOM = SamplingParams(top_p=1.0)  # nothing is excluded


def chosen(logits: torch.Tensor, sampling: SamplingParams, rows: int = 1) -> list[int]:
    """The tokens of ``rows`` positions that all have the same logits, shape [vocabulary]."""
    batch = logits.expand(rows, -1).contiguous()
    return [int(token) for token in choose(batch, [sampling] * rows, range(rows))]


def probabilities(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def ranked(logits: Array, sampling: SamplingParams) -> tuple[list[int], Array]:
    """The tokens of top_k, the likeliest first, and the probability of those before each.

    Of equally likely tokens the lower id comes first.
    """
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    shares = probabilities(logits[order] / sampling.temperature)
    return order.tolist(), np.concatenate([[0.0], np.cumsum(shares)[:-1]])


def allowed(logits: Array, sampling: SamplingParams) -> list[int]:
    """What top_k and top_p leave, by their definition: sort, cut, add up, cut."""
    order, before = ranked(logits, sampling)
    return [
        token
        for token, sum_ in zip(order, before, strict=True)
        if sum_ < sampling.top_p or sampling.top_p == 0
    ]


def by_definition(logits: Array, sampling: SamplingParams, rows: int) -> list[int]:
    """For each position the allowed token whose weight is the greatest by its noise."""
    tokens = np.array(allowed(logits, sampling))
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    keys = torch.tensor([noise_key(sampling.seed, position) for position in range(rows)])
    noise = module._exponential(keys, len(logits)).double().numpy()
    return [int(token) for token in tokens[(weights / noise)[:, tokens].argmax(axis=1)]]


# The distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 7, MAX_SEED])
def test_tokens_come_with_their_probabilities(temperature: float, seed: int) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 0.5, 1.5, -3.0, 0.0])
    rows = 20_000

    counts = Counter(
        chosen(logits, SamplingParams(temperature=temperature, top_p=1.0, seed=seed), rows)
    )

    expected = probabilities(logits.double().numpy() / temperature) * rows
    deviation = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(len(expected)))
    assert deviation < 27.9  # 6 degrees of freedom: more than that has a chance of 1 in 10,000


def test_the_allowed_tokens_keep_their_proportions() -> None:
    logits = torch.tensor([1.0, 0.0, 0.5, -1.0, 0.9])
    sampling = SamplingParams(top_k=3, top_p=1.0)

    counts = Counter(chosen(logits, sampling, 20_000))

    kept = [0, 4, 2]
    expected = probabilities(logits[kept].double().numpy()) * 20_000
    assert counts.keys() == set(kept)
    deviation = sum((counts[t] - e) ** 2 / e for t, e in zip(kept, expected, strict=True))
    assert deviation < 18.4  # 2 degrees of freedom


def test_different_seeds_differ() -> None:
    logits = torch.zeros(1000)
    sequences = {tuple(chosen(logits, SamplingParams(top_p=1.0, seed=s), 5)) for s in range(50)}
    assert len(sequences) == 50


# Limits


LOGITS = st.lists(
    st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=12
)  # a coarse grid, so that there are equal ones


@settings(max_examples=150, deadline=None)
@given(
    values=LOGITS,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.9, 0.99, 1.0]),
    seed=st.integers(0, MAX_SEED),
)
def test_choice_is_the_one_by_definition(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    assume(not sampling.greedy)
    # Where a sum meets top_p but for rounding, either answer would be right.
    before = ranked(np.array(values), sampling)[1][1:]
    assume(np.abs(before - top_p).min(initial=1.0) > 1e-4)

    wanted = by_definition(np.array(values), sampling, 30)

    assert chosen(torch.tensor(values), sampling, 30) == wanted


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 1.0},
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"top_k": 2},
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 5000, "top_p": 0.8},
    ],
)
def test_choice_is_the_one_by_definition_in_a_large_vocabulary(
    spread: float, limits: dict[str, Any]
) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * spread
    sampling = SamplingParams(temperature=0.7, seed=3, **limits)

    wanted = by_definition(logits.double().numpy(), sampling, 100)

    assert chosen(logits, sampling, 100) == wanted
    assert len(set(wanted)) > 1 or spread > 1


def test_everything_allowed_is_chosen_sometime() -> None:
    logits = np.array([0.0, 0.3, 0.1, 0.2, -0.1])
    sampling = SamplingParams(top_k=4, top_p=0.7)

    assert set(chosen(torch.tensor(logits), sampling, 300)) == set(allowed(logits, sampling))
    assert 1 < len(allowed(logits, sampling)) < 4


def test_of_equally_likely_tokens_the_lower_ids_are_within() -> None:
    assert set(chosen(torch.zeros(10), SamplingParams(top_k=3), 300)) == {0, 1, 2}
    assert set(chosen(torch.zeros(10), SamplingParams(top_p=0.35), 300)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, top_p=1.0),
        SamplingParams(top_k=1, top_p=1.0),
        SamplingParams(),  # neither top_k nor top_p
        SamplingParams(top_p=1e-9),
        SamplingParams(top_k=2, top_p=1e-300),
        SamplingParams(temperature=1e-30, top_p=1.0),
        SamplingParams(temperature=1e-300, top_p=1.0),
        SamplingParams(temperature=1e-4, top_k=50, top_p=0.9),
    ],
)
def test_greedy(sampling: SamplingParams) -> None:
    logits = torch.tensor([50.0, 90.0, 90.5, -3.0, 90.25])
    assert chosen(logits, sampling, 50) == [2] * 50


def test_a_token_without_probability_is_never_chosen() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[17, 400]] = torch.tensor([1.0, 2.0])
    for sampling in (RANDOM, SamplingParams(top_p=0.999), SamplingParams(top_k=900)):
        assert set(chosen(logits, sampling, 200)) == {17, 400}


# Batches


KINDS = [
    SamplingParams(top_p=1.0, seed=1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2),
    SamplingParams(temperature=1.5, top_k=7, seed=3),
    SamplingParams(),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.5, seed=0),
    SamplingParams(temperature=1.2, top_p=0.9, seed=MAX_SEED),
]


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 70
    logits = torch.randn(rows, 500, generator=generator)
    samplings = [KINDS[i % len(KINDS)] for i in range(rows)]
    positions = list(range(100, 100 + rows))

    together = choose(logits, samplings, positions)
    alone = [
        int(choose(logits[i : i + 1], samplings[i : i + 1], positions[i : i + 1]))
        for i in range(rows)
    ]
    order = torch.randperm(rows, generator=generator).tolist()
    permuted = choose(logits[order], [samplings[i] for i in order], [positions[i] for i in order])

    assert together.tolist() == alone
    assert permuted.tolist() == [alone[i] for i in order]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(len(KINDS), 100, generator=torch.Generator().manual_seed(0))
    before = logits.clone()

    choose(logits, KINDS, range(len(KINDS)))

    assert torch.equal(logits, before)


def test_no_rows() -> None:
    assert choose(torch.zeros(0, 10), [], []).tolist() == []


# Noise


def test_noise_keys_are_determined_and_unique() -> None:
    seeds = [0, 1, 2, 2**31, 2**32, 2**63, MAX_SEED - 1, MAX_SEED, *range(1000, 1050)]
    keys = [noise_key(seed, position) for seed in seeds for position in range(200)]

    assert keys == [noise_key(seed, position) for seed in seeds for position in range(200)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= half < 2**32 for key in keys for half in key)


def test_noise_keys_are_spread() -> None:
    ones = np.array(
        [[bin(half).count("1") for half in noise_key(0, position)] for position in range(4000)]
    )
    assert np.abs(ones.mean(axis=0) - 16).max() < 0.2  # the standard error is 0.045


def noise(rows: int = 64, vocabulary: int = 5000) -> Array:
    keys = torch.tensor([noise_key(5, position) for position in range(rows)])
    return np.asarray(module._exponential(keys, vocabulary).double().numpy())


def test_noise_is_exponential() -> None:
    uniform = -np.expm1(-noise())
    assert abs(noise().mean() - 1) < 0.01  # the standard error is 0.0018
    for part in (uniform.ravel(), uniform[:, 0], uniform[:, -1], uniform[0], uniform[-1]):
        counts, _ = np.histogram(part, bins=10, range=(0, 1))
        expected = part.size / 10
        assert ((counts - expected) ** 2 / expected).sum() < 33.7  # 9 degrees: 1 in 10,000


def test_noise_of_neighbours_is_independent() -> None:
    uniform = -np.expm1(-noise())
    for a, b in (
        (uniform[:, :-1], uniform[:, 1:]),
        (uniform[:-1], uniform[1:]),
        (uniform[:, : 5000 - 128], uniform[:, 128:]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01


def test_noise_has_both_its_keys_and_the_token() -> None:
    def of(first: int, second: int) -> torch.Tensor:
        return module._exponential(torch.tensor([[first, second]]), 100)[0]

    assert torch.equal(of(1, 2), of(1, 2))
    assert not torch.isin(of(1, 2), of(1, 3)).any()
    assert not torch.isin(of(1, 2), of(2, 2)).any()
    assert len(set(of(1, 2).tolist())) == 100
    assert torch.equal(
        of(2**32 - 1, 2**31)[:50], module._exponential(torch.tensor([[-1, -(2**31)]]), 50)[0]
    )


@pytest.mark.parametrize("bits", [0, 1, -1, -2, 2**31 - 1, -(2**31)])
def test_noise_is_finite_and_positive_whatever_the_hash(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Zero or infinity would choose a token, or exclude it, whatever its probability.
    monkeypatch.setattr(module, "_mix_", lambda x: torch.full_like(x, bits))

    found = module._exponential(torch.tensor([[1, 2]]), 3)

    assert bool(torch.isfinite(found).all())
    assert bool((found > 0).all())


def test_the_hash_is_murmurs() -> None:
    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ x >> 16

    numbers = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x9E3779B9, 123456789]

    found = module._mix_(torch.tensor([module._signed(n) for n in numbers], dtype=torch.int32))

    assert [int(x) & 0xFFFFFFFF for x in found] == [mix(n) for n in numbers]


# Penalties

PROMPT, OUTPUT = [1, 1, 3], [3, 4, 4, 4]


def history(output: list[int] = OUTPUT, vocabulary: int = 6, **values: Any) -> History:
    request = GenerationRequest("a", **{"input_ids": PROMPT, "max_tokens": 9, **values})
    made = History(request, vocabulary, CPU)
    made.extend(output)
    return made


def penalize(logits: torch.Tensor, sampling: SamplingParams, end_id: int | None) -> torch.Tensor:
    return history(sampling=sampling, end_id=end_id).penalize(logits)


def penalized_by_definition(logits: list[float], sampling: SamplingParams) -> list[float]:
    found = []
    for token, value in enumerate(logits):
        if token in PROMPT + OUTPUT:
            factor = sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= sampling.frequency_penalty * OUTPUT.count(token)
        value -= sampling.presence_penalty * (token in OUTPUT)
        found.append(value)
    return found


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.75},
        {"frequency_penalty": -0.75},
        {"presence_penalty": 1.25},
        {"presence_penalty": -1.25},
        {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": -0.25},
    ],
)
def test_penalties(values: dict[str, Any]) -> None:
    logits = [0.5, 1.0, -1.0, -2.0, 2.0, 0.0]
    sampling = SamplingParams(**values)

    found = penalize(torch.tensor(logits), sampling, None)

    assert found.tolist() == pytest.approx(penalized_by_definition(logits, sampling))
    assert found.tolist() != pytest.approx(logits)


@pytest.mark.parametrize(
    ("bad_words", "excluded"),
    [
        (((2,),), {2}),
        (((2,), (5,)), {2, 5}),
        (((4, 2),), {2}),  # the output ends in 4
        (((3, 2),), set()),
        (((4, 4, 4, 0), (4, 4, 0, 1)), {0}),
        (((1, 3, 3, 4, 4, 4, 5),), {5}),  # begun in the prompt
        (((0, 1, 1, 3, 3, 4, 4, 4, 5),), set()),  # longer than all there is
    ],
)
def test_bad_words(bad_words: tuple[tuple[int, ...], ...], excluded: set[int]) -> None:
    found = penalize(torch.zeros(6), SamplingParams(bad_words=bad_words), None)
    assert {i for i, value in enumerate(found.tolist()) if value == -math.inf} == excluded


@pytest.mark.parametrize(("min_tokens", "excluded"), [(0, False), (4, False), (5, True)])
def test_the_end_before_the_minimum(min_tokens: int, excluded: bool) -> None:
    sampling = SamplingParams(min_tokens=min_tokens)  # 4 tokens are there
    found = penalize(torch.zeros(6), sampling, 2)
    assert found.tolist() == [0, 0, -math.inf if excluded else 0, 0, 0, 0]
    assert penalize(torch.zeros(6), sampling, None).tolist() == [0] * 6


def test_penalize_leaves_its_input() -> None:
    logits = torch.ones(6)
    sampling = SamplingParams(repetition_penalty=2.0, bad_words=((0,),), min_tokens=9)
    penalize(logits, sampling, 1)
    assert logits.tolist() == [1] * 6


def test_a_history_may_grow_in_any_steps() -> None:
    whole, stepwise = history([3, 4, 4, 5]), history([])
    for end in (1, 1, 3, 4):
        stepwise.extend([3, 4, 4, 5][:end])
    assert stepwise.output == whole.output == [3, 4, 4, 5]
    assert torch.equal(stepwise.counts, whole.counts)
    assert torch.equal(stepwise.seen, whole.seen)
    assert whole.counts.tolist() == [0, 0, 0, 1, 2, 1]
    assert whole.seen.tolist() == [False, True, False, True, True, True]


@given(
    output=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_penalties_count_on_in_an_output_that_is_continued(
    output: list[int], cut: int, seed: int
) -> None:
    cut = min(cut, len(output))
    sampling = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, bad_words=((4, 5),)
    )
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    whole = history(output, 10, input_ids=[1, 2], sampling=sampling)
    prompt = [1, 2, *output[:cut]]
    continued = history(output[cut:], 10, input_ids=prompt, continued=cut, sampling=sampling)
    assert torch.equal(whole.penalize(logits), continued.penalize(logits))


# min_p


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("limits", [{"top_p": 1.0}, {"top_k": 40}, {"top_p": 0.8}])
def test_min_p_leaves_the_tokens_that_transformers_leaves(
    temperature: float, min_p: float, limits: dict[str, Any]
) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 2
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if "top_k" in limits:
        warped = TopKLogitsWarper(limits["top_k"])(None, warped)
    if limits.get("top_p", 1.0) < 1:
        warped = TopPLogitsWarper(limits["top_p"])(None, warped)
    warped = MinPLogitsWarper(min_p)(None, warped)
    kept = set(warped.isfinite().nonzero()[:, 1].tolist())

    sampling = SamplingParams(temperature=temperature, min_p=min_p, **limits)
    rows = 20_000
    counts = Counter(chosen(logits[0], sampling, rows))

    assert counts.keys() <= kept
    expected = {t: p * rows for t, p in enumerate(warped[0].softmax(-1).tolist()) if p * rows > 20}
    assert counts.keys() >= expected.keys()
    deviation = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    assert deviation < 2.5 * len(expected) + 25  # by chance in fewer than one of 100,000


def test_min_p_of_one_row_is_not_that_of_another() -> None:
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).repeat(500, 1)
    samplings = [SamplingParams(top_p=1.0, min_p=0.9 * (i % 2)) for i in range(1000)]
    ids = choose(logits, samplings, range(1000)).tolist()
    assert set(ids[1::2]) == {0}
    assert set(ids[::2]) == {0, 1}
