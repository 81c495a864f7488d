"""How strictly TensorRT-LLM's backend takes its parameters, by its stand-in in a real tritonserver.

And that what our template makes of every variable's default is taken.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand_in.servers import Loader, filled, running_loader
from tests.support import ROOT

CONTRACT = json.loads((ROOT / "tests/contracts/inflight_batcher_llm.json").read_text())

# What the backend says when a parameter is missing or cannot be read, and takes its default.
WARNINGS = {
    "max_beam_width": "max_beam_width is not specified",
    "max_tokens_in_paged_kv_cache": "max_tokens_in_paged_kv_cache is not specified",
    "max_attention_window_size": "max_attention_window_size is not specified",
    "sink_token_length": "sink_token_length is not specified",
    "batch_scheduler_policy": "batch_scheduler_policy parameter was not found or is invalid",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_free_gpu_mem_fraction is not specified",
    "cross_kv_cache_fraction": "cross_kv_cache_fraction is not specified",
    "kv_cache_host_memory_bytes": "kv_cache_host_memory_bytes not set",
    "kv_cache_onboard_blocks": "kv_cache_onboard_blocks not set",
    "exclude_input_in_output": "exclude_input_in_output is not specified",
    "cancellation_check_period_ms": "cancellation_check_period_ms is not specified",
    "stats_check_period_ms": "stats_check_period_ms is not specified",
    "iter_stats_max_iterations": "iter_stats_max_iterations is not specified",
    "request_stats_max_iterations": "request_stats_max_iterations is not specified",
    "enable_kv_cache_reuse": "enable_kv_cache_reuse is not specified",
    "normalize_log_probs": "normalize_log_probs is not specified",
    "enable_chunked_context": "enable_chunked_context is not specified",
    "gpu_device_ids": "gpu_device_ids is not specified",
    "participant_ids": "participant_ids is not specified",
    "lora_cache_optimal_adapter_size": "lora_cache_optimal_adapter_size not set",
    "lora_cache_max_adapter_size": "lora_cache_max_adapter_size not set",
    "lora_cache_gpu_memory_fraction": "lora_cache_gpu_memory_fraction not set",
    "lora_cache_host_memory_bytes": "lora_cache_host_memory_bytes not set",
    "decoding_mode": "decoding_mode parameter is invalid or not specified",
    "gpu_weights_percent": "gpu_weights_percent parameter is not specified",
    "enable_context_fmha_fp32_acc": "enable_context_fmha_fp32_acc is not specified",
    "multi_block_mode": "multi_block_mode is not specified",
    "cuda_graph_mode": "cuda_graph_mode is not specified",
    "cuda_graph_cache_size": "cuda_graph_cache_size is not specified",
    "encoder_model_path": "encoder_model_path is not specified",
}
# Those that have tests of their own, or of which the backend says nothing unless another one asks for them.
OTHERS = {
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "eagle_choices",
    "executor_worker_path",
    "gpt_model_path",
    "gpt_model_type",
    "guided_decoding_backend",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "lookahead_window_size",
    "lora_prefetch_dir",
    "medusa_choices",
    "num_nodes",
    "speculative_decoding_fast_logits",
    "tokenizer_dir",
    "xgrammar_tokenizer_info_path",
}
VALUES = {
    "max_attention_window_size": "2560,1280",
    "batch_scheduler_policy": "max_utilization",
    "gpu_device_ids": "0,1;2,3",
    "participant_ids": "0;1",
    "decoding_mode": "top_k_top_p",
}
BOOLEANS = {
    "kv_cache_onboard_blocks",
    "exclude_input_in_output",
    "enable_kv_cache_reuse",
    "normalize_log_probs",
    "enable_chunked_context",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
}


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    with running_loader(tmp_path_factory.mktemp("parameters")) as loader:
        yield loader


def load(loader: Loader, **parameters: str | None) -> None:
    """Loads the model with parameters set past the template's own checks; None takes one away."""
    config = filled({"triton_backend": "tensorrtllm", "engine_dir": loader.engine()})
    for key, value in parameters.items():
        config.parameters.pop(key, None)
        if value is not None:
            config.parameters[key].string_value = value
    loader.load_config(config)


def test_the_tables_here_have_every_parameter_of_the_contract() -> None:
    assert set(CONTRACT["models"]["tensorrt_llm"]["parameters"]) == set(WARNINGS) | OTHERS


@pytest.mark.parametrize("name", sorted(WARNINGS))
@pytest.mark.parametrize("value", [None, "", "${a_placeholder}"], ids=["missing", "empty", "bare"])
def test_a_value_that_cannot_be_had_is_the_default_with_a_warning(
    loader: Loader, name: str, value: str | None
) -> None:
    if name in ("gpu_device_ids", "participant_ids") and value == "":
        pytest.skip("an empty list of devices is read as none, without a word")
    load(loader, **{name: value})
    assert f"[TensorRT-LLM][WARNING] {WARNINGS[name]}" in loader.log


@pytest.mark.parametrize("name", sorted(WARNINGS.keys() - {"encoder_model_path"}))
def test_a_value_that_can_be_read_is_taken_without_a_warning(loader: Loader, name: str) -> None:
    load(loader, **{name: VALUES.get(name, "true" if name in BOOLEANS else "1")})
    assert WARNINGS[name] not in loader.log


