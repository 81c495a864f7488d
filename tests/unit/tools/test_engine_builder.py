"""Engine configurations, the commands they become, and what is kept out of logs and tars."""
# The commands of guides are literal, hence the long lines.
# ruff: noqa: E501

from __future__ import annotations

import json
import os
import shlex
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cog_triton.errors import ConfigurationError
from tools.engine_builder import build, package
from tools.engine_builder.build import redact
from tools.engine_builder.config import EngineConfig, load_config, parse_config
from tools.engine_builder.toolchain import (
    FAMILIES,
    MODEL_TYPES,
    Layout,
    Toolchain,
    find_family,
    find_toolchain,
    named,
    options,
    release,
    steps,
)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "engines"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def example(name: str) -> EngineConfig:
    return load_config(EXAMPLES / f"{name}.yaml")


def config_of(text: str) -> EngineConfig:
    return parse_config(yaml.safe_load(text))


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        config_of(text)
    assert str(caught.value).startswith("E3001 ")
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


def commands(
    config: EngineConfig,
    *,
    model: str = "/model",
    checkpoint: str = "/checkpoint",
    engine: str = "/engine",
    script: str = "convert_checkpoint.py",
    python: str = "python",
    version: str | None = None,
) -> list[list[str]]:
    layout = Layout(
        Path(model), Path(checkpoint), Path(engine), Path(script), named(config.family or "llama")
    )
    return [list(step.command) for step in steps(config, Toolchain(python), layout, version)]


def words(text: str) -> list[str]:
    """A command as a guide has it: continued lines, and paths that need not be as pathlib has them."""
    return [
        str(Path(word)) if "/" in word else word for word in shlex.split(text.replace("\\\n", " "))
    ]


# Commands of guides


def test_gpt_2_medium() -> None:
    assert commands(example("gpt2-medium"), python="python3") == [
        words(
            "python3 convert_checkpoint.py --model_dir /model --output_dir /checkpoint --dtype float16"
        ),
        words(
            "trtllm-build --checkpoint_dir /checkpoint --output_dir /engine --gpt_attention_plugin float16 "
            "--gemm_plugin float16 --remove_input_padding enable --kv_cache_type paged"
        ),
    ]


def test_llama_2_7b_on_4_gpus() -> None:
    """TensorRT-LLM backend's docs/llama.md."""
    guide = r"""
python convert_checkpoint.py --model_dir ${HF_LLAMA_MODEL} \
            --output_dir ./tllm_checkpoint_4gpu_tp4 \
            --dtype float16 \
            --tp_size 4
---
trtllm-build --checkpoint_dir ./tllm_checkpoint_4gpu_tp4 \
            --output_dir /tmp/llama/7B/trt_engines/fp16/4-gpu/ \
            --gemm_plugin float16
"""
    made = commands(
        example("llama-2-7b-tp4"),
        model="${HF_LLAMA_MODEL}",
        checkpoint="./tllm_checkpoint_4gpu_tp4",
        engine="/tmp/llama/7B/trt_engines/fp16/4-gpu/",
    )
    assert made == [words(command) for command in guide.split("---")]


PHI_3 = r"""
python3 ./convert_checkpoint.py \
                    --model_dir ./Phi-3-mini-4k-instruct \
                    --output_dir ./phi-checkpoint \
                    --dtype float16
---
trtllm-build \
    --checkpoint_dir ./phi-checkpoint \
    --output_dir ./phi-engine \
    --gemm_plugin float16 \
    --max_batch_size 8 \
    --max_input_len 1024 \
    --max_seq_len 2048 \
    --tp_size 1 \
    --pp_size 1
"""


