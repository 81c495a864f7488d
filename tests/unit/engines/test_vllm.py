"""What vLLM is told, and what is made of its answers; vLLM itself is in test_vllm_engine.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.base import (
    LEAST_LOG_PROB,
    EngineError,
    GenerationRequest,
    SamplingParams,
    Step,
    TokenLogProb,
)
from cog_triton.engines.interpreter import python
from cog_triton.engines.library import TABLE
from cog_triton.engines.vllm import (
    CPU_CACHE_BYTES,
    VllmEngine,
    cpu_arguments,
    engine_arguments,
    guide_arguments,
    loading_dtype,
    prompt_log_probs,
    sampling_arguments,
)
from cog_triton.request.request import Guide, GuideKind
from cog_triton.wire import adapter_task_id
from tests.support import ROOT

ALWAYS = {"disable_log_stats": True, "generation_config": "vllm"}
PLAIN = {"max_tokens": 8, "detokenize": False, "ignore_eos": True}


def sampling(*, continued: int = 0, **values: Any) -> dict[str, Any]:
    params = SamplingParams(**values)
    return sampling_arguments(
        GenerationRequest("a", [5, 6], 8, sampling=params, continued=continued)
    )


# Its arguments


def test_template_variables_become_arguments() -> None:
    parameters = {
        "model": "/m",
        "dtype": "bfloat16",
        "tensor_parallel_size": "2",
        "pipeline_parallel_size": "1",
        "max_batch_size": "64",
        "max_num_tokens": "4096",
        "max_seq_len": "1000",
        "enable_chunked_context": "true",
        "enable_kv_cache_reuse": "false",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "stream_interval": "2",
        "trust_remote_code": "true",
    }
    assert engine_arguments(parameters) == {
        **ALWAYS,
        "skip_tokenizer_init": True,
        "model": "/m",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "max_model_len": 1000,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "stream_interval": 2,
        "trust_remote_code": True,
    }


def test_what_is_as_it_is_anyway_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    given = {"model": "/m", "dtype": "auto", "device": "auto", "trust_remote_code": "false"}
    assert engine_arguments(given) == {**ALWAYS, "model": "/m", "skip_tokenizer_init": True}
    assert caplog.messages == []
    engine_arguments(
        {"model": "/m", "device": "cpu", "max_beam_width": "2", "llm_api_config": "/f"}
    )
    assert sorted(caplog.messages) == [
        f"tensorrt_llm: {name} has no effect with the engine vllm"
        for name in ("device", "llm_api_config", "max_beam_width")
    ]


def test_guided_decoding_needs_a_tokenizer() -> None:
    given = {"model": "/m", "tokenizer_dir": "/t", "guided_decoding_backend": "xgrammar"}
    assert engine_arguments(given) == {
        **ALWAYS,
        "model": "/m",
        "tokenizer": "/t",
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }


def test_adapters() -> None:
    given = {"model": "/m", "lora_prefetch_dir": "/a", "lora_cache_max_adapter_size": "32"}
    arguments = engine_arguments(given)
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 32)


def test_the_file_wins_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("max_model_len: 7\nenforce_eager: true\n")
    given = {"model": "/m", "max_seq_len": "9", "vllm_config": str(file)}
    arguments = engine_arguments(given)
    assert (arguments["max_model_len"], arguments["enforce_eager"]) == (7, True)
    assert "vllm_config: max_model_len is 7, and not 9" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1", "vllm_config .*: expected a mapping"), ("a: [", "vllm_config .*: not valid YAML")],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        engine_arguments({"model": "/m", "vllm_config": str(file)})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "model: the engine vllm needs it"),
        ({"model": "/m", "max_batch_size": "many"}, "tensorrt_llm: max_batch_size: invalid"),
    ],
)
def test_parameters_that_are_wrong(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_arguments(parameters)


def test_on_cpus() -> None:
    eager = {"enforce_eager": True}
    assert cpu_arguments({}) == {**eager, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    assert cpu_arguments({"enforce_eager": False, "kv_cache_memory_bytes": 5}) == {
        "enforce_eager": False,
        "kv_cache_memory_bytes": 5,
    }
    fraction = {"gpu_memory_utilization": 0.2}
    assert cpu_arguments(fraction) == {**eager, **fraction}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ('{"dtype": "float32"}', {"dtype": "float32"}),
        ('{"torch_dtype": "float32"}', {"dtype": "float32"}),
        ('{"dtype": "bfloat16"}', {}),
        ("{}", {}),
    ],
)
def test_a_model_keeps_its_data_type(tmp_path: Path, config: str, dtype: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text(config)
    assert loading_dtype({"model": str(tmp_path)}, on_cpu=False) == dtype
    assert loading_dtype({"model": str(tmp_path), "dtype": "float32"}, on_cpu=False) == {}


def test_adapters_on_a_gpu_are_applied_in_half_precision(tmp_path: Path) -> None:
    """Which vLLM's own choice is; on CPUs float32 stays."""
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    lora = {"model": str(tmp_path), "enable_lora": True}
    assert loading_dtype(lora, on_cpu=False) == {}
    assert loading_dtype(lora, on_cpu=True) == {"dtype": "float32"}
    assert loading_dtype({**lora, "dtype": "bfloat16"}, on_cpu=False) == {}
    with pytest.raises(ValueError, match="dtype float32 does not go with lora_prefetch_dir"):
        loading_dtype({**lora, "dtype": "float32"}, on_cpu=False)


