"""The ensemble that makes ids alone, derived from the one that makes text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import TYPE_FP32, TYPE_INT32, ModelConfig

from cog_triton.repository.derived import ids_ensemble
from cog_triton.repository.fill import fill_repository
from cog_triton.wire import LOG_PROBS, OUTPUTS
from tests.support import ROOT


def config(path: Path) -> Any:
    return text_format.Parse((path / "config.pbtxt").read_text(), ModelConfig())


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    values = {"preprocessing": {"tokenizer_dir": "t"}, "postprocessing": {"tokenizer_dir": "t"}}
    llm = {"tokenizer_dir": "t", "engine": "simulated"}
    fill_repository(ROOT / "triton_model_repo", tmp_path, {**values, "tensorrt_llm": llm})
    return tmp_path


def test_it_has_the_steps_up_to_the_ids(filled: Path) -> None:
    whole, ids = config(filled / "ensemble"), config(filled / "ensemble_ids")
    assert ids.name == "ensemble_ids"
    assert [output.name for output in ids.output] == [*OUTPUTS, LOG_PROBS]
    assert list(ids.input) == list(whole.input)
    assert (ids.max_batch_size, ids.platform) == (whole.max_batch_size, "ensemble")
    assert ids.model_transaction_policy == whole.model_transaction_policy
    preprocessing, llm = ids.ensemble_scheduling.step
    first, second, _ = whole.ensemble_scheduling.step
    assert preprocessing.input_map == first.input_map
    assert llm.input_map == second.input_map
    assert dict(llm.output_map) == {name: name for name in (*OUTPUTS, LOG_PROBS)}
    *counts, log_probs = ids.output
    assert {output.data_type for output in counts} == {TYPE_INT32}
    assert (log_probs.data_type, log_probs.dims) == (TYPE_FP32, [-1, -1])
    made, read = set(preprocessing.output_map.values()), set(llm.input_map.values())
    assert made <= read
    assert (filled / "ensemble_ids" / "1").is_dir()


def test_inputs_of_the_last_step_alone_go_with_it() -> None:
    whole = text_format.Parse(
        """name: "ensemble"
        input { name: "text" } input { name: "style" }
        output { name: "written" }
        ensemble_scheduling {
          step { model_name: "a" input_map { key: "T" value: "text" }
                 output_map { key: "output_ids" value: "_IDS" } output_map { key: "X" value: "x" }
                 output_map { key: "sequence_length" value: "_LENGTH" } }
          step { model_name: "b" input_map { key: "I" value: "_IDS" }
                 input_map { key: "S" value: "style" } input_map { key: "X" value: "x" }
                 output_map { key: "O" value: "written" } }
        }""",
        ModelConfig(),
    )
    ids = ids_ensemble(whole)
    assert ids is not None
    assert [tensor.name for tensor in ids.input] == ["text"]
    (step,) = ids.ensemble_scheduling.step
    assert dict(step.output_map) == {name: name for name in ("output_ids", "sequence_length")}
    assert [(t.name, list(t.dims)) for t in ids.output] == [
        ("output_ids", [-1, -1]),
        ("sequence_length", [-1]),
    ]
    assert len(whole.ensemble_scheduling.step) == 2


def test_there_is_none_without_ids() -> None:
    assert ids_ensemble(ModelConfig(name="ensemble")) is None
