"""Templates and values to a filled repository, and every problem in one error."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.repository.derived_models import ids_ensemble
from cog_triton.repository.fill import fill_model, fill_repository
from cog_triton.repository.variables import load_overrides
from tests.unit.repository.support import TEMPLATES, VALID, fill, names, parameters, parse

LLM = (TEMPLATES / "tensorrt_llm" / "config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        pytest.param(
            "max_batch_size: ${triton_max_batch_size}\n", {}, "max_batch_size: 64", id="default"
        ),
        pytest.param(
            "max_batch_size: ${triton_max_batch_size}",
            {"triton_max_batch_size": "8"},
            "max_batch_size: 8",
            id="value",
        ),
        pytest.param(
            "dynamic_batching { preferred_batch_size: [ ${max_queue_size}, ${max_queue_size} ] }",
            {"max_queue_size": 5},
            "dynamic_batching { preferred_batch_size: [ 5, 5 ] }",
            id="value twice",
        ),
        pytest.param(
            'backend: "b/${model}/c"\n',
            {"model": "x"},
            'backend: "b/x/c"',
            id="value within a text",
        ),
        # An unset variable takes its line along.
        pytest.param(
            'platform: "p"\nbackend: "${model}"\nmax_batch_size: 2',
            {},
            'platform: "p" max_batch_size: 2',
            id="line without its variable",
        ),
        pytest.param(
            "max_batch_size: 1 # ${trust_remote_code}\n",
            {"trust_remote_code": "no"},
            "",
            id="flag that is off",
        ),
        pytest.param(
            "max_batch_size: 1 # ${trust_remote_code}\n",
            {"trust_remote_code": "True"},
            "max_batch_size: 1",
            id="flag that is on",
        ),
        # Or the parameter whose value it is, however that is written.
        pytest.param(
            'parameters { key: "k" value { string_value: "${model}" } }',
            {"model": "m"},
            'parameters { key: "k" value { string_value: "m" } }',
            id="parameter with its variable",
        ),
        pytest.param(
            'parameters { key: "k" value { string_value: "${model}" } } backend: "b"\n',
            {},
            'backend: "b"',
            id="parameter without its variable",
        ),
        pytest.param(
            'parameters: {\n key: "a"\n value: {\n string_value : "x/${model}"\n }\n}\n',
            {},
            "",
            id="parameter of several lines",
        ),
        pytest.param(
            "parameters\n{\n  key: 'a' value { string_value: '${model}' }\n},  # why",
            {},
            "",
            id="parameter in single quotes",
        ),
        pytest.param(
            (
                'parameters { key: "a" value { string_value: "" } }\n'
                'parameters { key: "b" value { string_value: "${guided_decoding_backend}" } }'
            ),
            {},
            'parameters { key: "a" value {} } parameters { key: "b" value {} }',
            id="parameters that are empty by themselves",
        ),
        pytest.param(
            'backend: "${max_num_sequences}"',
            {"max_num_sequences": "4"},
            'backend: "4"',
            id="variable without effect that is used",
        ),
        pytest.param(
            'backend: "${model}{model}"',
            {"model": "$"},
            'backend: "${model}"',
            id="value that looks like a variable",
        ),
    ],
)
def test_a_filled_template(
    template: str, values: dict[str, object], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled = fill_model("tensorrt_llm", template, values)
    assert parse(filled) == parse(expected)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("template", "values", "lines"),
    [
        pytest.param(
            'a: "${tokenizer_dir}"', {}, ["tokenizer_dir: required, a path"], id="required variable"
        ),
        pytest.param(
            "",
            {"tokeniser_dir": 1},
            ["tokeniser_dir: unknown variable; did you mean tokenizer_dir?"],
            id="value of an unknown variable",
        ),
        pytest.param(
            "${no}", {}, ["${no}: the template uses an unknown variable"], id="unknown variable"
        ),
        pytest.param("${", {}, ["${}: the template uses an unknown variable"], id="no name"),
        pytest.param(
            "${tokenizer_dir} ${triton_max_batch_size}",
            {"triton_max_batch_size": 0, "other": 1},
            [
                "other: unknown variable",
                "tokenizer_dir: required, a path",
                "triton_max_batch_size: expected an integer of at least 1, got 0",
            ],
            id="three problems",
        ),
        pytest.param(
            "# ${triton_max_batch_size}\nmax_batch_siz: 1",
            {},
            ["config.pbtxt:2:1 : "],
            id="unknown field",
        ),
        pytest.param("max_batch_size:\n", {}, ["config.pbtxt:"], id="field without a value"),
        pytest.param("input {\n", {}, ["config.pbtxt:"], id="block that is not closed"),
        pytest.param('name: "\\377"\n', {}, ["config.pbtxt:"], id="text that is no UTF-8"),
    ],
)
def test_every_problem_of_a_template_is_reported_at_once(
    template: str, values: dict[str, object], lines: list[str]
) -> None:
    """``lines`` has how the lines of the error begin."""
    with pytest.raises(TemplateError) as raised:
        fill_model("postprocessing", template, values)
    found = [
        line.partition("; the known ones are")[0] for line in raised.value.message.split("\n  ")[1:]
    ]
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(f"postprocessing: {expected}")
    assert str(raised.value).startswith("E3002 TemplateError: ")


@given(st.text(min_size=1), st.sampled_from("\"'"))
@example('\\"\\', '"')
@example("\0\x7f\x85\u2028\r\n\t", '"')
@example("1\x0012", '"')
def test_any_text_survives_in_a_string(text: str, quote: str) -> None:
    assume("${" not in text)
    template = f'parameters {{ key: "k" value {{ string_value: {quote}${{model}}{quote} }} }}'
    assert parameters(parse(fill_model("tensorrt_llm", template, {"model": text}))) == {"k": text}


# What TensorRT-LLM's backend reads of a template of which only engine_dir is set.
ALWAYS_READ = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "exclude_input_in_output": "false",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "gpt_model_type": "inflight_fused_batching",
    "max_beam_width": "1",
    "guided_decoding_backend": "",
    "tokenizer_dir": "",
    "xgrammar_tokenizer_info_path": "",
    "gpt_model_path": "/engine",
}


@pytest.mark.parametrize(
    ("values", "expected", "decoupled"),
    [
        pytest.param(
            {
                "engine_dir": "/engine",
                "decoupled_mode": "False",
                "max_tokens_in_paged_kv_cache": 2560,
                "max_attention_window_size": 2560,
                "kv_cache_free_gpu_mem_fraction": 0.5,
                "exclude_input_in_output": "True",
                "enable_kv_cache_reuse": "False",
                "batching_strategy": "inflight_batching",
            },
            {
                "max_tokens_in_paged_kv_cache": "2560",
                "max_attention_window_size": "2560",
                "kv_cache_free_gpu_mem_fraction": "0.5",
                "exclude_input_in_output": "true",
                "enable_kv_cache_reuse": "false",
                "gpt_model_type": "inflight_batching",
            },
            False,
            id="as the guide for Llama gives them, for the C++ backend by themselves",
        ),
        pytest.param(
            {
                "gpt_model_path": "/engine",
                "gpt_model_type": "V1",
                "decoupled": "False",
                "encoder_model_path": "/e",
                "encoder_engine_dir": "/e",
            },
            {"gpt_model_type": "V1", "encoder_model_path": "/e"},
            False,
            id="old names, and the new one with the same value",
        ),
        pytest.param(
            {"engine_dir": "/engine", "batch_scheduler_policy": "guaranteed_completion"},
            {},
            True,
            id="the old name of a policy",
        ),
        pytest.param(
            {"engine_dir": "/engine", "decoding_mode": "lookahead", "lookahead_window_size": "7"},
            {"decoding_mode": "lookahead", "lookahead_window_size": "7"},
            True,
            id="lookahead",
        ),
        pytest.param(
            {
                "engine_dir": "/engine",
                "decoding_mode": "medusa",
                "medusa_choices": "{0}, {0, 0}, {1}",
            },
            {"decoding_mode": "medusa", "medusa_choices": "{0}, {0, 0}, {1}"},
            True,
            id="medusa",
        ),
    ],
)
def test_the_backend_reads_what_was_asked_for_and_nothing_else(
    values: dict[str, object], expected: dict[str, str], decoupled: bool
) -> None:
    filled = parse(fill_model("tensorrt_llm", LLM, values))
    ours = LLM.partition("# Read by the embedded engines")[2]
    read = {key: value for key, value in parameters(filled).items() if f'"{key}"' not in ours}
    assert read == {**ALWAYS_READ, **expected}
    assert filled.backend == "tensorrtllm"
    assert filled.model_transaction_policy.decoupled is decoupled


def test_a_model_may_be_filled_without_what_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    fill_model("tensorrt_llm", LLM, {"engine_dir": "/e", "engine": "transformers"})
    assert caplog.messages == [
        "tensorrt_llm: engine_dir has no effect with triton_backend python",
        "tensorrt_llm: model: the transformers engine needs it",
    ]


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        pytest.param({}, True, id="default"),
        pytest.param({"enable_chunked_context": False}, True, id="chunked context off"),
        pytest.param({"enable_chunked_context": True}, False, id="chunked context on"),
        pytest.param({"decoupled_mode": False}, False, id="whole answers"),
        pytest.param({"batch_scheduler_policy": "guaranteed_no_evict"}, False, id="other policy"),
        pytest.param({"triton_backend": "python", "engine_dir": None}, False, id="embedded engine"),
    ],
)
def test_streams_that_will_be_refused_are_warned_of(
    values: dict[str, object], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = {"triton_backend": "tensorrtllm", "engine_dir": "/engine"}
    given = {**engine, "batch_scheduler_policy": "max_utilization", **values}
    fill_model("tensorrt_llm", LLM, given)
    fill(tmp_path, tensorrt_llm=given)
    found = [text for text in caplog.messages if "exceed the engine's max_input_len" in text]
    assert len(found) == (2 if warned else 0)
    assert all("set enable_chunked_context to true" in text for text in found)


# The repository


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Our templates, to change."""
    return Path(shutil.copytree(TEMPLATES, tmp_path / "source"))


