"""NVIDIA's command line. The commands are literal, hence the long lines."""
# ruff: noqa: E501

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "fill_template.py"
NAMES = runpy.run_path(str(SCRIPT))
main: Callable[[list[str]], int] = NAMES["main"]
parse_substitutions: Callable[[list[str]], dict[str, str]] = NAMES["parse_substitutions"]

BLS = """
name: "tensorrt_llm_bls"
backend: "python"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy {
  decoupled: ${decoupled_mode}
}
parameters: {
  key: "accumulate_tokens"
  value: {
    string_value: "${accumulate_tokens}"
  }
}
parameters: {
  key: "tensorrt_llm_draft_model_name"
  value: {
    string_value: "${tensorrt_llm_draft_model_name}"
  }
}
instance_group [
  {
    count: ${bls_instance_count}
    kind : KIND_CPU
  }
]
"""

# Commands as they stand in guides for cog-triton, Llama, Baichuan and Phi-3.
COMMANDS = [
    'python3 tools/fill_template.py -i triton_model_repo/preprocessing/config.pbtxt "triton_max_batch_size:4,tokenizer_dir:${HF_GPT_MODEL},tokenizer_type:auto,preprocessing_instance_count:1"',
    'python3 tools/fill_template.py -i triton_model_repo/postprocessing/config.pbtxt "triton_max_batch_size:4,tokenizer_dir:${HF_GPT_MODEL},tokenizer_type:auto,postprocessing_instance_count:1"',
    'python3 tools/fill_template.py -i triton_model_repo/tensorrt_llm/config.pbtxt "triton_max_batch_size:4,decoupled_mode:True,engine_dir:/src/tensorrtllm_backend/triton_model_repo/tensorrt_llm/1,batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:100,batch_scheduler_policy:max_utilization"',
    'python3 tools/fill_template.py -i triton_model_repo/tensorrt_llm/config.pbtxt "triton_max_batch_size:4,decoupled_mode:False,engine_dir:/src/tensorrtllm_backend/triton_model_repo/tensorrt_llm/1,batching_strategy:V1,max_queue_delay_microseconds:100"',
    'python3 tools/fill_template.py -i triton_model_repo/ensemble/config.pbtxt "triton_max_batch_size:4"',
    """python3 tensorrtllm_backend/tools/fill_template.py tensorrtllm_backend/all_models/inflight_batcher_llm/preprocessing/config.pbtxt \\
    tokenizer_dir:/src/tensorrtllm_backend/triton_model/tensorrt_llm/1,tokenizer_type:auto,triton_max_batch_size:8 \\
     > tensorrtllm_backend/triton_model/preprocessing/config.pbtxt""",
    """python3 tensorrtllm_backend/tools/fill_template.py tensorrtllm_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt \\
    batching_strategy:inflight_fused_batching,engine_dir:/src/tensorrtllm_backend/triton_model/tensorrt_llm/1,batch_scheduler_policy:max_utilization,decoupled_mode:True,triton_max_batch_size:8 \\
    > tensorrtllm_backend/triton_model/tensorrt_llm/config.pbtxt""",
    "python3 tools/fill_template.py -i triton_model_repo/preprocessing/config.pbtxt tokenizer_dir:${HF_LLAMA_MODEL},tokenizer_type:llama,triton_max_batch_size:64,preprocessing_instance_count:1",
    "python3 tools/fill_template.py -i triton_model_repo/tensorrt_llm/config.pbtxt triton_max_batch_size:64,decoupled_mode:False,max_beam_width:1,engine_dir:/tmp/llama/7B/trt_engines/fp16/4-gpu/,max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,batching_strategy:inflight_batching,max_queue_delay_microseconds:600",
    "python3 tools/fill_template.py -i triton_model_repo/postprocessing/config.pbtxt tokenizer_dir:${HF_LLAMA_MODEL},tokenizer_type:llama,triton_max_batch_size:64,postprocessing_instance_count:1",
    "python3 tools/fill_template.py -i ${VAR_DIR}/tensorrt_llm_bls/config.pbtxt triton_max_batch_size:64,decoupled_mode:False,bls_instance_count:1,accumulate_tokens:False",
    "python3 tools/fill_template.py -i ${VAR_DIR}/ensemble/config.pbtxt triton_max_batch_size:64",
    "python3 tools/fill_template.py -i ${VAR_DIR}/tensorrt_llm/config.pbtxt triton_max_batch_size:64,decoupled_mode:True,max_beam_width:1,engine_dir:$ENGINE_DIR,max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,batching_strategy:inflight_batching,max_queue_delay_microseconds:600",
    """    python3 tools/fill_template.py --in_place \\
        all_models/inflight_batcher_llm/ensemble/config.pbtxt \\
    triton_max_batch_size:128
""",
    """    python3 tools/fill_template.py --in_place \\
        all_models/inflight_batcher_llm/postprocessing/config.pbtxt \\
    tokenizer_type:auto,\\
    tokenizer_dir:../Phi-3-mini-4k-instruct,\\
    triton_max_batch_size:128,\\
    postprocessing_instance_count:2
""",
    """    python3 tools/fill_template.py --in_place \\
        all_models/inflight_batcher_llm/preprocessing/config.pbtxt \\
    tokenizer_type:auto,\\
    tokenizer_dir:../Phi-3-mini-4k-instruct,\\
    triton_max_batch_size:128,\\
    preprocessing_instance_count:2
""",
]  # fmt: skip
PHI_3 = """    python3 tools/fill_template.py --in_place \\
        all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt \\
    decoupled_mode:true,\\
    engine_dir:/all_models/inflight_batcher_llm/tensorrt_llm/1,\\
    max_tokens_in_paged_kv_cache:,\\
    batch_scheduler_policy:guaranteed_completion,\\
    kv_cache_free_gpu_mem_fraction:0.2,\\
    max_num_sequences:4,\\
    triton_backend:tensorrtllm,\\
    triton_max_batch_size:128,\\
    max_queue_delay_microseconds:10,\\
    max_beam_width:1,\\
    batching_strategy:inflight_fused_batching,\\
    engine_dir:/opt/all_models/inflight_batcher_llm/tensorrt_llm/1,\\
    max_tokens_in_paged_kv_cache:1,\\
    batch_scheduler_policy:guaranteed_completion,\\
    kv_cache_free_gpu_mem_fraction:0.2
"""


