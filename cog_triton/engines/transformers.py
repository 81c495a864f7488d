"""The embedded engine: transformers' continuous batching, on a CPU or a GPU.

Transformers schedules the requests, pages the KV cache and runs the model. Its list of logits processors is
replaced by one that chooses the tokens, since it has no per-request seeds, penalties or bad words, and its
router of outputs by one without another thread before the sinks. These are internals of transformers; the
range in pyproject.toml is as narrow as that asks for.
"""

import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from cog_triton.adapters.layers import CACHE_BYTES, Adapters, LoadedAdapter
from cog_triton.adapters.peft_files import import_peft
from cog_triton.engines import base, transformers_attention
from cog_triton.engines.base import Engine, EngineError, GenerationRequest, Sink, Step
from cog_triton.engines.guides import Guides
from cog_triton.engines.kv_events import KvEvents
from cog_triton.engines.model_config import context_length
from cog_triton.engines.transformers_loading import batching_problem, load_model
from cog_triton.engines.transformers_sequential import UNKNOWN_CONTEXT, SequentialEngine
from cog_triton.engines.transformers_step import Row, StepProcessor, request_key
from cog_triton.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

CPU_PAGE_TOKENS = 64
# A longer prompt is prefilled in pieces, between the tokens of other requests.
CPU_BATCH_TOKENS = 256
CPU_CACHE_BYTES = 512 << 20
# Further requests wait.
MAX_RUNNING = 256
_FEATURES = {"allowed_token_ids", "embedding_bias", "min_p", "prompt_logprobs", "top_logprobs"}


def create_transformers_engine(parameters: Mapping[str, str]) -> Engine:
    """Load the model that the tensorrt_llm model's parameters name, and start an engine on it."""
    model = load_model(parameters)
    problem = batching_problem(model.config, type(model))
    if problem is None:
        return TransformersEngine(model, parameters)
    logger.warning(
        "the %s model %s, which transformers' continuous batching does not support: requests run one at "
        "a time (ENGINE=vllm may be able to batch them)",
        *(model.config.model_type, problem),
    )
    return SequentialEngine(model, parameters)


class TransformersEngine(Engine):
    features = frozenset(_FEATURES)

    def __init__(self, model: Any, parameters: Mapping[str, str]) -> None:
        """Start generating with a model that is loaded, by continuous batching."""
        config = model.config.get_text_config()
        requested = int(parameters["max_seq_len"]) if "max_seq_len" in parameters else None
        limit = context_length(model.config.to_dict(), requested, default=UNKNOWN_CONTEXT)
        self.context_length = limit
        transformers_attention.register()
        batching = batching_config(model, limit, parameters)
        self._vocabulary = int(config.vocab_size)
        self.running: dict[str, Row] = {}
        self._preparer = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="preparer")
        self._guides: Guides | None = None
        self._adapters: Adapters | None = None
        name = parameters.get("tokenizer_dir")
        if name:
            trusted = parameters.get("trust_remote_code") == "true"
            load = partial(load_tokenizer, name, trust_remote_code=trusted)
            self._guides = Guides(load, self._vocabulary)
            self.features |= {"guided_decoding"}
        directory = parameters.get("lora_prefetch_dir")
        if directory:
            cache_bytes = int(parameters.get("lora_cache_host_memory_bytes", CACHE_BYTES))
            self._adapters = Adapters(model, Path(directory), self._adapters_in_use, cache_bytes)
            self.features |= {"lora_task_id"}
            self._preparer.submit(import_peft)
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=limit)
        manager = model.init_continuous_batching(greedy, batching)
        self._manager = manager
        # Outputs come on the generation thread, without a queue or an event loop between.
        manager.output_router.deliver = self._deliver
        manager.output_router.deliver_batch = lambda outputs: [*map(self._deliver, outputs)]
        self._processor = StepProcessor(model, self._guides, self._adapters)
        manager.logit_processor = self._processor
        # This allocates the cache.
        manager.warmup()
        cache = manager.batch_processor.cache
        endpoint = parameters.get("kv_events_endpoint")
        self._processor.watch(cache)
        # Where requests do not share blocks, nothing in it helps another one.
        self._events = KvEvents(endpoint, cache) if endpoint and cache.use_prefix_sharing else None
        manager.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        base.check_ids(request, self._vocabulary)
        if request.guide is not None and self._guides is None:
            raise EngineError("the embedded engine does not support guided_decoding_guide")
        if request.lora_task_id and self._adapters is None:
            raise EngineError("the embedded engine does not support lora_task_id without LORA_DIR")
        self._check_running()
        row = Row(request, sink, request.input_ids.copy())
        self.running[request.key] = row
        if request.guide is None and not request.lora_task_id:
            self._prepare(row)
            return
        try:
            self._preparer.submit(self._prepare, row)
        except RuntimeError as error:
            # The pool has been shut down, or has no thread left.
            self.running.pop(request.key, None)
            raise base.stopped(error) from error

    def abort(self, key: str) -> None:
        row = self.running.pop(key, None)
        if row is not None:
            self._manager.cancel_request(row.manager_key)

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)
        self._preparer.shutdown(cancel_futures=True)
        for each in (self._guides, self._events):
            if each is not None:
                each.close()

    def _check_running(self) -> None:
        status = self._manager.background_thread_status
        if status.can_accept_new_requests() is not None:
            raise base.stopped(status.fatal_error)

    def _prepare(self, row: Row) -> None:
        """Get a request its guide and adapter, and have transformers begin it; any failure is its error."""
        request = row.request
        try:
            if request.guide is not None and self._guides is not None:
                row.guided = self._guides.begin(request, row.tokens)
            if request.lora_task_id and self._adapters is not None:
                self._adapters.assign(request.lora_task_id, row)
            if request.key in self.running:
                self._add(row)
                # Asked again, so that a request is not lost when the engine stops meanwhile.
                self._check_running()
        except Exception as error:
            # Nothing reads what a pool's thread raises.
            if self.running.pop(request.key, None) is not None:
                row.sink(Step(finished=True, error=base.failed_request(error, request)))

    def _add(self, row: Row) -> None:
        """Have transformers continue a row from its tokens so far."""
        request = row.request
        row.begun_with = len(row.tokens)
        made = row.begun_with - len(request.input_ids)
        self._manager.add_request(
            self._processor.prompt(row),
            request_id=row.manager_key,
            streaming=True,
            row=row,
            max_new_tokens=request.max_tokens - made,
            eos_token_id=list(request.end_ids),
        )

    def _deliver(self, output: GenerationOutput) -> None:
        """Hand a request's new tokens to its sink, on the generation thread."""
        key = request_key(output.request_id)
        finished = output.is_finished()
        row = self.running.get(key)
        if row is None or row.manager_key != output.request_id:
            if not finished:
                # Transformers drops a cancellation that overtakes its request, so it is repeated.
                self._manager.cancel_request(output.request_id)
            return
        if finished:
            del self.running[key]
        try:
            step = self._next_step(row, output, finished=finished)
        except Exception as error:
            # This thread makes the tokens of all requests.
            step = Step(finished=True, error=base.failed_request(error, row.request))
        if step.finished and not finished:
            self.abort(key)
        row.sink(step)

    def _next_step(self, row: Row, output: GenerationOutput, *, finished: bool) -> Step:
        """Return a request's new tokens; begin it anew where its length changes RoPE."""
        if row.error is not None:
            return Step(finished=True, error=row.error)
        # Transformers fails only all requests together, when its loop ends.
        error = base.stopped(output.error) if output.status == RequestStatus.FAILED else None
        before = len(row.tokens)
        new_ids = output.generated_tokens[before - row.begun_with :]
        row.tokens += new_ids
        if not finished and self._processor.rope.outgrown(before, len(row.tokens)):
            self._manager.cancel_request(row.manager_key)
            row.attempt += 1
            self._add(row)
        log_probs = row.log_probs
        row.log_probs = []
        prompt_log_probs = row.prompt_log_probs
        row.prompt_log_probs = []
        return Step(new_ids, log_probs, finished, error, prompt_log_probs)

    def _adapters_in_use(self) -> set[LoadedAdapter]:
        return {row.adapter for row in tuple(self.running.values()) if row.adapter is not None}


