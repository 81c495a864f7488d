"""What clients may get wrong on Triton's own ports: each is refused as their mistake, in a clear text."""

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.integration.conftest import Triton
from tests.integration.test_ensemble import BLS, infer
from tests.support import limit


@dataclass(frozen=True)
class Mistake:
    """What differs from a good request, and a part of the answer to it."""

    changes: dict[str, Any]
    text: str


OK_TEXT: dict[str, Any] = {"text_input": "hi", "max_tokens": 2}
OK_IDS: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 2}
TOO_LONG = "exceeds maximum input length"
HALF = "a\udfff"  # it ends in half of a pair: valid as JSON, and no text
TEXT_MISTAKES = [  # of the ensemble and of BLS
    Mistake({"text_input": HALF}, "not valid UTF-8"),
    Mistake({"stop_words": HALF}, "not valid UTF-8"),
    Mistake({"id": HALF}, "must be valid Unicode"),
    Mistake({"seed": 1, "random_seed": 2}, "two names of one input"),
    Mistake({"max_tokens": 0}, "max_tokens must be at least 1"),
    Mistake({"max_tokens": -5}, "max_tokens must be at least 1"),
    Mistake({"min_tokens": 50}, "min_tokens must be at most max_tokens"),
    Mistake({"temperature": -1.0}, "temperature must be at least 0"),
    Mistake({"temperature": math.nan}, "temperature must be between"),
    Mistake({"temperature": 1e300}, "temperature must be between"),
    Mistake({"top_p": 7.0}, "top_p must be between 0 and 1"),
    Mistake({"top_k": -7}, "top_k must be at least 0"),
    Mistake({"beam_width": 3}, "does not support beam_width > 1"),
    Mistake({"num_return_sequences": -1}, "num_return_sequences must be at least 1"),
    Mistake({"end_id": 2**31 - 1}, "is not within acceptable range"),
    Mistake({"embedding_bias_words": ["a"]}, "must be the same length"),
    Mistake({"lora_task_id": 5}, "lora_task_id 5: no adapter has this id"),
    Mistake({"text_input": "word " * 1_000_000}, TOO_LONG),
    Mistake({"stop_words": ["w"] * 20_000}, "must be at most 1024, not 20000"),
    Mistake({"bad_words": ["w" * 20_000]}, "must be at most 16384 bytes"),
    Mistake({"embedding_bias_words": ["a"] * 2000}, "must be at most 1024"),
]
# An ensemble hands parameters down to its models, BLS does not.
ENSEMBLE_MISTAKES = [
    Mistake({"beam_width": 0}, "beam_width must be at least 1"),
    Mistake({"return_context_logits": True}, "does not support return_context_logits"),
    Mistake({"foo": HALF}, "must be valid Unicode"),
    Mistake({HALF: "foo"}, "must be valid Unicode"),
    Mistake({"continued_ids": "!!"}, "continued_ids must be 32-bit integers in base64"),
    Mistake({"continued_ids": 5}, "continued_ids must be 32-bit integers in base64"),
    Mistake({"continued_ids": "/////w=="}, "token ids, which are at least 0"),
    Mistake({"continued_ids": "////fw=="}, "token ids must be between 0 and"),
    Mistake({"prompt_ids": "!!"}, "prompt_ids must be 32-bit integers in base64"),
    Mistake({"prompt_ids": "////fw=="}, "token ids must be between 0 and"),
    Mistake({"add_special_tokens": "no"}, "add_special_tokens must be true or false"),
    Mistake({"logit_bias": "[]"}, "logit_bias must be a JSON object"),
    Mistake({"logit_bias": '{"1000000": 1}'}, "token ids of logit_bias must be between 0 and"),
    Mistake({"prompt_ids": base64.b64encode(bytes(40_000)).decode()}, TOO_LONG),
]
BLS_MISTAKES = [
    Mistake({"num_draft_tokens": 2}, "does not support speculative decoding"),
]
ENGINE_MISTAKES = [
    Mistake({"foo": HALF}, "must be valid Unicode"),
    Mistake({"id": HALF}, "must be valid Unicode"),
    Mistake({"continued_ids": "!"}, "continued_ids must be 32-bit integers in base64"),
    Mistake({"input_ids": [], "input_lengths": 0}, "no tokens"),
    Mistake({"input_ids": [-1, 5, 6]}, "token ids must be between 0 and"),
    Mistake({"input_ids": [2**31 - 1, 5, 6]}, "token ids must be between 0 and"),
    Mistake({"input_lengths": -1}, "input_lengths must be between 0 and 3, not -1"),
    Mistake({"input_lengths": 300}, "input_lengths must be between 0 and 3, not 300"),
    Mistake({"request_output_len": -9}, "max_tokens must be at least 1"),
    Mistake({"stop": True}, "needs the id of the request"),
    Mistake({"repetition_penalty": 0.0}, "repetition_penalty must be greater than 0"),
    Mistake({"lora_task_id": 5}, "lora_task_id 5: no adapter has this id"),
]
LARGE_QUERY = {"QUERY": [["hi"]], "REQUEST_OUTPUT_LEN": [[5]], "DECODER_QUERY": [["x" * 100_000]]}


