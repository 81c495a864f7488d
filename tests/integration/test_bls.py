"""The BLS model on a real Triton: text, streams, stops, and how it compares to the ensemble."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc.aio as grpcclient

from cog_triton.deployment.preparation import Values
from cog_triton.errors import CogTritonError
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import engine_counters, make_server, running, settings_for
from tests.integration.test_ensemble import MULTI_BYTE, generate
from tests.support import wait_until
from tools.demo_model.corpus import PAIRS

BLS = "tensorrt_llm_bls"
QUESTION, ANSWER = PAIRS[0]
ENSEMBLES_OWN = {"output_ids", "sequence_length", "sequence_id", "sequence_start", "sequence_end"}
# Until somebody stops it: some seconds of work.
ENDLESS: dict[str, Any] = {"text_input": QUESTION, "max_tokens": 1900, "min_tokens": 1900}


@pytest.fixture(scope="module")
def bls(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with running(
        make_server(settings_for(demo_model), tmp_path_factory.mktemp("bls"), {BLS: {}})
    ) as server:
        yield server


@pytest.fixture(scope="module")
def accumulating(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """With the whole text so far in every response, and no word on which response is the last one,
    as with TensorRT-LLM's C++ backend."""
    values: Values = {BLS: {"accumulate_tokens": True}}
    values |= {model: {"decoding_context": False} for model in ("ensemble", "tensorrt_llm")}
    with running(
        make_server(settings_for(demo_model), tmp_path_factory.mktemp("accumulating"), values)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def not_decoupled(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """As guides for a deployment without streaming fill the templates."""
    values: Values = {model: {"decoupled_mode": False} for model in (BLS, "tensorrt_llm")}
    values[BLS] |= {"bls_instance_count": 1, "accumulate_tokens": False}
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_PREFILL_MS="500")
    with running(make_server(settings, tmp_path_factory.mktemp("not_decoupled"), values)) as server:
        yield server


def stream(triton: TritonServer, **body: Any) -> Iterator[dict[str, Any]]:
    """The events of a ``generate_stream`` request; closing it disconnects."""
    url = f"http://{triton.endpoints.http}/v2/models/{BLS}/generate_stream"
    with httpx.stream(
        "POST", url, json={"stream": True, **body}, timeout=60, trust_env=False
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data:"):
                yield json.loads(line[5:])


def texts(events: Iterator[dict[str, Any]]) -> list[str]:
    return [event["text_output"] for event in events]


def cut_inside_a_character(tokenizer: Tokenizer) -> tuple[str, int, str]:
    """A question, how many tokens of the answer end inside a character, and their text."""
    for question, answer in MULTI_BYTE:
        ids = tokenizer(answer, add_special_tokens=False).input_ids
        for count in range(1, len(ids)):
            text = tokenizer.decode(ids[:count])
            if text.endswith("\ufffd"):
                return question, count, text
    raise AssertionError("the corpus has no character of several tokens")


async def infer(
    triton: TritonServer, inputs: dict[str, npt.NDArray[Any]], cancel_after: int | None = None
) -> list[dict[str, npt.NDArray[Any]]]:
    """A gRPC stream: all responses, by output name; it ends with the one that says it is final."""
    names = {np.dtype(np.int32): "INT32", np.dtype(np.bool_): "BOOL", np.dtype(object): "BYTES"}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        tensors = []
        for name, value in inputs.items():
            tensor = grpcclient.InferInput(name, value.shape, names[value.dtype])
            tensor.set_data_from_numpy(value)
            tensors.append(tensor)
        yield {"model_name": BLS, "inputs": tensors}

    responses: list[dict[str, npt.NDArray[Any]]] = []
    async with grpcclient.InferenceServerClient(triton.endpoints.grpc) as client:
        replies = client.stream_infer(requests())
        async for result, error in replies:
            assert error is None, error
            response = result.get_response()
            responses.append({o.name: result.as_numpy(o.name) for o in response.outputs})
            if response.parameters["triton_final_response"].bool_param:
                break
            if len(responses) == cancel_after:
                replies.cancel()
                break
    return responses


# Text


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2},
        {"max_tokens": 500, "bad_words": ["building"], "stop_words": ["patterns", "rules"]},
        {"max_tokens": 10, "return_log_probs": True, "min_length": 3, "random_seed": 5},
        {"max_tokens": 30, "temperature": 3.0, "top_p": 1.0, "seed": 5},
        {"max_tokens": 500, "exclude_input_in_output": False},
        {"max_tokens": 7, "return_num_input_tokens": True, "return_num_output_tokens": True},
        {"parameters": {"max_tokens": 256, "bad_words": [""], "stop_words": [""]}},
    ],
)
def test_a_reply_is_the_ensembles(bls: TritonServer, body: dict[str, Any]) -> None:
    expected = generate(bls, text_input=QUESTION, **body)
    expected = {name: value for name, value in expected.items() if name not in ENSEMBLES_OWN}
    assert generate(bls, BLS, text_input=QUESTION, **body) == {**expected, "model_name": BLS}


