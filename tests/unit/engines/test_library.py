"""What the engines on libraries share: arguments, from variables and a file, and log probabilities."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.engines import llm_api, vllm_arguments
from cog_triton.engines.base import LEAST_LOG_PROB, EngineError, GenerationRequest, SamplingParams
from cog_triton.engines.library import log_probs
from cog_triton.engines.library_arguments import Library, table_arguments, with_file
from cog_triton.protocol.log_probs import TokenLogProb

LIBRARIES: tuple[Library, ...] = ("llmapi", "vllm")
FILE = {"llmapi": "llm_api_config", "vllm": "vllm_config"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_defaults_are_left_out(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    given = {"dtype": "auto", "device": "auto", "trust_remote_code": "false", "engine": library}
    own = {"tokenizer_dir": "t", "simulated_prefill_ms": "0.0", "max_beam_width": "1"}
    assert table_arguments({**given, **own}, library) == {"skip_tokenizer_init": True}
    assert caplog.messages == []
    table_arguments({"device": "cpu", "decoding_mode": "top_k"}, library)
    assert sorted(caplog.messages) == [
        f"tensorrt_llm: {name} has no effect with the engine {library}"
        for name in ("decoding_mode", "device")
    ]


MODEL_ONLY = {"model": "m", "skip_tokenizer_init": True}


@pytest.mark.parametrize(
    ("library", "variables", "arguments"),
    [
        pytest.param("llmapi", {"model": "m"}, MODEL_ONLY, id="llmapi: model"),
        pytest.param(
            "llmapi",
            {"model": "m", "batch_scheduler_policy": "max_utilization"},
            {**MODEL_ONLY, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
            id="llmapi: policy of the scheduler",
        ),
        pytest.param(
            "llmapi",
            {
                "model": "m",
                "enable_kv_cache_reuse": "false",
                "max_attention_window_size": "4096,512",
            },
            {
                **MODEL_ONLY,
                "kv_cache_config": {
                    "enable_block_reuse": False,
                    "max_attention_window": [4096, 512],
                },
            },
            id="llmapi: KV cache",
        ),
        pytest.param(
            "llmapi",
            {"model": "m", "lora_prefetch_dir": "/a", "lora_cache_max_adapter_size": "16"},
            {**MODEL_ONLY, "enable_lora": True, "lora_config": {"max_lora_rank": 16}},
            id="llmapi: adapters",
        ),
        pytest.param(
            "llmapi",
            {"model": "m", "lora_cache_max_adapter_size": "16"},
            MODEL_ONLY,
            id="llmapi: rank without adapters",
        ),
        pytest.param(
            "vllm",
            {
                "model": "/m",
                "max_batch_size": "64",
                "enable_kv_cache_reuse": "false",
                "kv_cache_free_gpu_mem_fraction": "0.5",
                "lora_prefetch_dir": "/a",
                "lora_cache_max_adapter_size": "32",
                "tokenizer_dir": "/t",
                "guided_decoding_backend": "xgrammar",
                "kv_events_endpoint": "ipc:///run/kv",
            },
            {
                "kv_events_config": {"endpoint": "ipc:///run/kv", "enable_kv_cache_events": True},
                "block_size": 32,
                "disable_log_stats": True,
                "generation_config": "vllm",
                "model": "/m",
                "max_num_seqs": 64,
                "enable_prefix_caching": False,
                "gpu_memory_utilization": 0.5,
                "enable_lora": True,
                "max_lora_rank": 32,
                "tokenizer": "/t",
                "structured_outputs_config": {
                    "backend": "xgrammar",
                    "disable_any_whitespace": True,
                },
            },
            id="vllm: all",
        ),
    ],
)
def test_variables_become_arguments(
    library: Library, variables: dict[str, str], arguments: dict[str, Any]
) -> None:
    if library == "vllm":
        assert vllm_arguments.engine_arguments(variables) == arguments
    else:
        assert table_arguments(variables, library) == arguments


def asked(**fields: Any) -> GenerationRequest:
    """A request for 8 tokens."""
    return GenerationRequest("a", [5, 6], 8, **fields)


LLM_API_GREEDY = {"max_tokens": 8, "end_id": -1, "pad_id": 0, "ignore_eos": True, "top_k": 1}
LLM_API_SAMPLED = {
    "max_tokens": 8,
    "end_id": -1,
    "pad_id": 0,
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 0,
}
LLM_API_REQUESTS = [
    pytest.param(asked(), LLM_API_GREEDY, id="default"),
    pytest.param(asked(end_id=2), {"max_tokens": 8, "end_id": 2, "top_k": 1}, id="end token"),
    pytest.param(
        asked(end_id=2, other_end_ids=(6, 20)),
        {
            "max_tokens": 8,
            "end_id": 2,
            "stop_token_ids": [6, 20],
            "include_stop_str_in_output": True,
            "top_k": 1,
        },
        id="end tokens",
    ),
    pytest.param(
        asked(sampling=SamplingParams(temperature=0.0, top_p=0.9)),
        LLM_API_GREEDY,
        id="temperature 0",
    ),
    pytest.param(
        asked(sampling=SamplingParams(temperature=0.5)),
        LLM_API_GREEDY,
        id="neither top_k nor top_p",
    ),
    pytest.param(
        asked(sampling=SamplingParams(temperature=0.5, top_k=1, top_p=0.9)),
        LLM_API_GREEDY,
        id="top_k 1",
    ),
    pytest.param(
        asked(sampling=SamplingParams(temperature=0.5, top_p=0.9)), LLM_API_SAMPLED, id="top_p"
    ),
    pytest.param(
        asked(sampling=SamplingParams(temperature=0.5, top_k=9, seed=7)),
        {**LLM_API_SAMPLED, "top_p": 1.0, "top_k": 9, "seed": 7},
        id="top_k and a seed",
    ),
    pytest.param(
        asked(sampling=SamplingParams(presence_penalty=-0.5)),
        {**LLM_API_GREEDY, "presence_penalty": -0.5},
        id="penalty",
    ),
    pytest.param(
        asked(sampling=SamplingParams(min_tokens=3)),
        {**LLM_API_GREEDY, "min_tokens": 3},
        id="minimum",
    ),
    pytest.param(
        asked(sampling=SamplingParams(min_tokens=-1)), LLM_API_GREEDY, id="negative minimum"
    ),
    pytest.param(
        asked(sampling=SamplingParams(bad_words=((5,), (), (7,)))),
        {**LLM_API_GREEDY, "bad_token_ids": [5, 7]},
        id="bad words",
    ),
    pytest.param(
        asked(return_log_probs=True), {**LLM_API_GREEDY, "logprobs": 1}, id="log probabilities"
    ),
    pytest.param(
        asked(stop_words=((5, 6),)), LLM_API_GREEDY, id="stop words, which are ours to find"
    ),
]


@pytest.mark.parametrize(("generation_request", "arguments"), LLM_API_REQUESTS)
def test_a_request_becomes_arguments_of_the_llm_api(
    generation_request: GenerationRequest, arguments: dict[str, Any]
) -> None:
    assert llm_api.sampling_arguments(generation_request) == arguments


VLLM_GREEDY = {"max_tokens": 8, "detokenize": False, "ignore_eos": True, "temperature": 0.0}


@pytest.mark.parametrize(
    ("generation_request", "arguments"),
    [
        pytest.param(asked(), VLLM_GREEDY, id="default"),
        pytest.param(
            asked(sampling=SamplingParams(temperature=0.5, top_k=3, min_p=0.1, seed=7)),
            {**VLLM_GREEDY, "temperature": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "top_p": 1.0},
            id="sampling",
        ),
        pytest.param(
            asked(
                sampling=SamplingParams(
                    repetition_penalty=1.5,
                    presence_penalty=1.0,
                    frequency_penalty=-1.0,
                    min_tokens=3,
                )
            ),
            {
                **VLLM_GREEDY,
                "repetition_penalty": 1.5,
                "presence_penalty": 1.0,
                "frequency_penalty": -1.0,
                "min_tokens": 3,
            },
            id="penalties and a minimum",
        ),
        pytest.param(
            asked(sampling=SamplingParams(min_tokens=100)),
            {**VLLM_GREEDY, "min_tokens": 8},
            id="minimum above the maximum",
        ),
        # Without a seed vLLM samples all requests of a step at once, in two thirds of the time.
        pytest.param(
            asked(sampling=SamplingParams(temperature=0.5, top_p=1.0)),
            {**VLLM_GREEDY, "temperature": 0.5, "top_p": 1.0},
            id="no seed",
        ),
        # A continuation has the same seed, and one beyond an int64 would end vLLM's runner.
        pytest.param(
            asked(
                sampling=SamplingParams(temperature=0.5, top_p=1.0, seed=2**64 - 1),
                continued=3,
            ),
            {**VLLM_GREEDY, "temperature": 0.5, "top_p": 1.0, "seed": 2**63 - 1},
            id="seed beyond an int64",
        ),
        pytest.param(asked(end_id=2), {**VLLM_GREEDY, "stop_token_ids": [2]}, id="end token"),
        pytest.param(
            asked(end_id=2, other_end_ids=(6, 20)),
            {**VLLM_GREEDY, "stop_token_ids": [2, 6, 20]},
            id="end tokens",
        ),
        pytest.param(
            asked(logit_bias={4: -1.5}), {**VLLM_GREEDY, "logit_bias": {4: -1.5}}, id="biases"
        ),
        pytest.param(
            asked(allowed_ids=(4, 2)),
            {**VLLM_GREEDY, "allowed_token_ids": [4, 2]},
            id="allowed tokens",
        ),
        pytest.param(
            asked(return_log_probs=True), {**VLLM_GREEDY, "logprobs": 0}, id="log probabilities"
        ),
        pytest.param(
            asked(return_log_probs=True, top_log_probs=2),
            {**VLLM_GREEDY, "logprobs": 2},
            id="likeliest tokens",
        ),
        pytest.param(
            asked(prompt_log_probs=True, top_log_probs=2),
            {**VLLM_GREEDY, "prompt_logprobs": 2},
            id="likeliest tokens of the prompt",
        ),
    ],
)
def test_a_request_becomes_arguments_of_vllm(
    generation_request: GenerationRequest, arguments: dict[str, Any]
) -> None:
    assert vllm_arguments.sampling_arguments(generation_request) == arguments


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_file_wins(library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = {"max_tokens": 1, "sink_token_length": 2}
    ours: dict[str, Any] = {"model": "m", "batch": 8, "length": 9, "kv_cache_config": cache}
    theirs = {"batch": 16, "length": 9, "kv_cache_config": {"max_tokens": 3, "more": 4}}
    file = tmp_path / "more.yaml"
    file.write_text(json.dumps(theirs))
    both = {**theirs, "model": "m", "kv_cache_config": {**cache, "max_tokens": 3, "more": 4}}
    assert with_file(ours, {FILE[library]: str(file)}, library) == both
    assert caplog.messages == [
        f"{FILE[library]}: kv_cache_config.max_tokens is 3, and not 1 as the template variables have it",
        f"{FILE[library]}: batch is 16, and not 8 as the template variables have it",
    ]
    file.write_text("")
    assert with_file({"model": "m"}, {FILE[library]: str(file)}, library) == {"model": "m"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "vllm_config .*: expected a mapping, got \\['a'\\]"),
        ("a: [", "vllm_config .*: not valid YAML"),
        ("a: 1", "tensorrt_llm: model: the engine vllm needs it"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        with_file({}, {"vllm_config": str(file)}, "vllm")
    with pytest.raises(OSError, match="none"):
        with_file({}, {"vllm_config": str(tmp_path / "none")}, "vllm")


def test_a_value_that_is_none_names_its_variable() -> None:
    with pytest.raises(ValueError, match="tensorrt_llm: max_batch_size: invalid literal"):
        table_arguments({"max_batch_size": "many"}, "llmapi")


def entry(**values: float) -> dict[int, Any]:
    return {int(k[1:]): SimpleNamespace(logprob=v) for k, v in values.items()}


def test_log_probabilities_of_all_releases() -> None:
    """vLLM adds the chosen token to those that were asked for; a certain token may be a hair above 0."""
    both = [TokenLogProb(6, -1.5), TokenLogProb(7, -0.25)]
    assert log_probs([6, 7], [entry(t5=-0.5, t6=-1.5), -0.25]) == both
    places = [entry(t5=-4.0, t1=-0.1, t2=-2.0), entry(t6=1e-9, t1=float("-inf"))]
    assert log_probs([5, 6], places, 2) == [
        TokenLogProb(5, -4.0, ((1, -0.1), (2, -2.0))),
        TokenLogProb(6, 0.0, ((6, 0.0), (1, LEAST_LOG_PROB))),
    ]
    for missing in (None, [], [entry(t9=-1.0)]):
        with pytest.raises(EngineError, match="left out the log probability"):
            log_probs([5], missing)
