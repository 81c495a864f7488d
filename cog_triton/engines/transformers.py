"""The embedded engine: transformers' continuous batching, on a CPU or a GPU.

Transformers schedules the requests, pages the KV cache and runs the model. Two of its parts are
replaced, since it has no per-request seeds, penalties or bad words: the list of logits processors,
which here only carries each request's parameters to its row, and the sampling step. The router of
outputs is replaced too, so that tokens reach their sinks without another thread in between. These are
internals of transformers; the range in pyproject.toml is as narrow as that asks for.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.generation.continuous_batching.utils import pad_to_pow2, stream_context

from cog_triton import remote_code
from cog_triton.engines.attention import use_attention
from cog_triton.engines.base import (
    Engine,
    EngineError,
    EngineUnavailable,
    GenerationRequest,
    Sink,
    Tokens,
)
from cog_triton.engines.token_sampling import History, choose, penalize

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 2048  # for a model whose configuration names none
CPU_PAGE_TOKENS = 64
CPU_BATCH_TOKENS = 256  # a longer prompt is prefilled in pieces, between others' tokens
CPU_CACHE_BYTES = 512 << 20
MAX_RUNNING = 256  # more requests wait
GRAPH_QUERIES = 256  # a batch of more tokens, a prefill, computes longer than it takes to launch
GRAPH_KEYS = 1024  # the fewest that a graph reads
SCHEDULER = "cog-triton"  # transformers finds it by this name


class TransformersEngine(Engine):
    """See the module's docstring."""

    def __init__(
        self, model: Any, *, context_length: int, batching: ContinuousBatchingConfig
    ) -> None:
        """Starts generating on a loaded model.

        Args:
            model: a causal language model in evaluation mode, on its device.
            context_length: most tokens that prompt and output may have together.
            batching: transformers' configuration.
        """
        self._context_length = context_length
        self._vocabulary = _vocabulary(model)
        manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=context_length),
            batching,
        )
        self._router = manager.output_router = _Router(manager.cancel_request)
        manager.logit_processor = parameters = _RowParameters(model)
        processor = manager._create_batch_processor()
        processor.model_runner = _Runner(
            parameters=parameters,
            vocabulary=self._vocabulary,
            logit_processor=parameters,
            cb_config=processor.cb_config,
            cache=processor.cache,
            inputs_and_outputs=processor.inputs_and_outputs,
            do_sample=False,
            return_logprobs=True,
        )
        manager.batch_processor = processor
        self._manager = manager
        manager.start()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> TransformersEngine:
        """Loads the model that the tensorrt_llm model's parameters name.

        Raises:
            ValueError: the prompt and output cannot fit in ``max_tokens_in_paged_kv_cache``, there
                is no such attention, or the model needs its own code and that is not trusted.
            OSError: there is no such model.
        """
        device = _device(parameters.get("device", "auto"))
        model = load_model(
            parameters["model"],
            device,
            parameters.get("dtype", "auto"),
            trust_remote_code=parameters.get("trust_remote_code") == "true",
        )
        if attention := parameters.get("attn_implementation"):
            use_attention(model, attention)
        context_length = _context_length(model.config, parameters.get("max_seq_len"))
        return cls(
            model,
            context_length=context_length,
            batching=batching_config(model, context_length, parameters),
        )

    @property
    def context_length(self) -> int:
        return self._context_length

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        _check_ids(request, self._vocabulary)
        self._router.open(request, sink)
        self._manager.add_request(
            request.input_ids,
            request_id=request.key,
            max_new_tokens=request.max_tokens,
            streaming=True,
            eos_token_id=-1 if request.end_id is None else request.end_id,
            request=request,
        )
        # Asked only now, so that a request is not lost when the engine stops meanwhile.
        status = self._manager.background_thread_status
        if status.can_accept_new_requests() is not None and self._router.forget(request.key):
            raise EngineUnavailable(_stopped_text(status.fatal_error))

    def abort(self, key: str) -> None:
        if self._router.forget(key):
            self._manager.cancel_request(key)

    def active(self) -> int:
        return self._router.active()

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)