def test_in_a_stub_the_interpreter_is_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/tritonserver/triton_python_backend_stub")
    command = [python(), "-c", "import sys; print(sys.version_info[:2])"]
    assert subprocess.check_output(command, text=True).strip() == str(sys.version_info[:2])


# Requests


def test_sampling() -> None:
    assert sampling() == {**PLAIN, "temperature": 0.0}
    assert sampling(temperature=0.5, top_k=3, min_p=0.1, seed=7) == {
        **PLAIN,
        "min_p": 0.1,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "seed": 7,
    }
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
    }
    assert sampling(**penalties, min_tokens=3) == {
        **PLAIN,
        **penalties,
        "min_tokens": 3,
        "temperature": 0.0,
    }


def test_the_minimum_is_cut_with_the_maximum() -> None:
    assert sampling(min_tokens=100)["min_tokens"] == 8


def test_a_continuation_has_noise_of_its_own() -> None:
    assert sampling(continued=3, top_p=0.9, seed=2**64 - 1)["seed"] == 2
    assert sampling(top_p=0.9, seed=2**63)["seed"] == 0  # more than an int64 ends vLLM's runner


def test_what_else_a_request_has() -> None:
    arguments = sampling_arguments(
        GenerationRequest(
            "a", [5], 8, end_id=2, return_log_probs=True, logit_bias={4: -1.5}, allowed_ids=(4, 2)
        )
    )
    assert arguments == {
        **PLAIN,
        "temperature": 0.0,
        "stop_token_ids": [2],
        "logprobs": 0,
        "logit_bias": {4: -1.5},
        "allowed_token_ids": [4, 2],
    }


@pytest.mark.parametrize(
    ("guide", "arguments"),
    [
        (Guide(GuideKind.JSON), {"json_object": True}),
        (Guide(GuideKind.JSON_SCHEMA, "{}"), {"json": "{}"}),
        (Guide(GuideKind.REGEX, "a+"), {"regex": "a+"}),
        (Guide(GuideKind.GRAMMAR, "root ::= a"), {"grammar": "root ::= a"}),
        (Guide(GuideKind.STRUCTURAL_TAG, "{}"), {"structural_tag": "{}"}),
    ],
)
def test_guides(guide: Guide, arguments: dict[str, Any]) -> None:
    assert guide_arguments(guide) == arguments


def bare_engine() -> VllmEngine:
    return VllmEngine.__new__(VllmEngine)


def save_adapter(directory: Path, weights: str = "") -> None:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").touch()
    (directory / "adapter_model.safetensors").write_text(weights)