def tensor(name: str, value: Any) -> dict[str, Any]:
    array = np.array(value)
    kind = "INT32" if array.dtype.kind == "i" else "BYTES"
    data = array.ravel().tolist()
    return {"name": name, "datatype": kind, "shape": list(array.shape), "data": data}


def post(triton: Triton, path: str, body: dict[str, Any]) -> httpx.Response:
    url = f"http://{triton.endpoints.http}/v2/models/{path}"
    return httpx.post(url, content=json.dumps(body), timeout=limit(60), trust_env=False)


def check_refusal(reply: httpx.Response, text: str) -> None:
    assert reply.status_code == 400, reply.text
    error = json.loads(reply.text.removeprefix("data:"))["error"]
    assert text in error
    assert len(error) < 600
    assert not any(trace in error for trace in ("At:", "Traceback", ".py", "codec"))


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "mistakes", "good"),
    [
        ("ensemble", [*TEXT_MISTAKES, *ENSEMBLE_MISTAKES], OK_TEXT),
        (BLS, [*TEXT_MISTAKES, *BLS_MISTAKES], OK_TEXT),
        ("tensorrt_llm", ENGINE_MISTAKES, OK_IDS),
    ],
    ids=["ensemble", BLS, "tensorrt_llm"],
)
def test_a_mistake_is_the_clients(
    triton: Triton, model: str, mistakes: list[Mistake], good: dict[str, Any], endpoint: str
) -> None:
    for mistake in mistakes:
        reply = post(triton, f"{model}/{endpoint}", {**good, **mistake.changes})
        check_refusal(reply, mistake.text)
    assert post(triton, f"{model}/{endpoint}", good).status_code == 200


@pytest.mark.parametrize(
    ("model", "tensors", "parameters", "text"),
    [
        pytest.param(
            "preprocessing",
            {"QUERY": [["hi"]], "REQUEST_OUTPUT_LEN": [[5]]},
            {"foo": HALF},
            "must be valid Unicode",
            id="parameter that is no text",
        ),
        pytest.param(
            "preprocessing",
            {"QUERY": [["hi"]], "REQUEST_OUTPUT_LEN": [[5]]},
            {"continued_ids": "AAAA"},
            "continued_ids must be",
            id="ids that are no integers",
        ),
        pytest.param(
            "preprocessing",
            {"REQUEST_OUTPUT_LEN": [[5]]},
            {},
            "missing required input",
            id="no prompt",
        ),
        pytest.param(
            "preprocessing",
            {"QUERY": [[HALF]], "REQUEST_OUTPUT_LEN": [[5]]},
            {},
            "not valid UTF-8",
            id="prompt that is no text",
        ),
        pytest.param(
            "postprocessing",
            {"TOKENS_BATCH": [[[5, 6]]], "SEQUENCE_LENGTH": [[-1]]},
            {},
            "must be at least 0",
            id="negative length",
        ),
        pytest.param(
            "postprocessing",
            {"TOKENS_BATCH": [[[5, 6]]], "SEQUENCE_LENGTH": [[1, 1]]},
            {},
            "must be of shape",
            id="length too many",
        ),
        pytest.param(
            "postprocessing",
            {"TOKENS_BATCH": [[[-5]]], "SEQUENCE_LENGTH": [[1]]},
            {},
            "token ids must be at least 0",
            id="negative id",
        ),
        pytest.param("preprocessing", LARGE_QUERY, {}, TOO_LONG, id="too long a prompt"),
    ],
)
def test_a_mistake_in_infer_is_the_clients(
    triton: Triton, model: str, tensors: Any, parameters: dict[str, Any], text: str
) -> None:
    inputs = [tensor(name, value) for name, value in tensors.items()]
    body = {"inputs": inputs, "parameters": parameters}
    check_refusal(post(triton, f"{model}/infer", body), text)


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_long_lists_of_ids_are_refused(triton: Triton, name: str) -> None:
    inputs: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[2]], np.int32),
        name: np.ones((1, 2, 100_000), np.int32),
    }
    with pytest.raises(AssertionError, match="must be at most 65536 ids"):
        infer(triton.endpoints.grpc, inputs, model="tensorrt_llm")


def test_the_name_of_a_parameter_in_anothers_text_means_nothing(triton: Triton) -> None:
    assert post(triton, "ensemble/generate", {**OK_TEXT, "foo": "continued_ids"}).is_success
