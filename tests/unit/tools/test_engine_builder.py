"""Engine configurations, the commands they become, and what is kept out of logs and tars."""
# The commands of guides are literal, hence the long lines.
# ruff: noqa: E501

from __future__ import annotations

import json
import os
import re
import shlex
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cog_triton.errors import ConfigurationError
from tools.engine_builder import arguments, disk, package
from tools.engine_builder.commands import Layout, options, steps
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.families import (
    FAMILIES,
    MODEL_TYPES,
    family_of,
    named,
    script_candidates,
)
from tools.engine_builder.loading import load_config, parse_config
from tools.engine_builder.redaction import Redactor, is_secret_name, secrets_in
from tools.engine_builder.scripts import find_family
from tools.engine_builder.tools import Tools, check_version, find_tools, release

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "engines"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def example(name: str) -> EngineConfig:
    config, notes = load_config(EXAMPLES / f"{name}.yaml")
    assert not notes
    return config


def parse(text: str) -> tuple[EngineConfig, list[str]]:
    return parse_config(yaml.safe_load(text))


def config_of(text: str) -> EngineConfig:
    return parse(text)[0]


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
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
    return [list(step.command) for step in steps(config, Tools(python), layout, version)]


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


def test_the_arguments_of_build_py_become_those_of_now() -> None:
    """The command of a report on Baichuan2 13B with TensorRT-LLM 0.7."""
    config, notes = parse(
        """
        model_id: baichuan-inc/Baichuan2-13B-Chat
        example_name: baichuan
        build:
          executable: python3
          script: build.py
          args:
            model_dir: /models/download/Baichuan2-13B-Chat/
            model_version: v2_13b
            dtype: float16
            max_input_len: 4096
            max_output_len: 1024
            remove_input_padding:
            use_gpt_attention_plugin: float16
            enable_context_fmha:
            use_gemm_plugin: float16
            output_dir: /models/engine
            paged_kv_cache:
            max_batch_size: 64
            use_inflight_batching:
        """
    )
    wanted = example("baichuan2-13b")
    assert [set(c) for c in commands(config)] == [set(c) for c in commands(wanted)]
    code = {"trust_remote_code": False}  # which guides of that time do not know
    assert config == wanted.model_copy(update={"plugins": config.plugins, **code})
    assert config.plugins == wanted.plugins
    assert notes == [
        "build.script: build.py ended with TensorRT-LLM 0.7, trtllm-build is run",
        "build.args.model_dir: not used, the builder chooses it",
        "build.args.model_version: read as an argument of convert_checkpoint.py",
        "build.args.use_gpt_attention_plugin: read as gpt_attention_plugin",
        "build.args.enable_context_fmha: read as context_fmha",
        "build.args.use_gemm_plugin: read as gemm_plugin",
        "build.args.output_dir: not used, the builder chooses it",
        "build.args.paged_kv_cache: read as kv_cache_type: paged",
        "build.args.use_inflight_batching: dropped: every engine with a paged KV cache and packed input can do it",
        "build.args.max_output_len: read as max_seq_len: 5120, with the 4096 of max_input_len",
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


def test_codellama_with_the_arguments_of_tensorrt_llm_0_8() -> None:
    config = config_of(
        """
        model: codellama/CodeLlama-13b-Instruct-hf
        dtype: float16
        build_args: {gemm_plugin: float16, max_input_len: 4096, max_output_len: 1024,
          gpt_attention_plugin: float16, remove_input_padding: enable, paged_kv_cache: enable,
          context_fmha: enable, max_batch_size: 64}
        """
    )
    assert config.family is None  # the model's own files say that it is a Llama
    assert commands(config) == commands(example("codellama-13b"))


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
    again, notes = parse_config(yaml.safe_load(yaml.safe_dump(config.plain())))
    assert again == config
    assert not notes


def test_a_checkpoint_needs_no_first_step() -> None:
    config = config_of("{model: org/m, checkpoint: /ready, max_batch_size: 4}")
    layout = Layout(Path("/model"), Path("/ready"), Path("/engine"), None, named("none"))
    made = [list(step.command) for step in steps(config, Tools(), layout)]
    assert made == [
        words("trtllm-build --checkpoint_dir /ready --output_dir /engine --max_batch_size 4")
    ]


def test_flags_lists_and_switches() -> None:
    given = {"a": None, "b": True, "c": False, "d": [1, "x"], "e": 0, "f": ""}
    assert options(given) == ["--a", "--b", "--d", "1", "x", "--e", "0", "--f", ""]


# The step form


def test_the_step_form_says_what_the_short_form_says() -> None:
    """A configuration of cog-trt-llm, as Replicate had it for Llama 2 70B."""
    config, notes = parse(
        """
        model_id: meta-llama/Llama-2-70b-hf
        example_name: llama
        weight_format: safetensors # or pt
        convert_to_ft:
          executable: "python"
          script: convert_checkpoint.py
          output_dir: ./c-model/meta-llama/Llama-2-70b-hf
          args:
            model_dir: /src/models/meta-llama/Llama-2-70b-hf
            output_dir: ./c-model/meta-llama/Llama-2-70b-hf
            tp_size: 4
            storage-type: fp16
            load_by_shard:
        build:
          executable: trtllm-build
          output_dir: ./engine_outputs/
          args:
            checkpoint_dir: /src/c-model/meta-llama/Llama-2-70b-hf
            output_dir: ./engine_outputs/
            remove_input_padding: enable
            context_fmha: enable
            gpt_attention_plugin: float16
            gemm_plugin: float16
            paged_kv_cache: enable
            workers: 2
            max_batch_size: 64
            max_input_len: 1024
            max_output_len: 512
        """
    )
    assert config == config_of(
        """
        model: meta-llama/Llama-2-70b-hf
        family: llama
        dtype: float16
        tp_size: 4
        workers: 2
        kv_cache_type: paged
        max_batch_size: 64
        max_input_len: 1024
        max_seq_len: 1536
        plugins: {remove_input_padding: enable, context_fmha: enable, gpt_attention_plugin: float16, gemm_plugin: float16}
        convert_args: {load_by_shard: }
        """
    )
    assert commands(config) == [
        words(
            "python convert_checkpoint.py --model_dir /model --output_dir /checkpoint --dtype float16 "
            "--tp_size 4 --load_by_shard"
        ),
        words(
            "trtllm-build --checkpoint_dir /checkpoint --output_dir /engine --remove_input_padding enable "
            "--context_fmha enable --gpt_attention_plugin float16 --gemm_plugin float16 --kv_cache_type paged "
            "--max_batch_size 64 --max_input_len 1024 --max_seq_len 1536 --workers 2"
        ),
    ]
    assert "convert_to_ft.args.storage-type: read as dtype" in notes


def test_cog_trt_llms_gpt_2_builds_what_the_example_builds() -> None:
    config, _ = parse(
        """
        model_id: openai-community/gpt2-medium
        example_name: gpt
        convert_to_ft:
          script: hf_gpt_convert.py
          args: {in-file: /src/models/gpt2-medium, out-dir: ./c-model/gpt2, tensor-parallelism: 1, storage-type: float16}
        build:
          script: build.py
          args:
            model_dir: ./c-model/gpt2/1-gpu
            output_dir: ./engine_outputs/
            dtype: float16
            use_gpt_attention_plugin: float16
            hidden_act: gelu
            use_inflight_batching:
            paged_kv_cache:
            use_gemm_plugin: float16
            use_layernorm_plugin: float16
            remove_input_padding:
            parallel_build:
        """
    )
    assert commands(config) == commands(example("gpt2-medium"))


def test_steps_may_quantize_and_name_scripts_of_their_own() -> None:
    config, _ = parse(
        """
        model_id: org/m
        model_tar_url: https://host/weights/m.tar
        quantize:
          script: ../quantization/quantize.py
          args: {qformat: fp8, kv_cache_dtype: fp8, tp_size: 2, device: cpu}
        build: {executable: trtllm-build, args: {gemm_plugin: }}
        """
    )
    assert config.plain() == {
        "model": "https://host/weights/m.tar",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "tp_size": 2,
        "quantize_args": {"device": "cpu"},
        "plugins": {"gemm_plugin": "auto"},
    }
    script = config_of("{model_id: org/m, convert: {script: my_convert.py}}").convert_script
    assert script == Path("my_convert.py")


def test_a_build_step_alone_takes_its_checkpoint() -> None:
    config = config_of(
        "{model_id: org/m, build: {executable: trtllm-build, args: {checkpoint_dir: /ready}}}"
    )
    assert config.checkpoint == Path("/ready")


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
        build_args: {max_batch_sise: 3, context_fmha_fp32_acc: enable, max_num_tokens: -1, lora_dir: {a: b}}
        convert_args: [1]
        timeout: 0
        """
    ) == [
        "modell: unknown key; did you mean model?",
        "plugins.gemm_plugin: expected auto or float16 or bfloat16 or float32 or int32 or disable or fp8 or nvfp4, got 'fp17'",
        "plugins.gemm_plugins: unknown key; did you mean gemm_plugin?",
        "plugins.tokens_per_block: expected a whole number above 0, got 'many'",
        "build_args.max_batch_sise: unknown argument of trtllm-build; did you mean max_batch_size?",
        "build_args.context_fmha_fp32_acc: since TensorRT-LLM 0.12 it is set when the engine is served (enable_context_fmha_fp32_acc); remove it here",
        "build_args.lora_dir: expected a value, a list of values, or nothing for a bare flag",
        "convert_args: expected names and values, got [1]",
        "max_input_len: 4096 is more than max_seq_len 2048, which has room for prompt and output",
        "kv_cache_dtype: has no effect without quantization",
        "model: required",
        "dtype: expected auto, float16, bfloat16 or float32, got 'fp16'",
        "tp_size: expected greater than or equal to 1, got 0",
        "max_batch_size: expected a number, got True",
        "build_args.max_num_tokens: expected greater than or equal to 1, got -1",
        "timeout: expected greater than 0, got 0",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{model: m, max_batch_size: 4, build_args: {max_batch_size: 8}}", "build_args.max_batch_size: contradicts max_batch_size"),
        ("{model: m, max_output_len: 4}", "max_output_len: TensorRT-LLM 0.12 removed it"),
        ("{model: m, max_input_len: 8, max_output_len: 4, max_seq_len: 8}", "max_output_len: contradicts max_seq_len"),
        ("{model: m, quantization: fp8, convert_args: {x: 1}}", "convert_args.x: has no effect: quantize.py replaces"),
        ("{model: m, quantize_args: {x: 1}}", "quantize_args.x: has no effect without quantization"),
        ("{model: m, checkpoint: /c, quantization: fp8}", "quantization: has no effect with checkpoint"),
        ("{model: m, checkpoint: /c, tp_size: 2}", "tp_size: has no effect with checkpoint"),
        ("{model: m, family: ../x}", "family: "),
        ("{model: m, build_args: {paged_kv_cache: maybe}}", "build_args.paged_kv_cache: expected enable or disable"),
        ("{model: m, build_args: {use_smooth_quant: }}", "build_args.use_smooth_quant: use quantization: int8_sq"),
        ("{model_id: m, convert_to_ft: {}, convert: {}}", "convert: is the same as convert_to_ft"),
        ("{model_id: m, convert: {args: {tp_size: x}}}", "convert.args.tp_size: expected a valid integer"),
        ("{model_id: m, convert: {arguments: {}}}", "convert.arguments: unknown key"),
        ("{model_id: m, convert: {executable: bash}}", "convert.executable: expected python or trtllm-build"),
        ("{model_id: m, convert: {executable: trtllm-build}}", "convert.executable: trtllm-build is for the step build"),
        ("{model_id: m, build: {script: other.py}}", "build.script: engines are built by trtllm-build"),
        ("{model_id: m, build: {args: [x]}}", "build.args: expected names and values"),
        ("{model_id: m, build: 3}", "build: expected script or executable, and args"),
        ("{model_id: m, quantize: {args: {device: cpu}}}", "quantize.args.qformat: required"),
        ("{example_name: llama, build: {}}", "model_id: required"),
        ("{model_id: m, dtype: float16}", "dtype: unknown key"),
    ],
)  # fmt: skip
def test_a_problem_names_its_key(text: str, problem: str) -> None:
    assert any(line.startswith(problem) for line in problems(text)), problems(text)


def test_an_argument_that_is_not_known_is_passed_on() -> None:
    config, notes = parse("{model: m, build_args: {--brand_new: 3}}")
    assert config.build_args == {"brand_new": 3}
    assert notes == ["build_args.brand_new: no known argument of trtllm-build, passed as it is"]


def test_the_notes_tables_do_not_overlap() -> None:
    tables: list[Any] = [
        arguments.PLUGINS,
        arguments.LIMITS,
        arguments.OTHERS,
        arguments.PARALLEL,
        arguments.RENAMED,
        arguments.DROPPED,
        arguments.REFUSED,
        arguments.TO_CONVERT,
    ]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert set(arguments.RENAMED.values()) <= set(names)
    assert set(arguments.LIMITS) <= set(EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: [x", "is no YAML: line 1, column 10"),
        ("model: a\nmodel: b\n", "is no YAML: line 2, column 1: 'model' stands twice"),
        (f"hf_token: {TOKEN}: x\n", "is no YAML: line 1"),
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


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("hf_token", True),
        ("HF-TOKEN", True),
        ("accessToken", True),
        ("aws_secret_access_key", True),
        ("apikey", True),
        ("db_passwords", True),
        ("myhftoken", True),
        ("authorization", True),
        ("tokenizer", False),
        ("tokenizer_dir", False),
        ("monkey", False),
        ("author", False),
    ],
)
def test_secret_names(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_cleaning_keeps_what_only_sounds_secret() -> None:
    hide = Redactor(["the-known-one"])
    assert hide.clean(
        {
            "max_num_tokens": 8192,
            "tokens_per_block": "32",
            "quantize_per_token_plugin": "enable",
            "per_token": None,
            "tokenizer": "org/m",
            "api_key": "x",
            "password": {"inner": "x"},
            "secrets": ["a-b-c"],
            "url": "https://me:pw@host/m.tar?X-Sig=1&y=2#f",
            "text": "it is the-known-one, and " + TOKEN,
        }
    ) == {
        "max_num_tokens": 8192,
        "tokens_per_block": "32",
        "quantize_per_token_plugin": "enable",
        "per_token": None,
        "tokenizer": "org/m",
        "api_key": "***",
        "password": "***",
        "secrets": ["***"],
        "url": "https://***@host/m.tar?***#f",
        "text": "it is ***, and ***",
    }  # fmt: skip


def test_secrets_in_urls_and_arguments_are_found() -> None:
    assert secrets_in(
        {
            "model": "https://oauth2:pass-word@host/m.tar?sig=1",
            "tokenizer": "https://only-a-token@host/t.tar",
            "convert_args": {"access_token": "given-here", "per_token": True},
        }
    ) == ["pass-word", "sig=1", "only-a-token", "given-here"]


# Scripts, tools, disks


def test_families() -> None:
    assert set(MODEL_TYPES.values()) == set(FAMILIES)
    assert [family_of(t).name for t in ("gpt2", "mixtral", "phi3", "qwen2", "baichuan")] == [
        "gpt",
        "llama",
        "phi",
        "qwen",
        "baichuan",
    ]
    with pytest.raises(ConfigurationError) as caught:
        family_of("brandnew")
    assert re.search(r"'brandnew'.*gpt2.*llama.*convert_script", str(caught.value))


def test_scripts_are_found_in_every_layout() -> None:
    def names(family: str) -> list[str]:
        candidates = script_candidates(Path("/e"), named(family))
        return [str(path.parent.relative_to("/e")) for path in candidates]

    assert names("llama") == ["models/core/llama", "models/contrib/llama", "llama"]
    assert names("baichuan") == ["models/contrib/baichuan", "models/core/baichuan", "baichuan"]
    assert names("mine") == ["models/core/mine", "models/contrib/mine", "mine"]


def test_tools(tmp_path: Path) -> None:
    assert find_tools({}) == Tools("python3", "trtllm-build", Path("/app/tensorrt_llm/examples"))
    (tmp_path / "trtllm-build").touch()
    python = str(tmp_path / "python3")
    found = find_tools({"TENSORRT_LLM_EXAMPLES": "/e", "TENSORRT_LLM_PYTHON": python})
    assert found == Tools(python, str(tmp_path / "trtllm-build"), Path("/e"))
    with pytest.raises(ConfigurationError, match="trtllm-build-absent was not found"):
        Tools("python3", "trtllm-build-absent").check(scripts=False)
    with pytest.raises(ConfigurationError, match="TENSORRT_LLM_EXAMPLES"):
        Tools("python3", "python3", tmp_path / "absent").check(scripts=True)


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
    check_version("1.2.0")
    check_version(None)
    with pytest.raises(ConfigurationError, match=r"TensorRT-LLM 1\.3\.0 builds no engines"):
        check_version("1.3.0")


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=5e9)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: free)  # type: ignore[attr-defined]
    disk.check_space(tmp_path, tmp_path, int(1.5e9))
    with pytest.raises(
        ConfigurationError, match=r"needs about 6\.0 GB, 5\.0 GB are free"
    ) as caught:
        disk.check_space(tmp_path, tmp_path, int(2e9))
    assert str(tmp_path) in str(caught.value)


def test_the_space_needed_counts_one_copy_of_the_weights(tmp_path: Path) -> None:
    for name, size in {"a.safetensors": 100, "b.safetensors": 50, "pytorch_model.bin": 999}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert disk.bytes_needed(config_of("model: m"), tmp_path) == 150
    assert disk.bytes_needed(config_of("{model: m, quantization: fp8}"), tmp_path) == 90


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
