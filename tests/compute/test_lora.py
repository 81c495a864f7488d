"""LoRA adapters in the transformers engine, against PEFT's own model of each."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cog_triton.engines.base import EngineError, EngineUnavailable, GenerationRequest
from cog_triton.protocol.parameters import adapter_task_id
from cog_triton.request.request import Guide, GuideKind
from tests.adapters import make_adapter
from tests.engines import ENGINES, PROMPT, TIMEOUT, Requests, Stream, running
from tests.late import (
    adapter_layers,
    peft_files,
    safetensors_torch,
    torch,
    transformers_engine,
    transformers_step,
)
from tests.peft_reference import Reference, load
from tests.support import wait_until

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def task(name: str) -> int:
    return adapter_task_id(name) if name else 0


@pytest.fixture
def parameters(demo_model: Path, adapters: Path) -> dict[str, str]:
    return {**ENGINES["transformers"](demo_model), "lora_prefetch_dir": str(adapters)}


@pytest.fixture
def llm(parameters: dict[str, str]) -> Iterator[Requests]:
    with running(parameters) as requests:
        yield requests


@pytest.fixture
def reference(demo_model: Path, adapters: Path) -> Reference:
    return Reference(demo_model, adapters)


def loaded(llm: Requests) -> list[str]:
    return [version.path.name for version in llm.engine._adapters._loaded]  # type: ignore[attr-defined]


def test_a_beginning_is_shared_under_the_same_adapter(llm: Requests, reference: Reference) -> None:
    cache = llm.engine._manager.batch_processor.cache  # type: ignore[attr-defined]
    shared = []
    search = cache.search_prefix_match

    def noted(request_id: str, prompt_ids: list[int]) -> int:
        shared.append(search(request_id, prompt_ids))
        return int(shared[-1])

    cache.search_prefix_match = noted
    prompt = [i % 500 + 20 for i in range(2 * transformers_engine.CPU_PAGE_TOKENS + 5)]
    names = ("", "poet", "", "poet", "bard", "bard", "")
    answers = [llm.ids(prompt, max_tokens=8, lora_task_id=task(name)) for name in names]
    assert answers == [reference.ids(prompt, name, 8) for name in names]
    both = 2 * transformers_engine.CPU_PAGE_TOKENS
    assert shared == [0, 0, both, both, 0, both, both]


def test_an_answer_with_an_adapter_can_have_a_guide(
    demo_model: Path, parameters: dict[str, str], tokenizer: Any
) -> None:
    guide = Guide(GuideKind.REGEX, "(yes|no), [0-9]{3}")
    with running(parameters, tokenizer_dir=str(demo_model)) as llm:
        ids = llm.ids(end_id=tokenizer.eos_token_id, guide=guide, lora_task_id=task("poet"))
    assert re.fullmatch(guide.text, tokenizer.decode(ids, skip_special_tokens=True))


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "config", "layers"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200}, "all-linear"),
        ("qwen2", {**SMALL, **HEADS}, "all-linear"),
        ("phi3", {**SMALL, **HEADS, "pad_token_id": 0}, "all-linear"),
        ("mixtral", {**SMALL, **HEADS, "num_local_experts": 4}, ["q_proj", "o_proj"]),
    ],
)
def test_models_of_other_kinds_are_changed_as_peft_does(
    tmp_path: Path, kind: str, config: dict[str, Any], layers: str | list[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
    lora, row = adapter_layers.Adapters(copy.deepcopy(model), tmp_path, set), SimpleNamespace()
    # The layers of gpt2 lie the other way.
    given = {"target_modules": layers, "fan_in_fan_out": kind == "gpt2"}
    peft = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **given)).eval()
    peft.save_pretrained(tmp_path / "7")
    lora.assign(7, row)
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        lora.begin_step([(row.adapter, 9)])
        changed = lora._model(ids).logits
        assert torch.allclose(changed, peft(ids).logits, atol=1e-5)
        lora.begin_step([(None, 9)])
        with peft.disable_adapter():
            plain = peft(ids).logits
        assert torch.allclose(lora._model(ids).logits, plain, atol=1e-5)
    assert not torch.allclose(changed, plain, atol=1e-2)


# While the engine runs


class HeldStream(Stream):
    """Keeps the engine in the step of its first token, until it is let go on."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self._begun = threading.Event()
        self._may_go_on = threading.Event()

    def _hold(self, _: Stream) -> None:
        self._begun.set()
        assert self._may_go_on.wait(TIMEOUT)

    def wait_for_first(self) -> None:
        assert self._begun.wait(TIMEOUT)

    def go_on(self) -> None:
        self._may_go_on.set()


