"""The embedded engine: transformers' continuous batching, on a CPU or a GPU.

Transformers schedules the requests, pages the KV cache and runs the model. Its list of logits processors is
replaced by one that chooses the tokens, since it has no per-request seeds, penalties or bad words; its
router of outputs by one without another thread before the sinks; and two methods of its KV cache are
wrapped. These are internals of transformers; the range in pyproject.toml is as narrow as that asks for.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import (
    GenerationOutput,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from cog_triton.adapters.layers import CACHE_BYTES, Adapters, LoadedAdapter
from cog_triton.engines.base import (
    Engine,
    EngineError,
    EngineUnavailable,
    GenerationRequest,
    Sink,
    Step,
    check_ids,
    stopped_text,
)
from cog_triton.engines.structured_output import Guided, StructuredOutput
from cog_triton.engines.transformers_step import (
    Row,
    StepProcessor,
    keep_adapters_apart,
    vocabulary_of,
)
from cog_triton.text.tokenizer import load_tokenizer, remote_code_lock, remote_code_refusal

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 2048  # for a model whose configuration names none
CPU_PAGE_TOKENS = 64
CPU_BATCH_TOKENS = 256  # a longer prompt is prefilled in pieces, between others' tokens
CPU_CACHE_BYTES = 512 << 20
MAX_RUNNING = 256  # more requests wait
SCHEDULER = "cog-triton"  # transformers finds it by this name


class TransformersEngine(Engine):
    features = frozenset(
        {"allowed_token_ids", "embedding_bias", "min_p", "prompt_logprobs", "top_logprobs"}
    )

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        batching: ContinuousBatchingConfig,
        load_tokenizer: Callable[[], Any] | None = None,
        adapters: Path | None = None,
        adapter_cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Start generating on a loaded model.

        Args:
            model: a causal language model in evaluation mode, on its device.
            load_tokenizer: returns a fast tokenizer of transformers, for structured output.
            adapters: the directory of LoRA adapters.
            adapter_cache_bytes: the most that all adapters in the model may have.
        """
        self.context_length = context_length
        self._vocabulary = vocabulary_of(model)
        self._rows: dict[str, Row] = {}
        self._rows_lock = threading.Lock()
        self._structured_output = None
        if load_tokenizer is not None:
            self._structured_output = StructuredOutput(load_tokenizer, self._vocabulary)
            self.features |= {"guided_decoding"}
        self._adapters = lora = None
        if adapters is not None:
            self._adapters = Adapters(model, adapters, self._adapters_in_use, adapter_cache_bytes)
            self.features |= {"lora_task_id"}
            lora = self._adapters.layers
        self._manager = manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=context_length),
            batching,
        )
        # Outputs come on the generation thread, without a queue or an event loop between.
        manager.output_router.deliver = self._deliver
        manager.output_router.deliver_batch = lambda outputs: [*map(self._deliver, outputs)]
        manager.logit_processor = StepProcessor(model, self._structured_output, lora)
        manager.warmup()  # makes what has the cache
        keep_adapters_apart(manager.batch_processor.cache, self._rows.get)
        manager.start()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> TransformersEngine:
        """Load the model that the tensorrt_llm model's parameters name.

        Raises:
            ValueError: the prompt and output cannot fit in ``max_tokens_in_paged_kv_cache``, or the
                model needs its own code and that is not trusted.
            OSError: there is no such model.
        """
        device = parameters.get("device", "auto")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        trusted, dtype = (
            parameters.get("trust_remote_code") == "true",
            parameters.get("dtype", "auto"),
        )
        name, tokenizer_dir = parameters["model"], parameters.get("tokenizer_dir")
        model = load_model(name, torch.device(device), dtype, trust_remote_code=trusted)
        known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limit = known or DEFAULT_CONTEXT_LENGTH
        length = min(int(parameters.get("max_seq_len", limit)), limit)
        adapters = parameters.get("lora_prefetch_dir")
        load = partial(load_tokenizer, str(tokenizer_dir), trust_remote_code=trusted)
        return cls(
            model,
            context_length=length,
            batching=batching_config(model, length, parameters),
            load_tokenizer=load if tokenizer_dir else None,
            adapters=Path(adapters) if adapters else None,
            adapter_cache_bytes=int(parameters.get("lora_cache_host_memory_bytes", CACHE_BYTES)),
        )

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        check_ids(request, self._vocabulary)
        row = Row(request, sink)
        with self._rows_lock:
            self._rows[request.key] = row
        try:
            self._add_after(row, [f for f in (self._guided(row), self._loaded(row)) if f])
        except EngineError:
            if self._forget(request.key) is not None:  # else its sink has the error
                raise

    def abort(self, key: str) -> None:
        if self._forget(key) is not None:
            self._manager.cancel_request(key)

    def active(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)
        for part in (self._structured_output, self._adapters):
            if part is not None:
                part.close()

    def _guided(self, row: Row) -> Future[Any] | None:
        request = row.request
        if request.guide is None:
            return None
        if self._structured_output is None:
            raise EngineError("the embedded engine does not support guided_decoding_guide")
        output = request.input_ids[len(request.input_ids) - request.continued :]
        return self._structured_output.begin(request.guide, request.end_id, output)

    def _loaded(self, row: Row) -> Future[Any] | None:
        """Give a request its adapter; the future is of one that has to be loaded first."""
        task_id = row.request.lora_task_id
        if not task_id:
            return None
        if self._adapters is None:
            raise EngineError("the embedded engine does not support lora_task_id without LORA_DIR")
        return None if self._adapters.assign(task_id, row) else self._adapters.load(task_id, row)

    def _add_after(self, row: Row, waited_for: list[Future[Any]], _: object = None) -> None:
        """Add a request when its guide is compiled and its adapter loaded, on the thread that did it."""
        if not waited_for:
            self._add(row)
            return
        for future in waited_for:
            if not future.done():
                future.add_done_callback(partial(self._add_after, row, waited_for))
                return
        key = row.request.key
        try:
            for result in [future.result() for future in waited_for]:
                row.guided = result if isinstance(result, Guided) else row.guided
            if key in self._rows:
                self._add(row)
        except (EngineError, CancelledError) as error:
            if self._forget(key) is not None:
                refused = not isinstance(error, (EngineUnavailable, CancelledError))
                text = str(error) or stopped_text(None)
                row.sink(Step([], finished=True, error=text, refused=refused))

    def _add(self, row: Row) -> None:
        request = row.request
        self._manager.add_request(
            request.input_ids,
            request_id=request.key,
            max_new_tokens=request.max_tokens,
            streaming=True,
            eos_token_id=-1 if request.end_id is None else request.end_id,
            row=row,
        )
        # Asked only now, so that a request is not lost when the engine stops meanwhile.
        status = self._manager.background_thread_status
        if status.can_accept_new_requests() is not None:
            raise EngineUnavailable(stopped_text(status.fatal_error))

    def _deliver(self, output: GenerationOutput) -> None:
        """Hand a request's new tokens to its sink, on the generation thread."""
        key, finished = output.request_id, output.is_finished()
        row = self._forget(key) if finished else self._rows.get(key)
        if row is None:
            if not finished:
                # Transformers drops a cancellation that overtakes its request, so it is repeated.
                self._manager.cancel_request(key)
            return
        if row.error is not None:
            if not finished:
                self.abort(key)
            row.sink(Step([], finished=True, error=row.error, refused=True))
            return
        # Transformers fails only all requests together, when its loop ends.
        error = stopped_text(output.error) if output.status == RequestStatus.FAILED else None
        new, row.delivered = output.generated_tokens[row.delivered :], len(output.generated_tokens)
        log_probs, row.log_probs = row.log_probs, []
        prompt_log_probs, row.prompt_log_probs = row.prompt_log_probs, []
        row.sink(Step(new, log_probs, finished, error, prompt_log_probs=prompt_log_probs))

    def _forget(self, key: str) -> Row | None:
        with self._rows_lock:
            row = self._rows.pop(key, None)
        if row and row.adapter and self._adapters:
            self._adapters.tidy()
        return row

    def _adapters_in_use(self) -> set[LoadedAdapter]:
        with self._rows_lock:
            return {row.adapter for row in self._rows.values() if row.adapter is not None}


