"""OpenAI's API as a target: what a stream says, the promises beside Cog's, vLLM's command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tools.benchmark.driver import Failed
from tools.benchmark.faces import COG, OPENAI, promises, tokens_per_core_second
from tools.benchmark.load import Load
from tools.benchmark.openai_drivers import deltas
from tools.benchmark.processes import LOAD_GENERATOR, Usage
from tools.benchmark.report import Result, result
from tools.benchmark.servers import vllm_command
from tools.benchmark.worker import Record


def chat(text: str | None, **rest: Any) -> str:
    return json.dumps({"choices": [{"delta": {"content": text} if text else {}}], **rest})


def test_the_stream_of_a_chat() -> None:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
    parts = [(1.0, chat(None)), (2.0, chat("a")), (3.0, chat(" b", usage=None)), (3.5, usage)]
    assert deltas([*parts, (4.0, "[DONE]")]) == ([(2.0, "a"), (3.0, " b")], 3)
    with pytest.raises(Failed, match="DONE"):
        deltas(parts)
    with pytest.raises(Failed, match="is being stopped"):
        deltas([parts[1], (2.0, '{"error": {"message": "the server is being stopped"}}')])


def test_the_stream_of_a_text() -> None:
    event = json.dumps({"choices": [{"text": "a"}]})
    assert deltas([(1.0, event), (2.0, "[DONE]")]) == ([(1.0, "a")], None)


def of_face(target: str, cpu_s: float) -> Result:
    """A result with 1,000 tokens, for so many seconds of the processor and two of the generator."""
    records = [Record(0.0, 10.0, [0.1, 10.0], [1, 1], 1, 1000, None)]
    usages = [Usage(target, cpu_s, 1.0, None), Usage(LOAD_GENERATOR, 2.0, 1.0, None)]
    return result(target, Load(16), records, usages, [2.0])


def test_the_promises_beside_cog() -> None:
    openai, cog = of_face(OPENAI, 1.0), of_face(COG, 2.0)
    assert (tokens_per_core_second(openai), tokens_per_core_second(cog)) == (1000, 500)
    kept = replace(openai, ratio_to_baseline={COG: 0.96}, ttft_p50_added_ms={COG: 4.0})
    missed = replace(openai, ratio_to_baseline={COG: 0.94}, ttft_p50_added_ms={COG: 6.0})
    assert [check.met for check in promises("x", kept, cog)] == [True, True, True]
    assert [check.met for check in promises("x", missed, cog)] == [False, False, True]
    assert not promises("x", replace(kept, processes=of_face("", 2.2).processes), cog)[2].met


def test_vllms_command() -> None:
    arguments = {
        "model": "/m",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.45,
        "compilation_config": {"level": 3},
        "max_model_len": None,
    }
    command = vllm_command(arguments, 1234)
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    assert command[-8:] == [
        *("--model", "/m", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.45", "--compilation-config", '{"level": 3}'),
    ]
    assert "--skip-tokenizer-init" not in command
