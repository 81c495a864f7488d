"""The BLS model without a Triton: what it calls, what it sends, and what it makes of failures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.models.bls import (
    FROM_PREPROCESSING,
    PASSED_ON,
    TO_PREPROCESSING,
    TO_TENSORRT_LLM,
    Array,
    Bls,
    Watch,
    check_parameters,
    check_request,
)
from cog_triton.models.bls_stub import StubModels, answer_in_threads
from cog_triton.models.model_calls import (
    NO_PARAMETERS,
    Client,
    ModelError,
    Models,
    Parameters,
    request_key,
)
from cog_triton.models.postprocessing import Postprocessor
from cog_triton.repository.fill import fill_model, fill_repository
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from tests.support import ROOT, wait_until
from tools.demo_model.corpus import PAIRS

TEXT = next(pair.answer for pair in PAIRS if "🚀" in pair.answer or not pair.answer.isascii())
Reply = Mapping[str, Array] | ModelError


class FakeModels(Models):
    """tensorrt_llm sends what it is told to; postprocessing is the real one."""

    def __init__(self, tokenizer: Tokenizer, replies: Iterable[Reply] = ()) -> None:
        self._postprocessor = Postprocessor(tokenizer)
        self._replies = replies
        self.prompts: list[tuple[str, str, Mapping[str, Array]]] = []
        self.parameters: list[Parameters] = []
        self.stopped: list[str] = []
        self.failure: ModelError | None = None

    def call(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> dict[str, Array]:
        if model == "preprocessing":
            self.parameters.append(parameters)
            self.prompts.append((model, request_id, inputs))
            return {"INPUT_ID": np.ones((len(inputs["QUERY"]), 3), np.int32)}
        if self.failure is not None:
            raise self.failure
        return {"OUTPUT": self._postprocessor(inputs)}

    def stream(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> Iterator[Any]:
        if "stop" in inputs:
            self.stopped.append(request_id)
            return iter([{}])
        self.prompts.append((model, request_id, inputs))
        self.parameters.append(parameters)
        return iter(self._replies)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


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


def texts(responses: Iterable[tuple[Mapping[str, Array], bool]], index: int = 0) -> list[str]:
    return [
        tensors["text_output"].item().decode()
        for tensors, _ in responses
        if tensors["batch_index"].item() == index
    ]


# Text


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("told", [False, True], ids=["end not told", "end told"])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_streamed_text(
    tokenizer: Tokenizer, accumulate: bool, told: bool, size: int, cut: int
) -> None:
    """``cut`` tokens are missing at the end, so that it may be in a character."""
    ids = tokenizer("Ein Bär 🚀", add_special_tokens=False).input_ids
    ids = ids[: len(ids) - cut]
    parts = pieces(ids, size)
    replies = [
        reply(part, final=i == len(parts) if told else None) for i, part in enumerate(parts, 1)
    ]
    bls = Bls(FakeModels(tokenizer, replies), accumulate=accumulate)
    responses = list(bls.answer("1", request()))
    received = texts(responses)
    joined = received[-1] if accumulate else "".join(received)
    assert joined == tokenizer.decode(ids)
    assert [last for _, last in responses].count(True) == told
    if told:
        assert responses[-1][1]
        assert len(responses) == len(parts)
    if accumulate:
        assert all(after.startswith(before) for before, after in pairwise(received))


def test_a_long_text_is_never_decoded_again(tokenizer: Tokenizer) -> None:
    ids = tokenizer(TEXT * 3, add_special_tokens=False).input_ids
    models = FakeModels(tokenizer, [reply([i]) for i in ids])
    lengths = []
    decode = models.call

    def call(
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> dict[str, Array]:
        lengths.append(sum(array.size for array in inputs.values()))
        return decode(model, request_id, inputs, parameters)

    models.call = call  # type: ignore[method-assign]
    received = texts(Bls(models, accumulate=True).answer("1", request()))
    assert received[-1] == TEXT * 3
    assert max(lengths) < 25


def test_parameters_are_handed_down_but_for_those_about_ids(tokenizer: Tokenizer) -> None:
    models = FakeModels(tokenizer, [reply([5])])
    list(Bls(models).answer("1", request(), {"min_p": "0.1", "ids_only": True}))
    assert models.parameters == [{"min_p": "0.1"}] * 2


def test_the_sequences_of_a_batch_are_told_apart(tokenizer: Tokenizer) -> None:
    answers = [pair.answer for pair in PAIRS[:3]]
    parts = [pieces(tokenizer(a, add_special_tokens=False).input_ids, 2) for a in answers]
    replies = [
        reply(parts[i][n], i, final=n == len(parts[i]) - 1)
        for n in range(max(map(len, parts)))
        for i in range(3)
        if n < len(parts[i])
    ]
    responses = list(Bls(FakeModels(tokenizer, replies)).answer("1", request(3)))
    assert ["".join(texts(responses, i)) for i in range(3)] == answers
    assert [last for _, last in responses] == [False] * (len(responses) - 1) + [True]


@pytest.mark.parametrize("stream", [False, True])
def test_beams(tokenizer: Tokenizer, stream: bool) -> None:
    words = ["one", "three words here"]
    ids = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    width = max(map(len, ids))
    beams = np.array([[[*row, *[-1] * (width - len(row))] for row in ids]], np.int32)
    models = FakeModels(
        tokenizer,
        [{"output_ids": beams, "sequence_length": np.array([[len(row) for row in ids]], np.int32)}],
    )
    inputs = request(stream=stream, beam_width=np.array([[2]], np.int32))
    if stream:
        with pytest.raises(ModelError, match="does not stream with beam_width > 1"):
            list(Bls(models).answer("1", inputs))
        return
    ((tensors, last),) = Bls(models, accumulate=True).answer("1", inputs)
    assert [text.decode() for text in tensors["text_output"]] == words
    assert last


# What is passed on


def test_tensors_go_where_they_belong(tokenizer: Tokenizer) -> None:
    models = FakeModels(tokenizer, [reply([5], final=True), {}])
    inputs = request(
        2,
        stream=False,
        random_seed=np.array([[1], [2]], np.uint64),
        top_k=np.array([[3], [4]], np.int32),
        return_log_probs=np.array([True, False]),
    )
    responses = list(Bls(models, llm="other").answer("7", inputs))
    (_, id_1, query), (llm, id_2, prompt) = models.prompts
    assert (llm, id_1, id_2) == ("other", "7", "7")
    assert query["QUERY"].tolist() == [[b"?"], [b"?"]]
    assert query["RANDOM_SEED"].tolist() == [[1], [2]]
    assert prompt["input_ids"].shape == (2, 3)
    assert prompt["runtime_top_k"].tolist() == [[3], [4]]
    # A scalar is reshaped for this model alone.
    assert prompt["return_log_probs"].tolist() == [[True], [False]]
    assert prompt["streaming"].tolist() == [[False], [False]]
    ((tensors, last),) = responses
    assert tensors.keys() == {"text_output", "batch_index", "cum_log_probs"}
    assert not last  # the other one of the two is to come


def config(directory: Path, model: str) -> Any:
    return text_format.Parse((directory / model / "config.pbtxt").read_text(), ModelConfig())


def test_the_tables_are_the_ensembles(tmp_path: Path) -> None:
    values: dict[str, dict[str, object]] = {
        model: {"tokenizer_dir": "/x"} for model in ("preprocessing", "postprocessing")
    }
    values |= {"tensorrt_llm": {"model": "/x"}, "tensorrt_llm_bls": {}}
    fill_repository(ROOT / "triton_model_repo", tmp_path, values)
    ensemble, bls = config(tmp_path, "ensemble"), config(tmp_path, "tensorrt_llm_bls")
    preprocessing, llm, _ = ensemble.ensemble_scheduling.step
    outputs = {tensor: output for output, tensor in preprocessing.output_map.items()}
    inputs = {tensor: name for name, tensor in llm.input_map.items()}
    assert {tensor: name for name, tensor in preprocessing.input_map.items()} == TO_PREPROCESSING
    assert {outputs[t]: name for t, name in inputs.items() if t in outputs} == FROM_PREPROCESSING
    # Not the ensemble's: they take the way by preprocessing.
    assert {t: name for t, name in inputs.items() if t not in outputs} == TO_TENSORRT_LLM
    names = {tensor.name for tensor in bls.input}
    unsupported = {"num_draft_tokens", "use_draft_logits"}
    assert names - unsupported == TO_PREPROCESSING.keys() | TO_TENSORRT_LLM.keys()
    assert unsupported < names
    assert [tensor.name for tensor in bls.output] == ["text_output", *PASSED_ON]


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
    inputs: dict[str, Array], decoupled: bool, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_request(inputs, decoupled=decoupled)


def test_requests_that_can_be_served() -> None:
    check_request(request(stream=False), decoupled=False)
    check_request(request(2, num_draft_tokens=np.array([[0]])), decoupled=True)


@pytest.mark.parametrize("name", ["tensorrt_llm_draft_model_name", "multimodal_encoders_name"])
def test_a_configuration_that_is_not_supported(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: .* is not supported"):
        check_parameters({name: "x", "accumulate_tokens": "true"})


def test_a_request_without_an_id_gets_one() -> None:
    assert request_key("7") == "7"
    assert request_key("") != request_key("")


@pytest.mark.parametrize(("prompts", "stopped"), [(1, []), (2, ["7"])])
def test_an_error_of_one_sequence_ends_the_others(
    tokenizer: Tokenizer, prompts: int, stopped: list[str]
) -> None:
    models = FakeModels(tokenizer, [reply([5], final=False), ModelError("no"), reply([6])])
    with pytest.raises(ModelError, match="no"):
        list(Bls(models).answer("7", request(prompts)))
    assert models.stopped == stopped


def test_an_error_of_postprocessing_stops_the_engine(tokenizer: Tokenizer) -> None:
    models = FakeModels(tokenizer, [reply([5], final=False)])
    models.failure = ModelError("no")
    with pytest.raises(ModelError, match="no"):
        list(Bls(models).answer("7", request()))
    assert models.stopped == ["7"]


def test_an_answer_that_is_closed_stops_the_engine(tokenizer: Tokenizer) -> None:
    models = FakeModels(tokenizer, [reply([5], final=False)] * 3)
    answer = Bls(models).answer("7", request())
    next(answer)
    answer.close()
    assert models.stopped == ["7"]


def test_a_finished_answer_stops_nothing(tokenizer: Tokenizer) -> None:
    models = FakeModels(tokenizer, [reply([5], final=True), reply([6])])
    answer = Bls(models).answer("7", request())
    next(answer)
    answer.close()
    assert models.stopped == []


# The client


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[tuple[object, int]] = []
        self.cancelled = False
        self.asked = 0

    def send(self, response: object = None, flags: int = 0) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not any(flags for _, flags in self.sent)
        self.asked += 1
        return self.cancelled


def test_a_client_gets_its_responses() -> None:
    sender = FakeSender()
    client = Client(sender, 1)
    client.send("a", last=False)
    assert not client.closed
    client.send(None, last=True)
    assert client.closed
    assert sender.sent == [("a", 0), (None, 1)]


def test_triton_is_not_asked_about_a_request_that_is_over() -> None:
    sender = FakeSender()
    sender.cancelled = True
    client = Client(sender, 1)
    assert client.gone()
    client.send("a", last=True)
    assert not client.gone()
    assert sender.asked == 1


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch(0.01)
    yield watch
    watch.close()
    assert "cancellation" not in {thread.name for thread in threading.enumerate()}


def test_what_nobody_waits_for_is_stopped_until_it_is_over(watch: Watch) -> None:
    senders = [FakeSender(), FakeSender()]
    stops: list[int] = []
    record: Callable[[int], None] = stops.append
    with (
        watch.over(Client(senders[0], 1), lambda: record(0)),
        watch.over(Client(senders[1], 1), lambda: record(1)),
    ):
        wait_until(lambda: senders[0].asked > 2 and senders[1].asked > 2, 5, "looking")
        assert stops == []
        senders[1].cancelled = True
        wait_until(lambda: len(stops) > 2, 5, "stopping")
    count = senders[1].asked
    time.sleep(0.05)
    assert senders[1].asked <= count + 1
    assert set(stops) == {1}


def test_a_stop_that_fails_does_not_end_the_watch(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    sender = FakeSender()
    sender.cancelled = True

    def fail() -> None:
        raise RuntimeError("no")

    with watch.over(Client(sender, 1), fail):
        wait_until(lambda: sender.asked > 2, 5, "looking again")
    assert "a request could not be looked after" in caplog.text


class FakeUtils:
    """As much of the stub's module as an error needs, and one model that refuses or fails."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    class TritonError:
        INTERNAL, INVALID_ARG = 2, 3

        def __init__(self, message: str, code: int = INTERNAL) -> None:
            self._message, self._code = message, code

        def message(self) -> str:
            return self._message

        def code(self) -> int:
            return self._code

    class InferenceResponse:
        def __init__(self, error: FakeUtils.TritonError) -> None:
            self.error = lambda: error

        def has_error(self) -> bool:
            return True

    class InferenceRequest:
        def __init__(self, model_name: str, **_: object) -> None:
            self._code = {"refuses": 3, "fails": 2}[model_name]

        def exec(self) -> FakeUtils.InferenceResponse:
            return FakeUtils.InferenceResponse(FakeUtils.TritonError("why", self._code))


@pytest.mark.parametrize(
    ("model", "code", "text"),
    [
        ("refuses", FakeUtils.TritonError.INVALID_ARG, "why"),
        ("fails", FakeUtils.TritonError.INTERNAL, "why"),
        ("unknown", FakeUtils.TritonError.INTERNAL, "model 'tensorrt_llm_bls' failed: KeyError"),
    ],
)
def test_whose_fault_it_is_comes_from_the_model_that_says_so(
    model: str, code: int, text: str
) -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Sender:
        def send(self, response: Any, flags: int) -> None:
            assert flags == FakeUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sent.put(response.error())

    class Request:
        def get_response_sender(self) -> Sender:
            return Sender()

    models = StubModels(FakeUtils)
    answer_in_threads(FakeUtils, [Request()], lambda *_: models.call(model, "", {}))  # type: ignore[arg-type]
    error = sent.get(timeout=10)
    assert error.code() == code
    assert error.message().startswith(text)
