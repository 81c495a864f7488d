"""A repository that is filled by scripts/fill_template.py, as guides do it, beside the predictor's."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fill_template
import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import settings_for
from tests.support import ROOT

PROMPT = "What is machine learning?"


@pytest.fixture(scope="module")
def filled_by_hand(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("by_hand")
    repository = directory / "repository"
    shutil.copytree(ROOT / "triton_model_repo", repository)
    shutil.rmtree(repository / "tensorrt_llm_bls")
    for model, values in {
        "ensemble": "decoding_context:true,num_return_sequences:false",
        "preprocessing": f"tokenizer_dir:{demo_model}",
        "postprocessing": f"tokenizer_dir:{demo_model}",
        "tensorrt_llm": f"engine:simulated,tokenizer_dir:{demo_model},decoding_context:true,"
        "num_return_sequences:false",
    }.items():
        assert fill_template.main(["-i", str(repository / model / "config.pbtxt"), values]) == 0
    server = TritonServer(repository, directory, settings_for(demo_model))
    server.start()
    yield server
    server.stop()


def text(server: TritonServer, **inputs: Any) -> str:
    url = f"http://{server.endpoints.http}/v2/models/ensemble/generate"
    inputs = {"text_input": PROMPT, "max_tokens": 8, **inputs}
    reply = httpx.post(url, json=inputs, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["text_output"])


def test_the_prompt_is_in_the_output_as_at_nvidia_unless_a_request_or_the_predictor_says(
    filled_by_hand: TritonServer, paced_triton: TritonServer
) -> None:
    whole = text(filled_by_hand)
    assert whole.startswith(PROMPT)
    answer = text(filled_by_hand, exclude_input_in_output=True)
    assert whole == PROMPT + answer
    assert not text(paced_triton).startswith(PROMPT)
    assert text(paced_triton, exclude_input_in_output=False).startswith(PROMPT)


def refusal(server: TritonServer, model: str, **inputs: Any) -> str | None:
    """What Triton has against a request of gRPC, whose inputs are typed tensors."""
    kinds = {np.dtype(np.int32): "INT32", np.dtype(np.object_): "BYTES"}
    tensors = []
    for name, value in inputs.items():
        tensors.append(InferInput(name, value.shape, kinds[value.dtype]))
        tensors[-1].set_data_from_numpy(value)
    with InferenceServerClient(server.endpoints.grpc) as client:
        replies: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        client.start_stream(lambda result, error: replies.put(error))  # noqa: ARG005
        client.async_stream_infer(model, tensors)
        error = replies.get(timeout=60)
        client.stop_stream()
    return None if error is None else str(error)


ONE = np.array([[1]], np.int32)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("ensemble", {"text_input": np.array([[PROMPT.encode()]], np.object_), "max_tokens": ONE}),
        ("tensorrt_llm", {"input_ids": ONE, "input_lengths": ONE, "request_output_len": ONE}),
    ],
)
def test_an_input_that_was_dropped_is_refused_by_name(
    model: str, inputs: dict[str, Any], filled_by_hand: TritonServer, paced_triton: TritonServer
) -> None:
    several = {**inputs, "num_return_sequences": ONE}
    assert refusal(paced_triton, model, **several) is None
    assert refusal(filled_by_hand, model, **inputs) is None
    assert "num_return_sequences" in (refusal(filled_by_hand, model, **several) or "")


def test_generate_takes_it_for_a_parameter_that_nobody_reads(filled_by_hand: TritonServer) -> None:
    assert text(filled_by_hand, num_return_sequences=2) == text(filled_by_hand)
