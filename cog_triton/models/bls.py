"""The BLS model's work: which tensors go to which model, and which text comes back.

What the ensemble does by its configuration, done in a program (business logic scripting):
preprocessing, tensorrt_llm and postprocessing are called one after the other. Postprocessing, which
decodes, is told the tokens before each response, so that spaces and characters that are split over
responses come out right with any backend in tensorrt_llm. Nothing here knows a tokenizer.

Speculative decoding with a draft model and encoders of images are not supported: a configuration
that names one is refused, and so is a request for draft tokens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.models.model_calls import (
    NO_PARAMETERS,
    Client,
    Llm,
    ModelError,
    Models,
    Parameters,
    batch_size,
    flag,
    index,
    largest,
    renamed,
)
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.wire import (
    ADD_SPECIAL_TOKENS,
    LOGIT_BIAS,
    MIN_P,
    PROMPT_IDS,
    TOP_LOG_PROBS,
)

Array = npt.NDArray[Any]

logger = logging.getLogger(__name__)

# Input of the BLS model → input of preprocessing.
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "seed": "SEED",
    "random_seed": "RANDOM_SEED",
    "min_tokens": "MIN_TOKENS",
    "min_length": "MIN_LENGTH",
}
# Output of preprocessing → input of tensorrt_llm.
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
    "OUT_SEED": "seed",
    "OUT_MIN_TOKENS": "min_tokens",
}
# Input of the BLS model → input of tensorrt_llm.
TO_TENSORRT_LLM = {
    "num_return_sequences": "num_return_sequences",
    "beam_width": "beam_width",
    "temperature": "temperature",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "exclude_input_in_output": "exclude_input_in_output",
    "stream": "streaming",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
}
# Outputs of tensorrt_llm that the BLS model has as well.
PASSED_ON = (
    "cum_log_probs",
    "output_log_probs",
    "context_logits",
    "generation_logits",
    "batch_index",
    "sequence_index",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "num_input_tokens",
    "num_output_tokens",
)
PARAMETERS = frozenset({PROMPT_IDS, ADD_SPECIAL_TOKENS, LOGIT_BIAS, MIN_P, TOP_LOG_PROBS})
"""Of a request, that are handed down, as an ensemble hands down all of them."""
_UNSUPPORTED_PARAMETERS = {
    "tensorrt_llm_draft_model_name": "speculative decoding with a draft model",
    "multimodal_encoders_name": "encoding images",
}


class Bls:
    """Serves the requests of one instance. Methods may be called from any thread."""

    def __init__(
        self,
        models: Models,
        *,
        llm: str = "tensorrt_llm",
        accumulate: bool = False,
        decoupled: bool = True,
    ) -> None:
        """Calls nothing yet.

        Args:
            llm: the name of the tensorrt_llm model.
            accumulate: whether a response has the whole text so far, or only what it adds.
            decoupled: whether a request may get more than one response.
        """
        self._models = models
        self._llm = Llm(models, llm)
        self._accumulate = accumulate
        self._decoupled = decoupled

    def answer(
        self,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> Generator[tuple[dict[str, Array], bool], None, None]:
        """The tensors of each response to a request, and whether it is known to be the last one.

        Not every backend in tensorrt_llm tells the last response; otherwise the end of the iteration
        does. What is left to generate is stopped when the iteration fails or is closed.

        Args:
            request_id: the id by which tensorrt_llm is to know the request.
            parameters: of the request, which preprocessing and tensorrt_llm are to know too.

        Raises:
            ModelError: a model failed, or the request cannot be served.
        """
        check_request(inputs, decoupled=self._decoupled)
        # Not those by which a client asks for token ids in place of what postprocessing reads.
        passed = {name: value for name, value in parameters.items() if name in PARAMETERS}
        to_preprocessing = renamed(inputs, TO_PREPROCESSING)
        prompts = self._models.call("preprocessing", request_id, to_preprocessing, passed)
        prompts = {**renamed(prompts, FROM_PREPROCESSING), **renamed(inputs, TO_TENSORRT_LLM)}
        text = _Text(self._models, request_id, accumulate=self._accumulate)
        with closing(self._llm.responses(request_id, prompts, passed)) as responses:
            for tensors, final, last in responses:
                yield response_tensors(tensors, text.add(tensors, final=final)), last
        for rest in text.rest():
            yield rest, False

    def stop(self, request_id: str) -> None:
        """End the sequences of a request, if there are any."""
        self._llm.stop(request_id)


@dataclass
class _Sequence:
    """The last ids of one sequence, and the text of each of its beams if that is kept, UTF-8."""

    context: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    finished: bool = False


class _Text:
    """The text of one request's sequences, decoded by postprocessing as their ids arrive."""

    def __init__(self, models: Models, request_id: str, *, accumulate: bool) -> None:
        self._models = models
        self._request_id = request_id
        self._accumulate = accumulate
        self._sequences: dict[tuple[int, int], _Sequence] = {}

    def add(self, reply: Mapping[str, Array], *, final: bool) -> Array:
        """The text to send for a response of tensorrt_llm, shape [beams].

        Args:
            final: whether nothing follows of the same sequence, so that no part of a character is
                held back.
        """
        key = index(reply, "batch_index"), index(reply, "sequence_index")
        sequence = self._sequences.setdefault(key, _Sequence())
        sequence.finished = final
        return self._decode(sequence, reply["output_ids"], reply["sequence_length"], final)

    def rest(self) -> Iterator[dict[str, Array]]:
        """A response for each sequence of which something was held back until now."""
        ids, lengths = np.zeros((1, 1, 0), np.int32), np.zeros((1, 1), np.int32)
        for (batch_index, sequence_index), sequence in self._sequences.items():
            if sequence.finished:
                continue
            before = sequence.texts[:1]
            texts = self._decode(sequence, ids, lengths, final=True)
            if texts.item() not in (b"", *before):
                yield {
                    "text_output": texts,
                    "batch_index": np.array([[batch_index]], np.int32),
                    "sequence_index": np.array([[sequence_index]], np.int32),
                }

    def _decode(self, sequence: _Sequence, ids: Array, lengths: Array, final: bool) -> Array:
        inputs = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths, "IS_FINAL": np.array([[final]])}
        if sequence.context:
            inputs["CONTEXT_IDS"] = np.array([sequence.context], np.int32)
        texts = self._models.call("postprocessing", self._request_id, inputs)["OUTPUT"]
        new_ids = ids[0, 0, : lengths[0, 0]].tolist()
        sequence.context = (sequence.context + new_ids)[-CONTEXT_TOKENS:]
        if not self._accumulate:
            return texts
        before = sequence.texts or [b""] * texts.size
        sequence.texts = [old + new for old, new in zip(before, texts.flat, strict=True)]
        return np.array(sequence.texts, np.object_)


