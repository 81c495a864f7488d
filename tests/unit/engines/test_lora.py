"""LoRA adapters in the transformers engine, against PEFT's own model of each."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cog_triton.adapters.layers import LoraLayers
from cog_triton.engines.base import EngineError, GenerationRequest, Step, create_engine
from cog_triton.engines.transformers import CPU_PAGE_TOKENS
from cog_triton.engines.transformers_step import Row
from cog_triton.request.request import Guide, GuideKind
from cog_triton.text.tokenizer import load_tokenizer
from cog_triton.wire import adapter_task_id
from tests.adapters import make_adapter
from tests.peft_reference import Reference, load, make_varied_adapter
from tests.unit.engines.test_engines import ENGINES, PROMPT, Crowded, Requests, Stream

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
NAMES = ("", "poet", "bard")
QUESTIONS = ([5, 6, 7, 8, 9], [20, 21], [33] * 9, [300, 17, 5], [600, 601, 602], [5, 6, 7])


def task(name: str) -> int:
    return adapter_task_id(name) if name else 0


@pytest.fixture
def adapters(demo_model: Path, tmp_path: Path) -> Path:
    make_adapter(demo_model, tmp_path / "adapters" / "poet", seed=1)
    make_varied_adapter(demo_model, tmp_path / "adapters" / "bard")
    return tmp_path / "adapters"


def parameters(model: Path, adapters: Path, **more: str) -> dict[str, str]:
    return {**ENGINES["transformers"](model), "lora_prefetch_dir": str(adapters), **more}


@contextmanager
def running(model: Path, adapters: Path, **more: str) -> Iterator[Requests]:
    engine = create_engine(parameters(model, adapters, **more))
    try:
        yield Requests(engine)
    finally:
        engine.close()


@pytest.fixture
def llm(demo_model: Path, adapters: Path) -> Iterator[Requests]:
    with running(demo_model, adapters) as requests:
        yield requests


@pytest.fixture
def reference(demo_model: Path, adapters: Path) -> Reference:
    return Reference(demo_model, adapters)


def loaded(llm: Requests) -> list[str]:
    """The adapters in the model, once the loader has done what it was asked to."""
    adapters = llm.engine._adapters  # type: ignore[attr-defined]
    adapters._loader.submit(int).result(60)
    return [version.path.name for version in adapters._loaded]


def last(stream: Stream) -> Step:
    while not (tokens := stream.next()).finished:
        pass
    return tokens


def test_adapters_and_none_in_one_batch_answer_as_peft_does(
    llm: Requests, reference: Reference
) -> None:
    jobs = [(prompt, name) for prompt in QUESTIONS for name in NAMES]
    streams = [
        llm.start(prompt, max_tokens=30, lora_task_id=task(name), return_log_probs=True)
        for prompt, name in jobs
    ]
    assert llm.engine.active() == len(jobs)
    answers = [stream.wait().ids for stream in streams]
    assert answers == [reference.ids(prompt, name, 30) for prompt, name in jobs]
    assert len({tuple(ids) for ids in answers[:3]}) == 3
    for (prompt, name), stream in zip(jobs, streams, strict=True):
        expected = reference.log_probs(prompt, name, stream.ids)
        assert stream.log_probs == pytest.approx(expected, abs=2e-3)
    # And afterwards, when all of them are in the model.
    assert llm.ids(max_tokens=30) == reference.ids(PROMPT, "", 30)


def test_a_beginning_is_shared_under_the_same_adapter_alone(
    llm: Requests, reference: Reference
) -> None:
    cache = llm.engine._manager.batch_processor.cache  # type: ignore[attr-defined]
    shared = []
    search = cache.search_prefix_match

    def noted(request_id: str, prompt_ids: list[int]) -> int:
        shared.append(search(request_id, prompt_ids))
        return int(shared[-1])

    cache.search_prefix_match = noted
    prompt = [i % 500 + 20 for i in range(2 * CPU_PAGE_TOKENS + 5)]
    names = ("", "poet", "", "poet", "bard", "bard", "")
    answers = [llm.ids(prompt, max_tokens=12, lora_task_id=task(name)) for name in names]
    assert answers == [reference.ids(prompt, name, 12) for name in names]
    both = 2 * CPU_PAGE_TOKENS
    assert shared == [0, 0, both, both, 0, both, both]


def test_requests_that_are_set_back_keep_their_adapter(
    demo_model: Path, adapters: Path, reference: Reference
) -> None:
    crowded = Crowded(demo_model, lora_prefetch_dir=str(adapters))
    try:
        jobs = [(prompt * 6, name) for prompt in QUESTIONS[:3] for name in NAMES]
        streams = [
            crowded.requests.start(prompt, max_tokens=110, lora_task_id=task(name))
            for prompt, name in jobs
        ]
        answers = [stream.wait().ids for stream in streams]
    finally:
        crowded.engine.close()
    assert crowded.resets > 0
    assert answers == [reference.ids(prompt, name, 110) for prompt, name in jobs]


def test_an_answer_with_an_adapter_can_have_a_guide(demo_model: Path, adapters: Path) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    with running(demo_model, adapters, tokenizer_dir=str(demo_model)) as llm:
        for _ in range(2):  # loaded with the guide, and before it
            ids = llm.ids(
                max_tokens=40,
                end_id=tokenizer.eos_token_id,
                guide=Guide(GuideKind.REGEX, "(yes|no), [0-9]{3}"),
                lora_task_id=task("poet"),
            )
            text = tokenizer.decode(ids, skip_special_tokens=True)
            assert text.startswith(("yes, ", "no, "))
            assert len(text.partition(", ")[2]) == 3


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("kind", "config", "layers"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200}, "all-linear"),
        ("qwen2", SMALL, "all-linear"),
        ("phi3", {**SMALL, "pad_token_id": 0}, "all-linear"),
        ("mixtral", {**SMALL, "num_local_experts": 4}, ["q_proj", "o_proj"]),
    ],
)
def test_models_of_other_kinds_are_changed_as_peft_does(
    tmp_path: Path, kind: str, config: dict[str, Any], layers: str | list[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
    lora = LoraLayers(copy.deepcopy(model))
    settings = {
        "target_modules": layers,
        "fan_in_fan_out": kind == "gpt2",
    }  # its layers lie the other way
    peft = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings)).eval()
    peft.save_pretrained(tmp_path)
    adapter = lora.read(tmp_path)
    lora.put(adapter)
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        lora.begin_step([(adapter, 9)])
        changed = lora._model(ids).logits
        assert torch.allclose(changed, peft(ids).logits, atol=1e-5)
        lora.begin_step([(None, 9)])
        with peft.disable_adapter():
            plain = peft(ids).logits
        assert torch.allclose(lora._model(ids).logits, plain, atol=1e-5)
    assert not torch.allclose(changed, plain, atol=1e-2)


# While the engine runs


def test_an_adapter_comes_and_goes(llm: Requests, adapters: Path, reference: Reference) -> None:
    moved = adapters.parent / "moved"
    (adapters / "poet").rename(moved)
    assert "there is no such adapter" in str(last(llm_start_or_error(llm, "poet")).error)
    moved.rename(adapters / "poet")
    assert llm.ids(max_tokens=20, lora_task_id=task("poet")) == reference.ids(PROMPT, "poet", 20)
    assert loaded(llm) == ["poet"]

    (adapter,) = llm.engine._adapters._loaded.values()  # type: ignore[attr-defined]
    stream = llm.start(max_tokens=200, lora_task_id=task("poet"))
    stream.next()
    shutil.rmtree(adapters / "poet")
    assert "there is no such adapter" in str(last(llm_start_or_error(llm, "poet")).error)
    # Who has it goes on.
    assert stream.wait().ids == reference.ids(PROMPT, "poet", 200)
    assert loaded(llm) == []
    assert not adapter.changes


def llm_start_or_error(llm: Requests, name: str) -> Stream:
    """A stream that ends with the refusal, whether it comes at once or later."""
    stream = Stream()
    try:
        llm.start(stream=stream, lora_task_id=task(name))
    except EngineError as error:
        stream(Step([], finished=True, error=str(error), refused=True))
    return stream


def test_files_that_are_replaced_are_loaded_anew(
    llm: Requests, demo_model: Path, adapters: Path, reference: Reference
) -> None:
    prompt = [i % 500 + 20 for i in range(CPU_PAGE_TOKENS + 5)]
    before = reference.ids(prompt, "poet", 100)
    stream = llm.start(prompt, max_tokens=100, lora_task_id=task("poet"))
    stream.next()
    other = make_adapter(demo_model, adapters.parent / "other", seed=9)
    (other / WEIGHTS).rename(adapters / "poet" / WEIGHTS)
    after = Reference(demo_model, adapters).ids(prompt, "poet", 100)
    # The beginning in the cache is of the old weights.
    assert llm.ids(prompt, max_tokens=100, lora_task_id=task("poet")) == after
    assert stream.wait().ids == before != after
    assert loaded(llm) == ["poet"]


def size_of(adapter: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(adapter / WEIGHTS).values())


def test_the_least_recently_used_adapters_make_room(
    demo_model: Path, adapters: Path, reference: Reference
) -> None:
    make_adapter(demo_model, adapters / "third", seed=4)
    make_adapter(demo_model, adapters / "fourth", seed=5)
    room = {"lora_cache_host_memory_bytes": str(2 * size_of(adapters / "poet"))}
    with running(demo_model, adapters, **room) as llm:
        for name in ("poet", "third", "poet", "fourth"):
            llm.ids(lora_task_id=task(name))
        assert loaded(llm) == ["poet", "fourth"]
        streams = [llm.start(max_tokens=200, lora_task_id=task(n)) for n in ("poet", "fourth")]
        full = last(llm.start(lora_task_id=task("third")))
        assert str(full.error).startswith("the LoRA cache is full: adapter third does not fit")
        assert not full.refused
        assert streams[0].wait().ids == reference.ids(PROMPT, "poet", 200)
        streams[1].wait()
        assert len(llm.ids(lora_task_id=task("third"))) == 8
        large = last(llm.start(lora_task_id=task("bard")))
        assert large.refused
        assert "lora_cache_host_memory_bytes is" in str(large.error)


def test_an_abort_while_an_adapter_is_loaded(llm: Requests, reference: Reference) -> None:
    streams = []
    for i in range(6):
        streams.append(llm.start(max_tokens=200, lora_task_id=task(NAMES[1 + i % 2]), key=f"a{i}"))
        llm.engine.abort(f"a{i}")
    assert llm.engine.active() == 0
    assert llm.ids(lora_task_id=task("poet")) == reference.ids(PROMPT, "poet", 8)
    assert not any(stream.finished for stream in streams)


def test_closing_refuses_what_waits_for_an_adapter(demo_model: Path, adapters: Path) -> None:
    with running(demo_model, adapters) as llm:
        streams = [llm.start(max_tokens=200, lora_task_id=task(name)) for name in NAMES[1:]]
    for stream in streams:
        assert not stream.all or not stream.all[-1].refused
    with pytest.raises(EngineError, match="the engine has stopped"):
        llm.start(lora_task_id=task("bard"))


# What cannot be used


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps({**config, **values}))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        change(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, adapter / WEIGHTS)

    return changed


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda path: (path / CONFIG).write_text("{"), "JSON|Expecting"),
    "an empty configuration": (lambda path: (path / CONFIG).write_text("{}"), "."),
    "another method": (change_config(peft_type="IA3"), "not a LoRA adapter"),
    "no rank": (change_config(r=0), "should be a positive integer"),
    "DoRA": (change_config(use_dora=True), "use_dora=True is not supported"),
    "biases": (change_config(bias="all"), "bias='all' is not supported"),
    "whole layers": (
        change_config(modules_to_save=["lm_head"]),
        "modules_to_save=.* not supported",
    ),
    "PiSSA": (change_config(init_lora_weights="pissa"), "changes the model's own weights"),
    "other layers": (change_config(target_modules=["k_proj"]), "no weight .*_proj.lora_"),
    "unknown layers": (change_config(target_modules=["nothing"]), "not found in the base model"),
    "the embedding": (change_config(target_modules=["embed_tokens"]), "not a linear layer"),
    "the last layer": (change_config(target_modules=["lm_head"]), "lm_head is the model's last"),
    "another rank": (change_config(r=5), "size mismatch for .*lora_A"),
    "no weights": (lambda path: (path / WEIGHTS).write_bytes(b"none"), "."),
    "one weight less": (change_weights(lambda t: t.pop(A)), "has no weight .*lora_A.weight"),
    "another shape": (
        change_weights(lambda t: t.update({B: torch.ones(7, 4)})),
        "size mismatch for .*lora_B",
    ),
    "a layer too many": (
        change_weights(lambda t: t.update({A.replace("layers.0", "layers.99"): t[A]})),
        "this model have no weight model.layers.99",
    ),
    "a weight of the model": (
        change_weights(lambda t: t.update({"base_model.model.lm_head.weight": t[A]})),
        "this model have no weight lm_head.weight",
    ),
    "no number": (change_weights(lambda t: t[A].fill_(torch.nan)), "not finite"),
}


def test_a_broken_adapter_fails_its_request_alone(
    llm: Requests, adapters: Path, reference: Reference
) -> None:
    for name, (damage, reason) in BROKEN.items():
        shutil.copytree(adapters / "poet", adapters / "broken")
        damage(adapters / "broken")
        others = [llm.start(max_tokens=40, lora_task_id=task(other)) for other in NAMES]
        end = last(llm.start(lora_task_id=task("broken")))
        assert end.refused, name
        beginning = f"lora_task_id {task('broken')}: the adapter broken cannot be used: "
        with pytest.raises(EngineError, match=f"^{beginning}.*({reason})"):
            raise EngineError(end.error)
        expected = [reference.ids(PROMPT, other, 40) for other in NAMES]
        assert [other.wait().ids for other in others] == expected, name
        shutil.rmtree(adapters / "broken")
    assert sorted(loaded(llm)) == ["bard", "poet"]


def test_without_peft_the_engine_runs_and_says_what_to_install(
    demo_model: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with running(demo_model, adapters) as llm:
        assert len(llm.ids()) == 8
        end = last(llm.start(lora_task_id=task("poet")))
    assert end.refused
    assert "lora_task_id needs PEFT" in str(end.error)
    assert "pip install 'peft>=0.21,<0.22'" in str(end.error)


def test_without_a_directory_peft_is_not_imported_and_adapters_are_refused(
    demo_model: Path,
) -> None:
    program = f"""
