"""What clients may get wrong on Triton's own ports: each is refused as their mistake, in a clear text."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import yaml

from tests.integration.conftest import Triton
from tests.integration.test_ensemble import BLS, infer

MISTAKES = yaml.safe_load(Path(__file__).with_name("malformed_requests.yaml").read_text())
Mistake = tuple[dict[str, Any], str]
OK_TEXT: dict[str, Any] = {"text_input": "hi", "max_tokens": 2}
OK_IDS: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 2}
TOO_LONG = "exceeds maximum input length"
LARGE: list[Mistake] = [
    ({"text_input": "word " * 1_000_000}, TOO_LONG),
    ({"stop_words": ["w"] * 20_000}, "must be at most 1024, not 20000"),
    ({"bad_words": ["w" * 20_000]}, "must be at most 16384 bytes"),
    ({"embedding_bias_words": ["a"] * 2000}, "must be at most 1024"),
]
LARGE_IDS = {"prompt_ids": base64.b64encode(bytes(40_000)).decode()}
LARGE_QUERY = {"QUERY": [["hi"]], "REQUEST_OUTPUT_LEN": [[5]], "DECODER_QUERY": [["x" * 100_000]]}


def tensor(name: str, value: Any) -> dict[str, Any]:
    array = np.array(value)
    kind = "INT32" if array.dtype.kind == "i" else "BYTES"
    data = array.ravel().tolist()
    return {"name": name, "datatype": kind, "shape": list(array.shape), "data": data}


def post(triton: Triton, path: str, body: dict[str, Any]) -> httpx.Response:
    url = f"http://{triton.endpoints.http}/v2/models/{path}"
    return httpx.post(url, content=json.dumps(body), timeout=60, trust_env=False)


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
        ("ensemble", [*MISTAKES["text"], *LARGE, (LARGE_IDS, TOO_LONG)], OK_TEXT),
        (BLS, [*MISTAKES["text"], *LARGE], OK_TEXT),
        ("tensorrt_llm", [], OK_IDS),
    ],
    ids=["ensemble", BLS, "tensorrt_llm"],
)
def test_a_mistake_is_the_clients(
    triton: Triton, model: str, mistakes: list[Mistake], good: dict[str, Any], endpoint: str
) -> None:
    for changes, text in [*mistakes, *MISTAKES[model]]:
        check_refusal(post(triton, f"{model}/{endpoint}", {**good, **changes}), text)
    assert post(triton, f"{model}/{endpoint}", good).status_code == 200


@pytest.mark.parametrize(
    ("model", "tensors", "parameters", "text"),
    [*MISTAKES["infer"], ("preprocessing", LARGE_QUERY, {}, TOO_LONG)],
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
