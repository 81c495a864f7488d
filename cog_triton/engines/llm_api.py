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
- that log probabilities are those of the unchanged distribution, and that the one of the chosen token
  is always among them: a request that asked for them fails if it is not;
- whether the end token is part of the output: some samplers leave it out, so it is added then;
- the texts of its errors, by which clients tell a long prompt from other failures;
- that a dead worker process shows. If no output's iterator raises, requests wait until their clients
  lose patience, and the next request finds the LLM shut down;
- speed, of which the loop's thread may be the limit; a ``stream_interval`` above 1 eases that.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton import remote_code
from cog_triton.engines.base import (
    Engine,
    EngineError,
    EngineUnavailable,
    GenerationRequest,
    Sink,
    Tokens,
)
from cog_triton.engines.llm_api_sampler import Sampler, sampler_of, sampling_defaults

logger = logging.getLogger(__name__)

Parse = Callable[[str], Any]
Convert = Callable[[dict[str, Any], dict[str, Any], str], dict[str, Any]]


def _boolean(text: str) -> bool:
    return text == "true"


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


# Parameter of the tensorrt_llm model → argument of the LLM, and of its kv_cache_config.
_ARGUMENTS: dict[str, tuple[str, Parse]] = {
    "model": ("model", str),
    "dtype": ("dtype", str),
    "tensor_parallel_size": ("tensor_parallel_size", int),
    "pipeline_parallel_size": ("pipeline_parallel_size", int),
    "max_batch_size": ("max_batch_size", int),
    "max_num_tokens": ("max_num_tokens", int),
    "max_seq_len": ("max_seq_len", int),
    "max_beam_width": ("max_beam_width", int),
    "enable_chunked_context": ("enable_chunked_prefill", _boolean),
    "stream_interval": ("stream_interval", int),
    "trust_remote_code": ("trust_remote_code", _boolean),
}
_KV_CACHE: dict[str, tuple[str, Parse]] = {
    "enable_kv_cache_reuse": ("enable_block_reuse", _boolean),
    "max_tokens_in_paged_kv_cache": ("max_tokens", int),
    "max_attention_window_size": ("max_attention_window", _integers),
    "sink_token_length": ("sink_token_length", int),
    "kv_cache_free_gpu_mem_fraction": ("free_gpu_memory_fraction", float),
    "kv_cache_host_memory_bytes": ("host_cache_size", int),
}
_NO_ARGUMENT = (
    "attn_implementation",
    "cancellation_check_period_ms",
    "cross_kv_cache_fraction",
    "cuda_graph_cache_size",
    "cuda_graph_mode",
    "decoding_mode",
    "device",
    "eagle_choices",
    "enable_context_fmha_fp32_acc",
    "encoder_model_path",
    "gpt_model_type",
    "gpu_device_ids",
    "gpu_weights_percent",
    "iter_stats_max_iterations",
    "kv_cache_onboard_blocks",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "lookahead_window_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_cache_max_adapter_size",
    "lora_cache_optimal_adapter_size",
    "lora_prefetch_dir",
    "medusa_choices",
    "multi_block_mode",
    "normalize_log_probs",
    "num_nodes",
    "participant_ids",
    "request_stats_max_iterations",
    "speculative_decoding_fast_logits",
    "stats_check_period_ms",
    "use_cuda_graph",
    "xgrammar_tokenizer_info_path",
)
# Some variables always have a value: with this one the LLM does what it does anyway.
_SAME_AS_UNSET = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "device": "auto",
    "dtype": "auto",
    "gpt_model_type": "inflight_fused_batching",
    "max_beam_width": "1",
    "trust_remote_code": "false",
}

NO_END_ID = -1
ANY_ID = 0  # pads what no one reads; without it the LLM would pad with NO_END_ID


@dataclass(eq=False)
class _Running:
    """A request on its way through the LLM; but for the first three, the loop's thread alone uses it."""

    request: GenerationRequest
    sink: Sink
    sampling: Any  # the LLM's SamplingParams
    output: Any = None  # the LLM's RequestOutput
    task: asyncio.Task[None] | None = None
    last_id: int | None = None


