"""What is compared: the same requests to the same model in the same batches, four ways.

``transformers`` is its continuous batching called directly, which streams nothing: the ceiling.
``engine`` is this package's engine in the same process, on the same loaded model. ``stack`` is
tritonserver with that engine, reached as a predictor reaches it. ``serve`` is ``transformers serve``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch
import yaml
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cog_triton.deployment import Deployment
from cog_triton.engines.attention import use_attention
from cog_triton.engines.base import GenerationRequest, SamplingParams
from cog_triton.engines.serving import Output, Serving
from cog_triton.engines.transformers import TransformersEngine, batching_config, load_model
from cog_triton.repository.variables import VARIABLES
from cog_triton.request import Request
from cog_triton.settings import read_settings
from tools.benchmark.engine_model import text_of
from tools.benchmark.http import Pool, events, parse_reply
from tools.benchmark.servers import free_port

NAMES = ("transformers", "engine", "stack", "serve")
TIMEOUT = 300.0
STOP_SECONDS = 10.0
GREEDY = SamplingParams(top_k=1)

Prompts = list[list[int]]
Arrival = tuple[float, int]  # seconds since the load began, and tokens of the stream by then
Stream = list[Arrival]


class ContestantError(Exception):
    """A contestant could not be started, or did not do its work."""


@dataclass(frozen=True)
class Setup:
    """What all contestants have in common.

    Attributes:
        model: directory of the model.
        model_repository: directory of the Triton models' templates.
        device: cpu or cuda.
        context: most tokens of a prompt and its output together.
        cache_tokens: tokens that the KV cache holds.
        attention: transformers' attention implementation; None is the engine's choice.
        cuda_graph, async_batching: of transformers' continuous batching.
        padding: intervals of queries and keys in tokens for CUDA graphs; 0 is transformers' choice.
    """

    model: Path
    model_repository: Path
    device: str
    context: int
    cache_tokens: int
    attention: str | None = None
    cuda_graph: bool = False
    async_batching: bool = False
    padding: tuple[int, int] = (0, 0)

    @property
    def engine_parameters(self) -> dict[str, str]:
        """Of the tensorrt_llm model, besides those that a deployment's settings give it."""
        parameters = {"max_tokens_in_paged_kv_cache": str(self.cache_tokens)}
        if self.attention is not None:
            parameters["attn_implementation"] = self.attention
        if self.cuda_graph:
            parameters["use_cuda_graph"] = "true"
        return parameters

    @property
    def ignored(self) -> list[str]:
        """Parameters that the tensorrt_llm model does not have: they change nothing in the stack."""
        return [name for name in self.engine_parameters if name not in VARIABLES["tensorrt_llm"]]

    @cached_property
    def loaded(self) -> Any:
        """The model, loaded once for all contestants in this process."""
        model = load_model(str(self.model), torch.device(self.device), "auto")
        if self.attention is not None:
            use_attention(model, self.attention)
        return model

    @cached_property
    def batching(self) -> ContinuousBatchingConfig:
        """The engine's configuration of continuous batching, which the others are given too."""
        return batching_config(self.loaded, self.context, self.engine_parameters)


class Contestant(ABC):
    """One way to run requests. To be closed, also after a ``run`` that failed."""

    _processes: tuple[psutil.Process, ...] = ()

    @abstractmethod
    def run(self, prompts: Prompts, output_tokens: int) -> list[Stream]:
        """Runs requests that start together, each to exactly so many tokens of greedy output.

        Raises:
            ContestantError: one failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what was started."""

    def cpu_seconds(self) -> float:
        """What this process and the contestant's own have used so far."""
        return time.process_time() + sum(map(_cpu_seconds, self._processes))


def start(name: str, setup: Setup, directory: Path, serve_python: str) -> Contestant:
    """Starts a contestant, warm but for its first request.

    Args:
        directory: an existing one for its files.
        serve_python: the Python that can run ``transformers serve``.

    Raises:
        ContestantError, CogTritonError: it could not be started.
    """
    if name == "transformers":
        return Transformers(setup)
    if name == "engine":
        return Engine(setup)
    if name == "stack":
        return Stack(setup, directory)
    return Serve(setup, directory, serve_python)