def batching_config(model: Any, context_length: int, parameters: Mapping[str, str]) -> Any:
    """Return transformers' configuration. It sizes the KV cache itself, but for a CPU without a limit."""
    on_cpu = model.device.type == "cpu"
    page = CPU_PAGE_TOKENS if on_cpu else ContinuousBatchingConfig.page_size
    sequence_blocks = math.ceil(context_length / page) + 1
    blocks = None
    tokens = parameters.get("max_tokens_in_paged_kv_cache")
    if tokens:
        blocks = int(tokens) // page
        if blocks < sequence_blocks:
            raise ValueError(
                f"max_tokens_in_paged_kv_cache={tokens} is too small for a sequence of {context_length} "
                f"tokens; the minimum is {sequence_blocks * page}"
            )
    elif on_cpu:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Besides keys and values, each token of the cache has a column of the attention mask.
        numbers_per_token = 2 * config.num_hidden_layers * heads * size + CPU_BATCH_TOKENS
        blocks = CPU_CACHE_BYTES // (page * numbers_per_token * model.dtype.itemsize)
        blocks = min(max(sequence_blocks, blocks), MAX_RUNNING * sequence_blocks)
    fraction = parameters.get("kv_cache_free_gpu_mem_fraction")
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=blocks,
        max_batch_tokens=CPU_BATCH_TOKENS if on_cpu else None,
        max_memory_percent=float(fraction) if fraction else None,
        max_requests_per_batch=MAX_RUNNING,
        scheduler_type=_Scheduler.__name__,
        allow_block_sharing=parameters.get("enable_kv_cache_reuse", "true") == "true",
        # It prepares a step before the tokens of the last one are known, which penalties need.
        use_async_batching=False,
        use_cuda_graph=False,
    )


class _Scheduler(FIFOScheduler):
    # When the KV cache is full, some requests are set back, and then none is let in until one has finished.
    # Transformers forgets that the others may all be cancelled instead.
    def clear_cancelled_requests(self) -> Any:
        cancelled = super().clear_cancelled_requests()
        self.block_new_requests &= not cancelled
        return cancelled


SCHEDULER_MAPPING[_Scheduler.__name__] = _Scheduler
