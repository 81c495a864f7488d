"""vLLM, by its ``AsyncLLM``.

Its engine core and its workers are processes of their own; see ``interpreter``. When the engine core ends
by itself, all requests end with that reason, no more are taken, and ``on_death``'s function is called.

What differs from the embedded engine on transformers, by vLLM's nature:

- A continuation's ``continued`` ids are part of its prompt: presence and frequency penalties do not count
  them, and its noise is that of another seed. Greedy continuations are the same.
- A seed gives the same text on the same machine as far as vLLM's kernels compute the same for batches of
  different sizes, which it does not promise.
- It takes temperatures up to 2 and penalties from -2 to 2; others are refused in its words.
- A bad word is looked for only in the output: its beginning is not seen at the prompt's end.
- On CPUs, vLLM 0.32 applies an adapter to the requests without one in the same batch, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cog_triton.engines import library
from cog_triton.engines.base import EngineError, GenerationRequest, Steps, TokenLogProb, check_ids
from cog_triton.engines.interpreter import prepare, renice
from cog_triton.request.request import Guide, GuideKind

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30  # holds 8,192 tokens of an 8 B model
SEEDS = 2**63  # of an int64 that is not negative: others end vLLM's runner

# Measured with vLLM 0.32: its kernels for CPUs index the adapters by -1 where a request has none, and so
# take the last one.
NO_ADAPTERS = (
    "tensorrt_llm: lora_task_id is refused: vLLM's build for CPUs applies an adapter to the requests "
    "beside it in the batch as well"
)
_FEATURES = {"allowed_token_ids", "embedding_bias", "min_p", "prompt_logprobs", "top_logprobs"}
_GUIDES = {  # a guide's kind → the argument of vLLM's StructuredOutputsParams
    GuideKind.JSON_SCHEMA: "json",
    GuideKind.REGEX: "regex",
    GuideKind.GRAMMAR: "grammar",
    GuideKind.STRUCTURAL_TAG: "structural_tag",
}


class VllmEngine(library.LibraryEngine):
    """See the module's docstring."""

    title = "vLLM"
    lora_request = "vllm.lora.request:LoRARequest"

    def __init__(self, parameters: Mapping[str, str]) -> None:
        """Load the model that the tensorrt_llm model's parameters name.

        Raises:
            ValueError: a parameter is missing or not valid, vLLM does not know an argument, or the model
                needs its own code and that is not trusted.
            OSError: there is no such file or model.
            Exception: whatever else vLLM raises while it loads.
        """
        arguments = loading_arguments(parameters)
        adapters = "lora_prefetch_dir" in parameters
        if adapters and _on_cpu():
            logger.warning(NO_ADAPTERS)
        self._loadable: set[int] = set()  # numbers of the adapters that vLLM has loaded
        self._then: Callable[[], object] = lambda: None
        self._llm: Any = None
        super().__init__(parameters)
        try:
            with library.explained(arguments):
                asyncio.run_coroutine_threadsafe(self._load(arguments), self._loop).result()
        except BaseException as error:
            self.close()
            if isinstance(error, TypeError):  # an argument that its release does not know
                raise ValueError(f"vLLM: {error}") from error
            raise
        llm: Any = self._llm
        config = llm.model_config
        self.context_length = int(config.max_model_len)
        self._vocabulary = int(config.get_vocab_size())
        guided = set() if config.skip_tokenizer_init else {"guided_decoding"}
        adapted = {"lora_task_id"} if adapters and not _on_cpu() else set()
        self.features = frozenset(_FEATURES | guided | adapted)

    def on_death(self, then: Callable[[], object]) -> None:
        self._then = then

    def close(self) -> None:
        super().close()
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None  # else it shuts down once more, when the interpreter is half gone

    def die(self, reason: str) -> None:
        super().die(reason)
        self._then()

    def sampling_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        check_ids(request, self._vocabulary)
        arguments = sampling_arguments(request)
        if request.guide is not None:
            if request.continued:
                raise EngineError("an answer with a guide cannot be continued")
            guide = StructuredOutputsParams(**guide_arguments(request.guide))
            arguments["structured_outputs"] = guide
        sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        if request.sampling.bad_words:
            # Its own way is from text, by a tokenizer; this is where that would put the ids.
            sampling._bad_words_token_ids = [list(word) for word in request.sampling.bad_words]
        return sampling

    def is_refusal(self, error: Exception) -> bool:
        # Older releases raise only ValueError.
        return isinstance(error, ValueError) or _is_a(error, "VLLMClientError")

    def is_fatal(self, error: Exception) -> bool:
        return _is_a(error, "EngineDeadError")

    # What follows runs on the loop.

    async def _load(self, arguments: Mapping[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        before = set(multiprocessing.active_children())
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        for process in set(multiprocessing.active_children()) - before:
            self._loop.add_reader(process.sentinel, self._ended, process)
            if process.pid is not None and _on_cpu():
                renice(process.pid)

    def _ended(self, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        self.die(f"vLLM's process {process.name} has ended, with status {process.exitcode}")

    async def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        prompt, finished = {"prompt_token_ids": request.input_ids}, False
        wants_prompt = request.prompt_log_probs
        try:
            await self._load_adapter(adapter, request.lora_task_id)
            outputs = self._llm.generate(prompt, sampling, request.key, lora_request=adapter)
            async for output in outputs:
                new, finished = output.outputs[0], output.finished
                end = str(new.finish_reason) if finished else None
                step = self.step(request, list(new.token_ids), new.logprobs, end)
                if wants_prompt and step.ids:
                    wants_prompt = False
                    of_prompt = prompt_log_probs(output.prompt_logprobs, request)
                    step = replace(step, prompt_log_probs=of_prompt)
                if step.ids or finished:
                    yield step
        finally:
            if not finished:
                # vLLM drops a request whose task is cancelled, but not between two of the task's steps.
                with contextlib.suppress(Exception):  # it may have died meanwhile
                    await self._llm.abort(request.key)

    async def _load_adapter(self, adapter: Any, task_id: int) -> None:
        # One that it cannot load while it computes would end vLLM.
        if adapter is None or adapter.lora_int_id in self._loadable:
            return
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:
            if self.is_fatal(error):
                raise
            raise EngineError(f"lora_task_id {task_id}: {error}") from error
        self._loadable.add(adapter.lora_int_id)


def loading_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``vllm.AsyncEngineArgs`` on this machine. Readies the process for vLLM.

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


def engine_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``vllm.AsyncEngineArgs`` on any machine; see ``loading_arguments``."""
    arguments = {
        "disable_log_stats": True,
        # Else the model's own defaults of sampling and of end tokens would be added to each request's.
        "generation_config": "vllm",
        **library.table_arguments(parameters, "vllm"),
    }
    if backend := parameters.get("guided_decoding_backend"):
        # Some models write white space until max_tokens. The other backends have no such argument.
        compact = {"disable_any_whitespace": True} if backend in ("xgrammar", "guidance") else {}
        arguments["structured_outputs_config"] = {"backend": backend, **compact}
    return library.with_file(arguments, parameters, "vllm")


def loading_dtype(arguments: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return the data type of a model that vLLM would not find by itself.

    It halves float32 weights, which stay as they are here; but on GPUs it applies adapters only in half
    precision.

    Raises:
        ValueError: adapters are to be applied in float32 on a GPU.
        OSError: the model's configuration cannot be read.
    """
    if arguments.get("enable_lora") and not on_cpu:
        if arguments.get("dtype") in ("float32", "float"):
            raise ValueError(
                "tensorrt_llm: dtype float32 does not go with lora_prefetch_dir: vLLM applies adapters on "
                "a GPU in float16 or bfloat16 (auto takes one of them)"
            )
        return {}
    if "dtype" in arguments:
        return {}
    config = library.model_config(arguments)
    saved = config.get("dtype") or config.get("torch_dtype")
    return {"dtype": "float32"} if str(saved).endswith("float32") else {}


def cpu_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for CPUs, where vLLM would take most of the memory and minutes to compile."""
    cache = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    sized = "gpu_memory_utilization" in arguments
    return {"enforce_eager": True, **({} if sized else cache), **arguments}


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams`` for a request, but for bad words and guides."""
    # The request's end token is the one that counts.
    arguments: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    arguments |= library.sampling_arguments(request)
    if not request.sampling.greedy:
        arguments |= {"min_p": request.sampling.min_p} if request.sampling.min_p else {}
        # Its noise begins anew with a request: a continuation is not to repeat that of the beginning.
        arguments["seed"] = (request.sampling.seed + request.continued) % SEEDS
    if request.end_id is not None:
        arguments["stop_token_ids"] = [request.end_id]
    if request.logit_bias:
        arguments["logit_bias"] = dict(request.logit_bias)
    if request.allowed_ids:
        arguments["allowed_token_ids"] = list(request.allowed_ids)
    if request.return_log_probs:
        arguments["logprobs"] = request.top_log_probs  # with 0 only of the chosen tokens
    if request.prompt_log_probs:
        arguments["prompt_logprobs"] = request.top_log_probs
    return arguments


def guide_arguments(guide: Guide) -> dict[str, Any]:
    """Return the arguments of vLLM's ``StructuredOutputsParams``."""
    if guide.kind is GuideKind.JSON:
        return {"json_object": True}
    return {_GUIDES[guide.kind]: guide.text}


def prompt_log_probs(entries: Any, request: GenerationRequest) -> list[TokenLogProb]:
    """Return those of the prompt's tokens. ``entries`` are vLLM's, None at the first place."""
    ids = request.input_ids
    rest = library.log_probs(ids[1:], entries[1:], request.top_log_probs)
    return [TokenLogProb(ids[0], 0.0), *rest]


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _is_a(error: Exception, name: str) -> bool:
    # By name, for the places of vLLM's classes in the package are not promised.
    return name in {base.__name__ for base in type(error).__mro__}