def test_an_adapter_whose_files_are_replaced_gets_another_number(tmp_path: Path) -> None:
    for name in ("3", "poet"):
        save_adapter(tmp_path / name)
    requests = LoraRequests(tmp_path)

    def number(name: str) -> int:
        told: tuple[str, int, str] = requests.of(adapter_task_id(name), lambda *values: values)
        assert told == (f"{name}:{told[1]}", told[1], str(tmp_path / name))
        return told[1]

    first, other = number("3"), number("poet")
    assert number("3") == first
    save_adapter(tmp_path / "3", "other")
    second = number("3")
    assert number("3") == second
    assert len({first, other, second}) == 3
    assert min(first, other, second) > 0


def test_vllm_is_told_another_adapter_when_the_files_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(LoRARequest=lambda *arguments: arguments)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", fake)
    engine = bare_engine()
    engine._adapters = LoraRequests(tmp_path)
    save_adapter(tmp_path / "poet")
    task_id = adapter_task_id("poet")
    assert engine._adapter(0) is None
    before = engine._adapter(task_id)
    assert engine._adapter(task_id) == before == ("poet:1", 1, str(tmp_path / "poet"))
    save_adapter(tmp_path / "poet", "other")
    # Its blocks of the KV cache it tells apart by the name.
    assert engine._adapter(task_id) == ("poet:2", 2, str(tmp_path / "poet"))


def test_tokens() -> None:
    one, step = GenerationRequest("a", [5], 8), bare_engine().step
    assert step(one, [5, 6], None, None) == Step([5, 6])
    assert step(one, [5, 6], None, "stop") == Step([5, 6], finished=True)
    with pytest.raises(EngineError, match="vLLM ended the request: error"):
        step(one, [5, 6], None, "error")


def test_the_most_likely_tokens() -> None:
    def entry(**values: float) -> dict[int, Any]:
        return {int(k[1:]): SimpleNamespace(logprob=v) for k, v in values.items()}

    # vLLM adds the chosen token to those that were asked for.
    places = [entry(t5=-4.0, t1=-0.1, t2=-2.0), entry(t6=1e-9, t1=float("-inf"))]
    one = GenerationRequest("a", [5], 8, return_log_probs=True, top_log_probs=2)

    assert sampling_arguments(one)["logprobs"] == 2
    assert bare_engine().step(one, [5, 6], places, None) == Step(
        [5, 6],
        [
            TokenLogProb(5, -4.0, ((1, -0.1), (2, -2.0))),
            TokenLogProb(6, 0.0, ((6, 0.0), (1, LEAST_LOG_PROB))),
        ],
    )


@pytest.mark.parametrize("count", [0, 1])
def test_the_prompts_log_probabilities(count: int) -> None:
    def entry(**values: float) -> dict[int, Any]:
        return {int(k[1:]): SimpleNamespace(logprob=v) for k, v in values.items()}

    one = GenerationRequest(
        "a", [5, 6, 7], 8, return_log_probs=True, top_log_probs=count, prompt_log_probs=True
    )
    told = prompt_log_probs([None, entry(t6=-4.0, t1=-0.1), entry(t7=-0.5)], one)
    assert sampling_arguments(one)["prompt_logprobs"] == count
    assert told == [
        TokenLogProb(5, 0.0),
        TokenLogProb(6, -4.0, ((1, -0.1),)[:count]),
        TokenLogProb(7, -0.5, ((7, -0.5),)[:count]),
    ]


def test_every_variable_is_an_argument_or_said_to_have_no_effect() -> None:
    apart = {
        "encoder_model_path",  # as engine_dir, whose filling says so
        "engine",
        "exclude_input_in_output",
        "gpt_model_path",
        "guided_decoding_backend",
        "llm_api_config",  # has no effect
        "max_tokens_per_response",  # of what delivers the tokens of all embedded engines
        "tokenizer_dir",
        "vllm_config",
    }
    template = (ROOT / "triton_model_repo" / "tensorrt_llm" / "config.pbtxt").read_text()
    names = re.findall(r'key: "(\w+)" value \{ string_value: "\$\{(?!simulated)\w+\}"', template)
    assert {*names} - TABLE.keys() == apart - {"encoder_model_path"}
