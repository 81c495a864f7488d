"""Engine configurations, the commands they become, and the tar. Whole builds are integration tests."""

import os
import re
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from tests.support import ROOT
from tools.engine_builder import build
from tools.engine_builder.config import EngineConfig, load_config
from tools.engine_builder.toolchain import (
    FAMILIES,
    MODEL_TYPES,
    Toolchain,
    find_family,
    find_toolchain,
    plan,
)

Load = Callable[[str], EngineConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str) -> EngineConfig:
        file = tmp_path / "engine.yaml"
        file.write_text(text)
        return load_config(file)

    return load


def commands_of(config: EngineConfig) -> list[str]:
    """The command lines of a build, with words for the paths."""
    text = "\n".join(shlex.join(step.command) for step in plan(config, Toolchain(), Path("/w")))
    text = re.sub(r"/w/models/\S+", "MODEL", text)
    text = text.replace("/w/checkpoint", "CHECKPOINT").replace("/w/engine", "ENGINE")
    return re.sub(r"\S+/(\w+\.py)", r"\1", text).splitlines()


@pytest.mark.parametrize(
    ("file", "commands"),
    [
        pytest.param(
            "gpt2-medium.yaml",
            [
                (
                    "python3 convert_checkpoint.py --model_dir MODEL --output_dir CHECKPOINT "
                    "--dtype float16"
                ),
                (
                    "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE "
                    "--gpt_attention_plugin float16 --gemm_plugin float16 --remove_input_padding "
                    "enable --kv_cache_type paged"
                ),
            ],
            id="gpt2-medium",
        ),
        # TensorRT-LLM backend's docs/llama.md.
        pytest.param(
            "llama-2-7b-tp4.yaml",
            [
                (
                    "python3 convert_checkpoint.py --model_dir MODEL --output_dir CHECKPOINT "
                    "--dtype float16 --tp_size 4"
                ),
                "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --gemm_plugin float16",
            ],
            id="llama-2-7b-tp4",
        ),
        # NVIDIA's guide, without --tp_size 1 --pp_size 1, which trtllm-build refuses since 0.12.
        pytest.param(
            "phi-3-mini-4k.yaml",
            [
                (
                    "python3 convert_checkpoint.py --model_dir MODEL --output_dir CHECKPOINT "
                    "--dtype float16"
                ),
                (
                    "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --gemm_plugin "
                    "float16 --max_batch_size 8 --max_input_len 1024 --max_seq_len 2048"
                ),
            ],
            id="phi-3-mini-4k",
        ),
        pytest.param(
            "baichuan2-13b.yaml",
            [
                (
                    "python3 convert_checkpoint.py --model_dir MODEL --output_dir CHECKPOINT "
                    "--dtype float16 --model_version v2_13b"
                ),
                (
                    "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE "
                    "--gpt_attention_plugin float16 --gemm_plugin float16 --context_fmha enable "
                    "--remove_input_padding enable --kv_cache_type paged --max_batch_size 64 "
                    "--max_input_len 4096 --max_seq_len 5120"
                ),
            ],
            id="baichuan2-13b",
        ),
        # A guide's commands for 0.8, in the names of today.
        pytest.param(
            "codellama-13b.yaml",
            [
                (
                    "python3 convert_checkpoint.py --model_dir MODEL --output_dir CHECKPOINT "
                    "--dtype float16"
                ),
                (
                    "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --gemm_plugin "
                    "float16 --gpt_attention_plugin float16 --remove_input_padding enable "
                    "--context_fmha enable --kv_cache_type paged --max_batch_size 64 "
                    "--max_input_len 4096 --max_seq_len 5120"
                ),
            ],
            id="codellama-13b",
        ),
        pytest.param(
            "llama-3.1-8b-fp8.yaml",
            [
                (
                    "python3 quantize.py --model_dir MODEL --output_dir CHECKPOINT --dtype "
                    "bfloat16 --qformat fp8 --kv_cache_dtype fp8 --calib_size 512"
                ),
                (
                    "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE "
                    "--use_paged_context_fmha enable --use_fp8_context_fmha enable "
                    "--max_batch_size 512 --max_seq_len 8192 --max_num_tokens 8192"
                ),
            ],
            id="llama-3.1-8b-fp8",
        ),
    ],
)
def test_commands_of_the_examples(file: str, commands: list[str]) -> None:
    assert commands_of(load_config(ROOT / "examples" / "engines" / file)) == commands