def load_model(
    name: str, device: torch.device, dtype: str, *, trust_remote_code: bool = False
) -> Any:
    """A causal language model of a local directory or a Hugging Face id.

    Args:
        trust_remote_code: whether Python code that the model brings may be run.

    Raises:
        ValueError: the model needs its own code, and that is not trusted; or it cannot be loaded.
        OSError: there is no such model.
    """
    if trust_remote_code:
        # The part of its code that the tokenizer's processes load as well, at the same time.
        with remote_code.one_process_at_a_time():
            AutoConfig.from_pretrained(name, trust_remote_code=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )
    except ValueError as error:
        if trust_remote_code or not remote_code.was_refused(error):
            raise
        raise ValueError(remote_code.refusal("model", name)) from error
    return model.to(device).eval()


def batching_config(
    model: Any, context_length: int, parameters: Mapping[str, str]
) -> ContinuousBatchingConfig:
    """Transformers' configuration from the tensorrt_llm model's parameters.

    On a GPU the KV cache is sized by transformers; on a CPU it knows no limit, so it is set here.
    """
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
        use_cuda_graph=parameters.get("use_cuda_graph", "false") == "true",
        return_logprobs=True,
    )


class _Scheduler(FIFOScheduler):
    """Transformers' scheduler, in which a cancelled request makes room as a finished one does.

    When the KV cache is full some requests are set back, and then none is let in until one has
    finished. Transformers forgets that the others may all be cancelled instead.
    """

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Called before each step; returns the requests that were cancelled."""
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        if cancelled:
            self.block_new_requests = False
        return cancelled


SCHEDULER_MAPPING[SCHEDULER] = _Scheduler


@dataclass
class _Reader:
    """Who gets the tokens of a request, and how many it has had."""

    sink: Sink
    log_probs: bool
    had: int = 0

    def next_tokens(self, output: GenerationOutput) -> Tokens:
        """What is new in an output, which holds all tokens so far."""
        # Transformers fails no request alone, but all of them when its loop ends.
        error = _stopped_text(output.error) if output.status == RequestStatus.FAILED else None
        had, self.had = self.had, len(output.generated_tokens)
        return Tokens(
            output.generated_tokens[had:],
            output.logprobs[had:] if self.log_probs else [],
            output.is_finished(),
            error,
        )


class _Router(OutputRouter):
    """Hands each request's new tokens to its sink, on the generation thread."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self._cancel = cancel
        self._readers: dict[str, _Reader] = {}
        self._readers_lock = threading.Lock()

    def open(self, request: GenerationRequest, sink: Sink) -> None:
        with self._readers_lock:
            self._readers[request.key] = _Reader(sink, request.return_log_probs)

    def forget(self, key: str) -> bool:
        with self._readers_lock:
            return self._readers.pop(key, None) is not None

    def active(self) -> int:
        return len(self._readers)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)

    def deliver(self, output: GenerationOutput) -> None:
        key, finished = output.request_id, output.is_finished()
        with self._readers_lock:
            reader = self._readers.pop(key, None) if finished else self._readers.get(key)
        if reader is not None:
            reader.sink(reader.next_tokens(output))
        elif not finished:
            # Transformers drops a cancellation that overtakes its request, so it is repeated.
            self._cancel(key)


class _RowParameters:
    """Stands where transformers has its logits processors, and changes no logits.

    For each step it notes the requests whose next token is chosen, in the order of their rows, and
    keeps the history of those that need one.
    """

    tensors_required = 0
    do_processing = False

    def __init__(self, model: Any) -> None:
        self._vocabulary = _vocabulary(model)
        self._device = model.device
        self._histories: dict[str, History] = {}
        self.rows: list[tuple[GenerationRequest, int]] = []  # and the position of the next token
        self.histories: list[History | None] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Called for each new request; nothing is wrong with what ``submit`` passes."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing to fill: no row of the tensor is asked for."""

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Called before each forward pass with the batch's requests."""
        states = [future.state for future in requests_in_batch if future.has_new_token]
        requests = [state.logit_processor_kwargs["request"] for state in states]
        self.rows = [
            (request, state.position_offset)
            for request, state in zip(requests, states, strict=True)
        ]
        histories = {
            request.key: self._history(request, state)
            for request, state in zip(requests, states, strict=True)
            if not request.sampling.plain
        }
        self.histories = [histories.get(request.key) for request in requests]
        # A request without a new token is still being prefilled and has no history yet.
        self._histories = histories
        return arg_storage

    def _history(self, request: GenerationRequest, state: Any) -> History:
        history = self._histories.get(request.key)
        if history is None:
            history = History(request.input_ids, self._vocabulary, self._device)
        # After a reset, tokens generated before it count as prompt in transformers' state.
        earlier = state.initial_tokens[len(request.input_ids) :]
        history.extend(earlier + state.generated_tokens)
        return history


