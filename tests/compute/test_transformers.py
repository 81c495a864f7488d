"""The engine on transformers, against transformers' own generate() and the model's logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import (
    EngineError,
    SamplingParams,
    TokenLogProb,
    create_engine,
)
from cog_triton.request.request import Guide, GuideKind
from tests.engines import ENGINES, RANDOM, TIMEOUT, Requests, Stream, running
from tests.late import torch, transformers, transformers_engine, transformers_step

PAGE_TOKENS = 64
BATCH_TOKENS = 256  # a longer prompt is prefilled in pieces


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model).eval()


def next_logits(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The logits before each token of the output, shape [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0].float()
    return torch.as_tensor(logits[len(prompt) - 1 : -1])


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """Each token is the likeliest one, but for rounding: kernels differ where two are as likely."""
    logits = next_logits(model, prompt, output)
    taken = logits.gather(1, torch.tensor(output).unsqueeze(-1)).squeeze(-1)
    assert float((logits.amax(-1) - taken).max()) < 1e-3


@pytest.mark.parametrize("length", [BATCH_TOKENS - 1, BATCH_TOKENS, 700])
def test_a_long_prompt_is_prefilled_in_pieces_beside_others(
    llm: Requests, reference: Any, prompts: list[list[int]], length: int
) -> None:
    long = [*chain(*prompts * 2)][:length]
    streams = {tuple(one): llm.start(one, max_tokens=20) for one in (*prompts[:3], long)}
    for prompt, stream in streams.items():
        assert_greedy(reference, list(prompt), stream.wait().ids)


@pytest.mark.parametrize(
    ("top", "sampling"),
    [
        (0, SamplingParams()),
        (1, replace(RANDOM, presence_penalty=2.0, min_p=0.01)),
        (3, SamplingParams(top_k=5, presence_penalty=-8.0, seed=3)),
    ],
)
def test_log_probs_are_those_of_the_models_unchanged_distribution(
    llm: Requests, reference: Any, prompts: list[list[int]], top: int, sampling: SamplingParams
) -> None:
    asking: dict[str, Any] = {"return_log_probs": True, "top_log_probs": top}
    stream = llm.start(prompts[0], sampling=sampling, logit_bias={9: 3.0}, **asking)
    ids = stream.wait().ids
    logits = next_logits(reference, prompts[0], ids).log_softmax(-1)
    own = [logits[i, token].item() for i, token in enumerate(ids)]
    assert stream.log_probs == pytest.approx(own, abs=2e-3)
    for token, best in zip(stream.tokens, logits.topk(top).values.tolist(), strict=True):
        assert [value for _, value in token.top] == pytest.approx(best, abs=2e-3)
        # The same number, not one nearly the same.
        assert dict(token.top).get(token.id, token.log_prob) == token.log_prob


@pytest.mark.parametrize("length", [1, PAGE_TOKENS, 700])
def test_log_probs_of_the_prompt_are_those_of_the_models_distribution(
    llm: Requests, reference: Any, prompts: list[list[int]], length: int
) -> None:
    """In pieces, beside another request, and where others have had the same beginning."""
    prompt = [*chain(*prompts * 9)][:length]
    plain = llm.ids(prompt)
    streams = [llm.start(prompt, prompt_log_probs=True, top_log_probs=2) for _ in range(2)]

    expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    most = expected.topk(2).values
    for stream in streams:
        first, *rest = stream.wait().all[0].prompt_log_probs
        assert first == TokenLogProb(prompt[0], 0.0)
        assert [one.id for one in rest] == prompt[1:]
        for i, one in enumerate(rest):
            assert one.log_prob == pytest.approx(expected[i, one.id].item(), abs=2e-3)
            assert [v for _, v in one.top] == pytest.approx(most[i].tolist(), abs=2e-3)
        assert stream.ids == plain


# When the KV cache is full


class Crowded(Requests):
    """On an engine on transformers whose KV cache holds little more than one sequence of its context."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        processor = engine._manager.batch_processor
        self.active = processor.scheduler.active_requests
        self.resets = 0
        self.on_reset: Callable[[], object] = lambda: None
        offload = processor.offloading_manager.offload_requests

        def counted() -> bool:
            done: bool = offload()
            if processor.scheduler.block_new_requests:
                self.resets += 1
                self.on_reset()
            return done

        processor.offloading_manager.offload_requests = counted