@pytest.mark.parametrize(
    ("config", "commands"),
    [
        pytest.param(
            (
                "{model: org/m, quantization: int4_awq, awq_block_size: 64, calib_dataset: "
                "cnn_dailymail, tp_size: 2, pp_size: 2, quantize_args: {batch_size: 8}, "
                "build_args: {fast_build: null}}"
            ),
            [
                (
                    "python3 quantize.py --model_dir MODEL --output_dir CHECKPOINT --qformat "
                    "int4_awq --calib_dataset cnn_dailymail --awq_block_size 64 --tp_size 2 "
                    "--pp_size 2 --batch_size 8"
                ),
                "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --fast_build",
            ],
            id="quantization",
        ),
        pytest.param(
            "{model: google/gemma-2-9b, family: gemma, dtype: bfloat16, tp_size: 2}",
            [
                (
                    "python3 convert_checkpoint.py --ckpt-type hf --model-dir MODEL "
                    "--output-model-dir CHECKPOINT --dtype bfloat16 --world-size 2"
                ),
                "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE",
            ],
            id="Gemma's script, whose arguments have other names",
        ),
        pytest.param(
            "{model: m, checkpoint: /c, build_args: {a: , b: true, c: false, --d: [1, x], e: 0}}",
            ["trtllm-build --checkpoint_dir /c --output_dir ENGINE --a --b --d 1 x --e 0"],
            id="checkpoint and arguments of every kind",
        ),
        pytest.param(
            "{model: org/name@main, convert_args: {load_by_shard: }}",
            [
                (
                    "python3 convert_checkpoint.py --model_dir MODEL --output_dir CHECKPOINT "
                    "--load_by_shard"
                ),
                "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE",
            ],
            id="family that is known once the model is there",
        ),
    ],
)
def test_commands(load: Load, config: str, commands: list[str]) -> None:
    assert commands_of(load(config)) == commands


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        pytest.param(
            (
                "modell: x\n"
                "tp_size: 0\n"
                "max_batch_size: true\n"
                "family: ../x\n"
                "plugins: {gemm_plugin: fp17, gemm_plugins: auto, tokens_per_block: many}\n"
                "build_args: {max_batch_sise: 3, context_fmha_fp32_acc: enable, "
                "max_num_tokens: 1, use_gemm_plugin: , brand_new: 3}\n"
                "convert_args: [1]\n"
            ),
            (
                "engine.yaml cannot be used:\n"
                "model: Field required\n"
                "family: String should match pattern '^[\\w.-]+$'\n"
                "tp_size: Input should be greater than or equal to 1\n"
                "max_batch_size: Input should be a valid integer\n"
                "plugins: gemm_plugin: expected auto or float16 or bfloat16 or float32 or "
                "int32 or disable or fp8 or nvfp4, got 'fp17'\n"
                "plugins: gemm_plugins: unknown plugin; did you mean gemm_plugin?\n"
                "plugins: tokens_per_block: expected a whole number above 0, got 'many'\n"
                "convert_args: Input should be a valid dictionary\n"
                "build_args: max_batch_sise: unknown argument of trtllm-build; did you mean "
                "max_batch_size?\n"
                "build_args: context_fmha_fp32_acc: since TensorRT-LLM 0.12 it is set when the "
                "engine is served (enable_context_fmha_fp32_acc); remove it here\n"
                "build_args: max_num_tokens: use the key max_num_tokens\n"
                "build_args: use_gemm_plugin: use plugins: gemm_plugin\n"
                "modell: unknown key; did you mean model?"
            ),
            id="every kind at once",
        ),
        pytest.param(
            "{model: m, max_input_len: 4096, max_seq_len: 2048}",
            "max_input_len: 4096 is more than max_seq_len",
            id="inputs longer than sequences",
        ),
        pytest.param(
            "{model: m, kv_cache_dtype: fp8}",
            "kv_cache_dtype: has no effect without quantization",
            id="type of a cache without quantization",
        ),
        pytest.param(
            "{model: m, quantization: fp8, convert_args: {x: 1}}",
            "convert_args: has no effect: quantize.py",
            id="arguments of a conversion with quantization",
        ),
        pytest.param(
            "{model: m, checkpoint: /c, tp_size: 2}",
            "tp_size: has no effect with checkpoint",
            id="size with a checkpoint",
        ),
        pytest.param("model: [x", "is not YAML: while parsing a flow sequence", id="no YAML"),
        pytest.param("", "Input should be a valid dictionary", id="empty file"),
    ],
)
def test_every_problem_is_reported_at_once_with_its_key(
    load: Load, file: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(file)
    assert problem in "\n".join([line.strip() for line in caught.value.message.splitlines()])


@pytest.mark.parametrize("family", ["phi", "mamba", "gemma"])
def test_a_script_without_pipeline_parallelism_is_not_asked_for_it(
    tmp_path: Path, family: str
) -> None:
    """Phi's and Mamba's have --pp_size, and end with an assertion when it is not 1."""
    config = EngineConfig(model="m", family=family, pp_size=2)
    with pytest.raises(ConfigurationError, match=f"conversion of {family} models has no pipeline"):
        find_family(config, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    assert find_family(EngineConfig(model="m"), tmp_path).name == "phi"
    assert {*MODEL_TYPES.values()} == {*FAMILIES}


def test_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trtllm-build").touch()
    monkeypatch.setenv("TENSORRT_LLM_EXAMPLES", "/e")
    monkeypatch.setenv("TENSORRT_LLM_PYTHON", f"{tmp_path}/python3")
    found = find_toolchain()
    assert found == Toolchain(f"{tmp_path}/python3", f"{tmp_path}/trtllm-build", Path("/e"))
    for tools, problem in (
        (found, "trtllm-build was not found"),
        (Toolchain("python3", "python3", tmp_path / "absent"), "set TENSORRT_LLM_EXAMPLES"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            tools.check(EngineConfig(model="m"))


# The tar


def test_a_tokenizers_files_are_taken_and_no_others(tmp_path: Path) -> None:
    kept = "tokenizer.json tokenizer_config.json config.json tokenizer.model.v3 tokenization_x.py"
    kept += " chat_template.jinja additional_chat_templates/rag.jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (*kept.split(), "model.safetensors", "modeling_x.py", ".env", "README.md"):
        (tmp_path / name).touch()
    names = {name for name, _ in build.tokenizer_files(tmp_path)}
    assert names == {f"tokenizer/{name}" for name in kept.split()}


def test_the_tar_holds_what_links_lead_to_and_no_owner(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("vocabulary")
    (tmp_path / "blob").chmod(0o600)
    (tmp_path / "link").symlink_to("blob")
    os.link(tmp_path / "blob", tmp_path / "twin")
    output = tmp_path / "engine.tar"
    build.write_tar(output, [("a", tmp_path / "link"), ("b", tmp_path / "twin")])
    with tarfile.open(output) as tar:
        for member in tar.getmembers():
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
            assert member.mode == 0o644
            assert tar.extractfile(member).read() == b"vocabulary"  # type: ignore[union-attr]
    before = output.read_bytes()
    with pytest.raises(FileNotFoundError):
        build.write_tar(output, [("a", tmp_path / "link"), ("b", tmp_path / "absent")])
    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"blob", "link", "twin", "engine.tar"}