class _Runner(ModelRunner):
    """Transformers' model runner with this package's sampling.

    What a CUDA graph has captured is the forward pass alone. It leaves the logits in a fixed place, and
    the sampling, which is another for every batch, follows it on the same stream.
    """

    def __init__(self, *, parameters: _RowParameters, vocabulary: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._parameters = parameters
        self._graphs = any(self.cb_config.cuda_graph_booleans)
        self._logits = torch.empty(0)  # [rows, vocabulary]
        if self._graphs:
            rows = min(self.cb_config.max_requests_per_batch, self.cache.max_batch_tokens)
            self._logits = torch.empty(rows, vocabulary, device=self.cache.device)

    def maybe_pad_inputs(
        self,
        num_q_tokens: int,
        max_kv_read: int,
        use_decode_fast_path: bool,  # noqa: ARG002
    ) -> tuple[int, int]:
        """Called before each batch with its sizes; returns those that it is padded to."""
        # Asked for until the batch is through.
        self.pad_inputs = self._graphs and num_q_tokens <= GRAPH_QUERIES and max_kv_read > 0
        if not self.pad_inputs:
            return num_q_tokens, max_kv_read
        queries = int(pad_to_pow2(num_q_tokens, self.cache.max_batch_tokens))
        return queries, _padded_keys(max_kv_read, self.cache.max_tokens_read)

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        forward, graph = super()._get_forward_fn(use_block_table)
        return forward, graph and self.pad_inputs

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """One step: the forward pass, run, captured or replayed, and the sampling."""
        super().compute_batch(model, batch_data)
        with stream_context(self.inputs_and_outputs.compute_stream):
            self._choose(self.inputs_and_outputs.output_ids)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:  # noqa: ARG002
        """The end of the forward pass; what is done here is captured with it."""
        if self._graphs:
            self._logits[: scores.shape[1]].copy_(scores[0])
        else:
            self._logits = scores[0]

    def _choose(self, output_ids: torch.Tensor) -> None:
        rows = self._parameters.rows
        # Behind those come the rows of prompts that are not yet through, whose logits mean nothing.
        logits = self._logits[: len(rows)]
        ids = _next_tokens(logits, rows, self._parameters.histories)
        output_ids[0, : len(rows)].copy_(ids)
        if any(request.return_log_probs for request, _ in rows):
            log_probs = logits.gather(1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            output_ids[1, : len(rows)].copy_(log_probs.view(dtype=torch.int32))


def _padded_keys(keys: int, most: int) -> int:
    """How many keys a batch reads with its padding: at most an eighth more, in few different sizes."""
    step: int = max(GRAPH_KEYS, pad_to_pow2(keys, most) // 8)
    return min(-(-keys // step) * step, most)


def _next_tokens(
    logits: torch.Tensor, rows: list[tuple[GenerationRequest, int]], histories: list[History | None]
) -> torch.Tensor:
    """The next token of each row, shape [rows]."""
    if any(histories):
        logits = logits.clone()
        for i, ((request, _), history) in enumerate(zip(rows, histories, strict=True)):
            if history is not None:
                logits[i] = penalize(logits[i], request.sampling, history, request.end_id)
    return choose(
        logits, [request.sampling for request, _ in rows], [position for _, position in rows]
    )


def _stopped_text(reason: object) -> str:
    return f"the engine has stopped: {reason or 'it was closed'}"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _check_ids(request: GenerationRequest, vocabulary: int) -> None:
    """Refuses token ids that the model does not have: they would end the engine, not the request."""
    if request.end_id is not None and request.end_id >= vocabulary:
        # TensorRT-LLM's wording, which clients know.
        raise EngineError(
            f"EndId ({request.end_id}) is not within acceptable range [-1, {vocabulary})."
        )
    ids = list(chain(request.input_ids, *request.sampling.bad_words))
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise EngineError(f"token ids must be between 0 and {vocabulary - 1}")


def _context_length(config: Any, override: str | None) -> int:
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = known or DEFAULT_CONTEXT_LENGTH
    return min(int(override), limit) if override else limit


def _cache_bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)
