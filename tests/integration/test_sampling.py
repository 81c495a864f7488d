"""What a request may ask, by generate() on a real server: sampling against transformers', and the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidParameter
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import Triton
from tests.integration.test_generation import ask, collect, greedy, text, with_client
from tests.late import torch, transformers
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
NO_TOKEN = 10**6  # as an end token for transformers, which no model makes
LENGTH = 40

Compare = Callable[[Mapping[str, Any], Mapping[str, Any]], list[int]]


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model).eval()


class Subtract:
    """A logits processor: OpenAI's penalties, which transformers lacks: of tokens in the output alone."""

    def __init__(self, prompt: int, *, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token, count in Counter(input_ids[0, self._prompt :].tolist()).items():
            scores[0, token] -= self._presence + self._frequency * count
        return scores


@pytest.fixture
def compare(triton: Triton, tokenizer: Tokenizer, model: Any) -> Compare:
    """Asks both, and returns the ids if they are the same."""

    def ask_both(values: Mapping[str, Any], reference: Mapping[str, Any]) -> list[int]:
        request = greedy(QUESTION, **{"max_tokens": LENGTH, **values})
        ids = ids_of(ask(request, triton, tokenizer, "grpc"))
        prompt = tokenizer(QUESTION, return_tensors="pt").input_ids
        options = {"max_new_tokens": request.max_tokens, "do_sample": False, **reference}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert ids == expected[0, prompt.shape[1] :].tolist()
        return ids

    return ask_both


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> list[int]:
    """The ids of the answer."""
    ids: list[int] = tokenizer(ANSWER, add_special_tokens=False).input_ids
    return ids


def test_what_changes_an_answer(compare: Compare, tokenizer: Tokenizer, plain: list[int]) -> None:
    prompt = len(tokenizer(QUESTION).input_ids)
    words = (ANSWER.split()[3], "of")
    forms = [form for word in words for form in (word, f" {word}")]
    bad_ids = [tokenizer(form, add_special_tokens=False).input_ids for form in forms]
    biases = {plain[2]: -20.0, plain[5]: 3.0, 300: 2.5, 400: -1.0}
    sequences = {(token,): bias for token, bias in biases.items()}
    for values, reference in (
        ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"presence_penalty": 40.0}, {"logits_processor": [Subtract(prompt, presence=40.0)]}),
        ({"frequency_penalty": 40.0}, {"logits_processor": [Subtract(prompt, frequency=40.0)]}),
        ({"bad_words": words}, {"bad_words_ids": bad_ids}),
        ({"logit_bias": tuple(biases.items())}, {"sequence_bias": sequences}),
    ):
        assert compare(values, reference) != plain[:LENGTH], values


def test_where_an_answer_ends(compare: Compare, tokenizer: Tokenizer, plain: list[int]) -> None:
    """The end token is part of the ids, as transformers has it."""
    end_id, length = plain[9], len(plain) + 10
    assert compare({"end_id": end_id}, {"eos_token_id": end_id}) == plain[: plain.index(end_id) + 1]
    least = {"min_tokens": length, "max_tokens": length}
    assert len(compare(least, {"min_new_tokens": length})) == length
    ids = compare({"ignore_eos": True, "max_tokens": length}, {"eos_token_id": NO_TOKEN})
    assert len(ids) == length
    assert ids[len(plain)] == tokenizer.eos_token_id


def test_min_p(triton: Triton, tokenizer: Tokenizer, plain: list[int]) -> None:
    request = Request(QUESTION, 7, max_tokens=LENGTH, temperature=2.0, top_p=1.0, min_p=1.0)
    assert ids_of(ask(request, triton, tokenizer, "grpc")) == plain[:LENGTH]


def test_samples_have_the_distribution_that_the_bias_makes(
    triton: Triton, tokenizer: Tokenizer, model: Any
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

    values: Any = {"max_tokens": 1, "temperature": 0.8, "top_p": 1.0}

    async def first(seed: int, client: Any) -> int:
        request = Request(QUESTION, seed, logit_bias=tuple(biases.items()), **values)
        return (await collect(request, client, tokenizer))[-1].ids[0]

    async def use(client: Any) -> list[int]:
        await first(0, client)  # connected, before many keep this process busy
        return await asyncio.gather(*(first(seed, client) for seed in range(count)))

    drawn = Counter(with_client("grpc", triton, use))
    for token in biases:
        mean = count * float(expected[token])
        assert mean > 20
        assert abs(drawn[token] - mean) < 4 * (mean * (1 - mean / count)) ** 0.5


# Beyond text and sampling


def test_log_probabilities(triton: Triton, transport: str, tokenizer: Tokenizer) -> None:
    def places_of(**values: Any) -> list[TokenLogProb]:
        request = greedy(QUESTION, max_tokens=12, **values)
        chunks = ask(request, triton, tokenizer, transport)
        assert ANSWER.startswith(text(chunks))
        places = [place for chunk in chunks for place in chunk.log_probs]
        assert [place.id for place in places] == ids_of(chunks) * bool(places)
        return places

    places = places_of(log_probs=3)
    assert len(places) == 12
    for place in places:
        assert len(place.top) == 3
        assert place.top[0] == (place.id, place.log_prob)  # greedy takes the most likely
        assert sorted((-value for _, value in place.top)) == [-value for _, value in place.top]
    chosen = places_of(log_probs=0)
    values = [place.log_prob for place in places]
    assert [place.log_prob for place in chosen] == pytest.approx(values, abs=1e-4)
    assert all(place.top == () for place in chosen)
    assert places_of() == []
    request = greedy(QUESTION, max_tokens=12, log_probs=0, prompt_log_probs=True)
    first, *others = ask(request, triton, tokenizer, transport)
    assert [place.id for place in first.prompt_log_probs] == tokenizer(QUESTION).input_ids
    assert not any(chunk.prompt_log_probs for chunk in others)


def test_structured_output(triton: Triton, transport: str, tokenizer: Tokenizer) -> None:
    guide = Guide(GuideKind.CHOICE, '["yes", "no (never)"]')
    for max_tokens, reason in ((50, "stop"), (1, "length")):
        request = Request(QUESTION, 1, temperature=1.5, guide=guide, max_tokens=max_tokens)
        chunks = ask(request, triton, tokenizer, transport)
        assert chunks[-1].finish_reason == reason
        assert (text(chunks) in ("yes", "no (never)")) == (reason == "stop")
    with pytest.raises(InvalidParameter, match=r"type regex cannot be used: .*unclosed"):
        ask(greedy(QUESTION, guide=Guide(GuideKind.REGEX, "[")), triton, tokenizer, transport)