class Transformers(Contestant):
    """Transformers' continuous batching, as ``generate_batch`` uses it."""

    def __init__(self, setup: Setup) -> None:
        config = replace(
            setup.batching,
            scheduler_type="fifo",
            return_logprobs=False,
            use_cuda_graph=setup.cuda_graph,
            use_async_batching=setup.async_batching,
            q_padding_interval_size=setup.padding[0],
            kv_padding_interval_size=setup.padding[1],
        )
        self._manager = setup.loaded.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=setup.context), config
        )
        self._manager.warmup()
        self._manager.start()

    def run(self, prompts: Prompts, output_tokens: int) -> list[Stream]:
        start = time.perf_counter()
        names = [
            self._manager.add_request(prompt, max_new_tokens=output_tokens, record_timestamps=True)
            for prompt in prompts
        ]
        results: dict[str, Stream] = {}
        while len(results) < len(prompts):
            result = self._manager.get_result(timeout=TIMEOUT)
            if result is None or result.error is not None:
                raise ContestantError(f"transformers: {(result and result.error) or 'no answer'}")
            results[result.request_id] = [
                (at - start, count) for count, at in enumerate(result.timestamps, start=1)
            ]
        return [results[name] for name in names]

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)


class Engine(Contestant):
    """This package's engine, with what stands between it and Triton, in this process."""

    def __init__(self, setup: Setup) -> None:
        self._serving = Serving(
            TransformersEngine(setup.loaded, context_length=setup.context, batching=setup.batching)
        )

    def run(self, prompts: Prompts, output_tokens: int) -> list[Stream]:
        collections = [_Collection() for _ in prompts]
        start = time.perf_counter()
        for number, (prompt, collection) in enumerate(zip(prompts, collections, strict=True)):
            request = GenerationRequest("", prompt, output_tokens, sampling=GREEDY)
            self._serving.start(str(number), request, collection.add, streaming=True)
        return [collection.stream(start) for collection in collections]

    def close(self) -> None:
        self._serving.close()


@dataclass
class _Collection:
    """The outputs of one sequence, as they are delivered."""

    arrivals: Stream = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def add(self, output: Output) -> None:
        self.arrivals.append((time.perf_counter(), output.generated))
        self.error = output.error
        if output.final:
            self.done.set()

    def stream(self, start: float) -> Stream:
        if not self.done.wait(TIMEOUT) or self.error is not None:
            raise ContestantError(f"engine: {self.error or 'no answer'}")
        return [(at - start, count) for at, count in self.arrivals]


