"""vLLM, by its ``AsyncLLM``.

Its engine core and its workers are processes of their own; see ``interpreter``. When one of them ends by
itself, all requests end with that reason, and no more are taken. docs/gpu.md has its differences. A seed
gives the same text as far as vLLM computes the same in batches of other sizes, which it does not promise.
"""

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import Mapping
from typing import Any

from cog_triton.engines import library, vllm_resume
from cog_triton.engines.base import EngineError, GenerationRequest, TokenLogProb, check_ids
from cog_triton.engines.event_loop import Steps
from cog_triton.processes import prepare_for_vllm, renice
from cog_triton.protocol.names import KV_BLOCK_TOKENS
from cog_triton.request.guide import Guide, GuideKind

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30  # holds 8,192 tokens of an 8 B model
_FEATURES = {"allowed_token_ids", "embedding_bias", "min_p", "prompt_logprobs", "top_logprobs"}


class VllmEngine(library.LibraryEngine):
    title = "vLLM"
    lora_request = "vllm.lora.request:LoRARequest"
    refusals = frozenset({"ValueError", "VLLMClientError"})  # older releases raise only ValueError
    deaths = frozenset({"EngineDeadError"})

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._loadable: set[int] = set()  # numbers of the adapters that vLLM has loaded
        self._shared = parameters.get("shared")
        self._resumes = False  # see ``vllm_resume``
        super().__init__(parameters, loading_arguments(parameters))

    def load(self, arguments: library.Arguments) -> None:
        adapted, on_cpu = arguments.get("enable_lora"), _on_cpu()
        if adapted and on_cpu:  # measured with vLLM 0.32
            logger.warning(
                "tensorrt_llm: lora_task_id is refused: vLLM's build for CPUs applies an adapter to the "
                "requests beside it in the batch as well"
            )
        try:
            asyncio.run_coroutine_threadsafe(self._load(arguments), self._loop).result()
        except TypeError as error:  # an argument that its release does not know
            raise ValueError(f"vLLM: {error}") from error
        config = self._llm.model_config
        self.context_length = int(config.max_model_len)
        self._vocabulary = int(config.get_vocab_size())
        guided = set() if config.skip_tokenizer_init else {"guided_decoding"}
        adapters = {"lora_task_id"} if adapted and not on_cpu else set()
        self.features = frozenset(_FEATURES | guided | adapters)

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
            # Its own way is from text, by a tokenizer; this is where that would put the ids.
            sampling._bad_words_token_ids = [list(word) for word in request.sampling.bad_words]
        if request.continued and self._resumes:
            vllm_resume.deliver(sampling, request.input_ids[-request.continued :])
        elif request.continued and request.guide is not None:
            raise EngineError(
                "an answer with guided_decoding_guide cannot be continued with this release of vLLM"
            )
        return sampling

    # What follows runs on the loop.

    async def _load(self, arguments: library.Arguments) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        before = set(multiprocessing.active_children())
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
        executor = Executor.get_class(config)
        if self._shared and config.parallel_config.data_parallel_size > 1:
            raise ValueError("tensorrt_llm_instance_count must be 1 with data_parallel_size")
        more = client_arguments(self._shared) if self._shared else {}
        self._llm = AsyncLLM(config, executor, log_stats=False, log_requests=False, **more)
        for process in set(multiprocessing.active_children()) - before:
            self._loop.add_reader(process.sentinel, self._ended, process)
            if process.pid is not None and _on_cpu():
                renice(process.pid)

    def _ended(self, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        self.die(f"vLLM's process {process.name} has ended, with status {process.exitcode}")

    async def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        prompt, ended = {"prompt_token_ids": request.input_ids}, self._loop.create_future()

        def put(output: Any) -> None:
            try:
                if isinstance(output, Exception):
                    raise output
                new = output.outputs[0]
                end = str(new.finish_reason) if output.finished else None
                step = self.step(request, list(new.token_ids), new.logprobs, end)
                if request.prompt_log_probs and output.prompt_logprobs:
                    step.prompt_log_probs.extend(prompt_log_probs(output.prompt_logprobs, request))
                if step.finished:
                    ended.set_result(step)
                elif step.ids:
                    self.deliver(request.key, step)
            except Exception as error:
                if not ended.done():
                    ended.set_exception(error)

        try:
            await self._load_adapter(adapter, request)
            queue = await self._llm.add_request(request.key, prompt, sampling, lora_request=adapter)
            queue.put = put  # vLLM's generate() would cost a task's turn for each token
            if queue.output is not None:
                put(queue.output)
            yield await ended
        finally:
            if not ended.done() or ended.cancelled() or ended.exception():
                # vLLM drops a request whose task is cancelled, but not between two of the task's steps.
                with contextlib.suppress(Exception):  # it may have died meanwhile
                    await self._llm.abort(request.key)

    async def _load_adapter(self, adapter: Any, request: GenerationRequest) -> None:
        # One that it cannot load while it computes would end vLLM.
        if adapter is None or adapter.lora_int_id in self._loadable:
            return
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:
            if self.ends_engine(error):
                raise
            kind = type(self.request_error(error, request))
            raise kind(f"lora_task_id {request.lora_task_id}: {error}") from error
        self._loadable.add(adapter.lora_int_id)


def loading_arguments(parameters: Mapping[str, str]) -> library.Arguments:
    """Return the arguments of ``vllm.AsyncEngineArgs`` on this machine. Readies the process for vLLM."""
    arguments = engine_arguments(parameters)
    prepare_for_vllm()
    return on_device(arguments, cpu=_on_cpu())


def engine_config(arguments: library.Arguments) -> Any:
    """Return vLLM's configuration for the arguments, with the defaults of ``vllm serve`` on this machine.

    vLLM has other defaults for each use: without one, a step has 2,048 tokens where its API server has
    8,192.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


def client_arguments(shared: str) -> library.Arguments:
    """Return what ``AsyncLLM`` needs as a client of an engine core: by its number, their count, a path."""
    from vllm.v1.engine import core_client

    number, count, path = shared.split()
    index, launch = int(number), core_client.launch_core_engines
    inputs, outputs = ([f"ipc://{path}{k}{n}" for n in range(int(count))] for k in ("in", "out"))
    if index:
        addresses = {"input_address": inputs[index], "output_address": outputs[index]}
        return {"client_addresses": addresses, "client_count": len(inputs), "client_index": index}

    def launch_for_all(config: Any, executor: Any, log_stats: bool, addresses: Any) -> Any:
        addresses.inputs += inputs[1:]
        addresses.outputs += outputs[1:]
        return launch(config, executor, log_stats, addresses)

    core_client.launch_core_engines = launch_for_all
    return {}


def engine_arguments(parameters: Mapping[str, str]) -> library.Arguments:
    """Return the arguments of ``vllm.AsyncEngineArgs`` on any machine; see ``loading_arguments``."""
    arguments = {
        "disable_log_stats": True,
        # Else the model's own defaults of sampling and of end tokens would be added to each request's.
        "generation_config": "vllm",
        **library.table_arguments(parameters, "vllm"),
    }
    if events := arguments.get("kv_events_config"):
        events["enable_kv_cache_events"] = True
        arguments["block_size"] = KV_BLOCK_TOKENS
    guides: library.Arguments = arguments.get("structured_outputs_config", {})
    if guides.get("backend") in ("xgrammar", "guidance"):
        # Some models write white space until max_tokens. The other backends have no such argument.
        guides["disable_any_whitespace"] = True
    return library.with_file(arguments, parameters, "vllm")


def on_device(arguments: library.Arguments, *, cpu: bool) -> library.Arguments:
    """Return the arguments with what they leave open and vLLM would choose badly, on CPUs or GPUs."""
    if cpu:  # there it would take minutes to compile, and most of the memory
        if "gpu_memory_utilization" not in arguments:
            arguments = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, **arguments}
        arguments = {"enforce_eager": True, **arguments}
    elif arguments.get("enable_lora"):
        if arguments.get("dtype") in ("float32", "float"):
            raise ValueError(
                "tensorrt_llm: dtype float32 cannot be combined with lora_prefetch_dir: on a GPU, vLLM "
                "supports adapters only in float16 or bfloat16"
            )
        return arguments
    if "dtype" not in arguments:
        config = library.model_config(arguments)
        saved = str(config.get("dtype") or config.get("torch_dtype"))
        if saved.endswith("float32"):  # which vLLM would halve
            return {**arguments, "dtype": "float32"}
    return arguments


def sampling_arguments(request: GenerationRequest) -> library.Arguments:
    """Return the arguments of ``vllm.SamplingParams`` for a request, but for bad words and guides."""
    # The request's end tokens are those that count.
    arguments: library.Arguments = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    arguments |= library.sampling_arguments(request)
    if not request.sampling.greedy:
        arguments |= {"min_p": request.sampling.min_p} if request.sampling.min_p else {}
        if request.sampling.seed is not None:
            # Only where it was asked for: with a generator for each request vLLM samples one by one.
            # One beyond an int64 would end its runner.
            arguments["seed"] = request.sampling.seed % 2**63
    if request.end_ids:
        arguments["stop_token_ids"] = list(request.end_ids)
    if request.logit_bias:
        arguments["logit_bias"] = dict(request.logit_bias)
    if request.allowed_ids:
        arguments["allowed_token_ids"] = list(request.allowed_ids)
    if request.return_log_probs:
        arguments["logprobs"] = request.top_log_probs  # with 0 only of the chosen tokens
    if request.prompt_log_probs:
        arguments["prompt_logprobs"] = request.top_log_probs
    return arguments


def guide_arguments(guide: Guide) -> library.Arguments:
    """Return the arguments of vLLM's ``StructuredOutputsParams``."""
    if guide.kind is GuideKind.JSON:
        return {"json_object": True}
    names = {GuideKind.JSON_SCHEMA: "json", GuideKind.GRAMMAR: "grammar"}
    return {names.get(guide.kind, guide.kind.value): guide.text}


def prompt_log_probs(entries: Any, request: GenerationRequest) -> list[TokenLogProb]:
    """Return those of the prompt's tokens. ``entries`` are vLLM's, None at the first place."""
    ids = request.input_ids
    rest = library.log_probs(ids[1:], entries[1:], request.top_log_probs)
    return [TokenLogProb(ids[0], 0.0), *rest]


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