def test_fill_repository(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "ensemble" / "1")
    for path in ("1/__pycache__/x", "1/data/x"):
        (source / "tensorrt_llm" / path).parent.mkdir(exist_ok=True)
        (source / "tensorrt_llm" / path).write_text("x")
    (source / "notes").mkdir()
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    filled = tmp_path / "new" / "filled"
    models = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing"}
    assert fill(filled, source).keys() == {*models, "ensemble_ids"}
    assert all("${" not in (filled / model / "config.pbtxt").read_text() for model in models)
    assert list((filled / "ensemble" / "1").iterdir()) == []
    code = (filled / "tensorrt_llm" / "1" / "model.py").read_text()
    assert code == (TEMPLATES / "tensorrt_llm" / "1" / "model.py").read_text()
    assert (filled / "tensorrt_llm" / "1" / "data" / "x").read_text() == "x"
    assert not (filled / "tensorrt_llm" / "1" / "__pycache__").exists()
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    umask = os.umask(0)
    os.umask(umask)
    mode = (filled / "ensemble" / "config.pbtxt").stat().st_mode
    assert mode & 0o777 == 0o666 & ~umask  # others may read it


def test_the_bls_model_is_filled_when_it_is_named_and_there(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bls = fill(tmp_path / "with", tensorrt_llm_bls={})["tensorrt_llm_bls"]
    assert bls.model_transaction_policy.decoupled
    assert (tmp_path / "with" / "tensorrt_llm_bls" / "1" / "model.py").is_file()
    shutil.rmtree(source / "tensorrt_llm_bls")
    assert "tensorrt_llm_bls" not in fill(tmp_path / "without", source, tensorrt_llm_bls={})
    assert caplog.messages == ["tensorrt_llm_bls has no effect: the repository has no such model"]


@pytest.mark.parametrize(
    ("values", "in_ensemble", "origin"),
    [
        pytest.param({}, None, "tensorrt_llm", id="embedded engine"),
        pytest.param({"triton_backend": ""}, None, "tensorrt_llm", id="embedded engine by default"),
        pytest.param(
            {"triton_backend": "tensorrtllm", "engine_dir": "/e"},
            None,
            "tensorrt_llm_context",
            id="C++ backend",
        ),
        pytest.param(
            {"triton_backend": "tensorrtllm", "encoder_engine_dir": "/e"},
            None,
            "tensorrt_llm_context",
            id="C++ backend with an encoder",
        ),
        pytest.param(
            {"triton_backend": "tensorrtllm", "engine_dir": "/e", "decoupled_mode": False},
            None,
            None,
            id="C++ backend, whole answers",
        ),
        pytest.param(
            {"triton_backend": "python", "decoding_context": False},
            False,
            None,
            id="embedded engine, off",
        ),
        pytest.param(
            {"triton_backend": "tensorrtllm", "engine_dir": "/e", "decoding_context": False},
            False,
            None,
            id="C++ backend, off",
        ),
    ],
)
def test_decoding_context_comes_from_the_engine_or_a_model_before_the_backend(
    values: dict[str, object], in_ensemble: bool | None, origin: str | None, tmp_path: Path
) -> None:
    """``origin`` is the model that adds the context to ids."""
    filled = fill(
        tmp_path,
        ensemble={"decoding_context": in_ensemble},
        tensorrt_llm={**values, "triton_max_batch_size": 65},
    )
    llm, (_, step, post) = filled["tensorrt_llm"], filled["ensemble"].ensemble_scheduling.step
    for name in ("context_ids", "is_final"):
        tensor = f"_{name.upper()}"
        assert step.output_map.get(name) == post.input_map.get(name.upper())
        assert (step.output_map.get(name) == tensor) is (origin is not None)
        assert (name in names(llm.output)) is (origin == "tensorrt_llm")
    assert step.model_name == (origin or "tensorrt_llm")
    # Who reads ids reads the backend's own.
    ids = filled["ensemble_ids"].ensemble_scheduling.step[-1]
    assert ids.model_name == "tensorrt_llm"
    # Frames are for who reads ids alone, from an engine that makes them.
    assert ("frames" in names(filled["ensemble_ids"].output)) is ("frames" in names(llm.output))
    assert "frames" not in step.output_map
    # What no embedded engine reads is not sent to it.
    for name in ("decoder_input_ids", "decoder_input_lengths", "pad_id"):
        assert name in step.input_map
        assert (name in ids.input_map) is (origin != "tensorrt_llm")
    assert ("tensorrt_llm_context" in filled) is (origin == "tensorrt_llm_context")


def test_the_model_before_the_backend_takes_and_gives_what_the_backend_does(tmp_path: Path) -> None:
    values = {"triton_backend": "tensorrtllm", "engine_dir": "/e", "triton_max_batch_size": 65}
    filled = fill(tmp_path, tensorrt_llm=values)
    llm, model = filled["tensorrt_llm"], filled["tensorrt_llm_context"]
    assert (model.backend, model.max_batch_size) == ("python", 65)
    assert list(model.input) == list(llm.input)
    assert list(model.output)[:-2] == list(llm.output)
    assert names(model.output)[-2:] == ["context_ids", "is_final"]
    assert model.model_transaction_policy.decoupled
    assert "TritonPythonModel" in (tmp_path / "tensorrt_llm_context/1/model.py").read_text()


# Problems


def problems(source: Path, destination: Path, **changes: dict[str, object]) -> list[str]:
    with pytest.raises(TemplateError) as raised:
        fill(destination, source, **changes)
    assert not destination.exists()
    return str(raised.value).split("\n  ")[1:]


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        pytest.param(
            {"preprocessing": {"tokenizer_dir": None}, "postprocessing": {"tokenizer_dir": ""}},
            [
                "postprocessing: tokenizer_dir: required, a path",
                "preprocessing: tokenizer_dir: required, a path",
            ],
            id="no tokenizer",
        ),
        pytest.param(
            {"tensorrt_llm": {"max_batch_siz": 4}, "ensemble": {"triton_max_batch_size": "x"}},
            [
                "ensemble: triton_max_batch_size: expected an integer of at least 1, got 'x'",
                "tensorrt_llm: max_batch_siz: unknown variable; did you mean max_batch_size?",
            ],
            id="unknown variable and bad value",
        ),
        pytest.param(
            {"tensorrt_lm": {"engine_dir": "/e"}},
            ["tensorrt_lm: no such model in the repository; did you mean tensorrt_llm?"],
            id="unknown model",
        ),
        pytest.param(
            {"tensorrt_llm": {"triton_backend": "tensorrtllm"}},
            ["tensorrt_llm: engine_dir: triton_backend tensorrtllm needs it"],
            id="no engine",
        ),
        pytest.param(
            {"tensorrt_llm": {"model": ""}},
            ["tensorrt_llm: model: the transformers engine needs it"],
            id="no model",
        ),
        pytest.param(
            {"tensorrt_llm": {"engine": "simulated"}},
            ["tensorrt_llm: tokenizer_dir: the simulated engine needs it"],
            id="no tokenizer for the simulated engine",
        ),
        pytest.param(
            {"tensorrt_llm": {"triton_max_batch_size": 4}},
            [
                (
                    "tensorrt_llm: triton_max_batch_size: 4 is less than the 64 of ensemble, which "
                    "calls it; set both to the same value"
                )
            ],
            id="sizes of batches",
        ),
        pytest.param(
            {"tensorrt_llm": {"decoding_context": "no"}},
            [
                "ensemble: step tensorrt_llm has no input stop_words_text",
                "ensemble: step tensorrt_llm has no output context_ids",
                "ensemble: step tensorrt_llm has no output cut_characters",
                "ensemble: step tensorrt_llm has no output is_final",
            ],
            id="no decoding context",
        ),
        pytest.param(
            {"tensorrt_llm": {"gpt_model_path": "/a", "engine_dir": "/b"}},
            ["tensorrt_llm: engine_dir and its old name gpt_model_path have different values"],
            id="old and new name",
        ),
        pytest.param(
            {"tensorrt_llm": {"decoupled": "maybe", "decoupled_mode": True}},
            ["tensorrt_llm: decoupled_mode and its old name decoupled have different values"],
            id="old and new name of a boolean",
        ),
    ],
)
def test_problems_come_at_once_and_nothing_is_written(
    values: dict[str, dict[str, object]], lines: list[str], tmp_path: Path
) -> None:
    assert problems(TEMPLATES, tmp_path / "filled", **values) == lines


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param('name: "ens', 'name: "xens', "the template's name is xensemble", id="name"),
        pytest.param('"QUERY"', '"Q"', "step preprocessing has no input Q", id="input of a step"),
        pytest.param(
            '"OUTPUT"', '"O"', "step postprocessing has no output O", id="output of a step"
        ),
        pytest.param(
            'model_name: "post',
            'model_name: "past',
            "step pastprocessing: no such model in the repository",
            id="model of a step",
        ),
    ],
)
def test_a_broken_template_is_a_problem(
    old: str, new: str, problem: str, source: Path, tmp_path: Path
) -> None:
    path = source / "ensemble" / "config.pbtxt"
    path.write_text(path.read_text().replace(old, new))
    (found,) = problems(source, tmp_path / "filled")
    assert found.startswith("ensemble: ")
    assert problem in found


