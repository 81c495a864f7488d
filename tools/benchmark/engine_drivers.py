"""Targets in the load generator's own process: no Triton, no network."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tools.benchmark.driver import Answer, Context, Driver, Failed, engine_inputs
from tools.benchmark.load import Planned

# A field of transformers' ContinuousBatchingConfig that may stand beside the engine's parameters.
ASYNC_BATCHING = "use_async_batching"


class InProcess(Driver):
    """A driver that runs the model in its own process."""

    @property
    def own_cpu_s(self) -> float:
        return time.thread_time()  # the engine's threads are what is measured


class RawEngine(InProcess):
    """The engine in this very process: no Triton, no network."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from cog_triton.engines.base import create_engine
        from cog_triton.engines.serving import Serving

        self._serving = Serving(
            create_engine(context.engine), int(context.engine.get("max_tokens_per_response", 0))
        )
        self._loop = asyncio.get_running_loop()

    def prepare(self, request: Planned) -> Any:
        from cog_triton.models.tensors import generation_requests

        inputs = engine_inputs(request, self._context)
        return generation_requests(inputs)[0]

    async def send(self, prepared: Any) -> list[tuple[float, Any]]:
        done: asyncio.Future[None] = self._loop.create_future()
        outputs: list[tuple[float, Any]] = []

        def take(output: Any) -> None:  # on the delivery thread
            outputs.append((time.perf_counter(), output))
            if output.final:
                self._loop.call_soon_threadsafe(partial(_set, done))

        stop = self._serving.start(secrets.token_hex(8), prepared, take, streaming=True)
        try:
            await done
        except asyncio.CancelledError:
            stop()
            raise
        return outputs

    def parse(self, pieces: list[tuple[float, Any]]) -> Answer:
        answer = Answer()
        for at, output in pieces:
            if output.error is not None:
                raise Failed(output.error)
            if output.ids:
                answer.add(at, len(output.ids))
        return answer

    async def close(self) -> None:
        await asyncio.to_thread(self._serving.close)


class Transformers(InProcess):
    """Transformers' continuous batching, as its ``generate_batch`` uses it: nothing is streamed.

    The times of the tokens are those that it records itself.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from transformers import GenerationConfig

        model, context_length, batching = load_for_batching(context.engine)
        temperature = context.temperature
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        self._manager = model.init_continuous_batching(
            GenerationConfig(
                **{"do_sample": False, **sampling}, eos_token_id=-1, max_new_tokens=context_length
            ),
            replace(
                batching,
                scheduler_type="fifo",
                return_logprobs=False,
                use_async_batching=context.engine.get(ASYNC_BATCHING) == "true",
            ),
        )
        self._manager.warmup()
        self._manager.start()
        self._loop = asyncio.get_running_loop()

    def prepare(self, request: Planned) -> tuple[list[int], int]:
        return self._context.vocabulary.encode(request.prompt), request.output_tokens

    async def send(self, prepared: tuple[list[int], int]) -> list[Any]:
        ids, output_tokens = prepared
        done: asyncio.Future[Any] = self._loop.create_future()
        name = secrets.token_hex(8)
        self._manager.register_result_handler(name, partial(_set, done))
        self._manager.add_request(
            ids, request_id=name, max_new_tokens=output_tokens, record_timestamps=True
        )
        return [await done]

    def parse(self, pieces: list[Any]) -> Answer:
        [result] = pieces
        if result.error is not None:
            raise Failed(str(result.error))
        answer = Answer()
        for at in result.timestamps:
            answer.add(at, 1)
        return answer

    async def close(self) -> None:
        await asyncio.to_thread(self._manager.stop, block=True, hard_stop=True)


class Vllm(InProcess):
    """vLLM's AsyncLLM with the engine's arguments, and a stream of new tokens from each request."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from cog_triton.engines.vllm import loading_arguments

        arguments = loading_arguments(context.engine)
        from vllm import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine.async_llm import (  # type: ignore[import-not-found, unused-ignore]
            AsyncLLM,
        )

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def prepare(self, request: Planned) -> tuple[dict[str, list[int]], Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import (  # type: ignore[import-not-found, unused-ignore]
            RequestOutputKind,
        )

        sampling = SamplingParams(
            max_tokens=request.output_tokens,
            temperature=self._context.temperature,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        return {"prompt_token_ids": self._context.vocabulary.encode(request.prompt)}, sampling

    async def send(self, prepared: tuple[dict[str, list[int]], Any]) -> list[tuple[float, int]]:
        outputs = self._llm.generate(*prepared, request_id=secrets.token_hex(8))
        return [(time.perf_counter(), len(output.outputs[0].token_ids)) async for output in outputs]

    def parse(self, pieces: list[tuple[float, int]]) -> Answer:
        answer = Answer()
        for at, tokens in pieces:
            if tokens:
                answer.add(at, tokens)
        return answer

    async def close(self) -> None:
        # Not in a thread: its task on this loop would see the engine end, and say so.
        self._llm.shutdown()
        del self._llm  # else it is shut down once more, when the interpreter is half gone


def load_for_batching(parameters: Mapping[str, str]) -> tuple[Any, int, Any]:
    """Load the transformers engine's model, context length and batching."""
    from cog_triton.engines.transformers import TransformersEngine

    loaded: list[tuple[Any, int, Any]] = []

    class NotStarted(TransformersEngine):
        def __init__(self, model: Any, *, context_length: int, batching: Any, **_: Any) -> None:
            loaded.append((model, context_length, batching))

    NotStarted.from_parameters(parameters)
    return loaded[0]


def _set(done: asyncio.Future[Any], result: object = None) -> None:
    if not done.done():
        done.set_result(result)
