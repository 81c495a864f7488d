from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.repository.fill import fill_model, fill_repository
from cog_triton.repository.variables import TABLES, VARIABLES, Variable, known, load_overrides

TEMPLATES = Path(__file__).resolve().parents[3] / "triton_model_repo"
TOKENIZER: dict[str, object] = {"tokenizer_dir": "/models/demo"}
VALID: dict[str, dict[str, object]] = {
    "preprocessing": TOKENIZER,
    "postprocessing": TOKENIZER,
    "tensorrt_llm": {"model": "/models/demo"},
}


def variable(kind: str, default: Any = None, **limits: Any) -> Variable:
    return Variable(kind=kind, default=default, description="", **limits)


SIZE = variable("integer", 4, minimum=1, maximum=10)
MUST = variable("text", required=True)


def parse(text: str) -> Any:
    return text_format.Parse(text, ModelConfig())


def config(repository: Path, model: str) -> Any:
    return parse((repository / model / "config.pbtxt").read_text(encoding="utf-8"))


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def merged(changes: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    models = [*VALID, *(model for model in changes if model not in VALID)]
    return {model: {**VALID.get(model, {}), **changes.get(model, {})} for model in models}


def problems(changes: Mapping[str, Mapping[str, object]], source: Path, tmp_path: Path) -> str:
    with pytest.raises(TemplateError) as raised:
        fill_repository(source, tmp_path / "filled", merged(changes))
    assert not (tmp_path / "filled").exists()
    return str(raised.value)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Our templates, to change."""
    copy = tmp_path / "source"
    shutil.copytree(TEMPLATES, copy)
    return copy


# Values


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (SIZE, None, "4"),
        (SIZE, "", "4"),
        (SIZE, 7, "7"),
        (SIZE, "7", "7"),
        (SIZE, " 7\n", "7"),
        (SIZE, "+7", "7"),
        (variable("integer"), None, None),
        (variable("integer"), "", None),
        (variable("integer"), "-3", "-3"),
        (variable("float", minimum=0, maximum=1), "0.90", "0.9"),
        (variable("float", minimum=0, maximum=1), 1, "1.0"),
        (variable("float", minimum=0, maximum=1), "0", "0.0"),
        *(
            (variable("boolean"), value, "true")
            for value in (True, "True", "true", "TRUE", "1", 1, "yes", " true ")
        ),
        *(
            (variable("boolean", True), value, "false")
            for value in (False, "False", "false", "0", 0, "no")
        ),
        (variable("switch"), "True", "true"),
        (variable("switch"), False, None),
        (variable("text"), " as it is ", " as it is "),
        (variable("text", ""), None, ""),
        (variable("path"), "meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"),
        (variable("path"), Path("/a/b"), "/a/b"),
        (variable("data type"), "TYPE_FP16", "TYPE_FP16"),
        (variable("data type"), "BF16", "TYPE_BF16"),
        (variable("integer list"), "0,1, 2", "0,1,2"),
        (variable("integer list"), "0,1;2,3", "0,1;2,3"),
        (variable("integer list"), [0, 1], "0,1"),
        (variable("integer list"), 2560, "2560"),
        (variable("choice", "a", choices=("a", "b")), "b", "b"),
    ],
)
def test_a_value_is_spelled_as_triton_reads_it(
    kind: Variable, value: object, expected: str | None
) -> None:
    assert kind.render(value) == expected


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (MUST, None, "required, text, in quotes"),
        (MUST, "", "required, text, in quotes"),
        (SIZE, "four", "expected an integer from 1 to 10, got 'four'"),
        (SIZE, True, "expected an integer from 1 to 10, got True"),
        (SIZE, 4.0, "expected an integer from 1 to 10, got 4.0"),
        (SIZE, "4_0", "expected an integer from 1 to 10, got '4_0'"),
        (SIZE, "٤", "expected an integer from 1 to 10, got '٤'"),
        (SIZE, 0, "expected an integer from 1 to 10, got 0"),
        (SIZE, 11, "expected an integer from 1 to 10, got 11"),
        (SIZE, [4], "expected an integer from 1 to 10, got [4]"),
        (variable("integer", minimum=1), 0, "an integer of at least 1, got 0"),
        (variable("float"), "nan", "expected a number, got 'nan'"),
        (variable("float"), "inf", "expected a number, got 'inf'"),
        (variable("float"), False, "expected a number, got False"),
        (variable("float"), {}, "expected a number, got {}"),
        (variable("boolean"), "maybe", "expected true or false, got 'maybe'"),
        (variable("boolean"), 2, "expected true or false, got 2"),
        (variable("text"), 7, "expected text, in quotes, got 7"),
        (variable("path"), True, "expected a path, got True"),
        (variable("path"), "\udc80", "expected a path, got '\\udc80'"),
        (variable("path"), "${HOME}/a", "still to be expanded, '${HOME}/a'"),
        (variable("integer"), "${N}", "still to be expanded, '${N}'"),
        (variable("data type"), "float", "such as TYPE_FP32, got 'float'"),
        (variable("integer list"), "0,x", "separated by commas, got '0,x'"),
        (variable("integer list"), "0,", "separated by commas, got '0,'"),
        (variable("integer list"), True, "separated by commas, got True"),
        (variable("choice", "a", choices=("a", "b")), "c", "one of a, b, got 'c'"),
    ],
)
def test_a_value_that_is_not_valid(kind: Variable, value: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        kind.render(value)
    assert message in str(raised.value)


@pytest.mark.parametrize("model", [*VARIABLES])
def test_every_default_is_a_valid_value(model: str) -> None:
    for found in known(model).values():
        if not found.required:
            found.render()


@pytest.mark.parametrize("model", [*TABLES.ignored])
def test_no_name_is_both_current_and_ignored(model: str) -> None:
    assert not TABLES.ignored[model].keys() & VARIABLES[model].keys()


# One template

PARAMETER = 'parameters { key: "k" value { string_value: "${model}" } }'


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("max_batch_size: ${triton_max_batch_size}\n", {}, "max_batch_size: 64"),
        ("max_batch_size: ${triton_max_batch_size}", {"triton_max_batch_size": "8"}, "max_batch_size: 8"),
        (
            "dynamic_batching { preferred_batch_size: [ ${max_queue_size}, ${max_queue_size} ] }",
            {"max_queue_size": 5},
            "dynamic_batching { preferred_batch_size: [ 5, 5 ] }",
        ),
        ('backend: "b/${model}/c"\n', {"model": "x"}, 'backend: "b/x/c"'),
        # An unset variable takes its line along.
        ('platform: "p"\nbackend: "${model}"\nmax_batch_size: 2', {}, 'platform: "p" max_batch_size: 2'),
        ('backend: "${model}" max_batch_size: 1\nplatform: "p"', {}, 'platform: "p"'),
        ("max_batch_size: 1 # ${trust_remote_code}\n", {}, ""),
        ("max_batch_size: 1 # ${trust_remote_code}\n", {"trust_remote_code": "no"}, ""),
        ("max_batch_size: 1 # ${trust_remote_code}\n", {"trust_remote_code": "True"}, "max_batch_size: 1"),
        # Or the parameter whose value it is, however that is written.
        (PARAMETER, {"model": "m"}, 'parameters { key: "k" value { string_value: "m" } }'),
        (f'{PARAMETER} backend: "b"\n', {}, 'backend: "b"'),
        (
            'backend: "b"\nparameters: {\n key: "a"\n value: {\n string_value : "x/${model}"\n }\n}\n',
            {},
            'backend: "b"',
        ),
        ("parameters\n{\n  key: 'a' value { string_value: '${model}' }\n},  # why", {}, ""),
        # But not one that is empty by itself or by its default.
        (
            'parameters { key: "a" value { string_value: "" } }\n'
            'parameters { key: "b" value { string_value: "${guided_decoding_backend}" } }',
            {},
            'parameters { key: "a" value {} } parameters { key: "b" value {} }',
        ),
        # A value is not read as a variable again.
        ('backend: "${model}{model}"', {"model": "$"}, 'backend: "${model}"'),
    ],
)  # fmt: skip
def test_a_filled_template(template: str, values: dict[str, object], expected: str) -> None:
    assert parse(fill_model("tensorrt_llm", template, values)) == parse(expected)


@pytest.mark.parametrize(
    ("template", "values", "lines"),
    [
        ('a: "${tokenizer_dir}"', {}, ["tokenizer_dir: required, a path"]),
        (
            "",
            {"tokeniser_dir": 1},
            ["tokeniser_dir: unknown variable; did you mean tokenizer_dir?"],
        ),
        (
            "${skip_tokens}",
            {},
            [
                "${skip_tokens}: the template uses it, but there is no such variable; did you mean "
                "skip_special_tokens?"
            ],
        ),
        ("a\n${no-name}", {}, ["${no-name}: the template uses it, but there is no such variable"]),
        ("${", {}, ["${}: the template uses it, but there is no such variable"]),
        (
            "${tokenizer_dir} ${triton_max_batch_size}",
            {"triton_max_batch_size": 0, "other": 1},
            [
                "other: unknown variable",
                "tokenizer_dir: required, a path",
                "triton_max_batch_size: expected an integer of at least 1, got 0",
            ],
        ),
    ],
)
def test_every_problem_of_a_template_is_reported_at_once(
    template: str, values: dict[str, object], lines: list[str]
) -> None:
    with pytest.raises(TemplateError) as raised:
        fill_model("postprocessing", template, values)
    found = [line.partition("; known are")[0] for line in raised.value.message.split("\n  ")[1:]]
    assert found == [f"postprocessing: {line}" for line in lines]
    assert str(raised.value).startswith("E3002 TemplateError: ")


@given(st.text(min_size=1), st.sampled_from("\"'"))
@example('\\"\\', '"')
@example("\0\x7f\x85\u2028\r\n\t", '"')
@example("1\x0012", '"')
def test_any_text_survives_in_a_string(text: str, quote: str) -> None:
    assume("${" not in text)
    template = PARAMETER.replace('"${model}"', f"{quote}${{model}}{quote}")
    assert parameters(parse(fill_model("tensorrt_llm", template, {"model": text}))) == {"k": text}


@given(st.text(alphabet="abc\"\\'{}#$ \n", max_size=40))
def test_a_template_is_filled_or_refused(template: str) -> None:
    with contextlib.suppress(TemplateError):
        parse(fill_model("ensemble", template + "${triton_max_batch_size}", {}))


def test_the_line_that_does_not_parse_is_named() -> None:
    template = "# ${decoding_context}\nmax_batch_siz: ${triton_max_batch_size}\n"
    with pytest.raises(TemplateError, match=r"ensemble: config\.pbtxt:2:\d+ : .*max_batch_siz"):
        fill_model("ensemble", template, {})


@pytest.mark.parametrize("text", ["max_batch_size:\n", "input {\n", 'name: "\\377"\n', "a: [1,"])
def test_other_texts_that_do_not_parse(text: str) -> None:
    with pytest.raises(TemplateError, match=r"ensemble: config\.pbtxt:"):
        fill_model("ensemble", text, {})


# NVIDIA's way of writing, by which users' own templates are written.
NVIDIA_STYLE = """
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: ${triton_max_batch_size}

dynamic_batching {
    preferred_batch_size: [ ${triton_max_batch_size} ]
    max_queue_delay_microseconds: ${max_queue_delay_microseconds}
}
input [
  {
    name: "input_ids"
    data_type: TYPE_INT32
    dims: [ -1 ]
  }
]
parameters: {
  key: "gpt_model_path"
  value: {
    string_value: "${engine_dir}"
  }
}
parameters: {
  key: "max_tokens_in_paged_kv_cache"
  value: {
    string_value: "${max_tokens_in_paged_kv_cache}"
  }
}
parameters: {
  key: "max_num_sequences"
  value: {
    string_value: "${max_num_sequences}"
  }
}
parameters: {
  key: "guided_decoding_backend"
  value: {
    string_value: "${guided_decoding_backend}"
  }
}
"""


def test_templates_in_nvidias_format_can_be_filled() -> None:
    filled = parse(fill_model("tensorrt_llm", NVIDIA_STYLE, {"engine_dir": "/e"}))
    assert parameters(filled) == {"gpt_model_path": "/e", "guided_decoding_backend": ""}
    assert filled.max_batch_size == 64
    assert filled.dynamic_batching.preferred_batch_size == [64]


def test_a_template_that_still_uses_an_ignored_variable_gets_its_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = {"engine_dir": "/e", "max_num_sequences": "4"}
    filled = parse(fill_model("tensorrt_llm", NVIDIA_STYLE, values))
    assert parameters(filled)["max_num_sequences"] == "4"
    assert caplog.messages == []


# The repository


def test_fill_repository(source: Path, tmp_path: Path) -> None:
    (source / "tensorrt_llm" / "1" / "__pycache__").mkdir(parents=True, exist_ok=True)
    (source / "tensorrt_llm" / "1" / "model.py").write_text("import this")
    (source / "tensorrt_llm" / "1" / "data").mkdir()
    (source / "tensorrt_llm" / "1" / "data" / "x").write_text("x")
    (source / "notes").mkdir()
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    filled = tmp_path / "new" / "filled"
    fill_repository(source, filled, VALID)
    models = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing"}
    assert {path.name for path in filled.iterdir()} == {*models, "ensemble_ids"}
    assert all("${" not in (filled / model / "config.pbtxt").read_text() for model in models)
    assert list((filled / "ensemble" / "1").iterdir()) == []
    assert (filled / "tensorrt_llm" / "1" / "model.py").read_text() == "import this"
    assert (filled / "tensorrt_llm" / "1" / "data" / "x").read_text() == "x"
    assert not (filled / "tensorrt_llm" / "1" / "__pycache__").exists()
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}


def test_the_bls_model_is_filled_when_it_is_named(tmp_path: Path) -> None:
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm_bls": {}}))
    assert config(tmp_path, "tensorrt_llm_bls").model_transaction_policy.decoupled
    assert (tmp_path / "tensorrt_llm_bls" / "1" / "model.py").is_file()


def test_the_bls_model_may_be_removed_from_the_templates(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(source / "tensorrt_llm_bls")
    fill_repository(source, tmp_path / "filled", merged({"tensorrt_llm_bls": {}}))
    assert not (tmp_path / "filled" / "tensorrt_llm_bls").exists()
    assert caplog.messages == ["tensorrt_llm_bls: has no effect: the repository has no such model"]


def test_an_empty_destination_will_do(tmp_path: Path) -> None:
    fill_repository(TEMPLATES, tmp_path, VALID)
    assert (tmp_path / "ensemble" / "config.pbtxt").is_file()


def test_a_model_without_a_version_gets_one(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "ensemble" / "1")
    fill_repository(source, tmp_path / "filled", VALID)
    assert (tmp_path / "filled" / "ensemble" / "1").is_dir()


def test_values_reach_their_models(tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {
        "ensemble": {"triton_max_batch_size": "8", "logits_datatype": "FP16"},
        "preprocessing": {"add_special_tokens": "False", "max_queue_size": 3},
        "tensorrt_llm": {
            "decoupled_mode": False,
            "gpu_device_ids": [0, 1],
            "kv_cache_free_gpu_mem_fraction": 0.95,
            "simulated_prefill_tokens_per_s": 1000,
        },
    }
    fill_repository(TEMPLATES, tmp_path, merged(changes))
    ensemble, pre = config(tmp_path, "ensemble"), config(tmp_path, "preprocessing")
    llm = config(tmp_path, "tensorrt_llm")
    assert (ensemble.max_batch_size, pre.max_batch_size) == (8, 64)
    assert pre.dynamic_batching.default_queue_policy.max_queue_size == 3
    assert parameters(pre) == {
        "tokenizer_dir": "/models/demo",
        "add_special_tokens": "false",
        "words_after_space": "true",
    }
    assert not llm.model_transaction_policy.decoupled
    assert parameters(llm) == {
        "max_beam_width": "1",
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": "0.95",
        "exclude_input_in_output": "false",
        "gpu_device_ids": "0,1",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
        "engine": "transformers",
        "model": "/models/demo",
        "device": "auto",
        "dtype": "auto",
        "simulated_prefill_ms": "0.0",
        "simulated_inter_token_ms": "0.0",
        "simulated_prefill_tokens_per_s": "1000.0",
    }


@pytest.mark.parametrize(
    ("values", "on"),
    [
        ({}, True),
        ({"triton_backend": ""}, True),
        ({"triton_backend": "tensorrtllm", "engine_dir": "/e"}, False),
        ({"triton_backend": "tensorrtllm", "encoder_engine_dir": "/e"}, False),
    ],
)
def test_decoding_context_follows_the_backend(
    values: dict[str, object], on: bool, tmp_path: Path
) -> None:
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm": values}))
    outputs = {tensor.name for tensor in config(tmp_path, "tensorrt_llm").output}
    _, llm, post = config(tmp_path, "ensemble").ensemble_scheduling.step
    context = {"context_ids": "_CONTEXT_IDS", "is_final": "_IS_FINAL"}
    assert ({"context_ids", "is_final"} <= outputs) is on
    # The ensemble has it in any case: from the engine itself, or from the model before the C++ backend.
    assert llm.model_name == ("tensorrt_llm" if on else "tensorrt_llm_context")
    assert context.items() <= llm.output_map.items()
    assert {"CONTEXT_IDS": "_CONTEXT_IDS"}.items() <= post.input_map.items()
    assert {"IS_FINAL": "_IS_FINAL"}.items() <= post.input_map.items()
    assert (tmp_path / "tensorrt_llm_context").exists() is not on


def test_the_model_before_the_backend_has_its_tensors(tmp_path: Path) -> None:
    values = {"triton_backend": "tensorrtllm", "engine_dir": "/e", "triton_max_batch_size": 65}
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm": values}))
    relay, llm = config(tmp_path, "tensorrt_llm_context"), config(tmp_path, "tensorrt_llm")
    assert (relay.backend, relay.max_batch_size) == ("python", 65)
    assert list(relay.input) == list(llm.input)
    assert list(relay.output)[:-2] == list(llm.output)
    assert [tensor.name for tensor in relay.output][-2:] == ["context_ids", "is_final"]
    assert relay.model_transaction_policy.decoupled
    assert "TritonPythonModel" in (tmp_path / "tensorrt_llm_context/1/model.py").read_text()
    # Who reads ids reads the backend's own.
    assert (
        config(tmp_path, "ensemble_ids").ensemble_scheduling.step[-1].model_name == "tensorrt_llm"
    )


def test_without_streaming_nothing_stands_before_the_backend(tmp_path: Path) -> None:
    values = {"triton_backend": "tensorrtllm", "engine_dir": "/e", "decoupled_mode": False}
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm": values}))
    assert not (tmp_path / "tensorrt_llm_context").exists()
    assert config(tmp_path, "ensemble").ensemble_scheduling.step[1].model_name == "tensorrt_llm"


@pytest.mark.parametrize("backend", ["python", "tensorrtllm"])
def test_decoding_context_can_be_switched_off(tmp_path: Path, backend: str) -> None:
    off: dict[str, object] = {"decoding_context": False}
    llm = {**off, "triton_backend": backend, "engine_dir": "/e"}
    fill_repository(TEMPLATES, tmp_path, merged({"ensemble": off, "tensorrt_llm": llm}))
    assert "context_ids" not in (tmp_path / "tensorrt_llm" / "config.pbtxt").read_text()
    assert not (tmp_path / "tensorrt_llm_context").exists()


def test_an_input_that_the_backend_misplaces_can_be_dropped(tmp_path: Path) -> None:
    name = "num_return_sequences"
    fill_repository(TEMPLATES, tmp_path / "with", merged({}))
    assert name in [t.name for t in config(tmp_path / "with", "ensemble").input]
    off: dict[str, dict[str, object]] = {m: {name: False} for m in ("ensemble", "tensorrt_llm")}
    fill_repository(TEMPLATES, tmp_path / "without", merged(off))
    for model in ("ensemble", "ensemble_ids", "tensorrt_llm"):
        assert name not in str(config(tmp_path / "without", model))
    with pytest.raises(TemplateError, match=f"step tensorrt_llm has no input {name}"):
        fill_repository(TEMPLATES, tmp_path / "half", merged({"tensorrt_llm": {name: False}}))


MAX_UTILIZATION = {
    "triton_backend": "tensorrtllm",
    "engine_dir": "/engine",
    "batch_scheduler_policy": "max_utilization",
}


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({}, True),
        ({"enable_chunked_context": False}, True),
        ({"enable_chunked_context": True}, False),
        ({"decoupled_mode": False}, False),
        ({"batch_scheduler_policy": "guaranteed_no_evict"}, False),
        ({"triton_backend": "python", "engine_dir": None}, False),
    ],
)
def test_streams_that_will_be_refused_are_warned_of(
    values: dict[str, object], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = {**MAX_UTILIZATION, **values}
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm": llm}))
    template = (TEMPLATES / "tensorrt_llm" / "config.pbtxt").read_text()
    assert len([m for m in caplog.messages if "max_input_len" in m]) == warned
    caplog.clear()
    fill_model("tensorrt_llm", template, llm)
    found = [m for m in caplog.messages if "exceed the engine's max_input_len" in m]
    assert len(found) == warned
    assert all("set enable_chunked_context to true" in m for m in found)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"preprocessing": {"tokenizer_dir": None}, "postprocessing": {"tokenizer_dir": ""}},
            [
                "postprocessing: tokenizer_dir: required, a path",
                "preprocessing: tokenizer_dir: required, a path",
            ],
        ),
        (
            {"tensorrt_llm": {"max_batch_siz": 4}, "ensemble": {"triton_max_batch_size": "x"}},
            [
                "ensemble: triton_max_batch_size: expected an integer of at least 1, got 'x'",
                "tensorrt_llm: max_batch_siz: unknown variable; did you mean max_batch_size?",
            ],
        ),
        (
            {"tensorrt_lm": {"engine_dir": "/e"}},
            ["tensorrt_lm: no such model in the repository; did you mean tensorrt_llm?"],
        ),
        (
            {"tensorrt_llm": {"triton_backend": "tensorrtllm"}},
            ["tensorrt_llm: engine_dir: triton_backend tensorrtllm needs it"],
        ),
        (
            {"tensorrt_llm": {"model": ""}},
            ["tensorrt_llm: model: the transformers engine needs it"],
        ),
        (
            {"tensorrt_llm": {"engine": "simulated"}},
            ["tensorrt_llm: tokenizer_dir: the simulated engine needs it"],
        ),
        (
            {
                "tensorrt_llm": {"triton_max_batch_size": 4},
                "preprocessing": {"triton_max_batch_size": 128},
            },
            [
                "tensorrt_llm: triton_max_batch_size: 4 is less than the 64 of ensemble, which has "
                "it as a step; give both the same"
            ],
        ),
        (
            {"tensorrt_llm": {"decoding_context": "no"}},
            [
                "ensemble: step tensorrt_llm has no output context_ids",
                "ensemble: step tensorrt_llm has no output is_final",
            ],
        ),
        (
            {"tensorrt_llm": {"gpt_model_path": "/a", "engine_dir": "/b"}},
            ["tensorrt_llm: engine_dir: also given, with another value, as gpt_model_path"],
        ),
        (
            {"tensorrt_llm": {"decoupled": "maybe", "decoupled_mode": True}},
            ["tensorrt_llm: decoupled_mode: also given, with another value, as decoupled"],
        ),
    ],
)
def test_problems_are_reported_together_and_nothing_is_written(
    changes: dict[str, dict[str, object]], lines: list[str], source: Path, tmp_path: Path
) -> None:
    assert problems(changes, source, tmp_path).split("\n  ")[1:] == lines


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: text + "${foo}", "the template uses it, but there is no such variable"),
        (lambda text: text + "foo: 1", 'has no field named "foo"'),
        (
            lambda text: text.replace('name: "ens', 'name: "xens'),
            "the template's name is xensemble",
        ),
        (lambda text: text.replace('"QUERY"', '"Q"'), "step preprocessing has no input Q"),
        (lambda text: text.replace('"OUTPUT"', '"O"'), "step postprocessing has no output O"),
        (
            lambda text: text.replace('model_name: "post', 'model_name: "past'),
            "step pastprocessing: no such model in the repository",
        ),
    ],
)
def test_a_broken_template_is_a_problem(
    change: Callable[[str], str], line: str, source: Path, tmp_path: Path
) -> None:
    path = source / "ensemble" / "config.pbtxt"
    path.write_text(change(path.read_text()))
    message = problems({}, source, tmp_path)
    assert "\n  ensemble: " in message
    assert line in message


@pytest.mark.parametrize("make", [True, False])
def test_a_source_without_templates(make: bool, tmp_path: Path) -> None:
    if make:
        (tmp_path / "empty").mkdir()
    assert "no <model>/config.pbtxt in it" in problems({}, tmp_path / "empty", tmp_path)


def test_a_template_that_is_not_text(source: Path, tmp_path: Path) -> None:
    (source / "ensemble" / "config.pbtxt").write_bytes(b"\xff")
    assert "config.pbtxt: not UTF-8: " in problems({}, source, tmp_path)


@pytest.mark.parametrize("inside", [".", "filled", "ensemble/1"])
def test_the_source_is_never_written_to(inside: str, source: Path) -> None:
    with pytest.raises(ConfigurationError, match="inside of the templates' directory"):
        fill_repository(source, source / inside, VALID)


@pytest.mark.parametrize("kind", ["file", "full"])
def test_a_destination_that_holds_something_is_refused(kind: str, tmp_path: Path) -> None:
    destination = tmp_path / "d"
    if kind == "full":
        destination.mkdir()
    (destination if kind == "file" else destination / "x").write_text("mine")
    with pytest.raises(ConfigurationError, match="must be new or an empty directory"):
        fill_repository(TEMPLATES, destination, VALID)


# Old names


@pytest.mark.parametrize(
    ("model", "values", "key", "value", "warning"),
    [
        (
            "tensorrt_llm",
            {"gpt_model_type": "V1"},
            "gpt_model_type",
            "V1",
            None,
        ),
        (
            "tensorrt_llm",
            {"batch_scheduler_policy": "guaranteed_completion"},
            "batch_scheduler_policy",
            "guaranteed_no_evict",
            None,
        ),
        (
            "tensorrt_llm",
            {"encoder_model_path": "/e"},
            "encoder_model_path",
            "/e",
            None,
        ),
        (
            "tensorrt_llm",
            {"encoder_model_path": "/e", "encoder_engine_dir": "/e"},
            "encoder_model_path",
            "/e",
            None,
        ),
        (
            "tensorrt_llm",
            {"enable_trt_overlap": False},
            "enable_trt_overlap",
            None,
            "tensorrt_llm: enable_trt_overlap has no effect: the backend no longer reads it",
        ),
        (
            "tensorrt_llm",
            {"max_num_sequences": "anything"},
            "max_num_sequences",
            None,
            "tensorrt_llm: max_num_sequences has no effect: the backend no longer reads it",
        ),
        (
            "postprocessing",
            {"tokenizer_type": "llama"},
            "tokenizer_type",
            None,
            "postprocessing: tokenizer_type has no effect: the tokenizer's own files say what it "
            "is",
        ),
        (
            "preprocessing",
            {"max_num_images": 1},
            "max_num_images",
            None,
            "preprocessing: max_num_images has no effect: the template does not use it",
        ),
    ],
)
def test_old_names_are_accepted_with_a_warning_of_those_without_effect(
    model: str,
    values: dict[str, object],
    key: str,
    value: str | None,
    warning: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill_repository(TEMPLATES, tmp_path, merged({model: values}))
    assert parameters(config(tmp_path, model)).get(key) == value
    assert caplog.messages == ([warning] if warning else [])


@pytest.mark.parametrize(
    "values",
    [
        {"decoupled": False},
        {"decoupled": False, "decoupled_mode": ""},
        {"decoupled": False, "decoupled_mode": "0"},
        {"decoupled": "", "decoupled_mode": "false"},
    ],
)
def test_an_old_name_that_agrees_with_the_new_one(
    values: dict[str, object], tmp_path: Path
) -> None:
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm": values}))
    assert not config(tmp_path, "tensorrt_llm").model_transaction_policy.decoupled


def test_an_engine_that_is_not_used_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill_repository(TEMPLATES, tmp_path, merged({"tensorrt_llm": {"engine_dir": "/e"}}))
    assert caplog.messages == ["tensorrt_llm: engine_dir has no effect with triton_backend python"]


# The YAML file

OFFICIAL = """
build:
  version: 1
instantiate:
  weights: https://example.com/engine.tar
  server:
    preprocessing:
      args:
        tokenizer_dir: /src/triton_model_repo/tensorrt_llm/1/
        tokenizer_type: llama
        triton_max_batch_size: 64
        tokenizer_type: auto
        preprocessing_instance_count: 64
    tensorrt_llm:
      args:
        engine_dir: /src/triton_model_repo/tensorrt_llm/1/
        decoupled_mode: True
        kv_cache_free_gpu_mem_fraction: 0.95
        max_attention_window_size: 4096
    postprocessing:
      args:
        tokenizer_dir: /src/triton_model_repo/tensorrt_llm/1/
    tensorrt_llm_bls:
      args:
        accumulate_tokens: "true"
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("server:", {}),
        ("weights: x\ninstantiate: [1]", {}),
        ("instantiate: {weights: x}", {}),
        ("server: {ensemble: , tensorrt_llm: {args: }}", {"ensemble": {}, "tensorrt_llm": {}}),
        (
            "server: {ensemble: {args: {a: 1, b: 0.5, c: True, d: '1', e: [0, 1], f: , 1: x}}}",
            {"ensemble": {"a": 1, "b": 0.5, "c": True, "d": "1", "e": [0, 1], "f": None, "1": "x"}},
        ),
        ("server:\ninstantiate: {server: {ensemble: {args: {a: 1}}}}", {"ensemble": {"a": 1}}),
        ("instantiate: {server: }", {}),
    ],
)
def test_load_overrides(text: str, expected: object, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert load_overrides(path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "c.yaml: not valid YAML: "),
        ("a: 1\nb: c: d\n", "c.yaml: not valid YAML: "),
        ("a: \x00", "c.yaml: not valid YAML: "),
        ("a: !!python/object:os.system {}", "c.yaml: not valid YAML: "),
        ("- 1", "c.yaml: the file: expected a mapping, got [1]"),
        ("server: 1", "c.yaml: server: expected a mapping, got 1"),
        ("instantiate: {server: []}", "c.yaml: instantiate.server: expected a mapping, got []"),
        ("server: {ensemble: 1}", "c.yaml: server.ensemble: expected a mapping, got 1"),
        ("server: {ensemble: {arg: {}}}", "c.yaml: server.ensemble.arg: only args is known here"),
        (
            "instantiate: {server: {ensemble: {args: [a]}}}",
            "c.yaml: instantiate.server.ensemble.args: expected a mapping, got ['a']",
        ),
        (
            "server: {}\ninstantiate: {server: {}}",
            "c.yaml: give server or instantiate.server, not both",
        ),
    ],
)
def test_a_file_of_another_shape(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        load_overrides(path)
    assert str(raised.value).startswith("E3001 ")
    assert message in str(raised.value)


def test_a_file_that_cannot_be_read_is_named_with_the_place(tmp_path: Path) -> None:
    absent, binary = tmp_path / "none.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"server: \xff")
    for path, message in (
        (absent, f"{absent} cannot be read: No such file or directory"),
        (tmp_path, f"{tmp_path} cannot be read: Is a directory"),
        (binary, f"{binary}: not valid YAML: unacceptable character"),
    ):
        with pytest.raises(ConfigurationError) as raised:
            load_overrides(path)
        assert raised.value.message.startswith(message)


def test_models_beside_server_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max_batch_size: 64\nensemble: {args: {triton_max_batch_size: 64}}")
    assert load_overrides(path) == {}
    assert caplog.messages == [f"{path}: ensemble is ignored; it belongs under server"]


def test_a_cog_triton_file_fills_our_templates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OFFICIAL)
    overrides = load_overrides(path)
    overrides["tensorrt_llm"]["triton_backend"] = "tensorrtllm"
    fill_repository(TEMPLATES, tmp_path / "filled", overrides)
    llm = parameters(config(tmp_path / "filled", "tensorrt_llm"))
    assert llm["gpt_model_path"] == "/src/triton_model_repo/tensorrt_llm/1/"
    assert llm["kv_cache_free_gpu_mem_fraction"] == "0.95"
    assert llm["max_attention_window_size"] == "4096"
    assert config(tmp_path / "filled", "preprocessing").instance_group[0].count == 64
    bls = config(tmp_path / "filled", "tensorrt_llm_bls")
    assert parameters(bls) == {
        "accumulate_tokens": "true",
        "tensorrt_llm_model_name": "tensorrt_llm",
    }
    assert caplog.messages == [
        "preprocessing: tokenizer_type has no effect: the tokenizer's own files say what it is"
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_the_filled_files_can_be_read_by_others(tmp_path: Path) -> None:
    fill_repository(TEMPLATES, tmp_path / "filled", VALID)
    mode = (tmp_path / "filled" / "ensemble" / "config.pbtxt").stat().st_mode
    assert mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_python_model_without_its_code(source: Path, tmp_path: Path) -> None:
    """Triton would hang on it instead of failing."""
    for file in (source / "postprocessing").glob("*/model.py"):
        file.unlink()
    assert "postprocessing: no version of it has a model.py" in problems({}, source, tmp_path)
