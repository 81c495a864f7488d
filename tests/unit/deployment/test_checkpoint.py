"""What is refused by a checkpoint's configuration and the headers of its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cog_triton.deployment.file_checks import check_family, check_files
from cog_triton.errors import ConfigurationError

LAYER = "model.layers.0.mlp.up_proj"


def make_checkpoint(directory: Path, names: list[str], config: dict[str, Any]) -> dict[str, object]:
    """Write a checkpoint with weights of these names; return the engine's variables."""
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(1, np.float32) for name in names}, directory / "model.safetensors")
    return {"engine": "transformers", "model": str(directory)}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            [f"_orig_mod.{LAYER}.weight"],
            "1 of 1 weights .* wrapped by .*: _orig_mod.model.layers",
        ),
        ([f"module.{LAYER}.weight", "a.weight"], "1 of 2 weights"),
        (["model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight"], "wrapped model"),
        ([f"base_model.model.{LAYER}.base_layer.weight"], "merge_and_unload"),
        (
            [f"{LAYER}.weight", f"{LAYER}.weight_scale_inv"],
            "contains 1 scales or zero points .*weight_scale_inv",
        ),
        (
            [f"{LAYER}.qweight", f"{LAYER}.qzeros", f"{LAYER}.scales"],
            "contains 3 scales or zero points",
        ),
        ([f"layers.{i}.weight_packed" for i in range(5)], "layers.2.weight_packed and 2 more"),
    ],
)
def test_names_that_no_model_of_the_configuration_has(
    names: list[str], said: str, tmp_path: Path
) -> None:
    llm = make_checkpoint(tmp_path, names, {})
    with pytest.raises(ConfigurationError, match=said):
        check_files(llm)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quantization_config": {"quant_method": "zebra"}},
            "does not support the quantization 'zebra'.*gptq",
        ),
        ({"quantization_config": {"bits": 4}}, "does not support the quantization None"),
        ({"eos_token_id": [2, None]}, r"config.json: eos_token_id must be .* not \[2, None\]"),
        ({"eos_token_id": "2"}, "config.json: eos_token_id must be .* not '2'"),
        ({"pad_token_id": [0]}, r"config.json: pad_token_id must be a token id, not \[0\]"),
        ({"text_config": {"quantization_config": {"quant_method": "modelopt"}}}, "'modelopt'"),
        ({"compression_config": {"quant_method": "zebra"}}, "'zebra'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"architectures": ["BertForMaskedLM"]}, "contains a BertForMaskedLM"),
    ],
)
def test_configurations_that_transformers_would_read_otherwise(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    llm = make_checkpoint(tmp_path, [f"{LAYER}.weight"], config)
    with pytest.raises(ConfigurationError, match=said):
        check_files(llm)
    check_files({**llm, "engine": "vllm"})  # has more quantizations, and says itself what it lacks


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llava", r"vision-language model \(llava\).*ENGINE=vllm"),
        ("vit", "cannot generate text with the model type 'vit'"),
        ("zebra", "model type 'zebra'"),
    ],
)
def test_families_that_transformers_does_not_generate_text_with(
    family: str, said: str, tmp_path: Path
) -> None:
    llm = make_checkpoint(tmp_path, [f"{LAYER}.weight"], {"model_type": family})
    with pytest.raises(ConfigurationError, match=said):
        check_family(llm)
    check_family({**llm, "engine": "vllm"})
    check_family(make_checkpoint(tmp_path, [f"{LAYER}.weight"], {"model_type": "llama"}))