def test_a_python_model_without_its_code(source: Path, tmp_path: Path) -> None:
    """Triton would hang on it instead of failing."""
    (source / "postprocessing" / "1" / "model.py").unlink()
    lines = problems(source, tmp_path / "filled")
    assert lines == ["postprocessing: none of its versions contains a model.py"]


def test_a_source_that_is_none(source: Path, tmp_path: Path) -> None:
    (source / "ensemble" / "config.pbtxt").write_bytes(b"\xff")
    for directory, problem in ((source, "config.pbtxt: not UTF-8: "), (tmp_path, "no <model>")):
        with pytest.raises(TemplateError, match=problem):
            fill(tmp_path.with_name("filled"), directory)


@pytest.mark.parametrize("inside", [".", "filled", "ensemble/1"])
def test_the_source_is_never_written_to(inside: str, source: Path) -> None:
    with pytest.raises(ConfigurationError, match="must not be inside the templates' directory"):
        fill_repository(source, source / inside, VALID)


@pytest.mark.parametrize("mine", ["d", "d/x"])
def test_a_destination_that_holds_something_is_refused(mine: str, tmp_path: Path) -> None:
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    (tmp_path / mine).write_text("mine")
    with pytest.raises(ConfigurationError, match="must not exist or must be an empty directory"):
        fill(tmp_path / "d")


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        pytest.param(
            {"tensorrt_llm": {"enable_trt_overlap": False}},
            "tensorrt_llm: enable_trt_overlap has no effect: the backend no longer reads it",
            id="variable of a backend",
        ),
        pytest.param(
            {"tensorrt_llm": {"max_num_sequences": "anything"}},
            "tensorrt_llm: max_num_sequences has no effect: the backend no longer reads it",
            id="number of a backend",
        ),
        pytest.param(
            {"tensorrt_llm": {"engine_dir": "/e"}},
            "tensorrt_llm: engine_dir has no effect with triton_backend python",
            id="engine for the embedded engine",
        ),
        pytest.param(
            {"postprocessing": {"tokenizer_type": "llama"}},
            "postprocessing: tokenizer_type has no effect: the tokenizer's files determine it",
            id="kind of a tokenizer",
        ),
        pytest.param(
            {"preprocessing": {"max_num_images": 1}},
            "preprocessing: max_num_images has no effect: the template does not use it",
            id="variable of another template",
        ),
    ],
)
def test_a_variable_without_effect_is_warned_of(
    values: dict[str, dict[str, object]],
    warning: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    filled = fill(tmp_path, **values)
    assert caplog.messages == [warning]
    assert filled["tensorrt_llm"].model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(False, "0", id="both"),
        pytest.param("", "false", id="new only"),
        pytest.param(False, "", id="old only"),
    ],
)
def test_old_names_are_accepted(
    old: object, new: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled = fill(tmp_path, tensorrt_llm={"decoupled": old, "decoupled_mode": new})
    assert caplog.messages == []
    assert not filled["tensorrt_llm"].model_transaction_policy.decoupled


# With a name that is given twice, as cog-triton's own example had it.
COG_TRITON_FILE = """\
build: {version: 1}
instantiate:
  weights: https://example.com/engine.tar
  server:
    preprocessing:
      args: {tokenizer_type: llama, tokenizer_dir: /engine, preprocessing_instance_count: 64,
             tokenizer_type: auto}
    tensorrt_llm:
      args: {triton_backend: tensorrtllm, engine_dir: /engine, kv_cache_free_gpu_mem_fraction: 0.95}
    postprocessing: {args: {tokenizer_dir: /engine}}
    tensorrt_llm_bls: {args: {accumulate_tokens: "true"}}
"""


def test_a_cog_triton_file_fills_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(COG_TRITON_FILE)
    filled = fill(tmp_path / "filled", **load_overrides(path))
    llm = parameters(filled["tensorrt_llm"])
    assert llm.items() >= {**ALWAYS_READ, "kv_cache_free_gpu_mem_fraction": "0.95"}.items()
    assert filled["preprocessing"].instance_group[0].count == 64
    bls = {"accumulate_tokens": "true", "tensorrt_llm_model_name": "tensorrt_llm"}
    assert parameters(filled["tensorrt_llm_bls"]) == bls
    (warning,) = caplog.messages
    assert warning.startswith("preprocessing: tokenizer_type has no effect: ")


# Its last step makes text of ids.
ANOTHER_ENSEMBLE = """\
name: "ensemble"
input { name: "text" } input { name: "style" }
output { name: "written" }
ensemble_scheduling {
  step { model_name: "a" input_map { key: "T" value: "text" }
         output_map { key: "output_ids" value: "_IDS" } output_map { key: "X" value: "x" }
         output_map { key: "sequence_length" value: "_LENGTH" } }
  step { model_name: "b" input_map { key: "I" value: "_IDS" }
         input_map { key: "S" value: "style" } input_map { key: "X" value: "x" }
         output_map { key: "O" value: "written" } }
}
"""


def test_inputs_of_only_the_last_step_go_with_it() -> None:
    ids: Any = ids_ensemble(parse(ANOTHER_ENSEMBLE), {})
    assert names(ids.input) == ["text"]
    (step,) = ids.ensemble_scheduling.step
    assert dict(step.output_map) == {name: name for name in ("output_ids", "sequence_length")}
    dims = [(tensor.name, list(tensor.dims)) for tensor in ids.output]
    assert dims == [("output_ids", [-1, -1]), ("sequence_length", [-1])]
    assert ids_ensemble(parse('name: "ensemble"'), {}) is None


def test_what_only_the_last_step_reads_of_a_first_one_goes_with_it() -> None:
    ensemble = parse(ANOTHER_ENSEMBLE)
    first = ensemble.ensemble_scheduling.step.add(model_name="first")
    first.input_map["Q"] = "question"
    first.output_map.update({"A": "text", "B": "style"})
    steps = [*ensemble.ensemble_scheduling.step]
    del ensemble.ensemble_scheduling.step[:]
    ensemble.ensemble_scheduling.step.extend([steps[-1], *steps[:-1]])
    ids: Any = ids_ensemble(ensemble, {})
    assert [dict(step.output_map) for step in ids.ensemble_scheduling.step] == [
        {"A": "text"},
        {name: name for name in ("output_ids", "sequence_length")},
    ]
