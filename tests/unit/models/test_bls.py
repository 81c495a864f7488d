"""The BLS model without a Triton, for engines and failures that tests/integration/test_bls.py has not."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cog_triton.models import bls, stub
from cog_triton.models.bls import TritonPythonModel
from cog_triton.models.names import (
    BLS_TO_ENGINE,
    BLS_TO_PREPROCESSING,
    PREPROCESSING_TO_ENGINE,
)
from cog_triton.models.stub import Array
from tests.support import wait_until
from tests.unit.models.support import FINAL, REFUSED, Error, PbUtils, Response, Sender, Tensor
from tests.unit.models.support import request as stub_request
from tests.unit.repository.support import fill, names

Tensors = Mapping[str, Array]


class Triton(PbUtils):
    """tensorrt_llm sends ``replies``; postprocessing fails if there is a ``failure``."""

    def __init__(self) -> None:
        self.replies: Iterable[Tensors | Error] = ()
        self.failure: Error | None = None
        self.tokenized: dict[str, Array] = {}  # of preprocessing, beside the prompt
        self.asked: list[tuple[str, dict[str, Array]]] = []  # models and their inputs
        self.parameters: list[dict[str, Any]] = []  # of each call
        self.stopped: list[str] = []

    def InferenceRequest(
        self, model_name: str, request_id: str, inputs: list[Tensor], parameters: Any, **_: object
    ) -> Any:
        self.parameters.append(parameters)
        self.asked.append((model_name, {tensor.name(): tensor.as_numpy() for tensor in inputs}))
        stops = "stop" in {tensor.name() for tensor in inputs}
        return SimpleNamespace(exec=lambda **_: self._answer(model_name, request_id, stops))

    def _answer(self, model: str, request_id: str, stops: bool) -> Any:
        if model == "preprocessing":
            return made({"INPUT_ID": np.ones((1, 3), np.int32), **self.tokenized})
        if model == "postprocessing":
            return made(self.failure or {"OUTPUT": np.array([b"text"], object)})
        if stops:
            self.stopped.append(request_id)
            return iter([made({})])
        return map(made, self.replies)


def made(reply: Tensors | Error) -> Response:
    if isinstance(reply, Error):
        return Response(error=reply)
    return Response([Tensor(*item) for item in reply.items()])


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    triton = Triton()
    monkeypatch.setattr(stub, "pb_utils", triton)
    monkeypatch.setattr(bls, "CANCELLATION_CHECK_SECONDS", 0.01)
    return triton


NewModel = Callable[..., TritonPythonModel]


@pytest.fixture
def new_model(triton: Triton) -> Iterator[NewModel]:
    models: list[TritonPythonModel] = []
    assert not triton.parameters

    def new(*, decoupled: bool = True, **parameters: str) -> TritonPythonModel:
        model = TritonPythonModel()
        config = {
            "model_transaction_policy": {"decoupled": decoupled},
            "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        }
        model.initialize({"model_config": json.dumps(config)})
        models.append(model)
        return model

    yield new
    for model in models:
        model.finalize()
    assert "cancels" not in {thread.name for thread in threading.enumerate()}


def begin(model: TritonPythonModel, inputs: Tensors, **parameters: Any) -> Sender:
    sender = Sender()
    model.execute([stub_request(inputs, ["text_output"], sender, **parameters)])
    return sender


def error_of(model: TritonPythonModel, inputs: Tensors, **parameters: Any) -> Any:
    """The error that a request ends with."""
    sender, last = begin(model, inputs, **parameters), False
    while not last:
        response, last = sender.sent.get(timeout=60)
    return response.error()


def request(prompts: int = 1, *, stream: bool = True, **others: Array) -> dict[str, Array]:
    text = np.array([[b"?"]] * prompts, object)
    return {"text_input": text, "stream": np.full((prompts, 1), stream), **others}


def reply(token: int, *, final: bool = False) -> dict[str, Array]:
    return {
        "output_ids": np.array([[[token]]], np.int32),
        "sequence_length": np.array([[1]], np.int32),
        "is_final": np.array([[final]]),
    }


def test_the_tables_are_the_ensembles(tmp_path: Path) -> None:
    configs = fill(tmp_path, tensorrt_llm_bls={})
    preprocessing, llm, _ = configs["ensemble"].ensemble_scheduling.step
    outputs = {tensor: output for output, tensor in preprocessing.output_map.items()}
    inputs = {tensor: name for name, tensor in llm.input_map.items()}
    to_preprocessing = {tensor: name for name, tensor in preprocessing.input_map.items()}
    assert to_preprocessing == BLS_TO_PREPROCESSING
    made = {outputs[t]: name for t, name in inputs.items() if t in outputs}
    assert made == PREPROCESSING_TO_ENGINE
    # Not the ensemble's: they take the way by preprocessing.
    passed = {t: name for t, name in inputs.items() if t not in outputs}
    assert {t: n for t, n in passed.items() if t != n} == BLS_TO_ENGINE
    drafts = {"num_draft_tokens", "use_draft_logits"}
    own = configs["tensorrt_llm_bls"]
    assert {*names(own.input)} == to_preprocessing.keys() | passed.keys() | drafts
    assert {*names(own.output)} - {*names(configs["tensorrt_llm"].output)} == {"text_output"}


BEAMS = request(beam_width=np.array([[2]]))
TWICE = request(stream=False, num_return_sequences=np.array([2]))


@pytest.mark.parametrize(
    ("inputs", "decoupled", "message"),
    [
        (BEAMS, True, "does not stream with beam_width > 1"),
        (request(2, stream=False), False, "more than one answer to a request needs decoupled_mode"),
        (TWICE, False, "more than one answer to a request needs decoupled_mode"),
    ],
)
def test_a_request_that_cannot_be_served(
    new_model: NewModel, inputs: dict[str, Array], decoupled: bool, message: str
) -> None:
    error = error_of(new_model(decoupled=decoupled), inputs)
    assert error.code() == REFUSED
    assert message in error.message()


@pytest.mark.parametrize(("prompts", "stopped"), [(1, []), (2, ["7"])])
def test_an_error_of_one_sequence_ends_the_others(
    triton: Triton, new_model: NewModel, prompts: int, stopped: list[str]
) -> None:
    triton.replies = [reply(5), Error("no"), reply(6)]
    error = error_of(new_model(), request(prompts), min_p="0.1", frames_for="1")
    assert (error.message(), triton.stopped) == ("no", stopped)
    # Parameters are handed down, but for those about ids.
    assert triton.parameters[:2] == [{"min_p": "0.1"}] * 2


def asked_of(triton: Triton, model: str) -> list[dict[str, Array]]:
    return [inputs for name, inputs in triton.asked if name == model]


def test_the_other_end_tokens_of_preprocessing_are_in_no_text(
    triton: Triton, new_model: NewModel
) -> None:
    """TensorRT-LLM's C++ backend takes them for stop words, and leaves them in."""
    triton.tokenized = {
        "STOP_WORDS_IDS": np.array([[[6], [1]]], np.int32),
        "OUT_OTHER_END_IDS": np.array([[6]], np.int32),
    }
    triton.replies = [reply(5), reply(6, final=True)]
    sender = begin(new_model(), request())
    while not sender.sent.get(timeout=60)[1]:
        pass
    decoded = [inputs["TOKENS_BATCH"].tolist() for inputs in asked_of(triton, "postprocessing")]
    assert decoded == [[[[5]]], [[[]]]]
    assert "OUT_OTHER_END_IDS" not in asked_of(triton, "tensorrt_llm")[0]