def load_model(
    name: str, device: torch.device, dtype: str, *, trust_remote_code: bool = False
) -> Any:
    """Load a causal language model from a local directory or by its Hugging Face id.

    Raises:
        ValueError: the model needs its own code, and that is not trusted; or it cannot be loaded, as
            when a weight has another shape than its configuration gives it.
        OSError: there is no such model.
    """
    if trust_remote_code:
        # The part of its code that the tokenizer's processes load as well, at the same time.
        with remote_code_lock():
            AutoConfig.from_pretrained(name, trust_remote_code=True)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # its own error names none
            output_loading_info=True,
        )
    except ValueError as error:
        text = remote_code_refusal(error, "model", name)
        if trust_remote_code or not text:
            raise
        raise ValueError(text) from error
    for weight, shape, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"the weights of {name} are not those of its config.json: {weight} has the shape "
            f"{tuple(shape)}, and should have {tuple(expected)}"
        )
    return model.to(device).eval()


def batching_config(
    model: Any, context_length: int, parameters: Mapping[str, str]
) -> ContinuousBatchingConfig:
    """Return transformers' configuration. It sizes the KV cache itself, but for a CPU without a limit."""
    on_cpu = model.device.type == "cpu"
    page = CPU_PAGE_TOKENS if on_cpu else ContinuousBatchingConfig.page_size
    sequence_blocks = math.ceil(context_length / page) + 1
    blocks = None
    if tokens := parameters.get("max_tokens_in_paged_kv_cache"):
        blocks = int(tokens) // page
        if blocks < sequence_blocks:
            raise ValueError(
                f"max_tokens_in_paged_kv_cache={tokens} cannot hold one sequence of "
                f"{context_length} tokens; {sequence_blocks * page} is the least"
            )
    elif on_cpu:
        # Of the attention mask, each token of the cache has a column.
        column = CPU_BATCH_TOKENS * model.dtype.itemsize
        bytes_per_token = _cache_bytes_per_token(model) + column
        blocks = max(sequence_blocks, CPU_CACHE_BYTES // (page * bytes_per_token))
        blocks = min(blocks, MAX_RUNNING * sequence_blocks)
    fraction = parameters.get("kv_cache_free_gpu_mem_fraction")
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=blocks,
        max_batch_tokens=CPU_BATCH_TOKENS if on_cpu else None,
        max_memory_percent=float(fraction) if fraction else None,
        max_requests_per_batch=MAX_RUNNING,
        scheduler_type=SCHEDULER,
        allow_block_sharing=parameters.get("enable_kv_cache_reuse", "true") == "true",
        # It prepares a step before the tokens of the last one are known, which penalties need.
        use_async_batching=False,
        use_cuda_graph=False,
    )


class _Scheduler(FIFOScheduler):
    """Transformers' scheduler, in which a cancelled request makes room as a finished one does.

    When the KV cache is full some requests are set back, and then none is let in until one has
    finished. Transformers forgets that the others may all be cancelled instead.
    """

    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        if cancelled:
            self.block_new_requests = False
        return cancelled


SCHEDULER_MAPPING[SCHEDULER] = _Scheduler


def _cache_bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)
