"""Files in place and checked, and what they and the settings make of the template variables."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from cog_triton.deployment.deployment import Deployment
from cog_triton.deployment.engine_choice import EngineName
from cog_triton.deployment.file_checks import check_files
from cog_triton.deployment.model_defaults import warn_of_adapters, with_end_tokens
from cog_triton.deployment.model_files import with_files
from cog_triton.deployment.template_variables import context_length, template_values
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.text.end_tokens import EndTokens


@pytest.mark.parametrize("engine", ["tensorrtllm", "vllm"])
def test_the_models_that_read_end_tokens_get_them(
    engine: EngineName, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = with_end_tokens(read_settings({}), {}, engine, EndTokens((2, 6)))
    models = {"preprocessing"} if engine == "tensorrtllm" else {"preprocessing", "tensorrt_llm"}
    assert found == {model: {"end_ids": [2, 6]} for model in models}
    # Its further end tokens are stop words.
    assert ("which can end an output before min_tokens" in caplog.text) is (engine == "tensorrtllm")


def engine_directory(directory: Path) -> Path:
    config = {"build_config": {"max_seq_len": 200}, "pretrained_config": {"vocab_size": 9}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("asked", "limit"), [("", 200), ("100", 100), ("200", 200)])
def test_preprocessing_sees_to_the_length_of_an_engine(
    tmp_path: Path, asked: str, limit: int
) -> None:
    """TensorRT-LLM's C++ backend takes what the engine was built for."""
    directory = engine_directory(tmp_path)
    settings = read_settings({"ENGINE_DIR": str(directory), "MAX_SEQUENCE_LENGTH": asked})
    values = template_values(settings, "tensorrtllm")
    check_files(values["tensorrt_llm"])
    assert context_length(values["tensorrt_llm"]) == limit
    assert values["preprocessing"]["max_seq_len"] == limit
    assert ("ends_at_max_seq_len" in values["preprocessing"]) is bool(asked)


def test_an_engine_is_not_built_for_more(tmp_path: Path) -> None:
    directory = engine_directory(tmp_path)
    settings = read_settings({"ENGINE_DIR": str(directory), "MAX_SEQUENCE_LENGTH": "201"})
    values = template_values(settings, "tensorrtllm")
    with pytest.raises(ConfigurationError, match=r"MAX_SEQUENCE_LENGTH=201 .* the 200 tokens"):
        check_files(values["tensorrt_llm"])


