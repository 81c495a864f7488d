from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from cog_triton.deployment.deployment import Deployment, own_preprocessing
from cog_triton.deployment.engine_choice import (
    EngineName,
    check_supported,
    resolve_engine,
    without_bos,
)
from cog_triton.deployment.preparation import (
    check_files,
    merge,
    read_overrides,
    template_values,
    with_files,
)
from cog_triton.deployment.running import start_timeout
from cog_triton.errors import ConfigurationError, InvalidParameter, PromptTooLong, TritonUnavailable
from cog_triton.repository.variables import VARIABLES
from cog_triton.request.admission import Admission
from cog_triton.request.request import Request
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import load_tokenizer


def test_the_configuration_file_overrides_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server:\n  tensorrt_llm:\n    args: {engine: simulated, max_seq_len: 99}\n")
    environment = {"COG_TRITON_CONFIG": str(file), "ENGINE": "transformers", "MODEL": "org/name"}
    values = template_values(read_settings(environment), "transformers")
    assert values["tensorrt_llm"]["engine"] == "simulated"
    assert values["tensorrt_llm"]["max_seq_len"] == 99
    assert values["tensorrt_llm"]["model"] == "org/name"
    assert values["preprocessing"]["tokenizer_dir"] == "org/name"


def test_the_default_configuration_file_may_be_absent_and_a_named_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_overrides(read_settings({})) == {}
    for name in ("config.yaml", str(tmp_path / "none.yaml")):
        named = read_settings({"COG_TRITON_CONFIG": name})
        with pytest.raises(ConfigurationError, match=f"COG_TRITON_CONFIG={name} does not exist"):
            read_overrides(named.model_copy(update={"model": "another"}))
    (tmp_path / "config.yaml").write_text("server: {ensemble: {args: {triton_max_batch_size: 2}}}")
    assert read_overrides(read_settings({})) == {"ensemble": {"triton_max_batch_size": 2}}


def test_a_named_configuration_file_is_missed_before_anything_is_fetched(tmp_path: Path) -> None:
    environment = {
        "COG_TRITON_CONFIG": str(tmp_path / "none.yaml"),
        "MODEL": str(tmp_path / "no" / "model"),
    }
    with pytest.raises(ConfigurationError, match=r"none\.yaml does not exist"):
        asyncio.run(Deployment.start(read_settings(environment)))


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


def test_merging_keeps_models_that_only_one_side_has() -> None:
    assert merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": {"z": 4}}) == {
        "a": {"x": 1, "y": 3},
        "b": {"z": 4},
    }


@pytest.mark.parametrize("model", ["models/none", "/none", "./none", "a/b/c"])
def test_a_path_where_nothing_is(model: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MODEL={model} does not exist"):
        with_files(read_settings({"MODEL": model}))


def test_files_are_checked_of_the_engine_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "config.json").write_text("{}")
    llm = {"engine": "transformers", "model": str(tmp_path)}
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is damaged or incomplete"):
        check_files(llm)
    check_files({**llm, "engine": "simulated"})
    check_files({**llm, "model": "org/name"})
    check_files({"engine": "transformers"})


