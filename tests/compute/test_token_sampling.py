"""The choice of tokens by the engine on transformers: its distribution, limits, penalties and noise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cog_triton.engines.base import GenerationRequest, SamplingParams
from tests.engines import MAX_SEED
from tests.late import torch, transformers, transformers_step

ROWS = 20_000


def chosen(logits: torch.Tensor, sampling: SamplingParams, rows: int = 1) -> list[int]:
    """The tokens of ``rows`` positions that all have the same logits, shape [vocabulary]."""
    batch = logits.expand(rows, -1).contiguous()
    return [
        int(token) for token in transformers_step.choose(batch, [sampling] * rows, [*range(rows)])
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(temperature=0.5, top_p=1.0), id="low temperature"),
        pytest.param(SamplingParams(top_p=1.0, seed=MAX_SEED), id="greatest seed"),
        pytest.param(SamplingParams(temperature=2.0, top_p=1.0), id="high temperature"),
        pytest.param(SamplingParams(top_k=3), id="top_k"),
        pytest.param(
            SamplingParams(temperature=3.0, top_p=0.8, min_p=0.1),
            id="high temperature, top_p, min_p",
        ),
        pytest.param(
            SamplingParams(temperature=0.5, top_k=40, min_p=0.01),
            id="low temperature, top_k, min_p",
        ),
        pytest.param(SamplingParams(top_p=1.0, min_p=0.5), id="min_p"),
        pytest.param(
            SamplingParams(temperature=2.5, top_k=30, top_p=0.5),
            id="high temperature, top_k, top_p",
        ),
        pytest.param(SamplingParams(temperature=1.5, top_p=0.2), id="temperature, top_p"),
    ],
)
def test_tokens_come_with_the_probabilities_that_transformers_gives_them(
    sampling: SamplingParams,
) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 2
    warpers = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if 0 < sampling.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(transformers.MinPLogitsWarper(sampling.min_p))
    warped = transformers.LogitsProcessorList(warpers)(None, logits)[0]

    counts = Counter(chosen(logits[0], sampling, ROWS))

    assert counts.keys() <= set(warped.isfinite().nonzero()[:, 0].tolist())
    expected = {t: p * ROWS for t, p in enumerate(warped.softmax(-1).tolist()) if p * ROWS > 20}
    assert counts.keys() >= expected.keys()
    deviation = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    assert deviation < 2.5 * len(expected) + 25  # by chance in fewer than one of 100,000


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(temperature=0.0, top_p=1.0), id="temperature 0"),
        pytest.param(SamplingParams(top_k=1, top_p=1.0), id="top_k 1"),
        pytest.param(SamplingParams(), id="neither top_k nor top_p"),
        pytest.param(SamplingParams(top_p=1e-09), id="tiny top_p"),
        pytest.param(SamplingParams(top_k=2, top_p=1e-300), id="tinier top_p, and top_k"),
        pytest.param(SamplingParams(temperature=1e-30, top_p=1.0), id="tiny temperature"),
        pytest.param(SamplingParams(temperature=1e-300, top_p=1.0), id="tinier temperature"),
    ],
)
def test_greedy(sampling: SamplingParams) -> None:
    logits = torch.tensor([50.0, 90.0, 90.5, -3.0, 90.25])
    assert chosen(logits, sampling, 50) == [2] * 50


@pytest.mark.parametrize("limits", [{"top_p": 1.0}, {"top_p": 0.999}, {"top_k": 900}])
def test_a_token_without_probability_is_never_chosen(limits: dict[str, Any]) -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[17, 400]] = torch.tensor([1.0, 2.0])
    assert set(chosen(logits, SamplingParams(**limits), 200)) == {17, 400}


@pytest.mark.parametrize("limits", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 3, "top_p": 0.5}])
def test_of_equally_likely_tokens_the_first_are_within_a_limit(limits: dict[str, Any]) -> None:
    assert set(chosen(torch.zeros(5), SamplingParams(**limits), 200)) == {0, 1}


# Noise


def test_noise_keys_are_unique() -> None:
    seeds = [0, 1, 2, 2**31, 2**32, 2**63, MAX_SEED - 1, MAX_SEED, *range(1000, 1050)]
    keys = [
        transformers_step.noise_key(seed, position) for seed in seeds for position in range(200)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("bits", [0, 1, -1, -2, 2**31 - 1, -(2**31)])
def test_noise_is_finite_and_positive(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Zero or infinity would choose a token, or exclude it, whatever its probability.
    monkeypatch.setattr(transformers_step, "_mix_", lambda x: torch.full_like(x, bits))
    found = transformers_step._exponential(torch.tensor([[1, 2]]), 3)
    assert bool(torch.isfinite(found).all())
    assert bool((found > 0).all())


# Penalties, bad words and the minimum

PROMPT, OUTPUT = [1, 1, 3], [3, 4, 4, 4]


def history(
    ids: list[int], size: int, sampling: SamplingParams, continued: int = 0
) -> transformers_step.History:
    request = GenerationRequest("a", ids, 9, end_id=1, sampling=sampling, continued=continued)
    return transformers_step.History(request, size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("sampling", "excluded"),
    [
        pytest.param(SamplingParams(bad_words=((2,), (5,))), {2, 5}, id="words of a token"),
        pytest.param(SamplingParams(bad_words=((4, 2),)), {2}, id="word that the output began"),
        pytest.param(SamplingParams(bad_words=((3, 2),)), set(), id="word that nothing began"),
        pytest.param(
            SamplingParams(bad_words=((4, 4, 4, 0), (4, 4, 0, 1))),
            {0},
            id="words of several tokens",
        ),
        pytest.param(
            SamplingParams(bad_words=((1, 3, 3, 4, 4, 4, 5),)),
            {5},
            id="word that was begun in the prompt",
        ),
        pytest.param(
            SamplingParams(bad_words=((0, 1, 1, 3, 3, 4, 4, 4, 5),)),
            set(),
            id="word that is longer than all there is",
        ),
        pytest.param(SamplingParams(min_tokens=4), set(), id="minimum that is reached"),
        pytest.param(SamplingParams(min_tokens=5), {1}, id="minimum that is not reached"),
    ],
)
def test_bad_words_and_the_minimum(sampling: SamplingParams, excluded: set[int]) -> None:
    """The end token is 1."""
    made, logits = history(PROMPT, 6, sampling), torch.zeros(6)
    found = made.change(logits, PROMPT + OUTPUT)
    assert set(found.isneginf().nonzero()[:, 0].tolist()) == excluded
    assert not logits.any()


def test_penalties_count_on_in_steps_and_in_an_output_that_is_continued() -> None:
    penalties: Any = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    sampling = SamplingParams(**penalties, bad_words=((4, 5),))
    logits = torch.randn(10, generator=torch.Generator().manual_seed(1))
    tokens = [1, 2, 3, 3, 4, 9, 1, 4]
    wanted = history([1, 2], 10, sampling).change(logits, tokens)
    stepwise = history([1, 2], 10, sampling)
    for cut in range(2, len(tokens)):
        stepwise.change(logits, tokens[:cut])
        continued = history(tokens[:cut], 10, sampling, continued=cut - 2)
        assert torch.equal(continued.change(logits, tokens), wanted)
    assert torch.equal(stepwise.change(logits, tokens), wanted)
