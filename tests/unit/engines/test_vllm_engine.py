"""vLLM itself, where it is installed; what holds for every engine is in test_engines.py."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from cog_triton.engines.base import (
    EngineError,
    EngineUnavailable,
    SamplingParams,
)
from cog_triton.engines.create import create_engine
from cog_triton.guide import Guide, GuideKind
from cog_triton.protocol import adapter_task_id
from cog_triton.text.tokenizer import load_tokenizer
from tests.support import wait_until
from tests.unit.engines.test_engines import (
    ENGINES,
    NEEDS_VLLM,
    PROMPT,
    TIMEOUT,
    Requests,
    Stream,
    assert_greedy,
    request,
)
from tools.demo_model.corpus import PAIRS

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def llm(demo_model: Path, adapters: Path) -> Iterator[Requests]:
    parameters = {
        **ENGINES["vllm"](demo_model),
        "guided_decoding_backend": "xgrammar",
        "lora_prefetch_dir": str(adapters),
        "lora_cache_max_adapter_size": "8",
    }
    engine = create_engine(parameters)
    yield Requests(engine)
    engine.close()


RANDOM = SamplingParams(temperature=1.5, top_p=1.0, seed=7)


def save_adapter(directory: Path, model: Any) -> None:
    """Saves an adapter of a model's queries as PEFT does, and adds to the model what it would add."""
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            a = torch.randn(8, module.in_features, generator=generator)
            b = torch.randn(module.out_features, 8, generator=generator) * 0.1
            weights |= {
                f"base_model.model.{name}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))
            }
            module.weight.data += 2 * b @ a
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))


def test_an_adapter_that_appears_while_the_engine_runs(
    llm: Requests, adapters: Path, demo_model: Path
) -> None:
    task_id = adapter_task_id("poet")
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype="float32").eval()
    prompt = load_tokenizer(str(demo_model))(PAIRS[0].question).input_ids
    with pytest.raises(EngineError, match="there is no such adapter"):
        llm.start(lora_task_id=task_id)

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype="float32").eval()
    save_adapter(adapters / "poet", model)
    streams = [llm.start(prompt, lora_task_id=task_id * (i % 2)) for i in range(6)]
    ids = [stream.wait().ids for stream in streams]

    for i, output in enumerate(ids):
        assert_greedy(model if i % 2 else base, prompt, output)
    assert ids[0] != ids[1]


def test_log_probs_have_the_most_likely_tokens(llm: Requests) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=1.0, min_p=0.02, seed=3)
    values: dict[str, Any] = {"sampling": sampling, "return_log_probs": True}
    stream = llm.start(max_tokens=20, top_log_probs=3, **values).wait()
    top = [place for tokens in stream.all for place in tokens.top_log_probs]
    assert [len(place) for place in top] == [3] * 20
    for token, value, place in zip(stream.ids, stream.log_probs, top, strict=True):
        assert place[0][1] >= place[1][1] >= place[2][1]
        assert dict(place).get(token, value) == value


def test_min_p_of_1_is_greedy(llm: Requests) -> None:
    greedy = llm.ids(max_tokens=12)
    assert llm.ids(max_tokens=12, sampling=RANDOM) != greedy
    assert llm.ids(max_tokens=12, sampling=replace(RANDOM, min_p=1.0)) == greedy


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