@pytest.fixture
def small(demo_model: Path) -> Iterator[Crowded]:
    parameters = {**ENGINES["transformers"](demo_model), "tokenizer_dir": str(demo_model)}
    limits = {"max_seq_len": "128", "max_tokens_in_paged_kv_cache": "256"}
    with running({**parameters, **limits}) as requests:
        yield Crowded(requests.engine)


def test_more_requests_than_the_cache_holds(
    small: Crowded, llm: Requests, prompts: list[list[int]], tokenizer: Any
) -> None:
    samplings = [
        SamplingParams(),
        replace(RANDOM, seed=1),
        replace(RANDOM, seed=2, frequency_penalty=0.5, repetition_penalty=1.1),
        SamplingParams(presence_penalty=1.0, bad_words=((40,), (41, 42))),
        replace(RANDOM, top_p=0.9, seed=2**64 - 1),
    ]
    asking: dict[str, Any] = {"max_tokens": 60, "return_log_probs": True, "top_log_probs": 1}
    values = [
        {"input_ids": prompts[i] * 4, "sampling": sampling, **asking}
        for i, sampling in enumerate(samplings)
    ]
    guide = Guide(GuideKind.REGEX, "([a-z]{1,4}, ){400}")  # more than max_tokens
    values[1] |= {"guide": guide, "end_id": tokenizer.eos_token_id}
    wanted = [llm.start(**one) for one in values]
    streams = [small.start(**one, prompt_log_probs=True) for one in values]

    for one, stream, other in zip(values, streams, wanted, strict=True):
        assert stream.wait().ids == other.wait().ids
        assert stream.log_probs == pytest.approx(other.log_probs, abs=2e-3)
        assert all(len(step.ids) == 1 for step in stream.all)
        assert [token.id for token in stream.tokens] == stream.ids
        assert {len(token.top) for token in stream.tokens} == {1}
        # Of the prompt once, though it goes through the model twice.
        prompt = [token.id for step in stream.all for token in step.prompt_log_probs]
        assert prompt == one["input_ids"]
    assert small.resets > 0
    assert len(small.engine.running) == 0


def test_an_abort_lets_in_what_waits_for_room(small: Crowded, prompts: list[list[int]]) -> None:
    streams: dict[str, Stream] = {}
    aborted = threading.Event()

    def abort_the_running() -> None:
        if not aborted.is_set():
            for key in map(transformers_step.request_key, list(small.active)):
                small.engine.abort(key)
                del streams[key]
            aborted.set()

    small.on_reset = abort_the_running
    for i in range(4):
        streams[str(i)] = Stream()
        small.start(prompts[i] * 4, streams[str(i)], key=str(i), max_tokens=80)

    assert aborted.wait(TIMEOUT)
    assert 0 < len(streams) < 4
    for stream in streams.values():
        assert len(stream.wait().ids) == 80


# What must not end the engine, and what does


