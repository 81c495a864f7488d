"""vLLM itself, where it is installed, as far as it differs; the contract is in test_contract.py."""

import multiprocessing
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.engines.base import EngineError, SamplingParams
from cog_triton.engines.interpreter import LEAST_PRIORITY
from cog_triton.protocol.parameters import adapter_task_id
from cog_triton.request.request import Guide, GuideKind
from tests.adapters import make_adapter, merge
from tests.engines import ENGINES, NEEDS_VLLM, PROMPT, Requests, running
from tests.late import torch, transformers

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
    with running(parameters) as requests:
        yield requests


SCHEMA = """{"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"], "additionalProperties": false}"""
TAG = """{"type": "structural_tag", "format": {"type": "tag", "begin": "<a>",
    "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"}}"""


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
def test_a_guide(llm: Requests, tokenizer: Any, guide: Guide, pattern: str) -> None:
    ids = llm.ids(max_tokens=60, end_id=tokenizer.eos_token_id, guide=guide)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.skipif("torch.cuda.is_available()", reason="half precision rounds the two differently")
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


def test_an_adapter_that_comes_later_is_replaced_or_is_broken(
    llm: Requests, demo_model: Path, adapters: Path, tmp_path: Path
) -> None:
    task_id = adapter_task_id("poet")
    with pytest.raises(EngineError, match="no adapter has this id"):
        llm.start(lora_task_id=task_id)
    poet = make_adapter(demo_model, adapters / "poet", seed=2)
    before = llm.ids(max_tokens=30, lora_task_id=task_id)
    assert before == llm.ids(max_tokens=30, lora_task_id=2)
    other = make_adapter(demo_model, tmp_path / "other", seed=6)
    merged = merge(demo_model, other, tmp_path / "merged")
    (other / "adapter_model.safetensors").replace(poet / "adapter_model.safetensors")
    assert llm.ids(max_tokens=30, lora_task_id=task_id) == greedy_of(merged) != before
    (poet / "adapter_model.safetensors").write_bytes(b"no weights")
    assert str(llm.start(lora_task_id=task_id).last().error).startswith(f"lora_task_id {task_id}: ")
    assert len(llm.ids()) == 8


def greedy_of(model: Path) -> list[int]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return list(loaded.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist())


@pytest.mark.skipif(
    "torch.cuda.is_available()", reason="there nobody waits by spinning on the cores"
)
def test_its_processes_give_way_to_all_others(llm: Requests) -> None:
    assert llm.ids()
    cores = {process.pid for process in multiprocessing.active_children()}
    ours = [p for p in psutil.Process().children(recursive=True) if cores & {p.pid, p.ppid()}]
    computing = [p for p in ours if "resource_tracker" not in str(p.cmdline())]
    assert len(computing) > 1
    threads = [thread.id for process in computing for thread in process.threads()]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {LEAST_PRIORITY}


def test_a_guide_that_is_none_fails_its_request_only(llm: Requests) -> None:
    error = llm.start(guide=Guide(GuideKind.JSON_SCHEMA, "{not json")).last().error
    assert type(error) is EngineError
    assert "engine has stopped" not in str(error)
    assert len(llm.ids()) == 8


HOT = SamplingParams(temperature=2.0, top_p=1.0, seed=7)
PENALTIES: Any = {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
CONTINUED: dict[str, dict[str, Any]] = {
    "greedy": {"return_log_probs": True, "top_log_probs": 2},
    "sampled": {"sampling": HOT, "return_log_probs": True},
    "top": {"sampling": replace(HOT, top_k=20, min_p=0.02)},
    "penalties": {"sampling": SamplingParams(**PENALTIES)},
    "sampled penalties": {"sampling": replace(HOT, **PENALTIES)},
    "bad words": {"sampling": replace(HOT, bad_words=((27, 28), (30,)))},
    "minimum": {"sampling": replace(HOT, min_tokens=25), "end_id": 2},
    "schema": {"guide": Guide(GuideKind.JSON_SCHEMA, SCHEMA), "sampling": HOT},
    "regex": {"guide": Guide(GuideKind.REGEX, "(yes|no), [0-9a-f]{30}"), "sampling": HOT},
    "grammar": {"guide": Guide(GuideKind.GRAMMAR, 'root ::= ("a" | "b" | "c") root')},
    "tag": {"guide": Guide(GuideKind.STRUCTURAL_TAG, TAG)},
}


def test_an_output_that_is_continued_goes_on_as_it_would_have(
    llm: Requests, tokenizer: Any
) -> None:
    """All at once, from its beginning, its middle and before its end."""
    streams = []
    for name, values in CONTINUED.items():
        values = {"end_id": tokenizer.eos_token_id} | values if "guide" in values else values
        whole = llm.start(max_tokens=32, **values).wait()
        for cut in {1, len(whole.ids) // 2, len(whole.ids) - 1}:
            sampling = values.get("sampling", SamplingParams())
            rest = replace(sampling, min_tokens=max(0, sampling.min_tokens - cut))
            given = {**values, "sampling": rest, "max_tokens": 32 - cut, "continued": cut}
            stream = llm.start([*PROMPT, *whole.ids[:cut]], **given)
            streams.append((name, cut, stream, whole.ids[cut:], whole.tokens[cut:]))
    assert len({tuple(ids) for *_, ids, _ in streams}) > 2 * len(CONTINUED)
    for name, cut, stream, ids, tokens in streams:
        assert stream.wait().ids == ids, (name, cut)
        assert [token.id for token in stream.tokens] == [token.id for token in tokens]
        assert stream.log_probs == pytest.approx([token.log_prob for token in tokens], abs=1e-4)
    other = llm.start([*PROMPT, 40], guide=CONTINUED["regex"]["guide"], end_id=2, continued=1)
    assert other.last().error is not None
    assert len(llm.ids()) == 8