def response_tensors(reply: Mapping[str, Array], texts: Array) -> dict[str, Array]:
    """The tensors of a response: the text, and what is passed on of tensorrt_llm's."""
    return {"text_output": texts, **{name: reply[name] for name in PASSED_ON if name in reply}}


def check_parameters(parameters: Mapping[str, str]) -> None:
    """Refuse what the configuration asks for and this model does not do.

    Raises:
        ValueError: naming the parameter.
    """
    for name, what in _UNSUPPORTED_PARAMETERS.items():
        if name in parameters:
            raise ValueError(f"{name}: {what} is not supported")


def check_request(inputs: Mapping[str, Array], *, decoupled: bool) -> None:
    """Refuse a request that cannot be served.

    Raises:
        ModelError: saying why.
    """
    if largest(inputs, "num_draft_tokens", 0) > 0 or flag(inputs, "use_draft_logits"):
        raise ModelError("tensorrt_llm_bls does not support speculative decoding")
    streaming = flag(inputs, "stream")
    if streaming and largest(inputs, "beam_width") > 1:
        raise ModelError("tensorrt_llm_bls does not stream with beam_width > 1")
    several = batch_size(inputs) * largest(inputs, "num_return_sequences") > 1
    if (streaming or several) and not decoupled:
        what = "streaming" if streaming else "more than one answer to a request"
        raise ModelError(f"{what} needs decoupled_mode true in the tensorrt_llm_bls model")


class Watch:
    """Looks after running requests now and then, all in one thread, and stops those in vain.

    The requests' own threads cannot: most of the time they wait for the next response.
    """

    def __init__(self, period: float) -> None:
        """Start the thread, which looks once in ``period`` seconds."""
        self._period = period
        self._requests: dict[Client, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, client: Client, stop: Callable[[], object]) -> Iterator[None]:
        """Calls ``stop`` once in a period while the client is gone and the block still runs.

        Once may not do: what is to be stopped may not have begun.
        """
        with self._lock:
            self._requests[client] = stop
        try:
            yield
        finally:
            with self._lock:
                del self._requests[client]

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._period):
            with self._lock:
                requests = list(self._requests.items())
            for client, stop in requests:
                try:
                    if client.gone():
                        stop()
                except Exception:
                    logger.exception("a request could not be looked after")
