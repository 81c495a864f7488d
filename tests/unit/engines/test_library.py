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
from tests.support import load_cases

CASES = load_cases(__file__, "library.yaml")
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


@pytest.mark.parametrize("case", CASES["variables"])
def test_variables_become_arguments(case: dict[str, Any]) -> None:
    given, library = case["variables"], case["library"]
    made = (
        vllm_arguments.engine_arguments(given)
        if library == "vllm"
        else table_arguments(given, library)
    )
    assert made == case["arguments"]


@pytest.mark.parametrize(
    ("library", "case"), [(name, case) for name in LIBRARIES for case in CASES["requests"][name]]
)
def test_arguments_of_a_request(library: Library, case: dict[str, Any]) -> None:
    sampling = SamplingParams(**case.get("sampling", {}))
    asked = GenerationRequest("a", [5, 6], 8, sampling=sampling, **case.get("fields", {}))
    assert (vllm_arguments if library == "vllm" else llm_api).sampling_arguments(asked) == case[
        "arguments"
    ]


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