class TensorrtLlmEngine(Engine):
    """See the module's docstring."""

    def __init__(
        self,
        llm: Any,
        sampling_params: Callable[..., Any],
        *,
        context_length: int,
        sampler: Sampler,
    ) -> None:
        """Starts the loop's thread.

        Args:
            llm: a loaded ``tensorrt_llm.LLM``; the engine shuts it down.
            sampling_params: ``tensorrt_llm.SamplingParams``.
            context_length: most tokens that prompt and output may have together.
            sampler: what the LLM samples with; requests for what it would ignore are refused.
        """
        self._llm = llm
        self._sampler = sampler
        self._sampling_params = sampling_params
        self._context_length = context_length
        self._lock = threading.Lock()  # guards the next two, and that the loop is open
        self._running: dict[str, _Running] = {}
        self._stopped: str | None = None  # why no more requests are taken
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llm-api-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> TensorrtLlmEngine:
        """Loads the model that the tensorrt_llm model's parameters name.

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

        for name in sorted(_set(parameters).keys() & set(_NO_ARGUMENT)):
            logger.warning("tensorrt_llm: %s has no effect with the engine llmapi", name)
        arguments = llm_arguments(parameters)
        if path := parameters.get("llm_api_config"):
            convert = getattr(llm_args, "update_llm_args_with_extra_dict", None)
            arguments = merged(arguments, read_llm_api_config(Path(path)), path, convert)
        if "model" not in arguments:
            raise ValueError("tensorrt_llm: model: the engine llmapi needs it")
        kv_cache = arguments.get("kv_cache_config")
        if isinstance(kv_cache, dict):
            arguments = {**arguments, "kv_cache_config": KvCacheConfig(**kv_cache)}
        known = getattr(getattr(llm_args, "TorchLlmArgs", None), "model_fields", {})
        arguments = {**sampling_defaults(known, arguments), **arguments}
        sampler = sampler_of(str(getattr(tensorrt_llm, "__version__", "unknown")), arguments)
        if sampler.warning is not None:
            logger.warning(sampler.warning)
        llm = _load(tensorrt_llm.LLM, arguments)
        try:
            length = context_length(arguments, llm)
            return cls(llm, tensorrt_llm.SamplingParams, context_length=length, sampler=sampler)
        except BaseException:
            llm.shutdown()
            raise

    @property
    def context_length(self) -> int:
        return self._context_length

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        self._sampler.check(request.sampling)
        try:
            sampling = self._sampling_params(**sampling_arguments(request))
        except (ValueError, TypeError) as error:
            raise EngineError(str(error)) from error
        running = _Running(request, sink, sampling)
        with self._lock:
            if self._stopped is not None:
                raise EngineUnavailable(_stopped_text(self._stopped))
            self._running[request.key] = running
            self._loop.call_soon_threadsafe(self._start, running)

    def abort(self, key: str) -> None:
        with self._lock:
            running = self._running.pop(key, None)
            if running is not None:
                self._loop.call_soon_threadsafe(self._cancel, running)

    def active(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            self._running.clear()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._llm.shutdown()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._drop_tasks())
        with self._lock:
            self._loop.close()

    # What follows runs on the loop.

    async def _drop_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, running: _Running) -> None:
        running.task = self._loop.create_task(self._generate(running))

    def _cancel(self, running: _Running) -> None:
        # _start has run: the loop keeps the order of its callbacks.
        assert running.task is not None
        running.task.cancel()
        _abort_output(running)

    async def _generate(self, running: _Running) -> None:
        request = running.request
        try:
            running.output = self._llm.generate_async(
                inputs=request.input_ids, sampling_params=running.sampling, streaming=True
            )
            async for update in running.output:
                tokens = next_tokens(
                    update.outputs[0], request, running.last_id, finished=update.finished
                )
                running.last_id = tokens.ids[-1] if tokens.ids else running.last_id
                self._deliver(running, tokens)
        except Exception as error:
            if is_fatal(error):
                self._stop(str(error) or repr(error))
            else:
                text = error_text(error, len(request.input_ids))
                self._deliver(running, Tokens([], finished=True, error=text))
                _abort_output(running)

    def _deliver(self, running: _Running, tokens: Tokens) -> None:
        if tokens.finished:
            with self._lock:
                if self._running.pop(running.request.key, None) is None:
                    return
        running.sink(tokens)

    def _stop(self, reason: str) -> None:
        """Ends all requests after the LLM has died: nothing will come for them."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = reason
            ended = list(self._running.values())
            self._running.clear()
        logger.error(_stopped_text(reason))
        for running in ended:
            if running.task is not None:
                running.task.cancel()
            running.sink(Tokens([], finished=True, error=_stopped_text(reason)))