@pytest.fixture
def guide_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the guides' commands find what they name."""
    repository = tmp_path / "triton_model_repo"
    shutil.copytree(ROOT / "triton_model_repo", repository)
    (repository / "tensorrt_llm_bls" / "config.pbtxt").write_text(BLS)
    (tmp_path / "all_models").mkdir()
    (tmp_path / "all_models" / "inflight_batcher_llm").symlink_to(repository)
    (tmp_path / "tensorrtllm_backend").symlink_to(tmp_path)
    for model in ("preprocessing", "tensorrt_llm"):
        (tmp_path / "triton_model" / model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return repository


def shell_arguments(command: str) -> list[str]:
    """What python3 gets from a shell that runs ``command``, without the script's name."""
    environment = {
        **os.environ,
        "HF_GPT_MODEL": "/models/gpt2",
        "HF_LLAMA_MODEL": "/models/llama",
        "ENGINE_DIR": "/engines/baichuan",
        "VAR_DIR": "triton_model_repo",
    }
    show = 'python3() { printf "%s\\0" "$@" >&2; }\n'
    result = subprocess.run(
        ["bash", "-c", show + command], env=environment, capture_output=True, check=True
    )
    return result.stderr.decode().split("\0")[1:-1]


def parse(path: Path) -> Any:
    return text_format.Parse(path.read_text(), ModelConfig())


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guides(
    command: str, guide_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shell_arguments(command)
    assert main(arguments) == 0
    in_place = arguments[0] in ("-i", "--in_place")
    filled = Path(arguments[1]).read_text() if in_place else capsys.readouterr().out
    assert "${" not in filled
    config = text_format.Parse(filled, ModelConfig())
    assert config.name == Path(arguments[1] if in_place else arguments[0]).parent.name
    assert f"triton_max_batch_size:{config.max_batch_size}" in command
    assert guide_directory.is_dir()


def test_the_command_of_the_phi_3_guide(
    guide_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(shell_arguments(PHI_3)) == 0
    config = parse(guide_directory / "tensorrt_llm" / "config.pbtxt")
    assert config.backend == "tensorrtllm"
    assert config.max_batch_size == 128
    assert config.model_transaction_policy.decoupled
    assert config.dynamic_batching.max_queue_delay_microseconds == 10
    assert "context_ids" not in {tensor.name for tensor in config.output}
    expected = {
        "gpt_model_path": "/opt/all_models/inflight_batcher_llm/tensorrt_llm/1",
        "max_tokens_in_paged_kv_cache": "1",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": "0.2",
    }
    assert expected.items() <= parameters(config).items()
    assert caplog.messages == [
        "tensorrt_llm: max_num_sequences has no effect: the backend no longer reads it"
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a:1"], {"a": "1"}),
        (["a:1,b:2"], {"a": "1", "b": "2"}),
        (["a:1,", "b:2"], {"a": "1", "b": "2"}),
        (["a:1", "b:2"], {"a": "1", "b": "2"}),
        ([" a : 1 , \n b:2\n"], {"a": "1", "b": "2"}),
        (["a:1,\\\n    b:2"], {"a": "1", "b": "2"}),
        (["a:,b:"], {"a": "", "b": ""}),
        (["a:1,a:2"], {"a": "2"}),
        (["a:1", "a:2"], {"a": "2"}),
        ([""], {}),
        ([",,"], {}),
        (["a:0\\,1,b:2"], {"a": "0,1", "b": "2"}),
        (["a:b\\:c"], {"a": "b:c"}),
        (["a:/b:c:d"], {"a": "/b:c:d"}),
        (["a:b\\\\,c:d"], {"a": "b\\", "c": "d"}),
        (["a:C\\dir"], {"a": "C\\dir"}),
        (["a:{0\\, 0}\\, {1}"], {"a": "{0, 0}, {1}"}),
    ],
)
def test_parse_substitutions(arguments: list[str], expected: dict[str, str]) -> None:
    assert parse_substitutions(arguments) == expected


@pytest.mark.parametrize("text", ["a", "a:1,b", "a\\:1", "a:1,b\\,c"])
def test_a_part_without_a_colon(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected name:value, got "):
        parse_substitutions([text])


def escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in ",:\\" else char for char in text)


VALUES = st.text() | st.text(alphabet="a,:\\ \n")


@given(st.dictionaries(st.from_regex("[a-z_]+", fullmatch=True), VALUES), st.integers(0, 3))
def test_escaped_values_come_back(values: dict[str, str], cut: int) -> None:
    values = {name: value.strip() for name, value in values.items()}
    parts = [f"{name}:{escaped(value)}" for name, value in values.items()]
    assert parse_substitutions([",".join(parts[:cut]), ",".join(parts[cut:])]) == values


@given(VALUES)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        values = parse_substitutions([text])
    except ConfigurationError:
        return
    # A backslash that is itself escaped does not continue a line.
    assert "\\\\" in text or all("\\\n" not in name for name in values)


@pytest.mark.parametrize(
    ("model", "substitutions", "message"),
    [
        (
            "ensemble",
            "triton_max_batch_sizes:4",
            "ensemble: triton_max_batch_sizes: unknown variable; did you mean triton_max_batch_size?",
        ),
        (
            "ensemble",
            "foo:4",
            "unknown variable; known are decoding_context, logits_datatype, "
            "lora_weights_data_type, num_return_sequences, triton_max_batch_size",
        ),
        ("ensemble", "triton_max_batch_size:many", "expected an integer of at least 1, got 'many'"),
        ("ensemble", "triton_max_batch_size", "expected name:value, got 'triton_max_batch_size'"),
        ("preprocessing", "triton_max_batch_size:4", "preprocessing: tokenizer_dir: required, a path"),
        ("preprocessing", "tokenizer_dir:", "preprocessing: tokenizer_dir: required, a path"),
        ("preprocessing", "tokenizer_dir:${M}", "tokenizer_dir: still to be expanded, '${M}'"),
        ("tensorrt_llm", "decoupled:yes,decoupled_mode:no", "decoupled_mode: also given"),
        ("tensorrt_llm", "max_queue_size:99999999999", "Value out of range: 99999999999"),
        ("none", "a:1", "No such file or directory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_place", [["-i"], []])
def test_errors_leave_the_file_alone(
    in_place: list[str],
    model: str,
    substitutions: str,
    message: str,
    guide_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path: path.read_bytes() for path in guide_directory.glob("*/*") if path.is_file()}
    assert main([*in_place, str(guide_directory / model / "config.pbtxt"), substitutions]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True)
    assert before == {
        path: path.read_bytes() for path in guide_directory.glob("*/*") if path.is_file()
    }


def test_a_file_that_was_filled_already(
    guide_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(guide_directory / "ensemble" / "config.pbtxt")
    assert main(["-i", file, "triton_max_batch_size:4"]) == 0
    assert main(["-i", file, "triton_max_batch_size:4"]) == 2
    assert f"{file}: no ${{…}} in it, it was filled already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "place", "status"),
    [
        ('name: "ensemble"\nmax_batch_size: ${triton_max_batch_size}', "elsewhere", 0),
        ("max_batch_size: ${triton_max_batch_size}", "ensemble", 0),
        ('name: "mine"\nmax_batch_size: ${triton_max_batch_size}', "elsewhere", 2),
        ("max_batch_size: ${triton_max_batch_size}", "elsewhere", 2),
    ],
)
def test_the_model_is_known_by_its_name_or_its_directory(
    text: str, place: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / place / "config.pbtxt"
    file.parent.mkdir()
    file.write_text(text)
    assert main([str(file), "triton_max_batch_size:4"]) == status
    out, err = capsys.readouterr()
    assert ("max_batch_size: 4" in out) is (status == 0)
    assert ("no model is called" in err and "known are ensemble, " in err) is (status == 2)


def test_the_mode_of_a_file_filled_in_place_stays(guide_directory: Path) -> None:
    file = guide_directory / "ensemble" / "config.pbtxt"
    file.chmod(0o640)
    link = guide_directory / "link.pbtxt"
    link.symlink_to(file)
    assert main(["-i", str(link), "triton_max_batch_size:4"]) == 0
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert parse(file).max_batch_size == 4
    assert [path.name for path in file.parent.iterdir() if path.is_file()] == ["config.pbtxt"]


@pytest.mark.parametrize(
    ("values", "on"),
    [
        ("model:m", True),
        ("triton_backend:tensorrtllm,engine_dir:/e", False),
        ("triton_backend:tensorrtllm,engine_dir:/e,decoding_context:true", True),
    ],
)
def test_decoding_context_follows_the_backend(values: str, on: bool, guide_directory: Path) -> None:
    file = guide_directory / "tensorrt_llm" / "config.pbtxt"
    assert main(["-i", str(file), values]) == 0
    assert ("context_ids" in {tensor.name for tensor in parse(file).output}) is on


def test_the_ensembles_decoding_context_is_off_unless_asked_for(guide_directory: Path) -> None:
    file = guide_directory / "ensemble" / "config.pbtxt"
    text = file.read_text()
    for values, on in (("triton_max_batch_size:4", False), ("decoding_context:True", True)):
        file.write_text(text)
        assert main(["-i", str(file), values]) == 0
        assert ("_CONTEXT_IDS" in file.read_text()) is on


def test_an_engine_alone_means_the_backend_that_runs_it(
    guide_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As guides write it from before there was a choice."""
    file = guide_directory / "tensorrt_llm" / "config.pbtxt"
    assert main(["-i", str(file), "engine_dir:/e"]) == 0
    assert caplog.messages == []
    assert 'backend: "tensorrtllm"' in file.read_text()


def test_an_engine_without_its_model_is_warned_about(
    guide_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = guide_directory / "tensorrt_llm" / "config.pbtxt"
    assert main(["-i", str(file), "engine_dir:/e,engine:transformers"]) == 0
    assert caplog.messages == [
        "tensorrt_llm: engine_dir has no effect with triton_backend python",
        "tensorrt_llm: model: the transformers engine needs it",
    ]


def test_as_a_command(guide_directory: Path) -> None:
    file = guide_directory / "postprocessing" / "config.pbtxt"
    command = [sys.executable, str(SCRIPT), "-i", str(file), "tokenizer_type:auto"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr == (
        "WARNING: postprocessing: tokenizer_type has no effect: the tokenizer's own files say what "
        "it is\n"
        "fill_template.py: config templates cannot be filled:\n"
        "  postprocessing: tokenizer_dir: required, a path\n"
    )
    assert "${" in file.read_text()
    done = subprocess.run([*command, "tokenizer_dir:/a:b"], capture_output=True, check=False)
    assert done.returncode == 0
    assert parameters(parse(file))["tokenizer_dir"] == "/a:b"