@pytest.mark.parametrize(
    ("version", "end"),
    [
        ("0.11.0", ["--tp_size", "1", "--pp_size", "1"]),
        (None, ["--tp_size", "1", "--pp_size", "1"]),
        ("0.12.0", []),
        ("1.2.0rc3", []),
    ],
)
def test_phi_3_mini(version: str | None, end: list[str]) -> None:
    """NVIDIA's guide is for TensorRT-LLM 0.11; 0.12 and later refuse the last two arguments."""
    made = commands(
        example("phi-3-mini-4k"),
        model="./Phi-3-mini-4k-instruct",
        checkpoint="./phi-checkpoint",
        engine="./phi-engine",
        python="python3",
        version=version,
    )
    convert, build = (words(command) for command in PHI_3.split("---"))
    assert made == [convert, build[:-4] + end]


def test_baichuan_2_13b() -> None:
    assert commands(example("baichuan2-13b")) == [
        words(
            "python convert_checkpoint.py --model_dir /model --output_dir /checkpoint --dtype float16 "
            "--model_version v2_13b"
        ),
        words(
            "trtllm-build --checkpoint_dir /checkpoint --output_dir /engine --gpt_attention_plugin float16 "
            "--gemm_plugin float16 --context_fmha enable --remove_input_padding enable --kv_cache_type paged "
            "--max_batch_size 64 --max_input_len 4096 --max_seq_len 5120"
        ),
    ]


def test_codellama_13b() -> None:
    """A guide's commands for TensorRT-LLM 0.8, in the names of today."""
    convert, build = commands(example("codellama-13b"), python="python3")
    assert convert == words(
        "python3 convert_checkpoint.py --model_dir /model --output_dir /checkpoint --dtype float16"
    )
    assert build == words(
        "trtllm-build --checkpoint_dir /checkpoint --output_dir /engine --gemm_plugin float16 "
        "--gpt_attention_plugin float16 --remove_input_padding enable --context_fmha enable "
        "--kv_cache_type paged --max_batch_size 64 --max_input_len 4096 --max_seq_len 5120"
    )


def test_llama_3_1_8b_in_fp8() -> None:
    assert commands(example("llama-3.1-8b-fp8"), script="quantize.py") == [
        words(
            "python quantize.py --model_dir /model --output_dir /checkpoint --dtype bfloat16 --qformat fp8 "
            "--kv_cache_dtype fp8 --calib_size 512"
        ),
        words(
            "trtllm-build --checkpoint_dir /checkpoint --output_dir /engine --use_paged_context_fmha enable "
            "--use_fp8_context_fmha enable --max_batch_size 512 --max_seq_len 8192 --max_num_tokens 8192"
        ),
    ]


def test_int4_awq_on_several_gpus() -> None:
    config = config_of(
        "{model: org/m, quantization: int4_awq, awq_block_size: 64, calib_dataset: cnn_dailymail,"
        " tp_size: 2, pp_size: 2, quantize_args: {batch_size: 8}, build_args: {fast_build: null}}"
    )
    assert commands(config, script="quantize.py") == [
        words(
            "python quantize.py --model_dir /model --output_dir /checkpoint --qformat int4_awq "
            "--calib_dataset cnn_dailymail --awq_block_size 64 --tp_size 2 --pp_size 2 --batch_size 8"
        ),
        words("trtllm-build --checkpoint_dir /checkpoint --output_dir /engine --fast_build"),
    ]
    assert config.world_size == 4


def test_gemma_names_its_arguments_otherwise() -> None:
    config = config_of("{model: google/gemma-2-9b, family: gemma, dtype: bfloat16, tp_size: 2}")
    assert commands(config)[0] == words(
        "python convert_checkpoint.py --ckpt-type hf --model-dir /model --output-model-dir /checkpoint "
        "--dtype bfloat16 --world-size 2"
    )


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_what_is_recorded_of_an_example_builds_the_same(file: Path) -> None:
    config = example(file.stem)
    assert parse_config(yaml.safe_load(yaml.safe_dump(config.plain()))) == config


