"""Checkpoints that transformers would load, and the model would not be theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cog_triton.engines.base import SamplingParams, create_engine
from tests.engines import running
from tests.late import (
    safetensors_torch,
    torch,
    transformers,
    transformers_engine,
    transformers_loading,
)
from tests.tiny_models import save_tiny_model

OWN_CODE = Path(__file__).parents[1] / "integration" / "remote_code"

if TYPE_CHECKING:
    Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def changed(model: Path, directory: Path, change: Callable[[Weights], Weights]) -> dict[str, str]:
    """Return the parameters of an engine on a copy of a model with changed weights."""
    shutil.copytree(model, directory)
    weights = safetensors_torch.load_file(directory / "model.safetensors")
    safetensors_torch.save_file(change(weights), directory / "model.safetensors", {"format": "pt"})
    return {"engine": "transformers", "model": str(directory), "device": "cpu"}


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            without("lm_head"), r"lacks 1 of the model's weights \(lm_head.weight", id="head"
        ),
        pytest.param(without("layers.1.mlp"), r"lacks 3 of .*layers.1.mlp.down_proj", id="layer"),
        pytest.param(
            lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"][1:]},
            r"do not match its config.json: lm_head.weight has the shape \(\d+, \d+\) instead of \(",
            id="another shape",
        ),
        pytest.param(
            lambda weights: {f"net.{name}": value for name, value in weights.items()},
            r"lacks 21 of .* and 18 more\) and contains 21 unknown weights \(net\.",
            id="other names",
        ),
        pytest.param(
            lambda weights: {**weights, "model.layers.0.mlp.up_proj.bias": torch.ones(96)},
            r"contains 1 weights that would be ignored \(model.layers.0.mlp.up_proj.bias",
            id="bias",
        ),
        pytest.param(
            lambda weights: {**weights, "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
            r"contains 1 weights that would be ignored \(.*weight_scale",
            id="scale",
        ),
    ],
)
def test_a_model_that_its_checkpoint_does_not_fill(
    llama: Path, tmp_path: Path, change: Callable[[Weights], Weights], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        create_engine(changed(llama, tmp_path / "model", change))


def test_a_models_own_code_runs_if_it_is_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    for module in OWN_CODE.glob("*_own.py"):
        shutil.copy(module, model)
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "of_its_own", "architectures": ["Own"], "auto_map": classes}
    (model / "config.json").write_text(json.dumps(config))
    # Where transformers keeps copies of such code.
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("transformers.utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    parameters = {"model": str(model), "device": "cpu"}
    with pytest.raises(ValueError, match="requires its own Python code to run"):
        transformers_loading.load_model(parameters)
    loaded = transformers_loading.load_model({**parameters, "trust_remote_code": "true"})
    assert type(loaded).__name__ == "OwnForCausalLM"


def test_an_unknown_rotary_embedding_is_named(llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(llama, directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "of_tomorrow", "rope_theta": 10000.0}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"rotary embedding type 'of_tomorrow'"):
        transformers_loading.load_model({"model": str(directory), "device": "cpu"})


def test_tied_weights_and_parts_that_the_model_does_not_use_are_no_fault(tmp_path: Path) -> None:
    tied = save_tiny_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in safetensors_torch.load_file(tied / "model.safetensors")
    parameters = changed(
        tied,
        tmp_path / "model",
        lambda weights: {
            **weights,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "model.layers.2.mlp.up_proj.weight": torch.ones(1),  # a layer to predict more tokens
            "vision_tower.weight": torch.ones(1),
        },
    )
    assert transformers_loading.load_model(parameters) is not None


@pytest.mark.parametrize(
    ("architecture", "attention"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")]
)
def test_attention_is_what_the_class_has(architecture: str, attention: str, tmp_path: Path) -> None:
    model = transformers_loading.load_model(
        {"model": str(save_tiny_model(architecture, tmp_path)), "device": "cpu"}
    )
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(
    "architecture", ["gemma2", "gpt_oss", pytest.param("vaultgemma", marks=pytest.mark.rare)]
)
def test_eager_attention_in_a_batch_has_the_caps_and_sinks_of_the_model(
    architecture: str, tmp_path: Path
) -> None:
    directory = save_tiny_model(architecture, tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    prompts = [[*range(5, 15)], [*range(3, 61)], [7], [*range(9, 40)]]
    parameters = {"engine": "transformers", "model": str(directory), "device": "cpu"}
    with running(parameters) as engine:
        assert isinstance(engine.engine, transformers_engine.TransformersEngine)
        greedy = SamplingParams(temperature=0.0)
        streams = [engine.start(one, sampling=greedy, return_log_probs=True) for one in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            ids = stream.wait().ids
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
            assert stream.log_probs == pytest.approx(expected.tolist(), abs=1e-3)