@pytest.mark.parametrize("takes_texts", [True, False])
def test_stop_words_go_as_texts_to_engines_that_take_them(
    triton: Triton, new_model: NewModel, takes_texts: bool
) -> None:
    triton.tokenized = {"STOP_WORDS_TEXT": np.array([[b"end"]], object)}
    triton.replies = [{**reply(5, final=True), "cut_characters": np.array([[2]], np.int32)}]
    parameters = {"decoding_context": "true"} if takes_texts else {}
    sender = begin(new_model(**parameters), request())
    while not sender.sent.get(timeout=60)[1]:
        pass
    assert ("stop_words_text" in asked_of(triton, "tensorrt_llm")[0]) is takes_texts
    assert asked_of(triton, "postprocessing")[0]["CUT_CHARACTERS"].tolist() == [[2]]


@pytest.mark.parametrize(
    ("accumulate", "texts"),
    [("true", ["text", "texttext", "texttexttext"]), ("false", ["text", "text", "text"])],
)
def test_texts_grow_if_they_accumulate(
    triton: Triton, new_model: NewModel, accumulate: str, texts: list[str]
) -> None:
    triton.replies = [reply(1), reply(2), reply(3, final=True)]
    sender = begin(new_model(accumulate_tokens=accumulate), request())
    found = []
    last = False
    while not last:
        response, last = sender.sent.get(timeout=60)
        found += [
            tensor.as_numpy()[0].decode()
            for tensor in (response.output_tensors() if response else ())
            if tensor.name() == "text_output"
        ]
    assert found == texts


def test_what_fails_behind_the_engine_stops_it(
    triton: Triton, new_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton.replies = [reply(5)] * 3
    triton.failure = Error("why", REFUSED)  # in postprocessing
    error = error_of(new_model(), request())
    assert (error.message(), error.code(), triton.stopped) == ("why", REFUSED, ["7"])

    def broken(sender: Sender, response: Any = None, flags: int = 0) -> None:
        if response is not None and not response.has_error():
            raise RuntimeError("broken")
        sender.sent.put((response, flags == FINAL))

    triton.failure = None
    monkeypatch.setattr(Sender, "send", broken)
    error = error_of(new_model(), request())
    assert "model 'tensorrt_llm_bls' failed: RuntimeError" in error.message()
    assert triton.stopped == ["7", "7"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_request_is_stopped_again_and_again_until_it_has_ended(
    triton: Triton, new_model: NewModel, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    end = threading.Event()

    def replies() -> Iterator[dict[str, Array]]:
        yield reply(5)
        end.wait(10)
        yield reply(6, final=True)

    triton.replies = replies()
    sender = begin(new_model(), request())
    sender.sent.get(timeout=60)
    assert triton.stopped == []
    if fails:
        triton.stopped = None  # type: ignore[assignment]
    sender.cancelled = True
    failures = "supervising a request failed"
    wait_until(lambda: len(triton.stopped or ()) + caplog.text.count(failures) > 2, 60, "stopping")
    end.set()
    assert sender.sent.get(timeout=60)[1]
    assert fails == (failures in caplog.text)
