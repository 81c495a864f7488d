"""A connection to the model tensorrt_llm of a running Triton: prompts as ids in, new ids out."""

import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.client import http_transport
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.messages import flat_outputs, infer_request
from cog_triton.client.responses import TensorOutputs, read_tensors
from cog_triton.protocol.names import ENGINE
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import load_tokenizer, without_torch
from tools.token_clients.options import PromptOptions, SamplingOptions, ServerOptions

Client = GrpcClient | HttpClient
Inputs = dict[str, npt.NDArray[Any]]


def random_prompts(options: PromptOptions, count: int) -> list[list[int]]:
    vocabulary = options.vocab_size
    if options.tokenizer_dir is not None:
        without_torch()
        vocabulary = len(load_tokenizer(options.tokenizer_dir))
    random = np.random.default_rng(options.random_seed)
    shape = (count, options.start_len)
    prompts: list[list[int]] = random.integers(0, vocabulary, shape).tolist()
    return prompts


def engine_inputs(options: SamplingOptions, ids: list[int], **others: Any) -> Inputs:
    """Return the engine's inputs for a prompt, shapes [1, tokens] and [1, 1]."""
    values = {
        "input_lengths": np.int32(len(ids)),
        "request_output_len": np.int32(options.output_len),
        "runtime_top_k": np.int32(options.topk),
        "exclude_input_in_output": np.bool_(True),
        **others,
    }
    if options.topp > 0:
        values["runtime_top_p"] = np.float32(options.topp)
    if options.beam_width != 1:
        values["beam_width"] = np.int32(options.beam_width)
    scalars = {name: np.full((1, 1), value) for name, value in values.items()}
    return {"input_ids": np.array([ids], np.int32), **scalars}


def connect(options: ServerOptions) -> Client:
    """Return a client of --url, or of this machine's Triton, started with the same environment."""
    settings = read_settings()
    port = settings.http_port if options.protocol == "http" else settings.grpc_port
    address = options.url or f"localhost:{port}"
    if options.verbose:
        print(f"[INFO] {options.protocol} to tensorrt_llm at {address}", file=sys.stderr)
    if options.protocol == "http":
        return HttpClient(address, response_timeout=600)
    return GrpcClient(address)


async def engine_ids(triton: Client, inputs: Inputs) -> AsyncIterator[list[int]]:
    """Yield the new ids of a prompt as they come; of several beams, those of the first."""
    request_id = secrets.token_hex(8)
    if isinstance(triton, HttpClient):
        async for event in triton.events(ENGINE, request_id, inputs):
            outputs = http_transport.flat_outputs(event)
            yield read_tensors(TensorOutputs(outputs, final=False), None).ids
        return
    request = infer_request(ENGINE, request_id, inputs, ("output_ids", "sequence_length"))
    async for responses in triton.responses(request):
        for response in responses:
            outputs = flat_outputs(response)
            if outputs:
                yield read_tensors(TensorOutputs(outputs, final=False), None).ids