def test_a_cancellation_that_overtakes_its_request_is_repeated(
    llm: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager: Any = llm.engine._manager  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(manager, "cancel_request", lambda _: None)
        llm.start(key="lost", max_tokens=500)
        llm.engine.abort("lost")
    llm.ids(max_tokens=20)  # by its end the engine has come to the second
    active = manager.batch_processor.scheduler.active_requests
    assert not [key for key in active if transformers_step.request_key(key) == "lost"]


def test_when_the_model_fails_everything_ends_with_the_reason(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    def break_it(stream: Stream) -> None:
        if len(stream.all) == 3:
            monkeypatch.setattr(llm.engine._manager.batch_processor.model_runner, "_sample", fail)

    with running(ENGINES["transformers"](demo_model)) as llm:
        for stream in [llm.start(stream=s, max_tokens=100) for s in (Stream(break_it), Stream())]:
            last = stream.last()
            assert (last.ids, str(last.error)) == ([], "the engine has stopped: out of memory")
            assert len(stream.ids) < 10
        assert len(llm.engine.running) == 0
        with pytest.raises(EngineError, match="the engine has stopped: out of memory"):
            llm.start()


# Its configuration


def test_batching(reference: Any) -> None:
    assert transformers_engine.CPU_PAGE_TOKENS == PAGE_TOKENS
    assert transformers_engine.CPU_BATCH_TOKENS == BATCH_TOKENS
    config = transformers_engine.batching_config(reference, 2048, {})
    tokens = config.num_blocks * PAGE_TOKENS
    text = reference.config
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    # With the attention mask that goes with it.
    assert (
        transformers_engine.CPU_CACHE_BYTES * 0.99
        < (tokens * (per_token + BATCH_TOKENS * 4))
        <= transformers_engine.CPU_CACHE_BYTES
    )
    assert config.allow_block_sharing

    given = {"enable_kv_cache_reuse": "false", "max_tokens_in_paged_kv_cache": "1000"}
    config = transformers_engine.batching_config(reference, 512, given)
    assert not config.allow_block_sharing
    assert config.num_blocks == 1000 // PAGE_TOKENS
    with pytest.raises(ValueError, match=r"cache=128 .* 256 tokens; the minimum is 320"):
        transformers_engine.batching_config(reference, 256, {"max_tokens_in_paged_kv_cache": "128"})


def test_what_needs_a_directory_or_a_tokenizer_is_refused_without(demo_model: Path) -> None:
    with pytest.raises(ValueError, match=r"MAX_SEQUENCE_LENGTH=100000 .* the 2048 tokens"):
        create_engine({**ENGINES["transformers"](demo_model), "max_seq_len": "100000"})
    with running(ENGINES["transformers"](demo_model)) as plain:
        assert plain.engine.context_length == 2048  # the model's
        assert plain.engine.features.isdisjoint({"guided_decoding", "lora_task_id"})
        with pytest.raises(EngineError, match="does not support guided_decoding_guide"):
            plain.start(guide=Guide(GuideKind.JSON), end_id=2)
        with pytest.raises(EngineError, match="does not support lora_task_id without LORA_DIR"):
            plain.start(lora_task_id=3)
        assert len(plain.engine.running) == 0


@pytest.mark.parametrize("place", ["in the choice of its token", "in its delivery"])
def test_a_request_that_fails_in_a_step_fails_alone(
    llm: Requests, prompts: list[list[int]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = prompts[1] * 9
    assert len(long) > len(prompts[0]) + 12

    def fail(length: int) -> None:
        if length > len(long) + 1:
            raise IndexError("out of bounds")

    expected = llm.ids(prompts[0], max_tokens=12)
    if place == "in the choice of its token":
        change = transformers_step.History.change

        def change_or_fail(
            self: transformers_step.History, logits: Any, tokens: list[int], *args: Any
        ) -> Any:
            fail(len(tokens))
            return change(self, logits, tokens, *args)

        monkeypatch.setattr(transformers_step.History, "change", change_or_fail)
    else:
        rope = llm.engine._processor.rope  # type: ignore[attr-defined]
        monkeypatch.setattr(rope, "outgrown", lambda _, length: fail(length))
    failing = llm.start(long, max_tokens=200, sampling=SamplingParams(min_tokens=150))
    other = llm.start(prompts[0], max_tokens=12)
    assert str(failing.last().error) == "the engine failed a request: IndexError: out of bounds"
    assert other.wait().ids == expected
    assert not llm.engine.running
