"""What clients may get wrong on Triton's own ports: each is refused as their mistake, in a clear text."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import make_server, running, settings_for
from tests.integration.test_ensemble import infer as infer_stream

BLS = "tensorrt_llm_bls"
SURROGATE = "a\udfff"  # half of a pair: valid as JSON, and no text
OK_TEXT: dict[str, Any] = {"text_input": "hi", "max_tokens": 2}
OK_IDS: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 2}
NOT_UNICODE = "must be valid Unicode"
NO_IDS = "continued_ids must be 32-bit integers in base64"

# What is asked of the text models, and what they say to it.
TEXT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"text_input": SURROGATE}, "not valid UTF-8"),
    ({"text_input": "word " * 1_000_000}, "exceeds maximum input length"),
    ({"stop_words": SURROGATE}, "not valid UTF-8"),
    ({"stop_words": ["w"] * 20_000}, "must be at most 1024, not 20000"),
    ({"bad_words": ["w" * 20_000]}, "must be at most 16384 bytes"),
    ({"id": SURROGATE}, NOT_UNICODE),
    ({"seed": 1, "random_seed": 2}, "two names of one input"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": -5}, "max_tokens must be at least 1"),
    ({"min_tokens": 50}, "min_tokens must be at most max_tokens"),
    ({"temperature": -1.0}, "temperature must be at least 0"),
    ({"temperature": float("nan")}, "temperature must be between"),
    ({"temperature": 1e300}, "temperature must be between"),
    ({"top_p": 7.0}, "top_p must be between 0 and 1"),
    ({"top_k": -7}, "top_k must be at least 0"),
    ({"beam_width": 3}, "does not support beam_width"),
    ({"num_return_sequences": -1}, "num_return_sequences must be at least 1"),
    ({"end_id": 2**31 - 1}, "is not within acceptable range"),
    ({"embedding_bias_words": ["a"]}, "must be as many"),
    ({"embedding_bias_words": ["a"] * 2000}, "must be at most 1024"),
    ({"lora_task_id": 5}, "does not support lora_task_id"),
]
# An ensemble hands parameters down to its models, BLS does not.
ENSEMBLE_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"foo": SURROGATE}, NOT_UNICODE),
    ({SURROGATE: "foo"}, NOT_UNICODE),
    ({"continued_ids": "!!"}, NO_IDS),
    ({"continued_ids": 5}, NO_IDS),
    ({"continued_ids": "/////w=="}, "token ids, which are at least 0"),
    ({"continued_ids": "////fw=="}, "token ids must be between 0 and"),
    ({"prompt_ids": "!!"}, "prompt_ids must be 32-bit integers in base64"),
    ({"prompt_ids": "////fw=="}, "token ids must be between 0 and"),
    ({"prompt_ids": base64.b64encode(bytes(40_000)).decode()}, "exceeds maximum input length"),
    ({"add_special_tokens": "no"}, "add_special_tokens must be among"),
    ({"logit_bias": "[]"}, "logit_bias must be as a JSON object"),
    ({"logit_bias": '{"1000000": 1}'}, "token ids of logit_bias must be between 0 and"),
]
ID_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"foo": SURROGATE}, NOT_UNICODE),
    ({"id": SURROGATE}, NOT_UNICODE),
    ({"continued_ids": "!"}, NO_IDS),
    ({"input_ids": [], "input_lengths": 0}, "no tokens"),
    ({"input_ids": [-1, 5, 6]}, "token ids must be between 0 and"),
    ({"input_ids": [2**31 - 1, 5, 6]}, "token ids must be between 0 and"),
    ({"input_lengths": -1}, "input_lengths must be between 0 and 3, not -1"),
    ({"input_lengths": 300}, "input_lengths must be between 0 and 3, not 300"),
    ({"request_output_len": -9}, "max_tokens must be at least 1"),
    ({"stop": True}, "needs the id of the request"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than 0"),
    ({"lora_task_id": 5}, "does not support lora_task_id"),
]


def tensor(name: str, kind: str, value: Any) -> dict[str, Any]:
    array = np.array(value)
    data = array.ravel().tolist()
    return {"name": name, "datatype": kind, "shape": list(array.shape), "data": data}


QUERY, LENGTH = tensor("QUERY", "BYTES", [["hi"]]), tensor("REQUEST_OUTPUT_LEN", "INT32", [[5]])
TOKENS, LENGTHS = tensor("TOKENS_BATCH", "INT32", [[[5, 6]]]), "SEQUENCE_LENGTH"
INFER_MISTAKES: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("preprocessing", [QUERY, LENGTH], {"foo": SURROGATE}, NOT_UNICODE),
    ("preprocessing", [QUERY, LENGTH], {"continued_ids": "AAAA"}, NO_IDS),
    ("preprocessing", [LENGTH], {}, "missing required input"),
    ("preprocessing", [{**QUERY, "data": [SURROGATE]}, LENGTH], {}, "not valid UTF-8"),
    (
        "preprocessing",
        [QUERY, LENGTH, tensor("DECODER_QUERY", "BYTES", [["x" * 100_000]])],
        {},
        "exceeds maximum input length",
    ),
    ("postprocessing", [TOKENS, tensor(LENGTHS, "INT32", [[-1]])], {}, "must be at least 0"),
    ("postprocessing", [TOKENS, tensor(LENGTHS, "INT32", [[1, 1]])], {}, "must be of shape"),
    (
        "postprocessing",
        [tensor("TOKENS_BATCH", "INT32", [[[-5]]]), tensor(LENGTHS, "INT32", [[1]])],
        {},
        "token ids must be at least 0",
    ),
]


@pytest.fixture(scope="module")
def triton(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("malformed")
    with running(make_server(settings_for(demo_model), directory, {BLS: {}})) as server:
        yield server


def post(triton: TritonServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"http://{triton.endpoints.http}/v2/models/{path}",
        content=json.dumps(body),
        timeout=60,
        trust_env=False,
    )


def check_refusal(reply: httpx.Response, text: str) -> None:
    assert reply.status_code == 400, reply.text
    error = json.loads(reply.text.removeprefix("data:"))["error"]
    assert text in error
    assert len(error) < 600
    assert not any(trace in error for trace in ("At:", "Traceback", ".py", "codec"))


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", ["ensemble", BLS, "tensorrt_llm"])
def test_a_mistake_is_the_clients(triton: TritonServer, model: str, endpoint: str) -> None:
    mistakes, good = {
        "ensemble": (TEXT_MISTAKES + ENSEMBLE_MISTAKES, OK_TEXT),
        BLS: (TEXT_MISTAKES, OK_TEXT),
        "tensorrt_llm": (ID_MISTAKES, OK_IDS),
    }[model]
    for changes, text in mistakes:
        check_refusal(post(triton, f"{model}/{endpoint}", {**good, **changes}), text)
    assert post(triton, f"{model}/{endpoint}", good).status_code == 200


@pytest.mark.parametrize(("model", "inputs", "parameters", "text"), INFER_MISTAKES)
def test_a_mistake_in_infer_is_the_clients(
    triton: TritonServer,
    model: str,
    inputs: list[dict[str, Any]],
    parameters: dict[str, Any],
    text: str,
) -> None:
    body = {"inputs": inputs, "parameters": parameters}
    check_refusal(post(triton, f"{model}/infer", body), text)


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_long_lists_of_ids_are_refused(triton: TritonServer, name: str) -> None:
    inputs: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[2]], np.int32),
        name: np.ones((1, 2, 100_000), np.int32),
    }
    with pytest.raises(AssertionError, match="must be at most 65536 ids"):
        asyncio.run(infer_stream(triton, inputs, model="tensorrt_llm"))


def test_the_name_of_a_parameter_in_anothers_text_means_nothing(triton: TritonServer) -> None:
    assert post(triton, "ensemble/generate", {**OK_TEXT, "foo": "continued_ids"}).is_success
