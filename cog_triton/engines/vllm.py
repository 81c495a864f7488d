"""vLLM, by its ``AsyncLLM``: it schedules, batches and samples, and this module hands it token ids.

Its engine core and its workers are processes of their own; see ``interpreter``. When the engine core ends
by itself, all requests end with that reason, no more are taken, and ``on_death``'s function is called.

The arguments come from the same template variables as TensorRT-LLM's. Those of ``vllm_config``, a YAML
file, are handed over as they stand there and win.

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
from pathlib import Path
from typing import Any

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.arguments import (
    cpu_arguments,
    engine_arguments,
    loading_dtype,
    without_effect,
)
from cog_triton.engines.base import (
    LEAST_LOG_PROB,
    EngineError,
    GenerationRequest,
    Step,
    TokenLogProb,
    check_ids,
)
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.engines.interpreter import prepare, renice
from cog_triton.request.request import Guide, GuideKind
from cog_triton.text.tokenizer import remote_code_refusal

logger = logging.getLogger(__name__)

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


class VllmEngine(EventLoopEngine):
    """See the module's docstring."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
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
        self._adapters = LoraRequests(Path(adapters) if adapters else None)
        self._loadable: set[int] = set()  # numbers of the adapters that vLLM has loaded
        self._then: Callable[[], object] = lambda: None
        self._llm: Any = None
        super().__init__("vllm-engine")
        try:
            asyncio.run_coroutine_threadsafe(self._load(arguments), self._loop).result()
        except BaseException as error:
            self.close()
            if isinstance(error, TypeError):  # an argument that its release does not know
                raise ValueError(f"vLLM: {error}") from error
            text = remote_code_refusal(error, "model", str(arguments["model"]))
            if arguments.get("trust_remote_code") or not text:
                raise
            raise ValueError(text) from error
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

    def steps(self, request: GenerationRequest) -> Steps:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        check_ids(request, self._vocabulary)
        arguments = sampling_arguments(request)
        if request.guide is not None:
            if request.continued:
                raise EngineError("an answer with a guide cannot be continued")
            guide = StructuredOutputsParams(**guide_arguments(request.guide))
            arguments["structured_outputs"] = guide
        try:
            sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        except Exception as error:
            if not _is_refusal(error):
                raise
            raise EngineError(str(error)) from error
        if request.sampling.bad_words:
            # Its own way is from text, by a tokenizer; this is where that would put the ids.
            sampling._bad_words_token_ids = [list(word) for word in request.sampling.bad_words]
        return self._generate(request, sampling, self._adapter(request.lora_task_id))

    def _adapter(self, task_id: int) -> Any:
        if not task_id:
            return None
        from vllm.lora.request import LoRARequest

        return self._adapters.of(task_id, LoRARequest)

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

    async def _generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        prompt, finished = {"prompt_token_ids": request.input_ids}, False
        wants_prompt = request.prompt_log_probs
        try:
            await self._load_adapter(adapter, request.lora_task_id)
            outputs = self._llm.generate(prompt, sampling, request.key, lora_request=adapter)
            async for output in outputs:
                step = next_step(output.outputs[0], request, finished=output.finished)
                if wants_prompt and step.ids:
                    wants_prompt = False
                    told = prompt_log_probs(output.prompt_logprobs, request)
                    step = replace(step, prompt_log_probs=told)
                finished = step.finished
                if step.ids or finished:
                    yield step
        except Exception as error:
            if _is_a(error, "EngineDeadError"):
                raise
            text = str(error) or repr(error)
            yield Step([], finished=True, error=text, refused=_is_refusal(error))
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
            if _is_a(error, "EngineDeadError"):
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


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams`` for a request, but for bad words and guides.

    What changes nothing is left out. Stop words are not given to vLLM: they stay in the output here, and
    ``Serving`` looks for them.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "detokenize": False,
        "ignore_eos": True,  # the request's end token is the one that counts
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        **sampling.penalties,
    }
    if not sampling.greedy:
        arguments |= {"top_p": sampling.top_p or 1.0, "top_k": sampling.top_k}
        arguments |= {"min_p": sampling.min_p} if sampling.min_p else {}
        # Its noise begins anew with a request: a continuation is not to repeat that of the beginning.
        arguments["seed"] = (sampling.seed + request.continued) % SEEDS
    if sampling.min_tokens > 0:
        # The context may have cut the maximum since the two were compared.
        arguments["min_tokens"] = min(sampling.min_tokens, request.max_tokens)
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


def next_step(output: Any, request: GenerationRequest, *, finished: bool) -> Step:
    """Return the new tokens of one of vLLM's ``CompletionOutput`` of the kind DELTA.

    Args:
        finished: that of the ``RequestOutput``.

    Raises:
        EngineError: vLLM gave the request up.
    """
    if finished and output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request: {output.finish_reason}")
    ids = list(output.token_ids)
    entries = zip(ids, output.logprobs, strict=True) if request.return_log_probs else ()
    log_probs = [_log_prob(token, entry, request.top_log_probs) for token, entry in entries]
    return Step(ids, log_probs, finished)


def prompt_log_probs(entries: Any, request: GenerationRequest) -> list[TokenLogProb]:
    """Return those of the prompt's tokens. ``entries`` are vLLM's, None at the first place."""
    ids, count = request.input_ids, request.top_log_probs
    rest = zip(ids[1:], entries[1:], strict=True)
    return [TokenLogProb(ids[0], 0.0), *(_log_prob(token, entry, count) for token, entry in rest)]


def _log_prob(token: int, entry: Mapping[int, Any], count: int) -> TokenLogProb:
    # Rounding may leave a certain token a hair above 0.
    values = {i: max(LEAST_LOG_PROB, min(0.0, float(e.logprob))) for i, e in entry.items()}
    # vLLM adds the chosen token to the most likely ones.
    top = sorted(values.items(), key=lambda item: -entry[item[0]].logprob)[:count]
    return TokenLogProb(token, values[token], tuple(top))


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _is_refusal(error: Exception) -> bool:
    # Older releases raise only ValueError.
    return isinstance(error, ValueError) or _is_a(error, "VLLMClientError")


def _is_a(error: Exception, name: str) -> bool:
    # By name, for the places of vLLM's classes in the package are not promised.
    return name in {base.__name__ for base in type(error).__mro__}
