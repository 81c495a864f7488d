"""NVIDIA's small clients: token ids to the engine's model and back, past the ensemble."""

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.client import http_transport
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.messages import flat_outputs, infer_request
from cog_triton.client.stream import decode_response
from cog_triton.errors import TritonMalformedEvent
from cog_triton.settings import read_settings
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import load_tokenizer, without_torch
from cog_triton.wire import ENGINE

Client = GrpcClient | HttpClient
Inputs = dict[str, npt.NDArray[Any]]


def client(options: argparse.Namespace) -> None:
    """Print the time that the answer took, the text and the answer; streamed, the answer comes first."""
    asyncio.run(answer(options))


async def answer(options: argparse.Namespace) -> None:
    without_torch()
    tokenizer = load_tokenizer(options.tokenizer_dir)
    detokenizer = IncrementalDetokenizer(tokenizer)
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    inputs = engine_inputs(
        options,
        tokenizer(options.text).input_ids,
        end_id=np.int32(end_id),
        pad_id=np.int32(end_id if pad_id is None else pad_id),
        streaming=np.bool_(options.streaming),
    )

    def text_of(ids: list[int]) -> str:
        # The embedded engines send the end token, TensorRT-LLM does not.
        return detokenizer.decode(ids[:-1] if ids[-1:] == [end_id] else ids)

    if options.streaming:
        print(f"Input: {options.text}\nOutput: ", end="", flush=True)
    ids: list[int] = []
    async with contextlib.aclosing(connect(options)) as triton:
        began = time.perf_counter()
        async for new in engine_ids(triton, inputs):
            # With beams, a streamed response has all tokens so far.
            ids = new if "beam_width" in inputs else ids + new
            if options.streaming:
                print(text_of(new), end="", flush=True)
        latency = f"[INFO] Latency: {(time.perf_counter() - began) * 1000:.3f} ms"
    if options.streaming:
        print(f"{detokenizer.flush()}\n{latency}")
    else:
        print(f"{latency}\nInput: {options.text}\nOutput: {text_of(ids)}{detokenizer.flush()}")


def identity_test(options: argparse.Namespace) -> None:
    """Print a batch, its latency and the throughput."""
    seconds = asyncio.run(batch_seconds(options))
    size = f"Start len: {options.start_len}, Output len: {options.output_len}"
    print(f"[INFO] Batch size: {options.batch_size}, {size}")
    print(f"[INFO] Latency: {seconds * 1000:.3f} ms")
    print(f"[INFO] Throughput: {options.batch_size / seconds:.3f} sentences / sec")


async def batch_seconds(options: argparse.Namespace) -> float:
    prompts = random_prompts(options, options.batch_size)
    batch = [engine_inputs(options, ids) for ids in prompts]
    async with contextlib.aclosing(connect(options)) as triton:
        if options.warm_up:
            print("[INFO] sending requests to warm up")
            await send(triton, batch, 2, together=False)
        times, together = options.request_parallelism, options.mode == "async"
        seconds = [await send(triton, batch, times, together) for _ in range(options.num_runs)]
    return fmean(seconds) / float(times)


async def send(triton: Client, batch: list[Inputs], times: int, together: bool) -> float:
    """Send a batch so many times; return the seconds that all of them took."""

    async def is_answered(inputs: Inputs) -> bool:
        return any([ids async for ids in engine_ids(triton, inputs)])

    began = time.perf_counter()
    done: list[bool] = []
    for requests in [batch * times] if together else [batch] * times:
        done += await asyncio.gather(*map(is_answered, requests))
    seconds = time.perf_counter() - began
    if not all(done):
        raise TritonMalformedEvent(f"{done.count(False)} of {len(done)} outputs are empty")
    return seconds


def gen_input_data(options: argparse.Namespace) -> None:
    """Write each sample's tensors, without the batch's dimension."""
    scalars = {
        "input_lengths": options.start_len,
        "request_output_len": options.output_len,
        "runtime_top_k": options.topk,
        "runtime_top_p": options.topp,
        "beam_search_diversity_rate": 0.0,
        "temperature": 1.0,
        "len_penalty": 1.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "beam_width": options.beam_width,
    }
    same = {name: {"content": [value], "shape": [1]} for name, value in scalars.items()}
    samples = [
        {"input_ids": {"content": ids, "shape": [len(ids)]}, **same}
        for ids in random_prompts(options, options.num_samples)
    ]
    options.output.write_text(json.dumps({"data": samples}), encoding="utf-8")
    print(f"{options.output}: {options.num_samples} samples")


def random_prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    vocabulary = options.vocab_size
    if options.tokenizer_dir is not None:
        without_torch()
        vocabulary = len(load_tokenizer(options.tokenizer_dir))
    random, shape = np.random.default_rng(options.random_seed), (count, options.start_len)
    prompts: list[list[int]] = random.integers(0, vocabulary, shape).tolist()
    return prompts


def engine_inputs(options: argparse.Namespace, ids: list[int], **given: Any) -> Inputs:
    """Return the engine's inputs for a prompt, shapes [1, tokens] and [1, 1]; more may be given."""
    values = {
        "input_lengths": np.int32(len(ids)),
        "request_output_len": np.int32(options.output_len),
        "runtime_top_k": np.int32(options.topk),
        "exclude_input_in_output": np.bool_(True),
        **given,
    }
    if options.topp > 0:
        values["runtime_top_p"] = np.float32(options.topp)
    if options.beam_width != 1:
        values["beam_width"] = np.int32(options.beam_width)
    scalars = {name: np.full((1, 1), value) for name, value in values.items()}
    return {"input_ids": np.array([ids], np.int32), **scalars}


def connect(options: argparse.Namespace) -> Client:
    """Return a client of --url, or of this machine's Triton, started with the same environment."""
    settings = read_settings()
    http = options.protocol == "http"
    address = options.url or f"localhost:{settings.http_port if http else settings.grpc_port}"
    if options.verbose:
        print(f"[INFO] {options.protocol} to tensorrt_llm at {address}", file=sys.stderr)
    return HttpClient(address, response_timeout=600) if http else GrpcClient(address)


async def engine_ids(triton: Client, inputs: Inputs) -> AsyncIterator[list[int]]:
    """Yield the new ids of a prompt as they come; of several beams, those of the first."""
    request_id = secrets.token_hex(8)
    if isinstance(triton, HttpClient):
        async for event in triton.events(ENGINE, request_id, inputs):
            yield decode_response(http_transport.flat_outputs(event), 0, None).ids
        return
    request = infer_request(ENGINE, request_id, inputs, ("output_ids", "sequence_length"))
    async for responses in triton.responses(request):
        for outputs in filter(None, map(flat_outputs, responses)):
            yield decode_response(outputs, 0, None).ids
