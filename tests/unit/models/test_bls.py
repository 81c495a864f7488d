"""The BLS model without a Triton: what it calls, what it sends, and what it makes of failures."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.models import bls, stub
from cog_triton.models.bls import TritonPythonModel
from cog_triton.models.postprocessing import decoded
from cog_triton.models.stub import Array
from cog_triton.models.tensors import NAMES
from cog_triton.repository.fill import fill_model, fill_repository
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from tests.support import ROOT, wait_until
from tools.demo_model.corpus import PAIRS

TEXT = next(pair.answer for pair in PAIRS if "🚀" in pair.answer or not pair.answer.isascii())
FINAL, REFUSED, FAILED = 1, 3, 2


class Error:
    INVALID_ARG = REFUSED

    def __init__(self, message: str, code: int = FAILED) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Response:
    def __init__(self, tensors: Iterable[Any] = (), error: Error | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        self.output_tensors = lambda: tensors
        self._error = error

    def error(self) -> Error:
        assert self._error is not None
        return self._error

    def has_error(self) -> bool:
        return self._error is not None


class Value:
    def __init__(self, name: str, value: Array) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._value


def made(tensors: Mapping[str, Array]) -> Response:
    return Response([Value(*item) for item in tensors.items()])


class Triton:
    """The stub's module: tensorrt_llm replies as it is told to; postprocessing is the real one."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    TritonError, InferenceResponse, Tensor = Error, Response, Value

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.replies: Iterable[Mapping[str, Array] | Error] = ()
        self.calls: list[tuple[str, str, dict[str, Array], dict[str, Any]]] = []
        self.stopped: list[str] = []
        self.failure: Error | None = None  # postprocessing's

    def InferenceRequest(
        self,
        model_name: str,
        request_id: str,
        inputs: list[Value],
        parameters: dict[str, Any],
        **_: object,
    ) -> Any:
        given = {tensor.name(): tensor.as_numpy() for tensor in inputs}
        self.calls.append((model_name, request_id, given, parameters))
        if model_name == "preprocessing":
            ids = np.ones((len(given["QUERY"]), 3), np.int32)
            return SimpleNamespace(exec=lambda: made({"INPUT_ID": ids}))
        if model_name == "postprocessing":
            error = self.failure
            return SimpleNamespace(
                exec=lambda: (
                    Response(error=error)
                    if error
                    else made({"OUTPUT": decoded(self._tokenizer, given)})
                )
            )
        if "stop" in given:
            self.stopped.append(request_id)
            return SimpleNamespace(exec=lambda **_: iter([made({})]))
        replies = (Response(error=r) if isinstance(r, Error) else made(r) for r in self.replies)
        return SimpleNamespace(exec=lambda **_: replies)


class Sender:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[Response | None, bool]] = queue.SimpleQueue()
        self.cancelled = False
        self.raises: Exception | None = None

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        if self.raises is not None and response is not None and not response.has_error():
            raise self.raises
        self.sent.put((response, flags == FINAL))

    def is_cancelled(self) -> bool:
        return self.cancelled


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


