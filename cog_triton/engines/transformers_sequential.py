"""Transformers without continuous batching: ``generate()``, one request at a time.

For models that continuous batching cannot run: those with a recurrent state, with an encoder, or with an
attention that does not go through transformers' common interface.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from cog_triton.engines import base
from cog_triton.engines.base import Engine, EngineError, GenerationRequest, Sink, Step
from cog_triton.engines.guides import Guides
from cog_triton.engines.model_config import context_length
from cog_triton.engines.transformers_step import Row, StepProcessor
from cog_triton.errors import EngineFailure
from cog_triton.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# The context in tokens of a model whose configuration does not say.
UNKNOWN_CONTEXT = 2048
# The fields of generation_config.json that say how an output begins. Sampling is up to the request.
_KEPT = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id")


class SequentialEngine(Engine):
    features = frozenset({"allowed_token_ids", "embedding_bias", "min_p", "top_logprobs"})

    def __init__(self, model: Any, parameters: Mapping[str, str]) -> None:
        """Start generating with a model that is loaded."""
        self._model = model
        config = model.config.to_dict()
        requested = int(parameters["max_seq_len"]) if "max_seq_len" in parameters else None
        self.context_length = context_length(config, requested, default=UNKNOWN_CONTEXT)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._guides: Guides | None = None
        name = parameters.get("tokenizer_dir")
        if name:
            trusted = parameters.get("trust_remote_code") == "true"
            load = partial(load_tokenizer, name, trust_remote_code=trusted)
            self._guides = Guides(load, self._vocabulary)
            self.features |= {"guided_decoding"}
        kept = {name: getattr(model.generation_config, name, None) for name in _KEPT}
        model.generation_config = GenerationConfig(**kept)
        starts = (
            kept["decoder_start_token_id"],
            getattr(model.config, "decoder_start_token_id", None),
            kept["bos_token_id"],
        )
        self._start_id = next((token for token in starts if token is not None), 0)
        self._processor = StepProcessor(model, self._guides, None)
        self.running: dict[str, Row] = {}
        self._waiting: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sequential engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        base.check_ids(request, self._vocabulary)
        if self._closed:
            raise base.stopped()
        if request.guide is not None and self._guides is None:
            raise EngineError("the embedded engine does not support guided_decoding_guide")
        if request.lora_task_id:
            raise EngineError(
                f"the embedded engine does not support lora_task_id with {type(self._model).__name__}"
            )
        row = Row(request, sink, request.input_ids.copy())
        self.running[request.key] = row
        self._waiting.put(row)

    def abort(self, key: str) -> None:
        self.running.pop(key, None)

    def close(self) -> None:
        self._closed = True
        self.running.clear()
        self._waiting.put(None)
        self._thread.join()
        if self._guides is not None:
            self._guides.close()

    def _run(self) -> None:
        """Generate one request after another until the engine is closed."""
        while True:
            row = self._waiting.get()
            if row is None:
                return
            if not self.is_running(row):
                continue
            try:
                self._generate(row)
                # Without effect after the last token, with which the request left ``running``.
                self.fail(row, EngineFailure("the model ended the sequence before its last token"))
            except EngineError as error:
                self.fail(row, error)
            except BaseException as error:
                # Even a SystemExit: without this thread, all requests would wait.
                logger.exception("a request failed")
                self.fail(row, EngineFailure(f"the model failed: {type(error).__name__}: {error}"))

    @torch.inference_mode()
    def _generate(self, row: Row) -> None:
        """Run one request by ``generate()``, whose criteria deliver each token."""
        request = row.request
        if request.guide is not None and self._guides is not None:
            row.guided = self._guides.begin(request, row.tokens)
        prompt = request.input_ids
        inputs: dict[str, Tensor] = {}
        if self._model.config.is_encoder_decoder:
            # The output of an earlier attempt belongs to the decoder.
            made = prompt[len(prompt) - request.continued :]
            prompt = prompt[: len(prompt) - request.continued]
            inputs["decoder_input_ids"] = self._tensor([self._start_id, *made])
        ids = self._tensor(prompt)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=request.max_tokens,
                do_sample=False,
                pad_token_id=0,
                decoder_start_token_id=self._start_id,
            ),
            logits_processor=[_Choice(self._processor, row)],
            stopping_criteria=[_Delivery(self, row)],
            **inputs,
        )

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self._model.device)

    def is_running(self, row: Row) -> bool:
        """Return whether a request is neither finished nor aborted."""
        return self.running.get(row.request.key) is row

    def fail(self, row: Row, error: EngineError) -> None:
        """End a request with an error, unless it has ended."""
        if self.running.pop(row.request.key, None) is None:
            return
        try:
            row.sink(Step(finished=True, error=error))
        except Exception:
            logger.exception("request %s could not be told its error", row.request.key)

    def deliver(self, row: Row, token: int) -> bool:
        """Hand a new token to a request's sink; return whether it was the last."""
        if not self.is_running(row):
            return True
        if row.error is not None:
            self.fail(row, row.error)
            return True
        request = row.request
        row.tokens.append(token)
        made = len(row.tokens) - len(request.input_ids)
        finished = token in request.end_ids or made >= request.max_tokens
        if finished:
            self.running.pop(request.key, None)
        log_probs = row.log_probs
        row.log_probs = []
        row.sink(Step([token], log_probs, finished))
        return finished


class _Choice(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Chooses a request's next token as continuous batching does."""

    def __init__(self, processor: StepProcessor, row: Row) -> None:
        self._processor = processor
        self._row = row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._processor.begin_rows([self._row])
        return self._processor(input_ids, scores.float(), input_ids)


class _Delivery(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Hands each new token on, and ends ``generate()`` after the last."""

    def __init__(self, engine: SequentialEngine, row: Row) -> None:
        self._engine = engine
        self._row = row

    def __call__(self, input_ids: Tensor, _: Any, **__: Any) -> Any:
        finished = self._engine.deliver(self._row, int(input_ids[0, -1]))
        return torch.tensor([finished], device=input_ids.device)
