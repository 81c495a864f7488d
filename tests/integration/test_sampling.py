"""What each sampling parameter does, by generate() on a real server, against transformers' generate()."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

from cog_triton.models.preprocessing import variants
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.test_generation import (
    ANSWER,
    QUESTION,
    collect,
    greedy,
    text,
    with_client,
)

NO_TOKEN = 10**6  # as an end token for transformers, which no model makes
LENGTH = 40

Compare = Callable[[Mapping[str, Any], Mapping[str, Any]], list[int]]


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model).eval()


class Subtract(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """OpenAI's penalties, which transformers lacks: of tokens in the output alone."""

    def __init__(self, prompt: int, *, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token, count in Counter(input_ids[0, self._prompt :].tolist()).items():
            scores[0, token] -= self._presence + self._frequency * count
        return scores


@pytest.fixture
def compare(triton: TritonServer, tokenizer: Tokenizer, model: Any) -> Compare:
    """Asks both, and returns the ids if they are the same."""

    def ask(values: Mapping[str, Any], reference: Mapping[str, Any]) -> list[int]:
        request = greedy(QUESTION, **{"max_tokens": LENGTH, **values})
        chunks = with_client("grpc", triton, lambda c: collect(request, c, tokenizer))
        ids = [token for chunk in chunks for token in chunk.ids]
        prompt = tokenizer(QUESTION, return_tensors="pt").input_ids
        options = {"max_new_tokens": request.max_tokens, "do_sample": False, **reference}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert ids == expected[0, prompt.shape[1] :].tolist()
        return ids

    return ask


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> list[int]:
    """The ids of the answer."""
    ids: list[int] = tokenizer(ANSWER, add_special_tokens=False).input_ids
    return ids


def test_without_parameters(compare: Compare, plain: list[int]) -> None:
    assert compare({}, {}) == plain[:LENGTH]


def test_a_repetition_penalty(compare: Compare, plain: list[int]) -> None:
    assert compare({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}) != plain[:LENGTH]


@pytest.mark.parametrize("name", ["presence", "frequency"])
def test_other_penalties(
    compare: Compare, tokenizer: Tokenizer, plain: list[int], name: str
) -> None:
    prompt = len(tokenizer(QUESTION).input_ids)
    reference = {"logits_processor": [Subtract(prompt, **{name: 40.0})]}
    assert compare({f"{name}_penalty": 40.0}, reference) != plain[:LENGTH]


def test_bad_words(compare: Compare, tokenizer: Tokenizer, plain: list[int]) -> None:
    words = (ANSWER.split()[3], "of")
    ids = [tokenizer(w, add_special_tokens=False).input_ids for w in variants(words)]
    assert compare({"bad_words": words}, {"bad_words_ids": ids}) != plain[:LENGTH]


def test_a_bias_of_logits(compare: Compare, plain: list[int]) -> None:
    biases = {plain[2]: -20.0, plain[5]: 3.0, 300: 2.5, 400: -1.0}
    reference = {"sequence_bias": {(token,): bias for token, bias in biases.items()}}
    assert compare({"logit_bias": tuple(biases.items())}, reference) != plain[:LENGTH]


def test_a_minimum_length(compare: Compare, plain: list[int]) -> None:
    length = len(plain) + 10
    values = {"min_tokens": length, "max_tokens": length}
    ids = compare(values, {"min_new_tokens": length})
    assert len(ids) == length


def test_an_end_token_of_the_request(compare: Compare, plain: list[int]) -> None:
    """It is part of the ids, as transformers has it."""
    end_id = plain[9]
    assert compare({"end_id": end_id}, {"eos_token_id": end_id}) == plain[: plain.index(end_id) + 1]


def test_end_tokens_that_end_nothing(
    compare: Compare, tokenizer: Tokenizer, plain: list[int]
) -> None:
    length = len(plain) + 10
    ids = compare({"ignore_eos": True, "max_tokens": length}, {"eos_token_id": NO_TOKEN})
    assert len(ids) == length
    assert ids[len(plain)] == tokenizer.eos_token_id


def test_samples_have_the_distribution_that_the_bias_makes(
    triton: TritonServer, tokenizer: Tokenizer, model: Any
) -> None:
    """Of the first token; the seeds are fixed, and so is what comes of them."""
    prompt = tokenizer(QUESTION, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(prompt).logits[0, -1].float()
    top = float(logits.max())
    biases = {token: top - float(logits[token]) + i / 2 for i, token in enumerate((300, 400, 500))}
    for token, bias in biases.items():
        logits[token] += bias
    expected = torch.softmax(logits / 0.8, 0)
    count = 400

    async def first(seed: int, client: Any) -> int:
        request = Request(
            QUESTION,
            seed,
            max_tokens=1,
            temperature=0.8,
            top_p=1.0,
            logit_bias=tuple(biases.items()),
        )
        return (await collect(request, client, tokenizer))[-1].ids[0]

    async def use(client: Any) -> list[int]:
        return await asyncio.gather(*(first(seed, client) for seed in range(count)))

    drawn = Counter(with_client("grpc", triton, use))
    for token in biases:
        mean = count * float(expected[token])
        assert mean > 20
        assert abs(drawn[token] - mean) < 4 * (mean * (1 - mean / count)) ** 0.5


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_prompt_of_token_ids_is_the_prompt(
    triton: TritonServer, tokenizer: Tokenizer, transport: str
) -> None:
    ids = tokenizer(QUESTION).input_ids

    def ask(request: Request) -> tuple[str, int | None]:
        chunks = with_client(transport, triton, lambda c: collect(request, c, tokenizer))
        return text(chunks), chunks[-1].input_tokens

    assert ask(greedy("", prompt_ids=tuple(ids))) == (ANSWER, len(ids))
    assert ask(greedy(QUESTION, add_special_tokens=False))[1] == len(ids) - 1
