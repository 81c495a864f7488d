"""TensorRT-LLM by its Python LLM API, 1.0 and later; from 1.3 on it has no other.

TensorRT-LLM schedules, batches and samples; this module hands it token ids and takes token ids. One
thread runs an event loop on which everything of the LLM happens after its start: an output's queue
belongs to the loop that it was made on, and the LLM's sockets to one thread at a time.

The arguments of the LLM come from the same template variables as the C++ backend's configuration.
Those of ``llm_api_config``, a YAML file, are handed over as they stand there and win.

All of this has run on a fake of the LLM alone, which keeps to the interface that TensorRT-LLM promises
for 1.x, and never on the real one. So everything is unchecked there, and first of all:

- start and end: how long loading takes, that the LLM's worker processes can be started from Triton's
  Python stub, with one GPU and, by MPI, with several, and that ``shutdown`` ends them;
- that the sections of the YAML file become the objects that the LLM wants (``speculative_config``
  above all), by the library's own function, and that a scheduling policy is accepted as text;
- what the samplers honour, see ``llm_api_sampler``;
- that ``tensorrt_llm.executor.request.LoRARequest`` and the LLM's ``lora_config`` are what 1.0 to 1.3
  have by these names, that an adapter changes the requests that name it alone, and that one which
  cannot be loaded fails its requests and not the LLM;
- that log probabilities are those of the unchanged distribution, and that the one of the chosen token
  is always among them: a request that asked for them fails if it is not;
- whether the end token is part of the output: some samplers leave it out, so it is added then;
- the texts of its errors, by which clients tell a long prompt from other failures;
- that a dead worker process shows. If no output's iterator raises, requests wait until their clients
  lose patience, and the next request finds the LLM shut down;
- speed, of which the loop's thread may be the limit; a ``stream_interval`` above 1 eases that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.arguments import (
    context_length,
    llm_arguments,
    merged,
    read_arguments,
    without_effect,
)
from cog_triton.engines.base import EngineError, GenerationRequest, Tokens
from cog_triton.engines.event_loop import EventLoopEngine, Running
from cog_triton.engines.llm_api_requests import (
    error_text,
    is_fatal,
    next_tokens,
    sampling_arguments,
)
from cog_triton.engines.llm_api_sampler import Sampler, sampler_of, sampling_defaults
from cog_triton.text import remote_code

logger = logging.getLogger(__name__)


class TensorrtLlmEngine(EventLoopEngine):
    """See the module's docstring."""

    def __init__(
        self,
        llm: Any,
        sampling_params: Callable[..., Any],
        *,
        context_length: int,
        sampler: Sampler,
        adapters: Path | None = None,
    ) -> None:
        """Take over a loaded LLM.

        Args:
            llm: a loaded ``tensorrt_llm.LLM``; the engine shuts it down.
            sampling_params: ``tensorrt_llm.SamplingParams``.
            context_length: most tokens that prompt and output may have together.
            sampler: what the LLM samples with; requests for what it would ignore are refused.
            adapters: the directory of LoRA adapters.
        """
        self.features = frozenset() if adapters is None else frozenset({"lora_task_id"})
        self._adapters = LoraRequests(adapters)
        self._llm = llm
        self._sampler = sampler
        self._sampling_params = sampling_params
        self._context_length = context_length
        super().__init__("llm-api-engine")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> TensorrtLlmEngine:
        """Load the model that the tensorrt_llm model's parameters name.

        Raises:
            ValueError: a parameter is missing or not valid, the LLM does not know an argument, or the
                model needs its own code and that is not trusted.
            OSError: there is no such file or model.
            Exception: whatever else the LLM raises while it loads.
        """
        import tensorrt_llm  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from tensorrt_llm.llmapi import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            KvCacheConfig,
            llm_args,
        )

        for name in without_effect(parameters, "llmapi"):
            logger.warning("tensorrt_llm: %s has no effect with the engine llmapi", name)
        arguments = llm_arguments(parameters)
        if path := parameters.get("llm_api_config"):
            convert = getattr(llm_args, "update_llm_args_with_extra_dict", None)
            arguments = merged(
                arguments, read_arguments(Path(path), "llm_api_config"), path, convert
            )
        if "model" not in arguments:
            raise ValueError("tensorrt_llm: model: the engine llmapi needs it")
        kinds = {"kv_cache_config": KvCacheConfig}
        if hasattr(llm_args, "LoraConfig"):  # in the module that uses it; its own has changed
            kinds["lora_config"] = llm_args.LoraConfig
        for name, kind in kinds.items():
            if isinstance(section := arguments.get(name), dict):
                arguments[name] = kind(**section)
        known = getattr(getattr(llm_args, "TorchLlmArgs", None), "model_fields", {})
        arguments = {**sampling_defaults(known, arguments), **arguments}
        sampler = sampler_of(str(getattr(tensorrt_llm, "__version__", "unknown")), arguments)
        if sampler.warning is not None:
            logger.warning(sampler.warning)
        llm = _load(tensorrt_llm.LLM, arguments)
        try:
            length = context_length(arguments, llm)
            adapters = parameters.get("lora_prefetch_dir")
            return cls(
                llm,
                tensorrt_llm.SamplingParams,
                context_length=length,
                sampler=sampler,
                adapters=Path(adapters) if adapters else None,
            )
        except BaseException:
            llm.shutdown()
            raise

    @property
    def context_length(self) -> int:
        return self._context_length

    def _prepared(self, request: GenerationRequest) -> Any:
        self._sampler.check(request.sampling)
        try:
            sampling = self._sampling_params(**sampling_arguments(request))
            return sampling, self._adapter(request.lora_task_id)
        except (ValueError, TypeError) as error:
            raise EngineError(str(error)) from error

    def _adapter(self, task_id: int) -> Any:
        if not task_id:
            return None
        from tensorrt_llm.executor.request import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            LoRARequest,
        )

        return self._adapters.of(task_id, LoRARequest)

    async def _tokens(self, running: Running) -> AsyncIterator[Tokens]:
        request = running.request
        sampling, lora = running.sampling
        running.output = self._llm.generate_async(
            inputs=request.input_ids, sampling_params=sampling, lora_request=lora, streaming=True
        )
        async for update in running.output:
            yield next_tokens(update.outputs[0], request, running.last_id, finished=update.finished)

    def _abort(self, running: Running) -> None:
        if running.output is not None and not running.output.finished:
            running.output.abort()

    def _is_fatal(self, error: Exception) -> bool:
        return is_fatal(error)

    def _failure(self, error: Exception, request: GenerationRequest) -> Tokens:
        return Tokens([], finished=True, error=error_text(error, len(request.input_ids)))

    def _shut_down(self) -> None:
        self._llm.shutdown()


def _load(llm: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return llm(**arguments)
    except Exception as error:
        if arguments.get("trust_remote_code") or not remote_code.was_refused(error):
            raise
        raise ValueError(remote_code.refusal("model", str(arguments["model"]))) from error