@pytest.fixture
def triton(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Triton:
    triton = Triton(tokenizer)
    monkeypatch.setattr(stub, "pb_utils", triton)
    monkeypatch.setattr(bls, "CANCELLATION_CHECK_SECONDS", 0.01)
    return triton


NewModel = Callable[..., TritonPythonModel]


@pytest.fixture
def new_model(triton: Triton) -> Iterator[NewModel]:
    models = []

    def new(*, decoupled: bool = True, **parameters: str) -> TritonPythonModel:
        config = {
            "model_transaction_policy": {"decoupled": decoupled},
            "parameters": {name: {"string_value": text} for name, text in parameters.items()},
        }
        model = TritonPythonModel()
        model.initialize({"model_config": json.dumps(config)})
        models.append(model)
        return model

    assert triton.calls == []
    yield new
    for model in models:
        model.finalize()
    assert "cancellation" not in {thread.name for thread in threading.enumerate()}


OUTPUTS = ["text_output", "batch_index", "sequence_index", "cum_log_probs"]


def begin(
    model: TritonPythonModel, inputs: Mapping[str, Array], name: str = "7", **parameters: Any
) -> Sender:
    sender = Sender()
    request = SimpleNamespace(
        inputs=lambda: [Value(*item) for item in inputs.items()],
        requested_output_names=lambda: OUTPUTS,
        request_id=lambda: name,
        parameters=lambda: json.dumps(parameters) if parameters else "",
        get_response_sender=lambda: sender,
    )
    model.execute([request])
    return sender


def answer(
    model: TritonPythonModel, inputs: Mapping[str, Array], **parameters: Any
) -> tuple[list[dict[str, Array]], bool, Error | None]:
    """The tensors of all responses, whether the last of them was marked, and the error."""
    sender = begin(model, inputs, **parameters)
    tensors: list[dict[str, Array]] = []
    while True:
        response, last = sender.sent.get(timeout=10)
        if response is not None and response.has_error():
            assert last
            return tensors, last, response.error()
        if response is not None:
            tensors.append(response.tensors)
        if last:
            return tensors, response is not None, None


def refusal(model: TritonPythonModel, inputs: Mapping[str, Array]) -> str:
    tensors, _, error = answer(model, inputs)
    assert tensors == []
    assert error is not None
    assert error.code() == REFUSED
    return error.message()


def request(prompts: int = 1, *, stream: bool = True, **others: Array) -> dict[str, Array]:
    return {
        "text_input": np.array([[b"?"]] * prompts, object),
        "stream": np.full((prompts, 1), stream),
        **others,
    }


def reply(ids: list[int], index: int = 0, *, final: bool | None = None) -> dict[str, Array]:
    """As tensorrt_llm sends it: padded, and with or without a word on whether it is the last."""
    tensors: dict[str, Array] = {
        "output_ids": np.array([[[*ids, -1]]], np.int32),
        "sequence_length": np.array([[len(ids)]], np.int32),
        "batch_index": np.array([[index]], np.int32),
        "cum_log_probs": np.array([[-1.5]], np.float32),
    }
    return tensors if final is None else {**tensors, "is_final": np.array([[final]])}


def pieces(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def texts(responses: Iterable[Mapping[str, Array]], index: int = 0) -> list[str]:
    return [
        tensors["text_output"].item().decode()
        for tensors in responses
        if tensors["batch_index"].item() == index
    ]


# Text


@pytest.mark.parametrize("accumulate", ["false", "true"])
@pytest.mark.parametrize("told", [False, True], ids=["end not told", "end told"])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_streamed_text(
    tokenizer: Tokenizer,
    triton: Triton,
    new_model: NewModel,
    accumulate: str,
    told: bool,
    size: int,
    cut: int,
) -> None:
    """``cut`` tokens are missing at the end, so that it may be in a character."""
    ids = tokenizer("Ein Bär 🚀", add_special_tokens=False).input_ids
    ids = ids[: len(ids) - cut]
    parts = pieces(ids, size)
    triton.replies = [
        reply(part, final=i == len(parts) if told else None) for i, part in enumerate(parts, 1)
    ]
    responses, marked, error = answer(new_model(accumulate_tokens=accumulate), request())
    received = texts(responses)
    joined = received[-1] if accumulate == "true" else "".join(received)
    assert joined == tokenizer.decode(ids)
    assert (marked, error) == (told, None)
    if told:
        assert len(responses) == len(parts)
    if accumulate == "true":
        assert all(after.startswith(before) for before, after in pairwise(received))


def test_a_long_text_is_never_decoded_again(
    tokenizer: Tokenizer, triton: Triton, new_model: NewModel
) -> None:
    ids = tokenizer(TEXT * 3, add_special_tokens=False).input_ids
    triton.replies = [reply([i]) for i in ids]
    responses, *_ = answer(new_model(accumulate_tokens="true"), request())
    assert texts(responses)[-1] == TEXT * 3
    sizes = [
        sum(array.size for array in inputs.values())
        for model, _, inputs, _ in triton.calls
        if model == "postprocessing"
    ]
    assert max(sizes) < 25


def test_parameters_are_handed_down_but_for_those_about_ids(
    triton: Triton, new_model: NewModel
) -> None:
    triton.replies = [reply([5], final=True)]
    answer(new_model(), request(), min_p="0.1", ids_only=True)
    assert [parameters for *_, parameters in triton.calls][:2] == [{"min_p": "0.1"}] * 2


def test_the_sequences_of_a_batch_are_told_apart(
    tokenizer: Tokenizer, triton: Triton, new_model: NewModel
) -> None:
    answers = [pair.answer for pair in PAIRS[:3]]
    parts = [pieces(tokenizer(a, add_special_tokens=False).input_ids, 2) for a in answers]
    triton.replies = [
        reply(parts[i][n], i, final=n == len(parts[i]) - 1)
        for n in range(max(map(len, parts)))
        for i in range(3)
        if n < len(parts[i])
    ]
    responses, marked, _ = answer(new_model(), request(3))
    assert ["".join(texts(responses, i)) for i in range(3)] == answers
    assert marked


@pytest.mark.parametrize("stream", [False, True])
def test_beams(tokenizer: Tokenizer, triton: Triton, new_model: NewModel, stream: bool) -> None:
    words = ["one", "three words here"]
    ids = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    width = max(map(len, ids))
    beams = np.array([[[*row, *[-1] * (width - len(row))] for row in ids]], np.int32)
    lengths = np.array([[len(row) for row in ids]], np.int32)
    triton.replies = [{"output_ids": beams, "sequence_length": lengths}]
    inputs = request(stream=stream, beam_width=np.array([[2]], np.int32))
    if stream:
        assert "does not stream with beam_width > 1" in refusal(new_model(), inputs)
        return
    (tensors,), marked, _ = answer(new_model(accumulate_tokens="true"), inputs)
    assert [text.decode() for text in tensors["text_output"]] == words
    assert marked


# What goes where


def test_tensors_go_where_they_belong(triton: Triton, new_model: NewModel) -> None:
    triton.replies = [reply([5], final=True), {}]
    inputs = request(
        2,
        stream=False,
        random_seed=np.array([[1], [2]], np.uint64),
        top_k=np.array([[3], [4]], np.int32),
        num_draft_tokens=np.array([[0], [0]], np.int32),
        return_log_probs=np.array([True, False]),
    )
    (tensors,), marked, _ = answer(new_model(tensorrt_llm_model_name="other"), inputs)
    (_, id_1, query, _), (llm, id_2, prompt, _) = triton.calls[:2]
    assert (llm, id_1, id_2) == ("other", "7", "7")
    assert query["QUERY"].tolist() == [[b"?"], [b"?"]]
    assert query["RANDOM_SEED"].tolist() == [[1], [2]]
    assert prompt["input_ids"].shape == (2, 3)
    assert prompt["runtime_top_k"].tolist() == [[3], [4]]
    # A scalar is reshaped for this model only.
    assert prompt["return_log_probs"].tolist() == [[True], [False]]
    assert prompt["streaming"].tolist() == [[False], [False]]
    assert "num_draft_tokens" not in prompt
    assert tensors.keys() == {"text_output", "batch_index", "cum_log_probs"}
    assert not marked  # the other one of the two did not come


def config(directory: Path, model: str) -> Any:
    return text_format.Parse((directory / model / "config.pbtxt").read_text(), ModelConfig())


def test_the_tables_are_the_ensembles(tmp_path: Path) -> None:
    values: dict[str, dict[str, object]] = {
        model: {"tokenizer_dir": "/x"} for model in ("preprocessing", "postprocessing")
    }
    values |= {"tensorrt_llm": {"model": "/x"}, "tensorrt_llm_bls": {}}
    fill_repository(ROOT / "triton_model_repo", tmp_path, values)
    ensemble, filled = config(tmp_path, "ensemble"), config(tmp_path, "tensorrt_llm_bls")
    preprocessing, llm, _ = ensemble.ensemble_scheduling.step
    outputs = {tensor: output for output, tensor in preprocessing.output_map.items()}
    inputs = {tensor: name for name, tensor in llm.input_map.items()}
    to_preprocessing = {tensor: name for name, tensor in preprocessing.input_map.items()}
    assert to_preprocessing == NAMES["bls_to_preprocessing"]
    made = {outputs[t]: name for t, name in inputs.items() if t in outputs}
    assert made == NAMES["preprocessing_to_llm"]
    # Not the ensemble's: they take the way by preprocessing.
    passed = {t: name for t, name in inputs.items() if t not in outputs}
    assert {t: n for t, n in passed.items() if t != n} == NAMES["bls_to_llm"]
    names = {tensor.name for tensor in filled.input}
    assert names == to_preprocessing.keys() | passed.keys() | {
        "num_draft_tokens",
        "use_draft_logits",
    }
    made_by_llm = {tensor.name for tensor in config(tmp_path, "tensorrt_llm").output}
    assert {tensor.name for tensor in filled.output} - made_by_llm == {"text_output"}


def test_the_template_is_filled_as_guides_do_it() -> None:
    template = (ROOT / "triton_model_repo" / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    values = {
        "triton_max_batch_size": "64",
        "decoupled_mode": "False",
        "bls_instance_count": "2",
        "accumulate_tokens": "False",
    }
    filled = text_format.Parse(fill_model("tensorrt_llm_bls", template, values), ModelConfig())
    assert not filled.model_transaction_policy.decoupled
    assert filled.instance_group[0].count == 2
    assert filled.parameters["accumulate_tokens"].string_value == "false"


# Refusals and failures


@pytest.mark.parametrize(
    ("inputs", "decoupled", "message"),
    [
        (request(num_draft_tokens=np.array([[2]])), True, "speculative decoding"),
        (request(use_draft_logits=np.array([True])), True, "speculative decoding"),
        (request(), False, "streaming needs decoupled_mode true"),
        (request(2, stream=False), False, "more than one answer to a request needs decoupled_mode"),
        (
            request(stream=False, num_return_sequences=np.array([2])),
            False,
            "more than one answer to a request needs decoupled_mode",
        ),
    ],
)
def test_a_request_that_cannot_be_served(
    new_model: NewModel, inputs: dict[str, Array], decoupled: bool, message: str
) -> None:
    assert message in refusal(new_model(decoupled=decoupled), inputs)


@pytest.mark.parametrize("name", ["tensorrt_llm_draft_model_name", "multimodal_encoders_name"])
def test_a_configuration_that_is_not_supported(new_model: NewModel, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: .* is not supported"):
        new_model(accumulate_tokens="true", **{name: "x"})


def test_a_request_without_an_id_gets_one(triton: Triton, new_model: NewModel) -> None:
    model = new_model()
    for _ in range(2):
        begin(model, request(), "").sent.get(timeout=10)
    assert len({name for _, name, *_ in triton.calls}) == 2


@pytest.mark.parametrize(("prompts", "stopped"), [(1, []), (2, ["7"])])
def test_an_error_of_one_sequence_ends_the_others(
    triton: Triton, new_model: NewModel, prompts: int, stopped: list[str]
) -> None:
    triton.replies = [reply([5], final=False), Error("no"), reply([6])]
    _, _, error = answer(new_model(), request(prompts))
    assert error is not None
    assert error.message() == "no"
    assert triton.stopped == stopped


@pytest.mark.parametrize("code", [REFUSED, FAILED])
def test_an_error_of_postprocessing_stops_the_engine(
    triton: Triton, new_model: NewModel, code: int
) -> None:
    triton.replies, triton.failure = [reply([5], final=False)], Error("why", code)
    _, _, error = answer(new_model(), request())
    assert error is not None
    assert (error.message(), error.code()) == ("why", code)
    assert triton.stopped == ["7"]


def test_a_response_that_cannot_be_sent_stops_the_engine(
    triton: Triton, new_model: NewModel
) -> None:
    triton.replies = [reply([5], final=False)] * 3
    model = new_model()
    sender = Sender()
    sender.raises = RuntimeError("broken")
    inputs = request()
    model.execute(
        [
            SimpleNamespace(
                inputs=lambda: [Value(*item) for item in inputs.items()],
                requested_output_names=lambda: OUTPUTS,
                request_id=lambda: "7",
                parameters=lambda: "",
                get_response_sender=lambda: sender,
            )
        ]
    )
    response, last = sender.sent.get(timeout=10)
    assert response is not None
    assert "model 'tensorrt_llm_bls' failed: RuntimeError" in response.error().message()
    assert last
    assert triton.stopped == ["7"]


# Clients that are gone


def test_a_cancelled_request_is_stopped_until_it_has_ended(
    triton: Triton, new_model: NewModel
) -> None:
    end = threading.Event()

    def replies() -> Iterator[dict[str, Array]]:
        yield reply([5], final=False)
        end.wait(10)
        yield reply([6], final=True)

    triton.replies = replies()
    sender = begin(new_model(), request())
    sender.sent.get(timeout=10)
    assert triton.stopped == []
    sender.cancelled = True
    wait_until(lambda: len(triton.stopped) > 2, 5, "stopping")
    end.set()
    _, last = sender.sent.get(timeout=10)
    assert last
    assert set(triton.stopped) == {"7"}


def test_a_stop_that_fails_does_not_end_the_watch(
    triton: Triton, new_model: NewModel, caplog: pytest.LogCaptureFixture
) -> None:
    end = threading.Event()

    def replies() -> Iterator[dict[str, Array]]:
        end.wait(10)
        yield reply([6], final=True)

    triton.replies = replies()
    sender = begin(new_model(), request())
    wait_until(lambda: len(triton.calls) > 1, 5, "the call")
    triton.stopped = None  # type: ignore[assignment]
    sender.cancelled = True
    wait_until(lambda: caplog.text.count("could not be looked after") > 2, 5, "looking again")
    end.set()
    assert sender.sent.get(timeout=10)[1]
