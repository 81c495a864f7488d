"""vLLM, by its ``AsyncLLM``.

Its engine core and its workers are processes of their own; see ``interpreter``. When
one of them ends by itself, all requests end with that reason, and no more are taken. docs/gpu.md lists the
differences from the other engines. A seed gives the same text only if vLLM computes the same in batches of
other sizes, which it does not guarantee.
"""

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import Mapping
from typing import Any

from cog_triton.engines import library, vllm_resume
from cog_triton.engines.base import (
    EngineError,
    GenerationRequest,
    Step,
    TokenLogProb,
    check_ids,
)
from cog_triton.engines.event_loop import Steps
from cog_triton.engines.interpreter import renice
from cog_triton.engines.library_arguments import Arguments
from cog_triton.engines.vllm_arguments import (
    client_arguments,
    engine_config,
    guide_arguments,
    is_on_cpu,
    loading_arguments,
    sampling_arguments,
)

logger = logging.getLogger(__name__)

_FEATURES = frozenset(
    ("allowed_token_ids", "embedding_bias", "min_p", "prompt_logprobs", "top_logprobs")
)


class VllmEngine(library.LibraryEngine):
    title = "vLLM"
    lora_request = "vllm.lora.request:LoRARequest"
    # Older releases raise only ValueError.
    refusals = frozenset({"ValueError", "VLLMClientError"})
    deaths = frozenset({"EngineDeadError"})

    def __init__(self, parameters: Mapping[str, str]) -> None:
        # The numbers of the adapters that vLLM has loaded.
        self._loaded: set[int] = set()
        self._shared = parameters.get("shared")
        # Whether answers can be continued; see ``vllm_resume``.
        self._resumes = False
        super().__init__(parameters, loading_arguments(parameters))

    def load(self, arguments: Arguments) -> None:
        has_adapters = bool(arguments.get("enable_lora"))
        if has_adapters and is_on_cpu():
            # Measured with vLLM 0.32.
            logger.warning(
                "tensorrt_llm: lora_task_id is refused: vLLM's build for CPUs applies an adapter to the "
                "requests beside it in the batch as well"
            )
            has_adapters = False
        try:
            asyncio.run_coroutine_threadsafe(self._load(arguments), self._loop).result()
        except TypeError as error:
            # The installed release does not know an argument.
            raise ValueError(f"vLLM: {error}") from error
        config = self._llm.model_config
        self.context_length = int(config.max_model_len)
        self._vocabulary = int(config.get_vocab_size())
        features = set(_FEATURES)
        if not config.skip_tokenizer_init:
            features.add("guided_decoding")
        if has_adapters:
            features.add("lora_task_id")
        self.features = frozenset(features)

    def sampling_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        check_ids(request, self._vocabulary)
        arguments = sampling_arguments(request)
        if request.guide is not None:
            guide = StructuredOutputsParams(**guide_arguments(request.guide))
            arguments["structured_outputs"] = guide
        sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        if request.sampling.bad_words:
            # Its argument takes texts, whose ids its tokenizer would put here.
            sampling._bad_words_token_ids = [list(word) for word in request.sampling.bad_words]
        if request.continued and self._resumes:
            vllm_resume.deliver(sampling, request.input_ids[-request.continued :])
        elif request.continued and request.guide is not None:
            raise EngineError(
                "an answer with guided_decoding_guide cannot be continued with this release of vLLM"
            )
        return sampling

    # The rest runs on the loop.

    async def _load(self, arguments: Arguments) -> None:
        """Start vLLM with its processes, and watch these for their end."""
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        earlier_processes = set(multiprocessing.active_children())
        config = engine_config(arguments)
        problem = vllm_resume.problem()
        self._resumes = not problem
        if self._resumes:
            config.resuming = vllm_resume.install()
        else:
            logger.warning(
                "tensorrt_llm: this release of vLLM has different internals, so after a restart, answers "
                "with structured output fail, and others lose their seed and penalties: %s",
                problem,
            )
        if self._shared and config.parallel_config.data_parallel_size > 1:
            raise ValueError("tensorrt_llm_instance_count must be 1 with data_parallel_size")
        self._llm = AsyncLLM(
            config,
            Executor.get_class(config),
            log_stats=False,
            log_requests=False,
            **(client_arguments(self._shared) if self._shared else {}),
        )
        for process in set(multiprocessing.active_children()) - earlier_processes:
            self._loop.add_reader(process.sentinel, self._process_ended, process)
            if process.pid is not None and is_on_cpu():
                renice(process.pid)

    def _process_ended(self, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        self.die(f"vLLM's process {process.name} has ended, with status {process.exitcode}")

    async def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        """Deliver the steps as vLLM puts them in its queue, and yield the last one.

        The queue's ``put`` is replaced: vLLM's own generator would cost a task's turn for each token.
        """
        last_step = self._loop.create_future()

        def put(output: Any) -> None:
            try:
                if isinstance(output, Exception):
                    raise output
                step = self._read(request, output)
                if step.finished:
                    last_step.set_result(step)
                elif step.ids:
                    self.deliver(request.key, step)
            except Exception as error:
                if not last_step.done():
                    last_step.set_exception(error)

        try:
            if adapter is not None:
                await self._load_adapter(adapter, request)
            queue = await self._llm.add_request(
                request.key,
                {"prompt_token_ids": request.input_ids},
                sampling,
                lora_request=adapter,
            )
            queue.put = put
            if queue.output is not None:
                put(queue.output)
            yield await last_step
        finally:
            if not last_step.done() or last_step.cancelled() or last_step.exception():
                # vLLM drops a request whose task is cancelled, but not between two steps of the task.
                # It raises if it has died meanwhile.
                with contextlib.suppress(Exception):
                    await self._llm.abort(request.key)

    def _read(self, request: GenerationRequest, output: Any) -> Step:
        """Return an output of vLLM's as a step."""
        new = output.outputs[0]
        end = str(new.finish_reason) if output.finished else None
        step = self.step(request, list(new.token_ids), new.logprobs, end)
        if request.prompt_log_probs and output.prompt_logprobs:
            step.prompt_log_probs = prompt_log_probs(output.prompt_logprobs, request)
        return step

    async def _load_adapter(self, adapter: Any, request: GenerationRequest) -> None:
        """Have vLLM load an adapter before a request computes with it: a failure then would end vLLM."""
        if adapter.lora_int_id in self._loaded:
            return
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:
            if self.ends_engine(error):
                raise
            kind = type(self.request_error(error, request))
            raise kind(f"lora_task_id {request.lora_task_id}: {error}") from error
        self._loaded.add(adapter.lora_int_id)


def prompt_log_probs(entries: Any, request: GenerationRequest) -> list[TokenLogProb]:
    """Return the log probabilities of the prompt's tokens.

    Args:
        entries: vLLM's, one for each token; the first is None.
    """
    ids = request.input_ids
    rest = library.log_probs(ids[1:], entries[1:], request.top_log_probs)
    return [TokenLogProb(ids[0], 0.0), *rest]