import sys
from cog_triton.engines.base import EngineError, GenerationRequest
from cog_triton.engines.base import create_engine
if __name__ == "__main__":
    engine = create_engine({ENGINES["transformers"](demo_model)!r})
    assert "lora_task_id" not in engine.features
    try:
        engine.submit(GenerationRequest("a", [5], 8, lora_task_id=3), print)
    except EngineError as error:
        print(error)
    print(engine.active(), "peft" in sys.modules)
    engine.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == [
        "the embedded engine does not support lora_task_id without LORA_DIR",
        "0 False",
    ], done.stderr


def test_a_layer_that_sees_some_tokens_alone_fails_those_who_have_the_adapter(
    demo_model: Path, adapters: Path
) -> None:
    model = load(demo_model)
    layers = LoraLayers(model)
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(1, 3, layer.in_features)
    plain = layer(x)
    adapter = layers.read(adapters / "poet")
    layers.put(adapter)
    assert torch.equal(layer(x), plain)
    with torch.no_grad():
        layers.begin_step([(None, 1), (adapter, 2)])
        changed = layer(x)
        assert torch.equal(changed[:, 0], plain[:, 0])
        assert not torch.isclose(changed[:, 1:], plain[:, 1:]).all()
        layers.begin_step([(None, 1), (adapter, 3)])
        assert torch.equal(layer(x), plain)
    row = Row(GenerationRequest("a", [5], 8, lora_task_id=7), Stream(), adapter=adapter)
    assert row.error == (
        "lora_task_id 7: model.layers.0.self_attn.q_proj does not see each token once"
    )