def _stopped_text(reason: str) -> str:
    return f"the engine has stopped: {reason}"


def _abort_output(running: _Running) -> None:
    if running.output is not None and not running.output.finished:
        running.output.abort()


# Configuration


def llm_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of ``tensorrt_llm.LLM`` that the tensorrt_llm model's parameters stand for.

    What is unset, or set to what the LLM does anyway, is left out. ``kv_cache_config`` is a dict.

    Raises:
        ValueError: a value is not valid.
    """
    given = _set(parameters)
    arguments = _parsed(_ARGUMENTS, given)
    if kv_cache := _parsed(_KV_CACHE, given):
        arguments["kv_cache_config"] = kv_cache
    if given.get("batch_scheduler_policy") == "max_utilization":
        arguments["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    if backend := given.get("guided_decoding_backend"):
        # It compiles grammars for a vocabulary.
        tokenizer = given.get("tokenizer_dir") or given.get("model")
        return {**arguments, "guided_decoding_backend": backend, "tokenizer": tokenizer}
    return {**arguments, "skip_tokenizer_init": True}


def merged(
    arguments: Mapping[str, Any],
    extra: Mapping[str, Any],
    source: str = "",
    convert: Convert | None = None,
) -> dict[str, Any]:
    """``arguments`` with those of ``extra``, which win; their ``kv_cache_config`` are merged too.

    Args:
        source: the file that ``extra`` is from.
        convert: TensorRT-LLM's ``update_llm_args_with_extra_dict``, which merges the same way and makes
            objects of the sections that the LLM does not take as dicts, ``speculative_config`` and
            ``lora_config`` among them. Without it they stay as they are.

    Raises:
        ValueError: a section is not valid.
    """
    extra = dict(extra)
    ours, theirs = arguments.get("kv_cache_config"), extra.get("kv_cache_config")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        extra["kv_cache_config"] = {**ours, **theirs}
        _log_overridden(ours, theirs, "kv_cache_config.")
    _log_overridden(arguments, extra)
    if convert is None:
        return {**arguments, **extra}
    try:
        return convert(dict(arguments), extra, source)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"llm_api_config {source}: {type(error).__name__}: {error}") from error


def _load(llm: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return llm(**arguments)
    except Exception as error:
        if arguments.get("trust_remote_code") or not remote_code.was_refused(error):
            raise
        raise ValueError(remote_code.refusal("model", str(arguments["model"]))) from error


def read_llm_api_config(path: Path) -> dict[str, Any]:
    """The arguments in a YAML file.

    Raises:
        ValueError: it is not YAML, or not a mapping.
        OSError: it cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"llm_api_config {path}: not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"llm_api_config {path}: expected a mapping, got {content!r}")
    return content


def context_length(arguments: Mapping[str, Any], llm: Any) -> int:
    """Most tokens that prompt and output may have together.

    The first that is known of: ``max_seq_len`` among the arguments; ``llm.args.max_seq_len``;
    ``max_position_embeddings`` in the model's configuration.

    Raises:
        ValueError: none is.
        OSError: the model's configuration cannot be read.
    """
    known = arguments.get("max_seq_len") or getattr(getattr(llm, "args", None), "max_seq_len", None)
    if known is None:
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(
            arguments["model"], revision=arguments.get("revision")
        )
        known = config.get("text_config", config).get("max_position_embeddings")
    if known is None:
        raise ValueError(f"the configuration of {arguments['model']} does not say; set max_seq_len")
    return int(known)


def _set(parameters: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if _SAME_AS_UNSET.get(name) != value}


def _parsed(
    table: Mapping[str, tuple[str, Parse]], parameters: Mapping[str, str]
) -> dict[str, Any]:
    return {
        argument: _parse(name, parse, parameters[name])
        for name, (argument, parse) in table.items()
        if name in parameters
    }


def _parse(name: str, parse: Parse, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"tensorrt_llm: {name}: {error}") from None


def _log_overridden(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> None:
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name] and name != "kv_cache_config":
            logger.warning(
                "llm_api_config: %s%s is %r, and not %r as the template variables have it",
                prefix,
                name,
                theirs[name],
                ours[name],
            )


