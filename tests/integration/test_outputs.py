"""Subsets of outputs that a client may name, on the ensembles and the engine, decoupled and not.

Two failures of Triton's lie in wait here: it leaves out steps whose outputs nobody named, and with them
more than it should; and its stub dies under Python 3.12 when a model sends what nobody named.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.grpc import service_pb2_grpc

from cog_triton.client.messages import infer_request
from cog_triton.deployment.template_variables import Values
from cog_triton.protocol.names import OUTPUTS
from tests.integration.conftest import Triton, make_server, running, settings_for
from tests.stand_in.servers import environment
from tests.support import limit

Array = npt.NDArray[Any]

MODES: list[dict[str, object]] = [
    {"decoding_context": False},
    {"decoupled_mode": False, "decoding_context": False},
]
PROMPT = {
    "text_input": np.array([["Hello"]], np.object_),
    "max_tokens": np.array([[4]], np.int32),
    "return_log_probs": np.array([[True]]),
    "return_num_input_tokens": np.array([[True]]),
    "return_num_output_tokens": np.array([[True]]),
}
IDS = {
    **{name: value for name, value in PROMPT.items() if name.startswith("return_")},
    "input_ids": np.array([[5, 6, 7]], np.int32),
    "input_lengths": np.array([[3]], np.int32),
    "request_output_len": np.array([[4]], np.int32),
}
# What each engine makes of a request as above. Others are made on other requests alone.
MADE = ("output_ids", "sequence_length", "cum_log_probs", "output_log_probs", *OUTPUTS[2:])


def subsets(names: Sequence[str], sizes: Iterable[int]) -> list[tuple[str, ...]]:
    return [some for size in sizes for some in itertools.combinations(names, size)]


def check(stub: Any, streams: bool, model: str, inputs: dict[str, Array], names: Any) -> None:
    """Ask for the outputs with those names; exactly those must come."""
    flag = "streaming" if model == "tensorrt_llm" else "stream"
    given = {**inputs, **({flag: np.array([[True]])} if streams else {})}
    found = Counter[str]()
    request = infer_request(model, "", given, names)
    for message in stub.ModelStreamInfer(iter([request]), timeout=limit(30)):
        assert not message.error_message, message.error_message
        response = message.infer_response
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
            found[output.name] += len(content)
    assert found.keys() == set(names), model
    assert found.get("output_ids") in (None, 4 * np.int32().nbytes)


def check_subsets(triton: Triton, largest: int) -> None:
    """Ask for each subset of up to so many of the outputs, and for all of them."""
    of_made = subsets(MADE, {*range(1, min(largest, len(MADE)) + 1), len(MADE)})
    url = f"http://{triton.endpoints.http}/v2/models/tensorrt_llm/config"
    config = httpx.get(url, trust_env=False, timeout=limit(60)).json()
    with grpc.insecure_channel(triton.endpoints.grpc) as channel:
        streams = bool(config["model_transaction_policy"]["decoupled"])
        ask = partial(check, service_pb2_grpc.GRPCInferenceServiceStub(channel), streams)
        for names in [*of_made, *((*names, "text_output") for names in of_made), ("text_output",)]:
            ask("ensemble", PROMPT, names)
        for names in subsets(OUTPUTS, {*range(1, min(largest, len(OUTPUTS)) + 1), len(OUTPUTS)}):
            ask("ensemble_ids", PROMPT, names)
        if config["backend"] != "tensorrtllm":  # which refuses some
            for names in of_made:
                ask("tensorrt_llm", IDS, names)
    if not streams:
        check_text_alone_over_http(triton)


def check_text_alone_over_http(triton: Triton) -> None:
    """With /infer, which is for one response: there a client may name outputs, too."""
    inputs = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Hello"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4]},
    ]
    body = {"inputs": inputs, "outputs": [{"name": "text_output"}]}
    url = f"http://{triton.endpoints.http}/v2/models/ensemble/infer"
    (output,) = httpx.post(url, json=body, trust_env=False, timeout=limit(60)).json()["outputs"]
    assert (output["name"], output["shape"]) == ("text_output", [1])
    assert output["data"][0]


def test_one_two_or_all_outputs(triton: Triton) -> None:
    check_subsets(triton, 2)


@pytest.mark.rare
@pytest.mark.parametrize(
    ("engine", "changes"), [("stand-in", {}), *itertools.product(("simulated", "stand-in"), MODES)]
)
def test_every_subset_in_other_modes(
    demo_model: Path, tmp_path: Path, engine: str, changes: dict[str, object]
) -> None:
    chosen = {"ENGINE": engine} if engine == "simulated" else environment(tmp_path / "engine")
    context = {name: value for name, value in changes.items() if name == "decoding_context"}
    values: Values = {"tensorrt_llm": dict(changes), "ensemble": context}
    with running(make_server(settings_for(demo_model, **chosen), tmp_path, values)) as server:
        check_subsets(server, len(OUTPUTS))
