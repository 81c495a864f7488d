"""Templates and values to a filled repository, and every problem in one error."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.repository.fill import fill_model, fill_repository, ids_ensemble
from cog_triton.repository.variables import load_overrides
from tests.support import load_cases
from tests.unit.repository.support import TEMPLATES, VALID, fill, names, parameters, parse

CASES = load_cases(__file__, "fill.yaml")
LLM = (TEMPLATES / "tensorrt_llm" / "config.pbtxt").read_text()


@pytest.mark.parametrize("case", CASES["filled"])
def test_a_filled_template(case: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    filled = fill_model("tensorrt_llm", case["template"], case.get("values", {}))
    assert parse(filled) == parse(case["filled"])
    assert not caplog.messages


@pytest.mark.parametrize("case", CASES["refused"])
def test_every_problem_of_a_template_is_reported_at_once(case: dict[str, Any]) -> None:
    with pytest.raises(TemplateError) as raised:
        fill_model("postprocessing", case["template"], case.get("values", {}))
    found = [line.partition("; known are")[0] for line in raised.value.message.split("\n  ")[1:]]
    for line, expected in zip(found, case["lines"], strict=True):
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


@pytest.mark.parametrize("case", CASES["read"], ids=lambda case: case["case"])
def test_the_backend_reads_what_was_asked_for_and_nothing_else(case: dict[str, Any]) -> None:
    filled = parse(fill_model("tensorrt_llm", LLM, case["values"]))
    ours = LLM.partition("# Read by the embedded engines")[2]
    read = {key: value for key, value in parameters(filled).items() if f'"{key}"' not in ours}
    assert read == {**CASES["always"], **case["read"]}
    assert filled.backend == "tensorrtllm"
    assert filled.model_transaction_policy.decoupled is case["decoupled"]


def test_a_model_may_be_filled_without_what_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    fill_model("tensorrt_llm", LLM, {"engine_dir": "/e", "engine": "transformers"})
    assert caplog.messages == [
        "tensorrt_llm: engine_dir has no effect with triton_backend python",
        "tensorrt_llm: model: the transformers engine needs it",
    ]


@pytest.mark.parametrize("case", CASES["streams"])
def test_streams_that_will_be_refused_are_warned_of(
    case: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = {"triton_backend": "tensorrtllm", "engine_dir": "/engine"}
    given = {**engine, "batch_scheduler_policy": "max_utilization", **case["values"]}
    fill_model("tensorrt_llm", LLM, given)
    fill(tmp_path, tensorrt_llm=given)
    found = [text for text in caplog.messages if "exceed the engine's max_input_len" in text]
    assert len(found) == 2 * case["warned"]
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


@pytest.mark.parametrize("case", CASES["context"])
def test_decoding_context_comes_from_the_engine_or_a_model_before_the_backend(
    case: dict[str, Any], tmp_path: Path
) -> None:
    context, values = {"decoding_context": case.get("ensemble")}, case["values"]
    filled = fill(tmp_path, ensemble=context, tensorrt_llm={**values, "triton_max_batch_size": 65})
    llm, (_, step, post) = filled["tensorrt_llm"], filled["ensemble"].ensemble_scheduling.step
    for name in ("context_ids", "is_final"):
        tensor = f"_{name.upper()}"
        assert step.output_map.get(name) == post.input_map.get(name.upper())
        assert (step.output_map.get(name) == tensor) is (case["from"] is not None)
        assert (name in names(llm.output)) is (case["from"] == "tensorrt_llm")
    assert step.model_name == (case["from"] or "tensorrt_llm")
    # Who reads ids reads the backend's own.
    ids = filled["ensemble_ids"].ensemble_scheduling.step[-1]
    assert ids.model_name == "tensorrt_llm"
    # Frames are for who reads ids alone, from an engine that makes them.
    assert ("frames" in names(filled["ensemble_ids"].output)) is ("frames" in names(llm.output))
    assert "frames" not in step.output_map
    # What no embedded engine reads is not sent to it.
    for name in ("decoder_input_ids", "decoder_input_lengths", "pad_id"):
        assert name in step.input_map
        assert (name in ids.input_map) is (case["from"] != "tensorrt_llm")
    assert ("tensorrt_llm_context" in filled) is (case["from"] == "tensorrt_llm_context")


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


@pytest.mark.parametrize("case", CASES["problems"])
def test_problems_come_at_once_and_nothing_is_written(case: dict[str, Any], tmp_path: Path) -> None:
    assert problems(TEMPLATES, tmp_path / "filled", **case["values"]) == case["lines"]


@pytest.mark.parametrize("case", CASES["broken"])
def test_a_broken_template_is_a_problem(case: dict[str, str], source: Path, tmp_path: Path) -> None:
    path = source / "ensemble" / "config.pbtxt"
    path.write_text(path.read_text().replace(case["replace"], case["by"]))
    (found,) = problems(source, tmp_path / "filled")
    assert found.startswith("ensemble: ")
    assert case["problem"] in found


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


@pytest.mark.parametrize("case", CASES["warnings"])
def test_old_names_are_accepted_with_a_warning_of_those_without_effect(
    case: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled = fill(tmp_path, **case["values"])
    assert caplog.messages == ([case["warning"]] if "warning" in case else [])
    assert filled["tensorrt_llm"].model_transaction_policy.decoupled is case.get("decoupled", True)


def test_a_cog_triton_file_fills_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CASES["cog_triton"])
    filled = fill(tmp_path / "filled", **load_overrides(path))
    llm = parameters(filled["tensorrt_llm"])
    assert llm.items() >= {**CASES["always"], "kv_cache_free_gpu_mem_fraction": "0.95"}.items()
    assert filled["preprocessing"].instance_group[0].count == 64
    bls = {"accumulate_tokens": "true", "tensorrt_llm_model_name": "tensorrt_llm"}
    assert parameters(filled["tensorrt_llm_bls"]) == bls
    (warning,) = caplog.messages
    assert warning.startswith("preprocessing: tokenizer_type has no effect: ")


def test_inputs_of_only_the_last_step_go_with_it() -> None:
    ids: Any = ids_ensemble(parse(CASES["foreign"]), {})
    assert names(ids.input) == ["text"]
    (step,) = ids.ensemble_scheduling.step
    assert dict(step.output_map) == {name: name for name in ("output_ids", "sequence_length")}
    dims = [(tensor.name, list(tensor.dims)) for tensor in ids.output]
    assert dims == [("output_ids", [-1, -1]), ("sequence_length", [-1])]
    assert ids_ensemble(parse('name: "ensemble"'), {}) is None