# Requests


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """The arguments of ``tensorrt_llm.SamplingParams`` that a request stands for.

    What changes nothing is left out, but for what means something else when it is missing. Stop
    words are not the LLM's business: they stay in the output here, and are looked for elsewhere.

    Raises:
        EngineError: a bad word has several tokens.
    """
    arguments: dict[str, Any] = {"max_tokens": request.max_tokens, **_end(request.end_id)}
    sampling = request.sampling
    if sampling.greedy:
        # The one that means greedy in all releases. A temperature or top_p of 0 does not.
        arguments["top_k"] = 1
    else:
        arguments["temperature"] = sampling.temperature
        # The LLM takes a top_p of 0 as greedy, even with a top_k; SamplingParams takes it as none.
        arguments["top_p"] = sampling.top_p or 1.0
        arguments["seed"] = sampling.seed
        if sampling.top_k:
            arguments["top_k"] = sampling.top_k
    for name, neutral in (
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ):
        if (value := getattr(sampling, name)) != neutral:
            arguments[name] = value
    if sampling.min_tokens > 0:
        arguments["min_tokens"] = sampling.min_tokens
    if bad := _single_ids(sampling.bad_words):
        arguments["bad_token_ids"] = bad
    if request.return_log_probs:
        arguments["logprobs"] = 1  # 0 means none in older releases
    return arguments


def _end(end_id: int | None) -> dict[str, Any]:
    # Without a tokenizer the LLM refuses requests that give no end id.
    if end_id is None:
        return {"end_id": NO_END_ID, "pad_id": ANY_ID, "ignore_eos": True}
    return {"end_id": end_id}


def _single_ids(words: Sequence[Sequence[int]]) -> list[int]:
    long = [list(word) for word in words if len(word) > 1]
    if long:
        raise EngineError(
            "TensorRT-LLM's LLM API does not support bad words of several tokens, such as token "
            f"ids {long[0]}"
        )
    return [word[0] for word in words if word]


def next_tokens(
    completion: Any, request: GenerationRequest, last_id: int | None, *, finished: bool
) -> Tokens:
    """What is new in one of the LLM's ``CompletionOutput``.

    Args:
        last_id: the last id of the update before.
        finished: whether the ``RequestOutput`` is.

    Raises:
        EngineError: log probabilities are missing, or the LLM gave the request up.
    """
    ids = list(completion.token_ids_diff)
    log_probs = chosen_log_probs(ids, completion.logprobs_diff) if request.return_log_probs else []
    if not finished:
        return Tokens(ids, log_probs)
    reason = completion.finish_reason
    if reason in ("timeout", "cancelled"):
        raise EngineError(f"TensorRT-LLM ended the request: {reason}")
    # No stop words are given to the LLM, so "stop" is the end token.
    if reason == "stop" and request.end_id not in (None, ids[-1] if ids else last_id):
        ids.append(request.end_id)
    return Tokens(ids, log_probs, finished=True)


def chosen_log_probs(ids: Sequence[int], entries: Sequence[Any] | None) -> list[float]:
    """The log probability of each id.

    Args:
        entries: for each id a number, or a mapping from ids to objects with a ``logprob``, as
            releases differ.

    Raises:
        EngineError: one is missing.
    """
    found = [_log_prob(token, entry) for token, entry in zip(ids, entries or (), strict=False)]
    if len(found) < len(ids) or None in found:
        raise EngineError("TensorRT-LLM left out the log probability of a token")
    return [value for value in found if value is not None]


def _log_prob(token: int, entry: Any) -> float | None:
    if isinstance(entry, Mapping):
        entry = entry.get(token)
    value = getattr(entry, "logprob", entry)
    return None if value is None else float(value)


# Errors


def is_fatal(error: Exception) -> bool:
    """Whether an error of the LLM's is its end, and not that of one request.

    A request's own errors are ``RequestError``, or those of Python for arguments; what ends the
    executor, or is raised because it has ended, is a RuntimeError or comes from a socket or pipe.
    """
    # By name, for its place in the package is not promised.
    if any(base.__name__ == "RequestError" for base in type(error).__mro__):
        return False
    return isinstance(error, (RuntimeError, OSError))


_TOO_LONG = re.compile(r"prompt length.*(exceed|larger than)", re.IGNORECASE | re.DOTALL)


def error_text(error: Exception, prompt_length: int) -> str:
    """The text for the client. A prompt that is too long is called what it is in the C++ backend."""
    text = str(error) or repr(error)
    if _TOO_LONG.search(text) and "exceeds maximum input length" not in text:
        return f"Prompt length ({prompt_length}) exceeds maximum input length: {text}"
    return text