def test_a_checkpoint_needs_no_first_step() -> None:
    config = config_of("{model: org/m, checkpoint: /ready, max_batch_size: 4}")
    layout = Layout(Path("/model"), Path("/ready"), Path("/engine"), None, named("none"))
    made = [list(step.command) for step in steps(config, Toolchain(), layout)]
    assert made == [
        words("trtllm-build --checkpoint_dir /ready --output_dir /engine --max_batch_size 4")
    ]


def test_flags_lists_and_switches() -> None:
    given = {"a": None, "b": True, "c": False, "d": [1, "x"], "e": 0, "f": ""}
    assert options(given) == ["--a", "--b", "--d", "1", "x", "--e", "0", "--f", ""]


# Problems


def test_every_problem_is_reported_at_once_with_its_key() -> None:
    assert problems(
        """
        modell: x
        tp_size: 0
        max_batch_size: true
        max_input_len: 4096
        max_seq_len: 2048
        dtype: fp16
        kv_cache_dtype: fp8
        plugins: {gemm_plugin: fp17, gemm_plugins: auto, tokens_per_block: many}
        build_args: {max_batch_sise: 3, context_fmha_fp32_acc: enable, max_num_tokens: 1, lora_dir: {a: b}}
        convert_args: [1]
        timeout: 0
        """
    ) == [
        "plugins.gemm_plugin: expected auto or float16 or bfloat16 or float32 or int32 or disable or fp8 or nvfp4, got 'fp17'",
        "plugins.gemm_plugins: unknown key; did you mean gemm_plugin?",
        "plugins.tokens_per_block: expected a whole number above 0, got 'many'",
        "build_args.max_batch_sise: unknown argument of trtllm-build; did you mean max_batch_size?",
        "build_args.context_fmha_fp32_acc: since TensorRT-LLM 0.12 it is set when the engine is served (enable_context_fmha_fp32_acc); remove it here",
        "build_args.max_num_tokens: use the key max_num_tokens",
        "max_input_len: 4096 is more than max_seq_len 2048, which has room for prompt and output",
        "kv_cache_dtype: has no effect without quantization",
        "model: required",
        "dtype: expected auto, float16, bfloat16 or float32",
        "tp_size: expected greater than or equal to 1",
        "max_batch_size: expected a number",
        "convert_args: expected a valid dictionary",
        "build_args.lora_dir: expected a valid string",
        "timeout: expected greater than 0",
        "modell: unknown key; did you mean model?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{model: m, quantization: fp8, convert_args: {x: 1}}", "convert_args: has no effect: quantize.py replaces"),
        ("{model: m, quantize_args: {x: 1}}", "quantize_args: has no effect without quantization"),
        ("{model: m, checkpoint: /c, quantization: fp8}", "quantization: has no effect with checkpoint"),
        ("{model: m, checkpoint: /c, tp_size: 2}", "tp_size: has no effect with checkpoint"),
        ("{model: m, family: ../x}", "family: "),
        ("{model: m, build_args: {max_output_len: 8}}", "build_args.max_output_len: use max_seq_len"),
        ("{model: m, build_args: {use_gemm_plugin: }}", "build_args.use_gemm_plugin: use plugins: gemm_plugin"),
        ("{model: m, build_args: {use_smooth_quant: }}", "build_args.use_smooth_quant: use quantization: int8_sq"),
        ("{model_id: m, build: {}}", "model_id: unknown key: the steps of cog-trt-llm's files are not read"),
    ],
)  # fmt: skip
def test_a_problem_names_its_key(text: str, problem: str) -> None:
    assert any(line.startswith(problem) for line in problems(text)), problems(text)