@pytest.mark.parametrize("pair", [PAIRS[0], *MULTI_BYTE], ids=lambda pair: pair.question[:30])
def test_streamed_texts_join_to_the_answer(bls: TritonServer, pair: Any) -> None:
    found = texts(stream(bls, text_input=pair.question, max_tokens=500))
    assert "".join(found) == pair.answer
    assert len(found) > 1


@pytest.mark.parametrize("pair", [PAIRS[0], *MULTI_BYTE], ids=lambda pair: pair.question[:30])
def test_accumulated_texts_grow_to_the_answer(accumulating: TritonServer, pair: Any) -> None:
    found = texts(stream(accumulating, text_input=pair.question, max_tokens=500))
    assert found[-1] == pair.answer
    assert all(pair.answer.startswith(text) for text in found)
    assert len(found) > 1
    reply = generate(accumulating, BLS, text_input=pair.question, max_tokens=500)
    assert reply["text_output"] == pair.answer


def test_a_text_that_ends_inside_a_character(
    bls: TritonServer, accumulating: TritonServer, tokenizer: Tokenizer
) -> None:
    question, count, text = cut_inside_a_character(tokenizer)
    assert "".join(texts(stream(bls, text_input=question, max_tokens=count))) == text
    assert texts(stream(accumulating, text_input=question, max_tokens=count))[-1] == text


def test_without_stream_there_is_one_event(bls: TritonServer) -> None:
    assert texts(stream(bls, text_input=QUESTION, max_tokens=500, stream=False)) == [ANSWER]


def test_streams_at_once_do_not_mix(bls: TritonServer) -> None:
    pairs = [*MULTI_BYTE, *PAIRS][:8]
    barrier = threading.Barrier(len(pairs))

    def ask(pair: Any) -> str:
        barrier.wait()
        return "".join(texts(stream(bls, text_input=pair.question, max_tokens=500)))

    with ThreadPoolExecutor(len(pairs)) as pool:
        assert list(pool.map(ask, pairs)) == [pair.answer for pair in pairs]


def test_a_batch_of_prompts_whose_end_is_told(bls: TritonServer) -> None:
    pairs = PAIRS[:3]
    inputs = {
        "text_input": np.array([[pair.question] for pair in pairs], object),
        "max_tokens": np.full((3, 1), 500, np.int32),
        "stream": np.full((3, 1), True),
    }
    answers = ["", "", ""]
    for response in asyncio.run(infer(bls, inputs)):
        answers[response["batch_index"].item()] += response["text_output"].item().decode()
    assert answers == [pair.answer for pair in pairs]


# Errors


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "word " * 5000}, "exceeds maximum input length"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"beam_width": 2}, "does not support beam_width > 1"),
        ({"num_draft_tokens": 2}, "does not support speculative decoding"),
        (
            {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
            "embedding_bias_words and embedding_bias_weights must be as many",
        ),
    ],
)
def test_errors_reach_the_client(bls: TritonServer, inputs: dict[str, Any], message: str) -> None:
    body = {"text_input": QUESTION, "max_tokens": 5, **inputs}
    assert message in generate(bls, BLS, **body)["error"]
    (event,) = stream(bls, **body)
    assert event.keys() == {"error"}
    assert generate(bls, BLS, text_input=QUESTION, max_tokens=500)["text_output"] == ANSWER