def test_what_a_step_sets_in_the_models_config_is_not_copied(llm: Requests) -> None:
    """Transformers sets and deletes fields there, which a copy in that moment fails with."""
    llm.engine._adapters._model.config.of_a_step = threading.Lock()  # type: ignore[attr-defined]
    assert llm.ids(lora_task_id=task("poet"))


def test_a_running_request_keeps_the_files_that_it_began_with(
    llm: Requests, demo_model: Path, adapters: Path, reference: Reference
) -> None:
    prompt = [i % 500 + 20 for i in range(transformers_engine.CPU_PAGE_TOKENS + 5)]
    poet: dict[str, Any] = {"max_tokens": 20, "lora_task_id": task("poet")}
    before = reference.ids(prompt, "poet", 20)
    first = HeldStream()
    llm.start(prompt, first, **poet)
    first.wait_for_first()
    other = make_adapter(demo_model, adapters.parent / "other", seed=9)
    (other / WEIGHTS).rename(adapters / "poet" / WEIGHTS)
    after = Reference(demo_model, adapters).ids(prompt, "poet", 20)
    # The beginning in the cache is of the old weights.
    second = HeldStream()
    llm.start(prompt, second, **poet)
    first.go_on()
    second.wait_for_first()
    shutil.rmtree(adapters / "poet")
    assert "no adapter has this id" in str(llm.start(prompt, **poet).last().error)
    second.go_on()
    assert first.wait().ids == before != after
    assert second.wait().ids == after
    llm.ids(lora_task_id=task("bard"))
    assert loaded(llm) == ["bard"]  # those without files make room


def test_the_least_recently_used_adapters_make_room(
    demo_model: Path, adapters: Path, parameters: dict[str, str], reference: Reference
) -> None:
    make_adapter(demo_model, adapters / "third", seed=4)
    make_adapter(demo_model, adapters / "fourth", seed=5)
    size = sum(
        tensor.nbytes
        for tensor in safetensors_torch.load_file(adapters / "poet" / WEIGHTS).values()
    )
    with running(parameters, lora_cache_host_memory_bytes=str(2 * size)) as llm:
        for name in ("poet", "third", "poet", "fourth"):
            llm.ids(lora_task_id=task(name))
        assert loaded(llm) == ["poet", "fourth"]
        streams = [HeldStream(), HeldStream()]
        for stream, name in zip(streams, ("poet", "fourth"), strict=True):
            llm.start(stream=stream, max_tokens=20, lora_task_id=task(name))
        engine: Any = llm.engine
        wait_until(lambda: len(engine._adapters_in_use()) == 2, TIMEOUT, "both in use")
        full = llm.start(lora_task_id=task("third")).last()
        assert str(full.error).startswith("the LoRA cache is full: adapter third does not fit")
        assert isinstance(full.error, EngineUnavailable)
        for stream in streams:
            stream.go_on()
        assert streams[0].wait().ids == reference.ids(PROMPT, "poet", 20)
        streams[1].wait()
        assert len(llm.ids(lora_task_id=task("third"))) == 8
        large = llm.start(lora_task_id=task("bard")).last()
        assert type(large.error) is EngineError
        assert "more than the lora_cache_host_memory_bytes" in str(large.error)