class Stack(Contestant):
    """Tritonserver with the ensemble and the engine, through ``generate()`` over gRPC."""

    def __init__(self, setup: Setup, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        before = psutil.Process().children()
        settings = read_settings(stack_environment(setup, directory / "stack.yaml"))
        self._deployment = self._loop.run_until_complete(Deployment.start(settings))
        self._processes = tuple(p for p in psutil.Process().children() if p not in before)

    def run(self, prompts: Prompts, output_tokens: int) -> list[Stream]:
        start = time.perf_counter()
        requests = [self._stream(prompt, output_tokens, start) for prompt in prompts]
        return self._loop.run_until_complete(_all(requests))

    async def _stream(self, prompt: list[int], output_tokens: int, start: float) -> Stream:
        request = Request(
            prompt=text_of(prompt), seed=0, max_tokens=output_tokens, temperature=0.0, end_id=-1
        )
        arrivals: Stream = []
        async for chunk in self._deployment.generate(request):
            arrivals.append((time.perf_counter() - start, chunk.output_tokens))
        return arrivals

    def close(self) -> None:
        self._loop.run_until_complete(self._deployment.stop())
        self._loop.close()


def stack_environment(setup: Setup, config: Path) -> dict[str, str]:
    """Settings of the stack, after its configuration file has been written."""
    known = {
        name: value for name, value in setup.engine_parameters.items() if name not in setup.ignored
    }
    config.write_text(yaml.safe_dump({"server": {"tensorrt_llm": {"args": known}}}))
    return {
        "MODEL": str(setup.model),
        "TRITON_MODEL_REPO": str(setup.model_repository),
        "ENGINE": "transformers",
        "DEVICE": setup.device,
        "MAX_SEQUENCE_LENGTH": str(setup.context),
        "COG_TRITON_CONFIG": str(config),
        **dict.fromkeys(("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"), "0"),
    }


class Serve(Contestant):
    """``transformers serve``, through /v1/completions."""

    def __init__(self, setup: Setup, directory: Path, python: str) -> None:
        self._model = str(setup.model)
        self._loop = asyncio.new_event_loop()
        port = free_port()
        self._log = directory / "serve.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                serve_command(setup, python, port),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends this one
            )
        self._processes = (psutil.Process(self._server.pid),)
        self._pool = Pool(f"http://127.0.0.1:{port}")
        try:
            self._wait_until_ready(f"http://127.0.0.1:{port}/health")
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Prompts, output_tokens: int) -> list[Stream]:
        messages = [self._message(prompt, output_tokens) for prompt in prompts]
        start = time.perf_counter()
        return self._loop.run_until_complete(
            _all(self._stream(message, start) for message in messages)
        )

    def close(self) -> None:
        self._pool.close()
        self._server.terminate()
        try:
            self._server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._loop.close()

    def _message(self, prompt: list[int], output_tokens: int) -> bytes:
        # The first request's generation configuration stays in force for the batching.
        generation = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": output_tokens}
        body = {
            "model": self._model,
            "prompt": text_of(prompt),
            "stream": True,
            "max_tokens": output_tokens,
            "generation_config": json.dumps(generation),
        }
        return self._pool.message("/v1/completions", {}, json.dumps(body).encode())

    async def _stream(self, message: bytes, start: float) -> Stream:
        reply = parse_reply(await self._pool.send(message))
        if reply.status != 200:
            raise ContestantError(f"serve: status {reply.status}: {reply.text[:500]}")
        return completion_stream((event.at - start, event.data) for event in events(reply.body))

    def _wait_until_ready(self, url: str) -> None:
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end and self._server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
                return
            time.sleep(0.2)
        log = self._log.read_text(errors="replace")[-2000:]
        raise ContestantError(f"transformers serve did not become ready:\n{log}")


def serve_command(setup: Setup, python: str, port: int) -> list[str]:
    """The command line of ``transformers serve`` with the same batching as the others'."""
    batching = setup.batching
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--device": setup.device,
        "--log-level": "error",
        "--attn-implementation": setup.attention,
        "--cb-block-size": batching.page_size,
        "--cb-num-blocks": batching.num_blocks,
        "--cb-max-batch-tokens": batching.max_batch_tokens,
    }
    given = [str(part) for option in options.items() if option[1] is not None for part in option]
    graph = "--cb-use-cuda-graph" if setup.cuda_graph else "--no-cb-use-cuda-graph"
    program = [python, "-m", "transformers.cli.transformers", "serve", str(setup.model)]
    return [*program, "--continuous-batching", graph, *given]


def why_no_serve(python: str) -> str | None:
    """Why this Python cannot run ``transformers serve``; None if it can."""
    code = (
        "from transformers.utils import import_utils as u\n"
        "if not (u.is_serve_available() and u.is_accelerate_available()):\n"
        "    raise SystemExit('the packages of transformers[serving] are not installed')"
    )
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=TIMEOUT
        )
    except OSError as error:
        return str(error)
    return None if found.returncode == 0 else found.stderr.strip().rpartition("\n")[2]


def completion_stream(parts: Iterable[tuple[float, str]]) -> Stream:
    """The stream that the events of a completion make: one with text is one token.

    Raises:
        ContestantError: one of them is an error, or the count at the end is another.
    """
    stream: Stream = []
    for at, data in parts:
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise ContestantError(f"serve: {event['error']}")
        if event["choices"][0]["text"]:
            stream.append((at, len(stream) + 1))
        usage = event.get("usage")
        if usage and usage["completion_tokens"] != len(stream):
            made = usage["completion_tokens"]
            raise ContestantError(f"serve: {len(stream)} texts for {made} tokens")
    return stream


async def _all(requests: Iterable[Awaitable[Stream]]) -> list[Stream]:
    return list(await asyncio.wait_for(asyncio.gather(*requests), TIMEOUT))


def _cpu_seconds(root: psutil.Process) -> float:
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