def test_a_draft_model_is_refused(demo_model: Path, tmp_path: Path) -> None:
    values: Values = {BLS: {"tensorrt_llm_draft_model_name": "draft"}}
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path, values)
    with pytest.raises(CogTritonError, match="draft model is not supported"):
        server.start()
    server.stop()


def test_a_model_that_is_not_there_is_named(demo_model: Path, tmp_path: Path) -> None:
    values: Values = {BLS: {"tensorrt_llm_model_name": "other"}}
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path, values)
    server.start()
    try:
        assert "'other'" in generate(server, BLS, text_input="?", max_tokens=5)["error"]
    finally:
        server.stop()


# Ending early


def test_a_stop_request_to_tensorrt_llm_ends_the_stream(bls: TritonServer) -> None:
    engine = engine_counters(bls)
    stopped = engine["stopped"]
    events = stream(bls, id="to-stop", **ENDLESS)
    found = [next(events)["text_output"]]
    stop = {"id": "to-stop", "stop": True, "input_ids": [0], "input_lengths": 1}
    url = f"http://{bls.endpoints.http}/v2/models/tensorrt_llm/generate_stream"
    reply = httpx.post(url, json={**stop, "request_output_len": 1}, trust_env=False)
    assert reply.status_code == 200
    found += texts(events)
    assert "".join(found).startswith(ANSWER[:20])
    wait_until(lambda: engine["stopped"] == stopped + 1, 10, "the stop")
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")


def test_a_client_that_disconnects_stops_the_engine(bls: TritonServer) -> None:
    engine = engine_counters(bls)
    stopped = engine["stopped"]
    with closing(stream(bls, **ENDLESS)) as events:  # type: ignore[type-var]
        next(events)
    wait_until(lambda: engine["stopped"] == stopped + 1, 10, "the stop")
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")


def test_a_grpc_client_that_cancels_stops_the_engine(bls: TritonServer) -> None:
    engine = engine_counters(bls)
    stopped = engine["stopped"]
    inputs = {
        "text_input": np.array([[QUESTION]], object),
        "max_tokens": np.array([[ENDLESS["max_tokens"]]], np.int32),
        "min_tokens": np.array([[ENDLESS["min_tokens"]]], np.int32),
        "stream": np.array([[True]]),
    }
    assert len(asyncio.run(infer(bls, inputs, cancel_after=2))) == 2
    wait_until(lambda: engine["stopped"] == stopped + 1, 10, "the stop")
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")


# Without decoupled mode


def test_one_reply_without_decoupled_mode(not_decoupled: TritonServer) -> None:
    body = {"text_input": QUESTION, "max_tokens": 40, "bad_words": "", "stop_words": ""}
    reply = generate(not_decoupled, BLS, **body, pad_id=2)
    expected = generate(not_decoupled, **body, pad_id=2)
    assert reply["text_output"] == expected["text_output"] != ""
    (event,) = stream(not_decoupled, **body)
    assert "streaming needs decoupled_mode true in the tensorrt_llm_bls" in event["error"]


def test_requests_without_decoupled_mode_do_not_wait_for_each_other(
    not_decoupled: TritonServer,
) -> None:
    """Each takes half a second."""

    def ask(number: int) -> float:
        body = {"text_input": f"prompt {number}", "max_tokens": 5}
        with httpx.Client(trust_env=False) as client:
            url = f"http://{not_decoupled.endpoints.http}/v2/models/{BLS}/generate"
            reply = client.post(url, json=body)
        assert reply.status_code == 200, reply.text
        return reply.elapsed.total_seconds()

    with ThreadPoolExecutor(8) as pool:
        times = list(pool.map(ask, range(8)))
    assert min(times) > 0.4
    assert max(times) < 2.5  # one after the other, the last would take 4