def test_the_llm_api_is_asked_for_no_more_than_the_model_has(tmp_path: Path) -> None:
    """It would take less, with a warning in its log."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    llm = {"engine": "llmapi", "model": str(tmp_path)}
    check_files({**llm, "max_seq_len": 128})
    check_files({**llm, "max_seq_len": 129, "llm_api_config": "more.yaml"})
    with pytest.raises(ConfigurationError, match=r"MAX_SEQUENCE_LENGTH=129 .* the 128 tokens"):
        check_files({**llm, "max_seq_len": 129})


@pytest.mark.parametrize(("ends", "warned"), [((2,), True), ((2, 6), False)])
def test_an_adapter_whose_tokenizer_ends_texts_in_another_way_is_named(
    tmp_path: Path, ends: tuple[int, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"eos_token": "<|end|>", "added_tokens_decoder": {"6": {"content": "<|end|>"}}}
    for name, files in {"chat": {"tokenizer_config.json": config}, "plain": {}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").touch()
        for file, content in {"adapter_config.json": {}, **files}.items():
            (tmp_path / name / file).write_text(json.dumps(content))
    warn_of_adapters(read_settings({"LORA_DIR": str(tmp_path)}), EndTokens(ends))
    assert ("tokenizer of adapter chat ends texts with token 6" in caplog.text) is warned
    assert ("END_ID=2,6" in caplog.text) is warned
    assert "adapter plain" not in caplog.text


def test_the_configuration_file_overrides_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server:\n  tensorrt_llm:\n    args: {engine: simulated, max_seq_len: 99}\n")
    environment = {"COG_TRITON_CONFIG": str(file), "ENGINE": "transformers", "MODEL": "org/name"}
    values = template_values(read_settings(environment), "transformers")
    found = [values["tensorrt_llm"][name] for name in ("engine", "max_seq_len", "model")]
    assert found == ["simulated", 99, "org/name"]
    assert values["preprocessing"]["tokenizer_dir"] == "org/name"


@pytest.mark.parametrize("name", ["decoupled_mode", "decoupled"])
def test_what_cannot_stream_is_refused_before_triton_is_started(
    name: str, tmp_path: Path, demo_model: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"server: {{tensorrt_llm: {{args: {{{name}: false}}}}}}\n")
    environment = {
        "COG_TRITON_CONFIG": str(file),
        "MODEL": str(demo_model),
        "TRITONSERVER_BACKEND_DIR": str(tmp_path),  # which would be the next problem
        "ENGINE": "simulated",
    }
    (tmp_path / "python").mkdir()
    with pytest.raises(ConfigurationError, match="decoupled_mode is false, but the predictor"):
        asyncio.run(Deployment.start(read_settings(environment)))


def test_an_engine_directory_goes_to_the_backend_with_its_own_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    values = template_values(read_settings({"ENGINE_DIR": str(tmp_path)}), "tensorrtllm")
    assert values["tensorrt_llm"] == {
        "exclude_input_in_output": True,
        "triton_backend": "tensorrtllm",
        "engine_dir": str(tmp_path),
        "tokenizer_dir": str(tmp_path / "tokenizer"),
    }
    assert values["preprocessing"]["tokenizer_dir"] == str(tmp_path / "tokenizer")


def test_an_input_that_the_backend_misplaces_is_left_out() -> None:
    values = template_values(read_settings({}), "tensorrtllm", num_return_sequences=False)
    for model in ("ensemble", "tensorrt_llm"):
        assert values[model]["num_return_sequences"] is False


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_directory_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineName
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr("cog_triton.deployment.template_variables.GPU", True)
    values = template_values(read_settings({"LORA_DIR": "adapters"}), engine)
    assert values["preprocessing"]["preprocessing_instance_count"] == 3  # one on fewer cores
    instances = values["tensorrt_llm"].get("tensorrt_llm_instance_count")
    assert instances == (2 if engine == "vllm" else None)
    assert values["tensorrt_llm"]["lora_prefetch_dir"] == str(tmp_path.resolve() / "adapters")
    assert "lora_prefetch_dir" not in template_values(read_settings({}), engine)["tensorrt_llm"]


# Models and tokenizers


@pytest.mark.parametrize("model", ["models/none", "/none", "./none", "a/b/c"])
def test_a_path_where_nothing_is(model: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MODEL={model} does not exist"):
        with_files(read_settings({"MODEL": model}))


def test_weights_are_an_engine_or_a_model_and_come_before_the_model(tmp_path: Path) -> None:
    model, packed, flat = tmp_path / "model", tmp_path / "packed", tmp_path / "flat"
    for directory in (model, packed / "engine", flat):
        directory.mkdir(parents=True)
    (model / "config.json").touch()
    (packed / "engine" / "rank0.engine").touch()
    (flat / "rank0.engine").touch()
    for source in (str(model), f"file://{model}"):
        settings = with_files(read_settings({"COG_WEIGHTS": source, "MODEL": "org/name"}))
        assert settings.model == str(model)
    assert with_files(read_settings({"COG_WEIGHTS": str(packed)})).engine_dir == packed / "engine"
    assert with_files(read_settings({"COG_WEIGHTS": str(flat)})).engine_dir == flat


def test_what_is_on_this_machine_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").touch()
    here = str(tmp_path)
    for environment in ({"MODEL": here}, {"ENGINE_DIR": here, "MODEL": "org/name"}):
        settings = read_settings(environment)
        assert with_files(settings) == settings


@pytest.mark.parametrize("name", ["TOKENIZER", "MODEL"])
def test_a_tokenizer_is_fetched_where_the_token_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's models load it as well, and have none."""
    (tmp_path / "tokenizer.json").touch()
    download = create_autospec(huggingface_hub.snapshot_download, return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    environment = {"ENGINE_DIR": "/engine", "HF_TOKEN": "secret", name: "org/name"}
    assert with_files(read_settings(environment)).tokenizer_dir == str(tmp_path)
    download.assert_called_once()
    assert download.call_args.args == ("org/name",)
    assert download.call_args.kwargs["token"] == "secret"
    assert "*.safetensors" in download.call_args.kwargs["ignore_patterns"]


def checkpoint(directory: Path, *shards: str) -> dict[str, object]:
    """Make a model of several files, of which ``shards`` are there; return the engine's variables."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in shards:
        save_file({"a": np.zeros(2, np.float32)}, directory / shard)
    return {"engine": "transformers", "model": str(directory)}


def test_a_checkpoint_of_several_files_that_are_whole(tmp_path: Path) -> None:
    llm = checkpoint(tmp_path, "1.safetensors")
    with pytest.raises(
        ConfigurationError, match=r"index\.json lists files that do not exist: 2\.safetensors"
    ):
        check_files(llm)
    check_files(checkpoint(tmp_path, "1.safetensors", "2.safetensors"))
    (tmp_path / "2.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigurationError, match=r"2\.safetensors is damaged or incomplete"):
        check_files(llm)
    check_files({**llm, "engine": "simulated"})  # which reads none


def test_a_checkpoint_that_is_left_to_the_loader(tmp_path: Path) -> None:
    llm: dict[str, object] = {"engine": "vllm", "model": str(tmp_path)}
    check_files({"engine": "transformers"})
    check_files({**llm, "model": "org/name"})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="contains no weights"):
        check_files(llm)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    check_files(llm)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "adapter_config.json").unlink()
    arguments = tmp_path / "vllm.yaml"
    with_arguments = {**llm, "vllm_config": str(arguments)}
    with pytest.raises(ConfigurationError, match="No such file"):
        check_files(with_arguments)
    arguments.write_text("max_model_len: 100\n")
    with pytest.raises(ConfigurationError, match="contains no weights"):
        check_files(with_arguments)
    arguments.write_text("load_format: dummy\n")  # vLLM makes them up
    check_files(with_arguments)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    check_files(llm)


@pytest.mark.parametrize(
    ("config", "values", "length"),
    [
        pytest.param('{"max_position_embeddings": 2048}', {}, 2048, id="of the model"),
        pytest.param(
            '{"text_config": {"max_position_embeddings": 4096}}',
            {},
            4096,
            id="of the model's part for texts",
        ),
        pytest.param('{"max_position_embeddings": null}', {}, None, id="null"),
        pytest.param("no JSON", {}, None, id="no JSON"),
        pytest.param("[]", {}, None, id="no object"),
        pytest.param(
            '{"max_position_embeddings": 2048}',
            {"max_seq_len": 100},
            100,
            id="max_seq_len below the model's",
        ),
        pytest.param(
            '{"max_position_embeddings": 2048}',
            {"max_seq_len": "9999"},
            2048,
            id="max_seq_len above the model's",
        ),
        pytest.param(
            '{"max_position_embeddings": 2048}',
            {"engine": "simulated"},
            None,
            id="simulated engine",
        ),
        pytest.param(
            '{"max_position_embeddings": 2048}',
            {"llm_api_config": "/more.yaml"},
            None,
            id="file of the LLM API",
        ),
        pytest.param(
            '{"max_position_embeddings": 2048}',
            {"model": "org/name"},
            None,
            id="model that is not here",
        ),
        pytest.param(
            '{"build_config": {"max_seq_len": 3000}}',
            {"triton_backend": "tensorrtllm"},
            3000,
            id="built engine",
        ),
    ],
)
def test_the_context_length(
    config: str, values: dict[str, Any], length: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    directories = {"model": str(tmp_path), "engine_dir": str(tmp_path)}
    assert context_length({**directories, **values}) == length