def test_modelopts_quantization_is_for_other_engines(tmp_path: Path) -> None:
    llm = make_checkpoint(tmp_path, [f"{LAYER}.weight", f"{LAYER}.weight_scale"], {})
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"ModelOpt \(hf_quant_config.json\).*ENGINE=vllm"):
        check_files(llm)
    check_files({**llm, "engine": "vllm"})


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"load_in_4bit": True}},
        {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "zebra", "auto_map": {"AutoModelForCausalLM": "zebra.Zebra"}},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_what_transformers_reads(config: dict[str, Any], tmp_path: Path) -> None:
    quantized = [f"{LAYER}.weight_scale"] if "quantization_config" in config else []
    check_files(make_checkpoint(tmp_path, [f"{LAYER}.weight", *quantized], config))


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": ["model.safetensors"]},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": ["model.safetensors"]}},
        {"weight_map": {"a": "../other/model.safetensors"}},
        {"weight_map": {}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_is_not_of_its_form(index: Any, name: str, tmp_path: Path) -> None:
    llm = make_checkpoint(tmp_path, ["a"], {})
    (tmp_path / name).write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=f"{name} is not a valid index of shards"):
        check_files(llm)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_context_that_the_model_does_not_have_is_refused(engine: str, tmp_path: Path) -> None:
    llm = make_checkpoint(tmp_path, ["a"], {"max_position_embeddings": 128})
    llm["engine"] = engine
    check_files({**llm, "max_seq_len": 128})
    with pytest.raises(ConfigurationError, match=r"MAX_SEQUENCE_LENGTH=129 .* the 128 tokens"):
        check_files({**llm, "max_seq_len": 129})


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "org/llama"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    for engine in ("transformers", "vllm"):
        with pytest.raises(
            ConfigurationError, match=r"contains an adapter of org/llama, .* LORA_DIR"
        ):
            check_files({"engine": engine, "model": str(tmp_path)})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", POINTER, "Git LFS pointer"),
        ("pytorch_model.bin", POINTER, "Git LFS pointer"),
        ("pytorch_model.bin", b"PK\x03\x04 and no more", "it is truncated, or"),
        ("pytorch_model.bin", b"", "it is truncated, or"),
        ("model-00001-of-00002.safetensors", None, "but none of the files"),
        (
            "consolidated.safetensors",
            None,
            "weights consolidated.safetensors but none of the files",
        ),
    ],
)
def test_files_of_weights_that_are_not_whole(
    name: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is None:
        save_file({"a": np.zeros(1, np.float32)}, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        check_files({"engine": "transformers", "model": str(tmp_path)})


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_link_to_weights_that_are_gone(name: str, tmp_path: Path) -> None:
    """As in a cache of Hugging Face whose blobs were deleted."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).symlink_to(tmp_path / "blob")
    with pytest.raises(
        ConfigurationError, match=f"{name} is damaged or incomplete: .*No such file"
    ):
        check_files({"engine": "transformers", "model": str(tmp_path)})


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ([1], "generation_config.json is not the configuration"),
        ({"pad_token_id": [0]}, "generation_config.json: pad_token_id must be a token id"),
        # These are left out with a warning, as an output needs only one end token.
        ({"eos_token_id": [2, None, "x"], "pad_token_id": None}, ""),
    ],
)
def test_ids_of_a_generation_config(tmp_path: Path, generation: Any, said: str) -> None:
    llm = make_checkpoint(tmp_path, ["a.weight"], {"eos_token_id": [2, 3], "pad_token_id": 0})
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if not said:
        check_files(llm)
        return
    with pytest.raises(ConfigurationError, match=said):
        check_files(llm)


PREDICTING = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("config", "names", "warned"),
    [
        pytest.param({"num_hidden_layers": 1}, [], "layers 1 to 1 are not used", id="fewer"),
        pytest.param(
            {"text_config": {"num_hidden_layers": 1}}, [], "2 layers", id="fewer in a part"
        ),
        pytest.param(
            {"n_layer": 1}, ["transformer.h.3.attn.weight"], "4 layers", id="GPT-2's name"
        ),
        pytest.param({"num_hidden_layers": 2}, [], None, id="all"),
        pytest.param({}, [], None, id="unknown"),
        pytest.param(
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
            ["model.layers.2.mlp.up_proj.weight"],
            None,
            id="one that predicts further tokens",
        ),
        pytest.param({"num_hidden_layers": 2}, PREDICTING, None, id="its number is lost"),
        pytest.param(
            {"num_hidden_layers": 2},
            ["model.vision_tower.encoder.layers.9.weight", "model.visual.layers.9.weight"],
            None,
            id="layers of an encoder of images",
        ),
    ],
)
def test_layers_that_the_configuration_does_not_name_are_warned_of(
    config: dict[str, Any],
    names: list[str],
    warned: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(2)]
    check_files(make_checkpoint(tmp_path, [*two, *names], config))
    if warned is None:
        assert "num_hidden_layers" not in caplog.text
    else:
        assert warned in caplog.text