def test_arguments_have_any_number_of_dashes_and_new_ones_are_passed_on() -> None:
    config = config_of("{model: m, build_args: {--brand_new: 3}, plugins: {-gemm_plugin: true}}")
    assert (config.build_args, config.plugins) == ({"brand_new": 3}, {"gemm_plugin": "auto"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: [x", "is not YAML: line 1, column 10"),
        ("model: a\nmodel: b\n", "is not YAML: line 2, column 1: 'model' stands twice"),
        (f"hf_token: {TOKEN}: x\n", "is not YAML: line 1"),
        ("- model\n", "expected keys and values"),
        ("", "expected keys and values"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_config(file)
    assert problem in str(caught.value)
    assert TOKEN not in str(caught.value)
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")


# Secrets


def test_the_token_is_read_and_never_shown() -> None:
    config = config_of(f"{{model: org/m, hf_token: {TOKEN}}}")
    assert config.hf_token is not None
    assert config.hf_token.get_secret_value() == TOKEN
    assert TOKEN not in f"{config!r} {config} {config.plain()} {config.model_dump_json()}"


def test_no_problem_shows_a_secret() -> None:
    text = "\n".join(
        problems(
            "{model: ['https://user:sesame-open@host/m.tar?sig=abcdefgh'], hf_token: [very-secret-value],"
            " tokenizer: 3, convert_args: {api_key: {x: hush-hush}}}"
        )
    )
    for secret in ("sesame-open", "abcdefgh", "very-secret-value", "hush-hush"):
        assert secret not in text


def test_tokens_and_parts_of_urls_are_masked() -> None:
    text = f"see https://me:pw@host/m.tar?X-Sig=1&y=2#f with {TOKEN} or the-known-one"
    assert redact(text, "the-known-one") == "see https://***@host/m.tar?***#f with *** or ***"


# Scripts, tools, disks


def test_families(tmp_path: Path) -> None:
    assert set(MODEL_TYPES.values()) == set(FAMILIES)
    (tmp_path / "config.json").write_text('{"model_type": "brandnew"}')
    with pytest.raises(ConfigurationError, match=r"'brandnew'.*gpt2.*llama.*convert_script"):
        find_family(config_of("model: m"), tmp_path)


def test_scripts_are_found_in_every_layout() -> None:
    def names(family: str) -> list[str]:
        return [str(path.parent) for path in named(family).scripts(Path())]

    assert names("llama") == ["models/core/llama", "models/contrib/llama", "llama"]
    assert names("baichuan") == ["models/contrib/baichuan", "models/core/baichuan", "baichuan"]
    assert names("mine") == ["models/core/mine", "models/contrib/mine", "mine"]


def test_tools(tmp_path: Path) -> None:
    assert find_toolchain({}) == Toolchain(
        "python3", "trtllm-build", Path("/app/tensorrt_llm/examples")
    )
    (tmp_path / "trtllm-build").touch()
    python = str(tmp_path / "python3")
    found = find_toolchain({"TENSORRT_LLM_EXAMPLES": "/e", "TENSORRT_LLM_PYTHON": python})
    assert found == Toolchain(python, str(tmp_path / "trtllm-build"), Path("/e"))
    with pytest.raises(ConfigurationError, match="trtllm-build-absent was not found"):
        Toolchain("python3", "trtllm-build-absent").check(config_of("model: m"))
    with pytest.raises(ConfigurationError, match="TENSORRT_LLM_EXAMPLES"):
        Toolchain("python3", "python3", tmp_path / "absent").check(config_of("model: m"))


@pytest.mark.parametrize("family", ["phi", "mamba", "gemma"])
def test_a_script_without_pipeline_parallelism_is_not_asked_for_it(
    tmp_path: Path, family: str
) -> None:
    """Phi's and Mamba's have --pp_size, and end with an assertion when it is not 1."""
    wanted = "{model: m, dtype: float16, family: FAMILY, tp_size: 2, pp_size: 2}"
    with pytest.raises(ConfigurationError) as caught:
        find_family(config_of(wanted.replace("FAMILY", family)), tmp_path)
    assert caught.value.message == (
        f"pp_size: 2: TensorRT-LLM's conversion of {family} models has no pipeline parallelism; split "
        "the layers instead, with tp_size"
    )
    assert find_family(config_of(wanted.replace("FAMILY", "llama")), tmp_path).name == "llama"


def test_phi_is_known_by_its_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    assert find_family(config_of("{model: m, dtype: float16, pp_size: 1}"), tmp_path).name == "phi"
    with pytest.raises(ConfigurationError, match="conversion of phi models"):
        find_family(config_of("{model: m, dtype: float16, pp_size: 2}"), tmp_path)


def test_versions() -> None:
    assert release("1.2.0rc3") == (1, 2)
    assert release("0.11.0") == (0, 11)
    assert Toolchain("no-such-python").version() is None


def test_a_version_that_builds_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(stdout="1.3.0\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    with pytest.raises(ConfigurationError, match=r"TensorRT-LLM 1\.3\.0 builds no engines"):
        Toolchain().version()


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5e9))
    build._check_space(tmp_path, tmp_path, int(1.5e9))
    with pytest.raises(
        ConfigurationError, match=r"needs about 6\.0 GB, 5\.0 GB are free"
    ) as caught:
        build._check_space(tmp_path, tmp_path, int(2e9))
    assert str(tmp_path) in str(caught.value)


def test_the_space_needed_counts_one_copy_of_the_weights(tmp_path: Path) -> None:
    for name, size in {"a.safetensors": 100, "b.safetensors": 50, "pytorch_model.bin": 999}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert build._bytes_needed(config_of("model: m"), tmp_path) == 150
    assert build._bytes_needed(config_of("{model: m, quantization: fp8}"), tmp_path) == 90


# The tar


def make_tokenizer(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in (
        *("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"),
        *("tokenizer.model.v3", "tokenization_x.py", "generation_config.json"),
        *("model.safetensors", "modeling_x.py", ".env", "README.md"),
    ):
        (directory / name).write_text(name)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag")
    return directory


def test_a_tokenizers_files_are_taken_and_no_others(tmp_path: Path) -> None:
    names = {name for name, _ in package.tokenizer_files(make_tokenizer(tmp_path / "model"))}
    assert names == {
        f"tokenizer/{name}"
        for name in (
            *("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"),
            *("tokenizer.model.v3", "tokenization_x.py", "generation_config.json"),
            "additional_chat_templates/rag.jinja",
        )
    }
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").touch()
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        package.tokenizer_files(tmp_path / "bare")


def test_the_tar_holds_what_links_lead_to_and_no_owner(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("vocabulary")
    (tmp_path / "blob").chmod(0o600)
    (tmp_path / "link").symlink_to("blob")
    os.link(tmp_path / "blob", tmp_path / "twin")
    output = tmp_path / "engine.tar"
    package.write_tar(output, [("a", tmp_path / "link"), ("b", tmp_path / "twin")])
    with tarfile.open(output) as tar:
        for member in tar.getmembers():
            assert member.isreg()
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
            assert member.mode == 0o644
            assert tar.extractfile(member).read() == b"vocabulary"  # type: ignore[union-attr]


def test_a_tar_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    output = tmp_path / "engine.tar"
    output.write_text("before")
    (tmp_path / "there").write_text("x")
    with pytest.raises(FileNotFoundError):
        package.write_tar(output, [("a", tmp_path / "there"), ("b", tmp_path / "absent")])
    assert output.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.tar", "there"]


# The training entry


def test_cog_accepts_the_training_function() -> None:
    from cog._inspector import create_predictor

    info = create_predictor("train", "train")
    assert list(info.inputs) == ["config", "hf_token"]
    assert info.inputs["hf_token"].type.primitive.name == "SECRET"
    assert info.output.json_type()["properties"]["weights"] == {
        "type": "string",
        "format": "uri",
        "title": "Weights",
    }


def test_the_examples_are_those_of_the_guides() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.yaml")} == {
        "baichuan2-13b",
        "codellama-13b",
        "gpt2-medium",
        "llama-2-7b-tp4",
        "llama-3.1-8b-fp8",
        "phi-3-mini-4k",
    }
    assert json.dumps([example(file.stem).plain() for file in EXAMPLES.glob("*.yaml")])
