"""What vLLM is told, and what is made of its answers; vLLM itself is in test_vllm_engine.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import EngineError, GenerationRequest, SamplingParams, Step
from cog_triton.engines.interpreter import python
from cog_triton.engines.library import TABLE
from cog_triton.engines.vllm import (
    CPU_CACHE_BYTES,
    VllmEngine,
    engine_arguments,
    guide_arguments,
    on_device,
    sampling_arguments,
)
from cog_triton.request.request import Guide, GuideKind
from tests.support import ROOT

PLAIN = {"max_tokens": 8, "detokenize": False, "ignore_eos": True, "temperature": 0.0}


# Its arguments; what holds for all libraries is in test_library.py


def test_template_variables_become_arguments() -> None:
    parameters = {
        "model": "/m",
        "max_batch_size": "64",
        "enable_kv_cache_reuse": "false",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "lora_prefetch_dir": "/a",
        "lora_cache_max_adapter_size": "32",
        "tokenizer_dir": "/t",
        "guided_decoding_backend": "xgrammar",
    }
    assert engine_arguments(parameters) == {
        "disable_log_stats": True,
        "generation_config": "vllm",
        "model": "/m",
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "enable_lora": True,
        "max_lora_rank": 32,
        "tokenizer": "/t",
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }


def test_every_variable_is_an_argument_or_said_to_have_no_effect() -> None:
    apart = {
        "engine",
        "exclude_input_in_output",
        "gpt_model_path",  # as engine_dir, whose filling says so
        "max_tokens_per_response",  # of what delivers the tokens of all embedded engines
        "tokenizer_dir",
    }
    template = (ROOT / "triton_model_repo" / "tensorrt_llm" / "config.pbtxt").read_text()
    names = re.findall(r'key: "(\w+)" value \{ string_value: "\$\{(?!simulated)\w+\}"', template)
    assert {*names} - TABLE.keys() == apart


EAGER = {"enforce_eager": True}
CACHE = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
FLOAT, HALF = {"dtype": "float32"}, {"dtype": "bfloat16"}
LORA = {"enable_lora": True}


@pytest.mark.parametrize(
    ("saved", "cpu", "given", "added"),
    [
        # A model keeps its data type.
        (FLOAT, False, {}, FLOAT),
        ({"torch_dtype": "float32"}, False, {}, FLOAT),
        (HALF, False, {}, {}),
        ({}, False, {}, {}),
        (HALF, False, FLOAT, {}),
        # Adapters on a GPU are applied in half precision, which vLLM's own choice is.
        (FLOAT, False, LORA, {}),
        (FLOAT, False, {**LORA, **HALF}, {}),
        (FLOAT, True, LORA, {**FLOAT, **EAGER, **CACHE}),
        # On CPUs it would compile for minutes, and take most of the memory.
        ({}, True, {}, {**EAGER, **CACHE}),
        ({}, True, {"enforce_eager": False, "kv_cache_memory_bytes": 5}, {}),
        ({}, True, {"gpu_memory_utilization": 0.2}, EAGER),
    ],
)
def test_on_device(
    tmp_path: Path, saved: dict[str, Any], cpu: bool, given: dict[str, Any], added: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(saved))
    given = {"model": str(tmp_path), **given}
    assert on_device(given, cpu=cpu) == {**given, **added}


def test_adapters_on_a_gpu_in_full_precision_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype float32 does not go with lora_prefetch_dir"):
        on_device({**LORA, **FLOAT}, cpu=False)


def test_in_a_stub_the_interpreter_is_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/tritonserver/triton_python_backend_stub")
    command = [python(), "-c", "import sys; print(sys.version_info[:2])"]
    assert subprocess.check_output(command, text=True).strip() == str(sys.version_info[:2])


# Requests

SAMPLED = {**PLAIN, "temperature": 0.5, "top_p": 1.0}
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": -1.0}
LIMITED = {"top_k": 3, "min_p": 0.1, "seed": 7}


@pytest.mark.parametrize(
    ("sampling", "values", "arguments"),
    [
        ({}, {}, PLAIN),
        ({"temperature": 0.5, **LIMITED}, {}, {**SAMPLED, **LIMITED}),
        ({**PENALTIES, "min_tokens": 3}, {}, {**PLAIN, **PENALTIES, "min_tokens": 3}),
        ({"min_tokens": 100}, {}, {**PLAIN, "min_tokens": 8}),
        # A continuation has noise of its own, and a seed beyond an int64 would end vLLM's runner.
        (
            {"temperature": 0.5, "top_p": 1.0, "seed": 2**64 - 1},
            {"continued": 3},
            {**SAMPLED, "seed": 2},
        ),
        ({}, {"end_id": 2}, {**PLAIN, "stop_token_ids": [2]}),
        ({}, {"logit_bias": {4: -1.5}}, {**PLAIN, "logit_bias": {4: -1.5}}),
        ({}, {"allowed_ids": (4, 2)}, {**PLAIN, "allowed_token_ids": [4, 2]}),
        ({}, {"return_log_probs": True}, {**PLAIN, "logprobs": 0}),
        ({}, {"return_log_probs": True, "top_log_probs": 2}, {**PLAIN, "logprobs": 2}),
        ({}, {"prompt_log_probs": True, "top_log_probs": 2}, {**PLAIN, "prompt_logprobs": 2}),
    ],
)
def test_arguments_of_a_request(
    sampling: dict[str, Any], values: dict[str, Any], arguments: dict[str, Any]
) -> None:
    asked = GenerationRequest("a", [5, 6], 8, sampling=SamplingParams(**sampling), **values)
    assert sampling_arguments(asked) == arguments


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (GuideKind.JSON_SCHEMA, "json"),
        (GuideKind.REGEX, "regex"),
        (GuideKind.GRAMMAR, "grammar"),
        (GuideKind.STRUCTURAL_TAG, "structural_tag"),
    ],
)
def test_guides(kind: GuideKind, argument: str) -> None:
    assert guide_arguments(Guide(kind, "text")) == {argument: "text"}
    assert guide_arguments(Guide(GuideKind.JSON)) == {"json_object": True}


def test_steps() -> None:
    one, step = GenerationRequest("a", [5], 8), VllmEngine.__new__(VllmEngine).step
    assert step(one, [5, 6], None, None) == Step([5, 6])
    assert step(one, [5, 6], None, "stop") == Step([5, 6], finished=True)
    with pytest.raises(EngineError, match="vLLM ended the request: error"):
        step(one, [5, 6], None, "error")