def test_the_files_of_a_load_format_are_vllms_business(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "vllm.yaml"
    llm = {"engine": "vllm", "model": str(tmp_path), "vllm_config": str(file)}
    with pytest.raises(ConfigurationError, match="No such file"):
        check_files(llm)
    file.write_text("max_model_len: 100\n")
    with pytest.raises(ConfigurationError, match="holds no weights"):
        check_files(llm)
    file.write_text("load_format: dummy\n")
    check_files(llm)
    with pytest.raises(ConfigurationError, match="holds no weights"):
        check_files({**llm, "engine": "transformers"})


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


def test_the_predictors_outputs_are_without_the_prompt_and_others_as_at_nvidia() -> None:
    for engine in get_args(EngineName):
        values = template_values(read_settings({}), engine)
        assert values["tensorrt_llm"]["exclude_input_in_output"] is True
    assert VARIABLES["tensorrt_llm"]["exclude_input_in_output"].render() == "false"


def test_code_is_trusted_in_every_model_that_may_load_some() -> None:
    trusted = template_values(read_settings({"TRUST_REMOTE_CODE": "1"}), "llmapi")
    for model in ("preprocessing", "postprocessing", "tensorrt_llm"):
        assert trusted[model]["trust_remote_code"] is True
        assert "trust_remote_code" not in template_values(read_settings({}), "llmapi")[model]
        assert VARIABLES[model]["trust_remote_code"].render() is None


def test_an_input_that_the_backend_misplaces_is_left_out() -> None:
    values = template_values(read_settings({}), "tensorrtllm", num_return_sequences=False)
    assert values["ensemble"]["num_return_sequences"] is False
    assert values["tensorrt_llm"]["num_return_sequences"] is False


@pytest.mark.parametrize(("told", "sent"), [(True, [[1.5]]), (False, None)])
def test_a_length_penalty_goes_where_it_has_an_effect(
    told: bool, sent: object, demo_model: Path
) -> None:
    inputs: list[Mapping[str, Any]] = []

    class Client:
        def stream(self, _id: str, given: Mapping[str, Any], **_: object) -> Any:
            inputs.append(given)
            raise TritonUnavailable("this far and no further")

    client = cast(Any, Client())
    tokenizer = load_tokenizer(str(demo_model))
    deployment = Deployment(
        read_settings({}),
        client,
        cast(Any, None),
        Admission(1, 0, 1.0),
        tokenizer,
        length_penalty=told,
    )
    with pytest.raises(TritonUnavailable):
        asyncio.run(anext(deployment.generate(Request(prompt="a", seed=0, length_penalty=1.5))))
    found = inputs[0].get("length_penalty")
    assert (None if found is None else found.tolist()) == sent


@pytest.mark.parametrize(("longest", "expected"), [(0.0, 300), (3, 60), (9, 90), (40, 300)])
def test_a_restart_gets_ten_times_what_the_longest_start_took(
    longest: float, expected: float
) -> None:
    assert start_timeout(300, longest) == expected


def test_without_a_gpu_and_an_engine_auto_is_transformers(demo_model: Path) -> None:
    assert resolve_engine(read_settings({"MODEL": str(demo_model)})) == "transformers"


def test_weights_are_an_engine_or_a_model(tmp_path: Path) -> None:
    model, packed, flat = tmp_path / "model", tmp_path / "packed", tmp_path / "flat"
    for directory in (model, packed / "engine", flat):
        directory.mkdir(parents=True)
    (model / "config.json").touch()
    (packed / "engine" / "rank0.engine").touch()
    (flat / "rank0.engine").touch()
    assert with_files(read_settings({"COG_WEIGHTS": str(model)})).model == str(model)
    assert with_files(read_settings({"COG_WEIGHTS": str(packed)})).engine_dir == packed / "engine"
    assert with_files(read_settings({"COG_WEIGHTS": str(flat)})).engine_dir == flat


def test_what_is_on_this_machine_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").touch()
    for environment in (
        {"MODEL": str(tmp_path)},
        {"ENGINE_DIR": str(tmp_path), "MODEL": "org/name"},
    ):
        settings = read_settings(environment)
        assert with_files(settings) == settings


@pytest.mark.parametrize("name", ["TOKENIZER", "MODEL"])
def test_a_tokenizer_is_fetched_where_the_token_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's models load it as well, and have none."""
    import huggingface_hub

    (tmp_path / "tokenizer.json").touch()
    asked: list[tuple[str, object, object]] = []

    def snapshot_download(repo: str, **options: object) -> str:
        asked.append((repo, options["token"], options["ignore_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    environment = {"ENGINE_DIR": "/engine", "HF_TOKEN": "secret", name: "org/name"}
    assert with_files(read_settings(environment)).tokenizer_dir == str(tmp_path)
    ((repo, token, ignored),) = asked
    assert (repo, token) == ("org/name", "secret")
    assert "*.safetensors" in ignored  # type: ignore[operator]


def test_weights_take_the_place_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = read_settings({"COG_WEIGHTS": f"file://{tmp_path}", "MODEL": "org/name"})
    assert with_files(settings).model == str(tmp_path)


def test_ranks_are_for_the_backend_alone(demo_model: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"WORLD_SIZE=2 is for TensorRT-LLM's C\+\+ backend"
    ):
        resolve_engine(read_settings({"MODEL": str(demo_model), "WORLD_SIZE": "2"}))


def request(**values: Any) -> Request:
    return Request(**{"prompt": "a", "seed": 0, **values})


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"log_probs": 2, "min_p": 0.1}, "min_p, top_logprobs"),
        ({"log_probs": 0, "prompt_log_probs": True}, "prompt_logprobs"),
        ({"allowed_token_ids": (1,)}, "allowed_token_ids"),
    ],
)
def test_what_tensorrt_llms_backend_would_ignore_is_refused(
    values: dict[str, Any], names: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"C\\+\\+ backend does not support {names}$"):
        check_supported(request(**values), "tensorrtllm", own_preprocessing=True)
    check_supported(request(**values), "transformers", own_preprocessing=True)
    check_supported(request(log_probs=0), "tensorrtllm", own_preprocessing=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_ids", (1, 2)), ("add_special_tokens", False), ("logit_bias", ((1, 2.0),))],
)
def test_what_another_preprocessing_would_ignore_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=f"TRITON_MODEL_REPO does not support {name}$"):
        check_supported(request(**{name: value}), "transformers", own_preprocessing=False)
    check_supported(request(**{name: value}), "transformers", own_preprocessing=True)
    check_supported(request(), "tensorrtllm", own_preprocessing=False)


def test_another_preprocessing_adds_the_beginning_of_a_chat_itself() -> None:
    tokenizer = SimpleNamespace(bos_token="<s>")
    chat = request(prompt="<s>[INST] <s>a", add_special_tokens=False)
    assert without_bos(chat, tokenizer) == request(prompt="[INST] <s>a")
    assert without_bos(chat, SimpleNamespace(bos_token=None)).prompt == chat.prompt
    raw = request(prompt="<s>a")
    assert without_bos(raw, tokenizer) is raw


def test_preprocessing_is_known_by_its_code(tmp_path: Path) -> None:
    assert own_preprocessing(read_settings({}))
    assert not own_preprocessing(read_settings({"TRITON_MODEL_REPO": str(tmp_path)}))
    model = tmp_path / "preprocessing" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("import triton_python_backend_utils")
    assert not own_preprocessing(read_settings({"TRITON_MODEL_REPO": str(tmp_path)}))


def test_messages_become_a_prompt(demo_model: Path) -> None:
    deployment = Deployment(
        read_settings({}),
        cast(Any, None),
        cast(Any, None),
        Admission(1, 0, 1.0),
        load_tokenizer(str(demo_model)),
        context_length=50,
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert deployment.chat_prompt(messages) == "<s><|user|>Hi<|end|><|assistant|>"
    with pytest.raises(PromptTooLong):
        deployment.chat_prompt([{"role": "user", "content": "x" * 10_000}])
