"""vLLM itself, where it is installed; what holds for every engine is in test_engines.py."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.engines.base import (
    EngineError,
    EngineUnavailable,
    SamplingParams,
)
from cog_triton.engines.create import create_engine
from cog_triton.guide import Guide, GuideKind
from tests.support import wait_until
from tests.unit.engines.test_engines import (
    ENGINES,
    NEEDS_VLLM,
    PROMPT,
    TIMEOUT,
    Requests,
    Stream,
    request,
)

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def llm(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requests]:
    parameters = {
        **ENGINES["vllm"](demo_model),
        "guided_decoding_backend": "xgrammar",
        "lora_prefetch_dir": str(tmp_path_factory.mktemp("adapters")),
        "lora_cache_max_adapter_size": "8",
    }
    engine = create_engine(parameters)
    yield Requests(engine)
    engine.close()


RANDOM = SamplingParams(temperature=1.5, top_p=1.0, seed=7)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed(llm: Requests, seed: int) -> None:
    params = SamplingParams(temperature=1.5, top_p=1.0, seed=seed)
    alone = llm.ids(max_tokens=30, sampling=params)
    others = [llm.start(max_tokens=20 + i, sampling=RANDOM) for i in range(5)]
    assert llm.ids(max_tokens=30, sampling=params) == alone
    for stream in others:
        stream.wait()
    assert llm.ids(max_tokens=30, sampling=RANDOM) != alone


def test_bad_words_are_not_chosen(llm: Requests) -> None:
    plain = llm.ids(max_tokens=20)
    words = ((plain[0],), (plain[3], plain[4]))
    ids = llm.ids(max_tokens=20, sampling=SamplingParams(bad_words=words))
    assert plain[0] not in ids
    assert (plain[3], plain[4]) not in pairwise(ids)


def test_a_bias_of_logits(llm: Requests) -> None:
    assert llm.ids(max_tokens=5, logit_bias={77: 100.0}) == [77] * 5


def test_the_end_token_waits_for_the_minimum(llm: Requests) -> None:
    plain = llm.ids(max_tokens=20)
    params = SamplingParams(min_tokens=15)
    assert llm.ids(max_tokens=20, end_id=plain[0]) == plain[:1]
    ids = llm.ids(max_tokens=20, end_id=plain[0], sampling=params)
    assert len(ids) >= 15
    assert plain[0] not in ids[:15]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_change_the_answer(llm: Requests, name: str) -> None:
    plain = llm.ids(max_tokens=60)
    strong: Any = {name: 2.0}
    assert llm.ids(max_tokens=60, sampling=SamplingParams(**strong)) != plain


def test_a_greedy_continuation_is_the_rest(llm: Requests) -> None:
    whole = llm.ids(max_tokens=40)
    assert llm.ids([*PROMPT, *whole[:15]], max_tokens=25, continued=15) == whole[15:]


def test_a_guide(llm: Requests, demo_model: Path) -> None:
    from cog_triton.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(demo_model))
    guide = Guide(GuideKind.REGEX, "(yes|no), [0-9]{3}")
    ids = llm.ids(max_tokens=30, end_id=tokenizer.eos_token_id, guide=guide)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text[:4] in ("yes,", "no, ")
    assert text[-3:].isdigit()
    with pytest.raises(EngineError, match="cannot be continued"):
        llm.start(guide=guide, continued=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": [5, 5000]}, "token ids must be between 0 and 1023"),
        ({"end_id": 1024}, r"EndId \(1024\) is not within acceptable range"),
        ({"sampling": SamplingParams(presence_penalty=3.0)}, "presence_penalty must be in"),
        ({"sampling": SamplingParams(temperature=5.0, top_k=9)}, "temperature must be in"),
        ({"lora_task_id": 3}, "there is no such adapter"),
    ],
)
def test_what_is_refused(llm: Requests, values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        llm.start(**values)
    assert llm.engine.active() == 0


def test_a_guide_that_is_none_fails_its_request_alone(llm: Requests) -> None:
    stream = llm.start(guide=Guide(GuideKind.JSON_SCHEMA, "{not json"))
    while not (last := stream.next()).finished:
        pass
    assert last.error
    assert last.refused
    assert "engine has stopped" not in last.error
    assert len(llm.ids()) == 8


@pytest.mark.parametrize("which", ["EngineCore", "VllmWorker"])
def test_a_process_of_its_that_is_killed_ends_the_engine(which: str, demo_model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    engine = create_engine(ENGINES["vllm"](demo_model))
    told = threading.Event()
    engine.on_death(told.set)
    mine = set(psutil.Process().children(recursive=True)) - before
    try:
        stream = Stream()
        engine.submit(request(max_tokens=1500), stream)
        stream.next()
        cores = {process.pid for process in multiprocessing.active_children()}
        core = next(p for p in mine if p.pid in cores)
        worker = next(p for p in core.children() if "resource_tracker" not in str(p.cmdline()))
        (core if which == "EngineCore" else worker).kill()

        while not (last := stream.next()).finished:
            pass

        assert last.error is not None
        assert last.error.startswith("the engine has stopped: ")
        assert told.wait(TIMEOUT)
        with pytest.raises(EngineUnavailable, match="the engine has stopped"):
            engine.submit(request(), Stream())
    finally:
        engine.close()

    def ended() -> bool:
        return not any("multiprocessing.spawn" in " ".join(p.cmdline()) for p in alive(mine))

    wait_until(ended, TIMEOUT, "the end of vLLM's processes")


def alive(processes: set[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