def test_no_request_waits_while_another_adapter_is_loaded(
    llm: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()
    may_end = threading.Event()
    read: list[str] = []

    def read_slowly(model: Any, config: Any, directory: Path) -> Any:
        read.append(directory.name)
        if directory.name == "poet":
            began.set()
            assert may_end.wait(60)
        return peft_files.read_changes(model, config, directory)

    monkeypatch.setattr("cog_triton.adapters.layers.read_changes", read_slowly)
    slow = [llm.start(lora_task_id=task("poet")) for _ in range(2)]
    try:
        assert began.wait(60)
        assert len(llm.ids(lora_task_id=task("bard"))) == 8  # is read meanwhile
        assert len(llm.ids(lora_task_id=task("bard"))) == 8  # is loaded
        assert len(llm.ids()) == 8
        assert not any(stream.all for stream in slow)
    finally:
        may_end.set()
    assert [len(stream.wait().ids) for stream in slow] == [8, 8]
    assert sorted(read) == ["bard", "poet"]


def test_whatever_fails_while_a_request_is_prepared_ends_it_with_the_reason(
    llm: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = llm.engine
    for error, reason in (
        (PermissionError(13, "Permission denied", "/adapters"), "/adapters: Permission denied"),
        (MemoryError(), "MemoryError"),
    ):
        monkeypatch.setattr(engine._adapters, "assign", Mock(side_effect=error))
        failed = llm.start(lora_task_id=5).last().error
        assert type(failed) is EngineUnavailable
        assert reason in str(failed)
    assert not engine.running
    assert llm.ids()


# What cannot be used

LAYER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
A, B = LAYER.format(0, "A"), LAYER.format(0, "B")


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    return load(demo_model)


@pytest.fixture
def broken(demo_model: Path, tmp_path: Path) -> Path:
    """An adapter for a test to break."""
    return make_adapter(demo_model, tmp_path / "broken")


def refusal(model: Any, adapter: Path) -> str:
    """Why an adapter cannot be used."""
    with pytest.raises(EngineError) as caught:
        adapter_layers.Adapters(model, adapter.parent, set).assign(
            task(adapter.name), SimpleNamespace()
        )
    beginning = f"lora_task_id {task(adapter.name)}: the adapter {adapter.name} cannot be used: "
    assert str(caught.value).startswith(beginning)
    return str(caught.value).removeprefix(beginning)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_a_file_that_is_cut_off(model: Any, broken: Path, file: str) -> None:
    (broken / file).write_text("{")
    assert refusal(model, broken)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({"peft_type": "IA3"}, "not a LoRA adapter", id="not LoRA"),
        pytest.param({"r": 0}, "should be a positive integer", id="rank 0"),
        pytest.param({"use_dora": True}, "use_dora=True is not supported", id="DoRA"),
        pytest.param({"bias": "all"}, "bias='all' is not supported", id="biases"),
        pytest.param(
            {"modules_to_save": ["lm_head"]}, "modules_to_save=.* not supported", id="whole modules"
        ),
        pytest.param(
            {"init_lora_weights": "pissa"}, "changes the base model's weights", id="PiSSA"
        ),
        pytest.param(
            {"target_modules": ["k_proj"]}, "its weight .*_proj.lora_", id="modules without weights"
        ),
        pytest.param(
            {"target_modules": ["nothing"]}, "not found in the base model", id="unknown module"
        ),
        pytest.param({"target_modules": ["embed_tokens"]}, "not a linear layer", id="embedding"),
        pytest.param(
            {"target_modules": ["lm_head"]}, "model's output layer, lm_head", id="output layer"
        ),
        pytest.param({"r": 5}, "size mismatch for .*lora_A", id="rank of another size"),
    ],
)
def test_a_configuration_that_cannot_be_used(
    model: Any, broken: Path, fields: dict[str, Any], reason: str
) -> None:
    config = json.loads((broken / CONFIG).read_text())
    (broken / CONFIG).write_text(json.dumps({**config, **fields}))
    assert re.search(reason, refusal(model, broken))


@pytest.mark.parametrize(
    ("name", "make_tensor", "reason"),
    [
        (A, None, "lacks the weight .*lora_A.weight"),
        (B, lambda: torch.ones(7, 4), "size mismatch for .*lora_B"),
        (B, lambda: torch.full((96, 4), torch.nan), "NaN or infinite"),
        (
            LAYER.format(99, "A"),
            lambda: torch.ones(4, 96),
            "its weight model.layers.99.* is not in",
        ),
    ],
)
def test_weights_that_cannot_be_used(
    model: Any,
    broken: Path,
    name: str,
    make_tensor: Callable[[], torch.Tensor] | None,
    reason: str,
) -> None:
    tensors = safetensors_torch.load_file(broken / WEIGHTS)
    tensors.pop(name, None)
    if make_tensor is not None:
        tensors[name] = make_tensor()
    safetensors_torch.save_file(tensors, broken / WEIGHTS)
    assert re.search(reason, refusal(model, broken))


def test_without_peft_the_engine_runs_and_says_what_to_install(
    parameters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with running(parameters) as llm:
        assert len(llm.ids()) == 8
        end = llm.start(lora_task_id=task("poet")).last()
    assert type(end.error) is EngineError
    assert "lora_task_id requires PEFT" in str(end.error)
    assert "pip install 'peft>=0.21,<0.22'" in str(end.error)


def test_a_layer_that_sees_some_tokens_only_fails_that_adapter(model: Any, adapters: Path) -> None:
    layers = adapter_layers.Adapters(model, adapters, set)
    row = transformers_step.Row(GenerationRequest("a", [5], 8, lora_task_id=7), Stream(), [5])
    layers.assign(task("poet"), row)
    layers.begin_step([(None, 1), (row.adapter, 3)])
    layer = model.model.layers[0].self_attn.q_proj
    layer(torch.randn(1, 3, layer.in_features))
    problem = "model.layers.0.self_attn.q_proj does not process each token exactly once"
    assert str(row.error) == f"lora_task_id 7: {problem}"
