"""vLLM itself, where it is installed; what holds for every engine is in test_engines.py."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from transformers import AutoModelForCausalLM

from cog_triton.engines.base import (
    EngineError,
    EngineUnavailable,
    SamplingParams,
    create_engine,
)
from cog_triton.engines.interpreter import LEAST_PRIORITY
from cog_triton.request.request import Guide, GuideKind
from cog_triton.text.tokenizer import load_tokenizer
from cog_triton.wire import adapter_task_id
from tests.adapters import make_adapter, merge
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
def adapters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two adapters, 1 and 2."""
    directory = tmp_path_factory.mktemp("adapters")
    for task_id in (1, 2):
        make_adapter(demo_model, directory / str(task_id), seed=task_id)
    return directory


@pytest.fixture(scope="module")
def llm(
    demo_model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Requests]:
    file = tmp_path_factory.mktemp("vllm") / "vllm.yaml"
    # Else the demo model makes nothing but that between the parts of JSON.
    file.write_text("structured_outputs_config: {backend: xgrammar, disable_any_whitespace: true}")
    parameters = {
        **ENGINES["vllm"](demo_model),
        "guided_decoding_backend": "xgrammar",
        "vllm_config": str(file),
        "lora_prefetch_dir": str(adapters),
        "lora_cache_max_adapter_size": "8",
    }
    engine = create_engine(parameters)
    yield Requests(engine)
    engine.close()


SCHEMA = """{"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"], "additionalProperties": false}"""
TAG = """{"type": "structural_tag", "format": {"type": "tag", "begin": "<a>",
    "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"}}"""
RANDOM = SamplingParams(temperature=2.0, top_p=1.0, seed=7)


def test_log_probs_have_the_most_likely_tokens(llm: Requests) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=1.0, min_p=0.02, seed=3)
    values: dict[str, Any] = {"sampling": sampling, "return_log_probs": True}
    stream = llm.start(max_tokens=20, top_log_probs=3, **values).wait()
    top = [token.top for token in stream.told]
    assert [len(place) for place in top] == [3] * 20
    for token, value, place in zip(stream.ids, stream.log_probs, top, strict=True):
        assert place[0][1] >= place[1][1] >= place[2][1]
        assert dict(place).get(token, value) == value


def test_log_probs_of_the_prompt(llm: Requests) -> None:
    """They are those that its tokens have when they are generated. The prefix cache has them not."""
    prompt = [*PROMPT, *llm.ids(max_tokens=8)]
    made = llm.start(max_tokens=8, return_log_probs=True).wait()
    for top in (2, 0):
        values: dict[str, Any] = {"return_log_probs": True, "top_log_probs": top}
        stream = llm.start(prompt, prompt_log_probs=True, **values).wait()
        told = stream.all[0].prompt_log_probs
        assert [one.id for one in told] == prompt
        assert [len(one.top) for one in told] == [0, *[top] * (len(prompt) - 1)]
        assert [one.log_prob for one in told[-8:]] == pytest.approx(made.log_probs, abs=2e-2)
        assert not any(tokens.prompt_log_probs for tokens in stream.all[1:])


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


def test_only_allowed_tokens_are_chosen(llm: Requests) -> None:
    assert llm.ids(max_tokens=9, allowed_ids=(77,)) == [77] * 9
    ids = llm.ids(max_tokens=30, allowed_ids=(77, 78), sampling=RANDOM)
    assert set(ids) <= {77, 78}


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


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        (Guide(GuideKind.REGEX, "(yes|no), [0-9]{3}"), "(yes|no), [0-9]{3}"),
        (Guide(GuideKind.GRAMMAR, 'root ::= "a" ("b" | "cd") "e"'), "a(b|cd)e"),
        (Guide(GuideKind.JSON_SCHEMA, SCHEMA), r'\{"sky": ?"(blue|grey)"\}'),
        (Guide(GuideKind.JSON), r"\{.*"),
        (Guide(GuideKind.STRUCTURAL_TAG, TAG), "<a>[0-9]{2}</a>"),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Guide) else "",
)
def test_a_guide(llm: Requests, demo_model: Path, guide: Guide, pattern: str) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    ids = llm.ids(max_tokens=60, end_id=tokenizer.eos_token_id, guide=guide)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert re.fullmatch(pattern, text, re.DOTALL), text


def test_an_answer_with_a_guide_is_not_continued(llm: Requests) -> None:
    with pytest.raises(EngineError, match="cannot be continued"):
        llm.start(guide=Guide(GuideKind.JSON), continued=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="half precision rounds the two differently")
def test_adapters_change_the_answers_as_if_they_were_merged(
    llm: Requests, demo_model: Path, adapters: Path, tmp_path: Path
) -> None:
    tasks = [1, 2, 1]
    plain = llm.ids(max_tokens=30)
    # In one batch, with none without an adapter: those are wrong on CPUs.
    streams = [llm.start(max_tokens=30, lora_task_id=task) for task in tasks]
    answers = [stream.wait().ids for stream in streams]
    models = [demo_model] + [
        merge(demo_model, adapters / str(task), tmp_path / str(task)) for task in (1, 2)
    ]
    expected = [greedy_of(model) for model in models]
    assert [plain, *answers] == [expected[task] for task in (0, *tasks)]
    assert len({tuple(ids) for ids in expected}) == 3


def test_an_adapter_that_comes_later_is_loaded(
    llm: Requests, demo_model: Path, adapters: Path
) -> None:
    task_id = adapter_task_id("poet")
    with pytest.raises(EngineError, match="there is no such adapter"):
        llm.start(lora_task_id=task_id)
    make_adapter(demo_model, adapters / "poet", seed=2)
    assert llm.ids(max_tokens=30, lora_task_id=task_id) == llm.ids(max_tokens=30, lora_task_id=2)


def test_an_adapter_whose_files_are_replaced_is_loaded_anew(
    llm: Requests, demo_model: Path, adapters: Path, tmp_path: Path
) -> None:
    make_adapter(demo_model, adapters / "5", seed=5)
    before = llm.ids(max_tokens=30, lora_task_id=5)
    other = make_adapter(demo_model, tmp_path / "other", seed=6)
    merged = merge(demo_model, other, tmp_path / "merged")
    (other / "adapter_model.safetensors").replace(adapters / "5" / "adapter_model.safetensors")
    assert llm.ids(max_tokens=30, lora_task_id=5) == greedy_of(merged) != before


def test_an_adapter_that_is_broken_fails_its_request_alone(llm: Requests, adapters: Path) -> None:
    (adapters / "8").mkdir()
    (adapters / "8" / "adapter_config.json").write_text("{}")
    (adapters / "8" / "adapter_model.safetensors").write_bytes(b"no weights")
    stream = llm.start(lora_task_id=8)
    while not (last := stream.next()).finished:
        pass
    assert last.error is not None
    assert last.error.startswith("lora_task_id 8: ")
    assert len(llm.ids()) == 8


def greedy_of(model: Path) -> list[int]:
    """What transformers' ``generate`` makes of the prompt."""

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    output = loaded.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(PROMPT) :]]


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


@pytest.mark.parametrize(
    "which",
    [
        "EngineCore",
        pytest.param(
            "VllmWorker",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="on one GPU the engine core does its work"
            ),
        ),
    ],
)
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
        others = (p for p in core.children() if "resource_tracker" not in str(p.cmdline()))
        worker = next(others, core)
        if not torch.cuda.is_available():  # there nobody waits by spinning on the cores
            threads = [thread.id for process in (core, worker) for thread in process.threads()]
            priorities = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
            assert priorities == {LEAST_PRIORITY}
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
