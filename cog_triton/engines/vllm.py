"""vLLM, by its ``AsyncLLM``: it schedules, batches and samples, and this module hands it token ids.

Its engine core and its workers are processes of their own. They are started from Triton's stub, which is
no Python interpreter: see ``vllm_processes``. When the engine core ends by itself, all requests end with
that as the reason, no more are taken, and who asked for it by ``on_death`` is told.

The arguments come from the same template variables as TensorRT-LLM's. Those of ``vllm_config``, a YAML
file, are handed over as they stand there and win.

What differs from the embedded engine on transformers, by vLLM's nature:

- A continuation's ``continued`` ids are part of its prompt: presence and frequency penalties do not count
  them, and its noise is that of another seed. Greedy continuations are the same.
- A seed gives the same text on the same machine as far as vLLM's kernels compute the same for batches of
  different sizes, which it does not promise.
- It takes temperatures up to 2 and penalties from -2 to 2; others are refused in its words.
- A bad word is looked for in the output alone: its beginning is not seen at the prompt's end.
- On CPUs, vLLM 0.32 applies an adapter to the requests without one in the same batch, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.arguments import (
    cpu_arguments,
    engine_arguments,
    loading_dtype,
    without_effect,
)
from cog_triton.engines.base import EngineError, GenerationRequest, Tokens, TopLogProbs, check_ids
from cog_triton.engines.event_loop import EventLoopEngine, Running
from cog_triton.engines.vllm_processes import prepare, renice
from cog_triton.engines.vllm_requests import (
    guide_arguments,
    next_tokens,
    prompt_log_probs,
    sampling_arguments,
)
from cog_triton.text import remote_code

logger = logging.getLogger(__name__)

# Measured with vLLM 0.32: its kernels for CPUs index the adapters by -1 where a request has none, and so
# take the last one.
NO_ADAPTERS = (
    "tensorrt_llm: lora_task_id is refused: vLLM's build for CPUs applies an adapter to the requests "
    "beside it in the batch as well"
)


class VllmEngine(EventLoopEngine):
    """See the module's docstring."""

    def __init__(self, arguments: Mapping[str, Any], adapters: Path | None = None) -> None:
        """Load a model.

        Args:
            arguments: of ``vllm.AsyncEngineArgs``.
            adapters: the directory of LoRA adapters.

        Raises:
            Exception: whatever vLLM raises while it loads.
        """
        self._adapters = LoraRequests(adapters)
        self._sound: set[int] = set()  # the adapters that could be loaded, by these numbers
        self._then: Callable[[], object] = lambda: None
        self._llm: Any = None
        super().__init__("vllm-engine")
        try:
            asyncio.run_coroutine_threadsafe(self._load(arguments), self._loop).result()
        except BaseException:
            self.close()
            raise
        llm: Any = self._llm
        config = llm.model_config
        self._context_length = int(config.max_model_len)
        self._vocabulary = int(config.get_vocab_size())
        features = {
            "allowed_token_ids",
            "embedding_bias",
            "min_p",
            "prompt_logprobs",
            "top_logprobs",
        }
        features |= {"guided_decoding"} if not config.skip_tokenizer_init else set()
        features |= {"lora_task_id"} if adapters is not None and not _on_cpu() else set()
        self.features = frozenset(features)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> VllmEngine:
        """Load the model that the tensorrt_llm model's parameters name.

        Raises:
            ValueError: a parameter is missing or not valid, vLLM does not know an argument, or the model
                needs its own code and that is not trusted.
            OSError: there is no such file or model.
            Exception: whatever else vLLM raises while it loads.
        """
        for name in without_effect(parameters, "vllm"):
            logger.warning("tensorrt_llm: %s has no effect with the engine vllm", name)
        arguments = loading_arguments(parameters)
        adapters = parameters.get("lora_prefetch_dir")
        if adapters and _on_cpu():
            logger.warning(NO_ADAPTERS)
        try:
            return cls(arguments, Path(adapters) if adapters else None)
        except TypeError as error:  # an argument that its release does not know
            raise ValueError(f"vLLM: {error}") from error
        except Exception as error:
            if arguments.get("trust_remote_code") or not remote_code.was_refused(error):
                raise
            text = remote_code.refusal("model", str(arguments["model"]))
            raise ValueError(text) from error

    @property
    def context_length(self) -> int:
        return self._context_length

    def on_death(self, then: Callable[[], object]) -> None:
        self._then = then

    def _prepared(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
        from vllm.sampling_params import (  # type: ignore[import-not-found, unused-ignore]
            RequestOutputKind,
            StructuredOutputsParams,
        )

        check_ids(request, self._vocabulary)
        arguments = sampling_arguments(request)
        if request.guide is not None:
            if request.continued:
                raise EngineError("an answer with a guide cannot be continued")
            arguments["structured_outputs"] = StructuredOutputsParams(
                **guide_arguments(request.guide)
            )
        try:
            sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        except Exception as error:
            if not _is_refusal(error):
                raise
            raise EngineError(str(error)) from error
        if request.sampling.bad_words:
            # Its own way is from text, by a tokenizer; this is where that would put the ids.
            sampling._bad_words_token_ids = [list(word) for word in request.sampling.bad_words]
        return sampling, self._adapter(request.lora_task_id)

    def _adapter(self, task_id: int) -> Any:
        if not task_id:
            return None
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]

        return self._adapters.of(task_id, LoRARequest)

    def _shut_down(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None  # else its end says so once more, when the interpreter is half gone

    # What follows runs on the loop.

    async def _load(self, arguments: Mapping[str, Any]) -> None:
        from vllm import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine.async_llm import (  # type: ignore[import-not-found, unused-ignore]
            AsyncLLM,
        )

        before = set(multiprocessing.active_children())
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        for process in set(multiprocessing.active_children()) - before:
            self._loop.add_reader(process.sentinel, self._ended, process)
            if process.pid is not None and _on_cpu():
                renice(process.pid)

    def _ended(self, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        self._stop(f"vLLM's process {process.name} has ended, with status {process.exitcode}")

    def _stop(self, reason: str) -> None:
        super()._stop(reason)
        self._then()

    async def _tokens(self, running: Running) -> AsyncIterator[Tokens]:
        request = running.request
        sampling, lora = running.sampling
        await self._check(lora, request.lora_task_id)
        prompt = {"prompt_token_ids": request.input_ids}
        outputs = self._llm.generate(prompt, sampling, request.key, lora_request=lora)
        told: list[TopLogProbs] = []
        async for output in outputs:
            tokens = next_tokens(output.outputs[0], request, finished=output.finished)
            if request.prompt_log_probs and not told and tokens.ids:
                told = prompt_log_probs(output.prompt_logprobs, request)
                tokens = replace(tokens, prompt_log_probs=told)
            if tokens.ids or tokens.finished:
                yield tokens

    async def _check(self, lora: Any, task_id: int) -> None:
        # One that it cannot load while it computes would end vLLM.
        if lora is None or lora.lora_int_id in self._sound:
            return
        try:
            await self._llm.add_lora(lora)
        except Exception as error:
            if self._is_fatal(error):
                raise
            raise EngineError(f"lora_task_id {task_id}: {error}") from error
        self._sound.add(lora.lora_int_id)

    def _abort(self, running: Running) -> None:
        # The task's end has vLLM forget it, but for one that was ended between two of its steps.
        self._loop.create_task(self._forget(running.request.key))

    async def _forget(self, key: str) -> None:
        with contextlib.suppress(Exception):  # it may have died meanwhile
            await self._llm.abort(key)

    def _is_fatal(self, error: Exception) -> bool:
        return _is_a(error, "EngineDeadError")

    def _failure(self, error: Exception, _: GenerationRequest) -> Tokens:
        text = str(error) or repr(error)
        return Tokens([], finished=True, error=text, refused=_is_refusal(error))


def loading_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of ``vllm.AsyncEngineArgs`` on this machine. Readies the process for vLLM.

    Raises:
        ValueError: a parameter is missing or not valid, or there is no interpreter to start.
        OSError: there is no such file or model.
    """
    arguments = engine_arguments(parameters)
    prepare()
    on_cpu = _on_cpu()
    if on_cpu:
        arguments = cpu_arguments(arguments)
    return arguments | loading_dtype(arguments, on_cpu=on_cpu)


def _on_cpu() -> bool:
    from vllm.platforms import (  # type: ignore[import-not-found, unused-ignore]
        current_platform,
    )

    return bool(current_platform.is_cpu())


def _is_refusal(error: Exception) -> bool:
    # Older releases raise ValueError alone.
    return isinstance(error, ValueError) or _is_a(error, "VLLMClientError")


def _is_a(error: Exception, name: str) -> bool:
    # By name, for the places of vLLM's classes in the package are not promised.
    return name in {base.__name__ for base in type(error).__mro__}
