"""Every subset of outputs that a client may name, on the ensembles and the engine, decoupled and not.

Two failures of Triton's lie in wait here: it leaves out steps whose outputs nobody named, and with them
more than it should; and its stub dies under Python 3.12 when a model sends what nobody named.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient

from cog_triton.deployment.preparation import Values
from cog_triton.server.tritonserver import TritonServer
from cog_triton.wire import OUTPUTS
from tests.integration.conftest import make_server, running, settings_for
from tests.stand_in.servers import environment

Array = npt.NDArray[Any]

STAND_IN = "the stand-in for TensorRT-LLM's backend"
MODES: dict[str, dict[str, object]] = {
    "decoupled": {},
    "decoupled, nothing said of what went before": {"decoding_context": False},
    "not decoupled": {"decoupled_mode": False, "decoding_context": False},
    STAND_IN: {},
    f"{STAND_IN}, not decoupled": {"decoupled_mode": False},
}
PROMPT = {
    "text_input": np.array([["Hello"]], np.object_),
    "max_tokens": np.array([[4]], np.int32),
    "return_log_probs": np.array([[True]]),
    "return_num_input_tokens": np.array([[True]]),
    "return_num_output_tokens": np.array([[True]]),
}
IDS = {
    "input_ids": np.array([[5, 6, 7]], np.int32),
    "input_lengths": np.array([[3]], np.int32),
    "request_output_len": np.array([[4]], np.int32),
    "return_log_probs": np.array([[True]]),
    "return_num_input_tokens": np.array([[True]]),
    "return_num_output_tokens": np.array([[True]]),
}
KINDS = {"O": "BYTES", "i": "INT32", "b": "BOOL"}
# What each engine makes of a request as above. Others are made on other requests alone.
MADE = ("output_ids", "sequence_length", "cum_log_probs", "output_log_probs", *OUTPUTS[2:])
SUBSETS = [
    names for count in range(1, len(MADE) + 1) for names in itertools.combinations(MADE, count)
]


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode.replace(" ", "_"))
def server(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    changes = MODES[request.param]
    context = {name: value for name, value in changes.items() if name == "decoding_context"}
    values: Values = {"tensorrt_llm": dict(changes), "ensemble": context}
    directory = tmp_path_factory.mktemp("outputs")
    engine = {"ENGINE": "simulated"}
    if STAND_IN in request.param:
        engine = environment(directory / "stand_in")
    with running(make_server(settings_for(demo_model, **engine), directory, values)) as triton:
        yield triton


@pytest.fixture(scope="module")
def config(server: TritonServer) -> dict[str, Any]:
    url = f"http://{server.endpoints.http}/v2/models/tensorrt_llm/config"
    found: dict[str, Any] = httpx.get(url, trust_env=False).json()
    return found


@pytest.fixture(scope="module")
def decoupled(config: dict[str, Any]) -> bool:
    return bool(config["model_transaction_policy"]["decoupled"])


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.endpoints.grpc) as connection:
        yield connection


def responses(
    client: grpcclient.InferenceServerClient,
    model: str,
    inputs: dict[str, Array],
    outputs: tuple[str, ...],
) -> list[dict[str, Array]]:
    """All responses of a stream, by output name, without empty ones."""
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    client.async_stream_infer(
        model,
        [_tensor(*item) for item in inputs.items()],
        outputs=[grpcclient.InferRequestedOutput(name) for name in outputs],
        enable_empty_final_response=True,
    )
    found, final = [], False
    while not final:
        result, error = arrived.get(timeout=30)
        assert error is None, error.message()
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        values = {output.name: result.as_numpy(output.name) for output in response.outputs}
        found += [values] if values else []
    client.stop_stream()
    return found


def _tensor(name: str, value: Array) -> Any:
    tensor = grpcclient.InferInput(name, list(value.shape), KINDS[value.dtype.kind])
    tensor.set_data_from_numpy(value)
    return tensor


def check(
    client: grpcclient.InferenceServerClient,
    model: str,
    inputs: dict[str, Array],
    names: tuple[str, ...],
    *,
    streaming: bool,
) -> None:
    flag = "streaming" if model == "tensorrt_llm" else "stream"
    given = {**inputs, **({flag: np.array([[True]])} if streaming else {})}
    found = responses(client, model, given, names)
    assert found, f"{model} answered {names} with nothing"
    assert set().union(*found) == set(names), names
    if "output_ids" in names:
        assert sum(values["output_ids"].size for values in found) == 4


def test_every_subset_of_the_ensembles_outputs(
    client: grpcclient.InferenceServerClient, decoupled: bool
) -> None:
    for names in [*SUBSETS, *((*names, "text_output") for names in SUBSETS), ("text_output",)]:
        check(client, "ensemble", PROMPT, names, streaming=decoupled)


def test_every_subset_of_the_ids_ensembles_outputs(
    client: grpcclient.InferenceServerClient, decoupled: bool
) -> None:
    for count in range(1, len(OUTPUTS) + 1):
        for names in itertools.combinations(OUTPUTS, count):
            check(client, "ensemble_ids", PROMPT, names, streaming=decoupled)


def test_every_subset_of_the_engines_outputs(
    client: grpcclient.InferenceServerClient, config: dict[str, Any], decoupled: bool
) -> None:
    if config["backend"] == "tensorrtllm":
        pytest.skip("TensorRT-LLM's backend refuses those without output_ids or sequence_length")
    for names in SUBSETS:
        check(client, "tensorrt_llm", IDS, names, streaming=decoupled)


def test_text_alone_over_http(server: TritonServer) -> None:
    """Where tensors may be named as well: with /infer, which is for one response."""
    inputs = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Hello"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4]},
    ]
    body = {"inputs": inputs, "outputs": [{"name": "text_output"}]}
    url = f"http://{server.endpoints.http}/v2/models/ensemble/infer"
    reply = httpx.post(url, json=body, trust_env=False)
    if "doesn't support models with decoupled" in reply.text:
        pytest.skip("Triton refuses /infer of decoupled models")
    (output,) = reply.json()["outputs"]
    assert output["name"] == "text_output"
    assert output["shape"] == [1]
    assert output["data"][0]