@pytest.mark.parametrize("value", ["True", "true", "TRUE", "1", "False", "false", "FALSE", "0"])
def test_the_spellings_of_a_boolean(loader: Loader, value: str) -> None:
    load(loader, cuda_graph_mode=value)
    assert WARNINGS["cuda_graph_mode"] not in loader.log


@pytest.mark.parametrize("value", ["yes", "no", "tRUE", "2", " true"])
def test_other_spellings_of_a_boolean_are_the_default(loader: Loader, value: str) -> None:
    load(loader, cuda_graph_mode=value)
    assert WARNINGS["cuda_graph_mode"] in loader.log


@pytest.mark.parametrize(
    ("value", "taken"), [("7 of them", True), ("+7", True), ("0.5", True), ("of 7", False)]
)
def test_numbers_are_read_as_far_as_they_go(loader: Loader, value: str, taken: bool) -> None:
    load(loader, sink_token_length=value)
    assert (WARNINGS["sink_token_length"] not in loader.log) == taken


@pytest.mark.parametrize("strategy", ["V1", "v1", "inflight_batching", "inflight_fused_batching"])
def test_batching_strategies(loader: Loader, strategy: str) -> None:
    load(loader, gpt_model_type=strategy)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"gpt_model_type": ""}, "Invalid gpt_model_type"),
        ({"gpt_model_type": "${batching_strategy}"}, "Invalid gpt_model_type"),
        ({"gpt_model_type": None}, "Cannot find parameter with name: gpt_model_type"),
        ({"tokenizer_dir": None}, "Cannot find parameter with name: tokenizer_dir"),
        (
            {"guided_decoding_backend": None},
            "Cannot find parameter with name: guided_decoding_backend",
        ),
        (
            {"xgrammar_tokenizer_info_path": None},
            "Cannot find parameter with name: xgrammar_tokenizer_info_path",
        ),
        (
            {"guided_decoding_backend": "xgrammar", "xgrammar_tokenizer_info_path": "/no/such"},
            "Xgrammar's tokenizer info path at /no/such does not exist",
        ),
        (
            {"guided_decoding_backend": "other", "xgrammar_tokenizer_info_path": "/"},
            "Guided decoding is currently supported with 'xgrammar' backend",
        ),
        ({"decoding_mode": "lookahead"}, "lookahead parameters are not specified"),
        ({"gpt_model_path": "/no/such"}, "Both encoder and decoder model paths are empty"),
        ({"gpt_model_path": "/"}, "File does not exist: /config.json"),
        ({"max_beam_width": "9"}, "Runtime configured max beam width (9) must not exceed engine"),
    ],
)
def test_what_keeps_the_model_from_loading(
    loader: Loader, parameters: dict[str, str | None], reason: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(reason)):
        load(loader, **parameters)


def test_lookahead_decoding_with_its_parameters(loader: Loader) -> None:
    sizes = ("window_size", "ngram_size", "verification_set_size")
    load(loader, decoding_mode="lookahead", **{f"lookahead_{size}": "7" for size in sizes})


@pytest.mark.parametrize("mode", ["medusa", "eagle"])
def test_choices_are_missed_in_their_mode_alone(loader: Loader, mode: str) -> None:
    warning = f"{mode}_choices parameter is not specified"
    load(loader)
    assert warning not in loader.log
    load(loader, decoding_mode=mode)
    assert warning in loader.log
    load(loader, decoding_mode=mode, **{f"{mode}_choices": "{0},{0,1}"})
    assert warning not in loader.log


@pytest.mark.parametrize("directory", ["", "${lora_prefetch_dir}", "/no/such"])
def test_any_lora_directory_is_a_path_for_an_engine_with_lora(
    loader: Loader, directory: str
) -> None:
    engine = loader.engine(plugin_config={"lora_plugin": "auto"})
    load(loader, lora_prefetch_dir=directory)
    load(loader, gpt_model_path=engine, lora_prefetch_dir=None)
    load(loader, gpt_model_path=engine, lora_prefetch_dir=engine)
    with pytest.raises(AssertionError, match="No such file or directory"):
        load(loader, gpt_model_path=engine, lora_prefetch_dir=directory)


def test_an_engine_without_its_file(loader: Loader) -> None:
    engine = loader.engine()
    os.unlink(Path(engine) / "rank0.engine")
    with pytest.raises(AssertionError, match="Error opening engine file"):
        load(loader, gpt_model_path=engine)


def test_unknown_parameters_are_ignored(loader: Loader) -> None:
    load(loader, no_such_parameter="1", engine="transformers", model="${model}")


def test_the_templates_defaults_are_taken(loader: Loader) -> None:
    """What our template leaves unset costs a warning; nothing that it sets does."""
    loader.load()
    assert "max_tokens_in_paged_kv_cache is not specified" in loader.log
    given = filled({"triton_backend": "tensorrtllm", "engine_dir": "/"}).parameters
    unset = {name for name, warning in WARNINGS.items() if warning in loader.log}
    assert not unset & set(given)
