"""The contract that every engine keeps, and that of sampling for those that compute probabilities."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import EngineError, SamplingParams, create_engine
from tests.engines import (
    ENGINES,
    EVERY_ENGINE,
    PROMPT,
    VLLM,
    Requests,
    Stream,
    request,
    running,
)

# vLLM takes no higher temperature than 2.
WARM = SamplingParams(temperature=2.0, top_p=1.0, seed=7)


@pytest.fixture(scope="module", params=EVERY_ENGINE)
def parameters(
    request: pytest.FixtureRequest,
    demo_model: Path,
    fake_tensorrt_llm: Any,  # noqa: ARG001
) -> dict[str, str]:
    return ENGINES[request.param](demo_model)


@pytest.fixture(scope="module")
def engine(parameters: dict[str, str]) -> Iterator[Requests]:
    with running(parameters) as requests:
        yield requests


def test_tokens_come_in_pieces_and_end_once(engine: Requests) -> None:
    stream = engine.start(max_tokens=20).wait()
    engine.ids()  # whatever would still come has come by now

    assert [step.finished for step in stream.all] == [False] * (len(stream.all) - 1) + [True]
    assert len(stream.all) > 1
    assert all(step.ids for step in stream.all[:-1])
    assert not any(step.log_probs for step in stream.all)
    assert len(stream.ids) == 20
    assert stream.ids == engine.ids(max_tokens=20)
    assert engine.ids(max_tokens=1) == stream.ids[:1]


def test_an_answer_does_not_depend_on_other_requests(engine: Requests) -> None:
    prompts = [[5 + i, 6, 7 + i, *range(20, 20 + i)] for i in range(6)]
    alone = [engine.ids(prompt, max_tokens=12) for prompt in prompts]

    streams = [engine.start(prompt, max_tokens=12) for prompt in prompts]

    assert [stream.wait().ids for stream in streams] == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_a_short_request_does_not_wait_for_a_long_one(engine: Requests) -> None:
    short, has_ended = Stream(), []

    def on_step(long: Stream) -> None:
        if len(long.all) == 1:
            engine.start(stream=short, max_tokens=5)
        has_ended.append(short.finished)

    engine.start(stream=Stream(on_step), max_tokens=200).wait()
    assert has_ended[-1]


@pytest.mark.parametrize("after", [0, 3])
def test_an_abort_ends_the_tokens(engine: Requests, after: int) -> None:
    one, reached = request(max_tokens=400), threading.Event()

    def abort(stream: Stream) -> None:
        if len(stream.ids) >= after and not reached.is_set():
            engine.engine.abort(one.key)
            reached.set()

    stream = Stream(abort)
    engine.engine.submit(one, stream)
    if not after:
        abort(stream)
    assert reached.wait(60)
    engine.ids()
    had = len(stream.ids)
    engine.ids(max_tokens=20)

    assert had == len(stream.ids) < 10
    assert not stream.finished
    assert len(engine.engine.running) == 0


def test_an_abort_of_what_is_not_there_does_nothing(engine: Requests) -> None:
    engine.engine.abort("unknown")
    engine.start(key="ended").wait()
    engine.engine.abort("ended")
    assert len(engine.ids()) == 8


def test_log_probs_come_when_asked_for(engine: Requests) -> None:
    streams = [engine.start(return_log_probs=i == 1, max_tokens=9) for i in range(3)]
    assert [len(stream.wait().tokens) for stream in streams] == [0, 9, 0]
    asking = streams[1]
    assert all([t.id for t in step.log_probs] == step.ids for step in asking.all)
    assert all(value <= 0 for value in asking.log_probs)


def test_the_end_token_ends_the_output_and_is_part_of_it(engine: Requests) -> None:
    ids = engine.ids(max_tokens=30)
    end = next(i for i in range(3, 30) if ids[i] not in ids[:i])
    assert engine.ids(max_tokens=30, end_id=ids[end]) == ids[: end + 1]


def test_any_of_several_end_tokens_ends_the_output(engine: Requests) -> None:
    ids = engine.ids(max_tokens=30)
    first, second = [i for i in range(3, 30) if ids[i] not in ids[:i]][:2]
    never = next(token for token in range(10, 1000) if token not in ids)
    for end_id, others in ((never, (ids[second], ids[first])), (ids[first], (ids[second],))):
        found = engine.ids(max_tokens=30, end_id=end_id, other_end_ids=others)
        assert found == ids[: first + 1]


def test_no_end_token_comes_before_the_minimum(engine: Requests) -> None:
    ids = engine.ids(max_tokens=30)
    first, second = [i for i in range(3, 30) if ids[i] not in ids[:i]][:2]
    ends: Any = {"end_id": ids[first], "other_end_ids": (ids[second],)}
    found = engine.ids(max_tokens=30, sampling=SamplingParams(min_tokens=second + 2), **ends)
    assert len(found) >= second + 2


def test_the_context_length(parameters: dict[str, str]) -> None:
    with running(parameters, max_seq_len="300") as engine:
        assert engine.engine.context_length == 300
        assert len(engine.ids(PROMPT * 50, max_tokens=50)) == 50  # all of it can be used


def test_closing_ends_the_threads_and_drops_what_runs(parameters: dict[str, str]) -> None:
    before = set(threading.enumerate())
    engine = create_engine(parameters)
    stream = Requests(engine).start(max_tokens=500)
    assert set(threading.enumerate()) > before
    stream.next()

    engine.close()

    assert set(threading.enumerate()) <= before
    had = len(stream.all)
    engine.abort("unknown")
    with pytest.raises(EngineError, match="the engine has stopped"):
        engine.submit(request(), Stream())
    assert len(stream.all) == had
    assert len(engine.running) == 0 or not stream.finished
    engine.close()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine 'none'; the known ones are"):
        create_engine({"engine": "none"})


# Sampling


@pytest.fixture(scope="module", params=["transformers", VLLM])
def sampler(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Requests]:
    with running(ENGINES[request.param](demo_model)) as requests:
        yield requests


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed_gives_the_same_ids_alone_and_among_others(sampler: Requests, seed: int) -> None:
    sampling = replace(WARM, seed=seed)
    alone = sampler.ids(max_tokens=16, sampling=sampling)
    kinds = [SamplingParams(i % 3, i % 4 * 20, 1 - i % 2 / 4, seed=i) for i in range(8)]
    others = [sampler.start(max_tokens=13 + i, sampling=kind) for i, kind in enumerate(kinds)]
    assert sampler.ids(max_tokens=16, sampling=sampling) == alone
    for stream in others:
        stream.wait()
    assert sampler.ids(max_tokens=16, sampling=replace(WARM, seed=seed ^ 7)) != alone


def test_sampled_text_that_is_continued_goes_on_as_it_would_have(sampler: Requests) -> None:
    """As on the next server, after one has died: with penalties that count what was delivered."""
    sampling = replace(WARM, presence_penalty=0.3, repetition_penalty=1.1)
    whole = sampler.ids(max_tokens=20, sampling=sampling)
    for delivered in (1, 9, 19):
        rest = sampler.ids(
            PROMPT + whole[:delivered],
            max_tokens=20 - delivered,
            sampling=sampling,
            continued=delivered,
        )
        assert rest == whole[delivered:]


def test_a_bias_and_the_allowed_tokens(sampler: Requests) -> None:
    assert sampler.ids(max_tokens=5, logit_bias={77: 100.0}) == [77] * 5
    assert sampler.ids(max_tokens=9, allowed_ids=(77,)) == [77] * 9
    sampling = replace(WARM, frequency_penalty=1.0)
    assert {*sampler.ids(max_tokens=20, allowed_ids=(264, 270), sampling=sampling)} == {264, 270}


@pytest.mark.parametrize("top", [2, 0])
def test_log_probs_of_the_prompt(sampler: Requests, top: int) -> None:
    """They are those that its tokens have when they are generated. The prefix cache does not have them."""
    prompt = [*PROMPT, *sampler.ids(max_tokens=8)]
    made = sampler.start(max_tokens=8, return_log_probs=True).wait()
    values: dict[str, Any] = {"return_log_probs": True, "top_log_probs": top}
    stream = sampler.start(prompt, prompt_log_probs=True, **values).wait()
    found = stream.all[0].prompt_log_probs
    assert [one.id for one in found] == prompt
    assert [len(one.top) for one in found] == [0, *[top] * (len(prompt) - 1)]
    assert [one.log_prob for one in found[-8:]] == pytest.approx(made.log_probs, abs=2e-2)
    assert not any(step.prompt_log_probs for step in stream.all[1:])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": [5, 5000]}, "token ids must be between 0 and 1023"),
        ({"input_ids": [-1]}, "token ids must be between 0 and 1023"),
        ({"end_id": 1024}, r"EndId \(1024\) is not within acceptable range \[-1, 1024\)"),
        ({"allowed_ids": (10**6,)}, "token ids must be between 0 and 1023"),
        ({"sampling": SamplingParams(bad_words=((5, 1024),))}, "token ids must be between 0 and"),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(
    sampler: Requests, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        sampler.start(**values)
    assert len(sampler.engine.running) == 0
    assert len(sampler.ids()) == 8
