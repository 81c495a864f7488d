"""The ensemble as a generic client of NVIDIA's sees it: curl's requests, and raw gRPC."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import np_to_triton_dtype

from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import ids_text
from tests.integration.conftest import engine_counters
from tests.support import metrics, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
MULTI_BYTE = [pair for pair in PAIRS if not pair.answer.isascii()]


def generate(triton: TritonServer, model: str = "ensemble", /, **body: Any) -> dict[str, Any]:
    reply = httpx.post(
        f"http://{triton.endpoints.http}/v2/models/{model}/generate", json=body, trust_env=False
    )
    found: dict[str, Any] = reply.json()
    return found


def generate_stream(triton: TritonServer, **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(
        f"http://{triton.endpoints.http}/v2/models/ensemble/generate_stream",
        json={"stream": True, **body},
        timeout=60,
        trust_env=False,
    )
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    return [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]


def test_the_readmes_curl_request(triton: TritonServer, tokenizer: Tokenizer) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=20, bad_words="", stop_words="")
    expected = tokenizer(ANSWER, add_special_tokens=False).input_ids[:20]
    assert reply["text_output"] == tokenizer.decode(expected)
    assert reply["model_name"] == "ensemble"
    assert reply["model_version"] == "1"
    assert reply["batch_index"] == reply["sequence_index"] == 0
    assert reply["cum_log_probs"] == 0.0
    assert reply["output_ids"] == expected
    assert reply["sequence_length"] == 20
    # As TensorRT-LLM's backend has it, zeros stand for what was not asked for.
    assert reply["output_log_probs"] == [0.0] * 20
    assert reply["context_logits"] == reply["generation_logits"] == 0.0


def test_the_whole_answer_ends_at_the_end_token(triton: TritonServer) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=500, bad_words="", stop_words="")
    assert reply["text_output"] == ANSWER


def test_pad_id_and_end_id_are_honoured(triton: TritonServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer(ANSWER, add_special_tokens=False).input_ids
    body = {"text_input": QUESTION, "max_tokens": 500, "bad_words": "", "stop_words": ""}
    reply = generate(triton, **body, pad_id=2, end_id=ids[5])
    assert reply["output_ids"] == ids[: ids.index(ids[5]) + 1]


def test_stop_words_end_the_output_and_stay_in_it(triton: TritonServer) -> None:
    body = {"text_input": QUESTION, "max_tokens": 500, "bad_words": ["xyzzy"]}
    reply = generate(triton, **body, stop_words=["patterns", "rules"])
    assert reply["text_output"] == ANSWER[: ANSWER.index("patterns") + len("patterns")]


@pytest.mark.parametrize("bad_words", [["building", "patterns"], "building"])
def test_bad_words_do_not_occur(triton: TritonServer, bad_words: list[str] | str) -> None:
    body = {"text_input": QUESTION, "max_tokens": 60, "stop_words": ""}
    assert "building" not in generate(triton, **body, bad_words=bad_words)["text_output"]


def test_parameters_may_be_nested(triton: TritonServer) -> None:
    """As the Phi-3 guide sends them."""
    parameters = {"max_tokens": 256, "bad_words": [""], "stop_words": [""]}
    assert generate(triton, text_input=QUESTION, parameters=parameters)["text_output"] == ANSWER


@pytest.mark.parametrize("pair", [PAIRS[0], *MULTI_BYTE], ids=lambda pair: pair.question[:30])
def test_streamed_texts_join_to_the_answer(triton: TritonServer, pair: Any) -> None:
    events = generate_stream(triton, text_input=pair.question, max_tokens=500)
    assert "".join(event["text_output"] for event in events) == pair.answer
    assert len(events) > 3


def test_without_stream_there_is_one_event(triton: TritonServer) -> None:
    events = generate_stream(triton, text_input=QUESTION, max_tokens=500, stream=False)
    assert [event["text_output"] for event in events] == [ANSWER]


def test_sampling_follows_the_seed_under_its_new_and_its_old_name(triton: TritonServer) -> None:
    body = {"text_input": QUESTION, "max_tokens": 30, "temperature": 1000.0, "top_p": 1.0}
    texts = [
        generate(triton, **body, **seed)["text_output"]
        for seed in ({"seed": 5}, {"seed": 5}, {"random_seed": 5}, {"seed": 6}, {"seed": 0}, {})
    ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[3] != texts[0]
    assert texts[4] == texts[5]  # TensorRT-LLM's default


def test_what_is_no_input_goes_as_a_parameter(triton: TritonServer, tokenizer: Tokenizer) -> None:
    """A prompt of token ids, a bias of logits by ids, and no special tokens."""
    ids = tokenizer(QUESTION).input_ids
    body = {"text_input": "", "max_tokens": 500, "prompt_ids": ids_text(ids)}
    assert generate(triton, **body)["text_output"] == ANSWER
    bias = json.dumps({ids[2]: 1000})
    biased = generate(triton, text_input=QUESTION, max_tokens=3, logit_bias=bias)
    assert biased["output_ids"] == [ids[2]] * 3
    counted = {"text_input": QUESTION, "max_tokens": 1, "return_num_input_tokens": True}
    assert generate(triton, **counted)["num_input_tokens"] == len(ids)
    counted["add_special_tokens"] = False
    assert generate(triton, **counted)["num_input_tokens"] == len(ids) - 1


@pytest.mark.parametrize("name", ["min_tokens", "min_length"])
def test_a_minimum_length_holds_the_end_token_back(triton: TritonServer, name: str) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=120, **{name: 100})
    assert reply["sequence_length"] >= 100


def test_penalties_change_the_text(triton: TritonServer) -> None:
    body = {"text_input": QUESTION, "max_tokens": 60}
    plain = generate(triton, **body)["text_output"]
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert generate(triton, **body, **{penalty: 30.0})["text_output"] != plain


def test_log_probabilities(triton: TritonServer) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=10, return_log_probs=True)
    log_probs = reply["output_log_probs"]
    assert len(log_probs) == 10
    assert all(-1 < value <= 0 for value in log_probs)
    assert reply["cum_log_probs"] == pytest.approx(sum(log_probs), abs=1e-5)


def test_the_prompt_comes_back_when_asked_for(triton: TritonServer) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=500, exclude_input_in_output=False)
    assert reply["text_output"].endswith(ANSWER)
    assert reply["text_output"].startswith(QUESTION)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "word " * 5000}, "exceeds maximum input length"),
        ({"beam_width": 2}, "does not support beam_width > 1"),
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"seed": 5, "random_seed": 6}, "two names of one input and must be the same"),
        ({"min_tokens": 6}, "min_tokens must be at most max_tokens (5), not 6"),
        ({"lora_task_id": 5}, "does not support lora_task_id"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"return_context_logits": True}, "does not support return_context_logits"),
        ({"lora_task_id": 7}, "does not support lora_task_id"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    triton: TritonServer, inputs: dict[str, Any], message: str
) -> None:
    body = {"text_input": QUESTION, "max_tokens": 5, **inputs}
    assert message in generate(triton, **body)["error"]
    # And nothing is lost by it.
    assert generate(triton, text_input=QUESTION, max_tokens=500)["text_output"] == ANSWER


def test_a_stop_request_needs_an_id(triton: TritonServer) -> None:
    body = {"stop": True, "input_ids": [1], "input_lengths": 1, "request_output_len": 1}
    assert "needs the id" in generate(triton, "tensorrt_llm", **body)["error"]


async def infer(
    triton: TritonServer,
    inputs: dict[str, npt.NDArray[Any]],
    outputs: list[str] | None = None,
    model: str = "ensemble",
) -> list[dict[str, npt.NDArray[Any]]]:
    """A generic gRPC client: all responses, by output name."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        tensors = []
        for name, value in inputs.items():
            kind = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
            kind.set_data_from_numpy(value)
            tensors.append(kind)
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs or []]
        yield {"model_name": model, "inputs": tensors, "outputs": wanted or None}

    responses = []
    async with grpcclient.InferenceServerClient(triton.endpoints.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error.message()
            response = result.get_response()
            responses.append({o.name: result.as_numpy(o.name) for o in response.outputs})
            final = response.parameters["triton_final_response"].bool_param
            if final:
                break
    return responses


def test_raw_ids_skip_postprocessing(triton: TritonServer, tokenizer: Tokenizer) -> None:
    count = 'nv_inference_count{model="postprocessing",version="1"}'
    before = metrics(triton.endpoints.metrics)[count]
    inputs = {
        "text_input": np.array([[QUESTION]], object),
        "max_tokens": np.array([[500]], np.int32),
        "stream": np.array([[True]]),
    }
    outputs = ["output_ids", "sequence_length"]
    responses = asyncio.run(infer(triton, inputs, outputs, "ensemble_ids"))
    ids = [i for r in responses for i in r["output_ids"][0, 0, : r["sequence_length"][0, 0]]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ANSWER
    assert metrics(triton.endpoints.metrics)[count] == before


def test_text_has_the_shape_that_nvidias_clients_read(triton: TritonServer) -> None:
    """They take ``text_output[0].decode()``: its one dimension is the batch, whatever the config says."""
    for stream in (True, False):
        inputs = {
            "text_input": np.array([[QUESTION]], object),
            "max_tokens": np.array([[500]], np.int32),
            "stream": np.array([[stream]]),
        }
        responses = asyncio.run(infer(triton, inputs, ["text_output"]))
        assert all(response["text_output"].shape == (1,) for response in responses)
        assert "".join(r["text_output"][0].decode() for r in responses) == ANSWER


def test_perf_metrics(triton: TritonServer) -> None:
    before = time.monotonic_ns()
    reply = generate(triton, text_input=QUESTION, max_tokens=20, return_perf_metrics=True)
    times = [reply[f"{name}_time_ns"] for name in ("arrival", "first_token", "last_token")]
    assert before < times[0] < times[1] <= times[2] < time.monotonic_ns()
    assert reply["total_draft_tokens"] == reply["total_accepted_draft_tokens"] == 0
    assert "first_token_time_ns" not in generate(triton, text_input=QUESTION, max_tokens=20)


def test_perf_metrics_are_in_every_response_of_a_stream(triton: TritonServer) -> None:
    """As with TensorRT-LLM's backend: its clients read them of each, and the last token's time is
    known at the end only."""
    body = {"text_input": QUESTION, "max_tokens": 20, "return_perf_metrics": True}
    responses = generate_stream(triton, **body)
    assert len(responses) > 1
    first = {(r["arrival_time_ns"], r["first_token_time_ns"]) for r in responses}
    assert len(first) == 1
    *others, last = [response["last_token_time_ns"] for response in responses]
    assert set(others) == {0}
    assert last >= responses[0]["first_token_time_ns"] > 0
    assert all("acceptance_rate" in response for response in responses)


def test_postprocessing_passes_log_probabilities_and_logits_through(triton: TritonServer) -> None:
    """end_to_end_test.py of NVIDIA's v0.8 to v0.13 gives it all of them, and compares what comes back."""
    made = {
        "CUM_LOG_PROBS": np.array([[-1.5]], np.float32),
        "OUTPUT_LOG_PROBS": np.array([[[-0.5, -1.0]]], np.float32),
        "CONTEXT_LOGITS": np.zeros((1, 1, 1), np.float32),
        "GENERATION_LOGITS": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3),
    }
    tokens = {
        "TOKENS_BATCH": np.array([[[70, 71]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[2]], np.int32),
    }
    outputs = ["OUTPUT", *(f"OUT_{name}" for name in made)]
    (response,) = asyncio.run(infer(triton, tokens | made, outputs, "postprocessing"))
    (alone,) = asyncio.run(infer(triton, tokens, ["OUTPUT"], "postprocessing"))
    assert response["OUTPUT"] == alone["OUTPUT"]
    for name, value in made.items():
        assert np.array_equal(response[f"OUT_{name}"], value)


def test_a_long_prompt_keeps_nobody_waiting(paced_triton: TritonServer) -> None:
    """It is tokenized for seconds; the others' are answered meanwhile."""
    url = f"http://{paced_triton.endpoints.http}/v2/models/preprocessing/infer"
    inputs = [
        {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": ["word " * 5]},
        {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [5]},
    ]
    ended = threading.Event()

    def ask(text: str) -> None:
        body = {"inputs": [{**inputs[0], "data": [text]}, inputs[1]]}
        reply = httpx.post(url, json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, "word " * 200_000)
        long.add_done_callback(lambda _: ended.set())
        answered = 0
        while not ended.is_set():
            ask("word")
            answered += 1
        long.result()
    assert answered > 5


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized(triton: TritonServer) -> None:
    error = generate(triton, text_input="word " * 1_000_000, max_tokens=5)["error"]
    assert "Prompt length (5000000 bytes) exceeds maximum input length" in error


def test_a_users_mistake_is_no_fault_of_the_servers(triton: TritonServer) -> None:
    url = f"http://{triton.endpoints.http}/v2/models"
    query = {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": ["word " * 100_000]}
    length = {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [5]}
    body = {"inputs": [query, length]}
    assert httpx.post(f"{url}/preprocessing/infer", json=body, trust_env=False).status_code == 400
    ids = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "beam_width": 2}
    assert httpx.post(f"{url}/tensorrt_llm/generate", json=ids, trust_env=False).status_code == 400


def test_a_client_of_ids_alone_gets_nothing_else(
    triton: TritonServer, tokenizer: Tokenizer
) -> None:
    reply = httpx.post(
        f"http://{triton.endpoints.http}/v2/models/ensemble_ids/generate_stream",
        json={"text_input": QUESTION, "max_tokens": 500, "stream": True, "ids_only": True},
        trust_env=False,
    )
    events = [json.loads(line[5:]) for line in reply.text.splitlines() if line]
    ids = [event["output_ids"] for event in events]
    flat = [i for part in ids for i in (part if isinstance(part, list) else [part])]
    assert tokenizer.decode(flat, skip_special_tokens=True) == ANSWER
    assert [event.get("num_output_tokens") for event in events][-1] == len(flat)
    sent = {name for event in events[:-1] for name in event}
    assert "sequence_length" not in sent
    assert {name for name in sent if not name.startswith(("model_", "sequence_"))} == {"output_ids"}


def test_a_batch_of_prompts(triton: TritonServer) -> None:
    pairs = PAIRS[:3]
    inputs = {
        "text_input": np.array([[pair.question] for pair in pairs], object),
        "max_tokens": np.full((3, 1), 500, np.int32),
        "stream": np.full((3, 1), True),
    }
    texts = ["", "", ""]
    for response in asyncio.run(infer(triton, inputs)):
        texts[response["batch_index"].item()] += response["text_output"].item().decode()
    assert texts == [pair.answer for pair in pairs]


def test_a_batch_with_one_prompt_too_long_is_refused_whole(triton: TritonServer) -> None:
    inputs = {
        "text_input": np.array([[QUESTION], ["word " * 5000]], object),
        "max_tokens": np.full((2, 1), 500, np.int32),
        "stream": np.full((2, 1), True),
    }
    with pytest.raises(AssertionError, match="exceeds maximum input length"):
        asyncio.run(infer(triton, inputs))
    engine = engine_counters(triton)
    wait_until(lambda: engine["active"] == 0, 10, "the stop of the other prompt")
    assert generate(triton, text_input=QUESTION, max_tokens=500)["text_output"] == ANSWER
