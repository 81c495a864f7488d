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
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cog_triton.detokenizer import CONTEXT_TOKENS

Array = npt.NDArray[Any]

logger = logging.getLogger(__name__)

# A call occupies one of the 32 threads that Triton has for an instance until its first response is
# there. With none left, the responses of the other requests would have to wait for that as well.
STARTING_AT_ONCE = 24

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
_UNSUPPORTED_PARAMETERS = {
    "tensorrt_llm_draft_model_name": "speculative decoding with a draft model",
    "multimodal_encoders_name": "encoding images",
}


class ModelError(Exception):
    """What a model answered instead of tensors, or why a request is refused; for the client."""


class Models(Protocol):
    """The other models of the server. Methods may be called from any thread."""

    def call(self, model: str, request_id: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The one response of a model that is not decoupled.

        Raises:
            ModelError: with the model's message.
        """

    def stream(
        self, model: str, request_id: str, inputs: Mapping[str, Array]
    ) -> Iterator[dict[str, Array] | ModelError]:
        """All responses of a model, decoupled or not, as they come. It waits for the first one.

        An error is yielded, not raised, because responses of other sequences may follow it.
        """


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
        self._llm = llm
        self._accumulate = accumulate
        self._decoupled = decoupled
        self._starting = threading.BoundedSemaphore(STARTING_AT_ONCE)

    def answer(
        self, request_id: str, inputs: Mapping[str, Array]
    ) -> Generator[tuple[dict[str, Array], bool], None, None]:
        """The tensors of each response to a request, and whether it is known to be the last one.

        Not every backend in tensorrt_llm tells the last response; otherwise the end of the iteration
        does. What is left to generate is stopped when the iteration fails or is closed.

        Args:
            request_id: the id by which tensorrt_llm is to know the request.

        Raises:
            ModelError: a model failed, or the request cannot be served.
        """
        check_request(inputs, decoupled=self._decoupled)
        prompts = self._models.call("preprocessing", request_id, renamed(inputs, TO_PREPROCESSING))
        prompts = {**renamed(prompts, FROM_PREPROCESSING), **renamed(inputs, TO_TENSORRT_LLM)}
        text = _Text(self._models, request_id, accumulate=self._accumulate)
        whole = not _flag(inputs, "stream")
        unfinished = batch_size(inputs) * _largest(inputs, "num_return_sequences")
        try:
            with self._starting:
                replies = self._models.stream(self._llm, request_id, prompts)
            for reply in replies:
                final = isinstance(reply, ModelError) or whole or _flag(reply, "is_final")
                unfinished -= final
                if isinstance(reply, ModelError):
                    raise reply
                if "output_ids" in reply:
                    yield response_tensors(reply, text.add(reply, final=final)), unfinished == 0
            unfinished = 0
            for rest in text.rest():
                yield rest, False
        except BaseException:
            if unfinished > 0:
                self.stop(request_id)
            raise

    def stop(self, request_id: str) -> None:
        """Ends the sequences that are generated for a request; there need not be any."""
        inputs = {
            "stop": np.array([[True]]),
            "input_ids": np.array([[0]], np.int32),
            "input_lengths": np.array([[1]], np.int32),
            "request_output_len": np.array([[1]], np.int32),
        }
        for reply in self._models.stream(self._llm, request_id, inputs):
            if isinstance(reply, ModelError):
                logger.warning("%s, told to stop %s: %s", self._llm, request_id, reply)


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
        key = _index(reply, "batch_index"), _index(reply, "sequence_index")
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
    """Refuses what the configuration asks for and this model does not do.

    Raises:
        ValueError: naming the parameter.
    """
    for name, what in _UNSUPPORTED_PARAMETERS.items():
        if name in parameters:
            raise ValueError(f"{name}: {what} is not supported")


def check_request(inputs: Mapping[str, Array], *, decoupled: bool) -> None:
    """Refuses a request that cannot be served.

    Raises:
        ModelError: saying why.
    """
    if _largest(inputs, "num_draft_tokens", 0) > 0 or _flag(inputs, "use_draft_logits"):
        raise ModelError("tensorrt_llm_bls does not support speculative decoding")
    streaming = _flag(inputs, "stream")
    if streaming and _largest(inputs, "beam_width") > 1:
        raise ModelError("tensorrt_llm_bls does not stream with beam_width > 1")
    several = batch_size(inputs) * _largest(inputs, "num_return_sequences") > 1
    if (streaming or several) and not decoupled:
        what = "streaming" if streaming else "more than one answer to a request"
        raise ModelError(f"{what} needs decoupled_mode true in the tensorrt_llm_bls model")


def request_key(request_id: str) -> str:
    """The id under which a request is known to the other models: its own, else a new one."""
    return request_id or f"bls-{uuid.uuid4()}"


def batch_size(inputs: Mapping[str, Array]) -> int:
    """How many prompts a request has."""
    return int(inputs["text_input"].shape[0])


def renamed(arrays: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
    """Those of the arrays that have a name in ``names``, under that, each of shape [batch, …].

    A scalar that the sender's configuration reshapes to nothing has shape [batch]; its receiver
    wants what clients send, [batch, 1].
    """
    return {
        new: array.reshape(-1, 1) if array.ndim == 1 else array
        for old, new in names.items()
        if (array := arrays.get(old)) is not None
    }


class Client:
    """Who waits for the responses to one request. Methods may be called from any thread.

    A sender must not be asked anything once it has sent the last response: Triton 2.51 frees what it
    refers to. Hence the lock.
    """

    def __init__(self, sender: Any, final_flag: int) -> None:
        self._sender = sender
        self._final_flag = final_flag
        self._lock = threading.Lock()
        self.closed = False

    def send(self, response: Any | None, *, last: bool) -> None:
        """Sends a response, or nothing but the end of the responses."""
        flags = self._final_flag if last else 0
        with self._lock:
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)
            self.closed = last

    def gone(self) -> bool:
        """Whether the client has gone away before the last response. It takes a round trip."""
        with self._lock:
            return not self.closed and bool(self._sender.is_cancelled())


class Watch:
    """Looks after running requests now and then, all in one thread, and stops those in vain.

    The requests' own threads cannot: most of the time they wait for the next response.
    """

    def __init__(self, period: float) -> None:
        """Starts the thread, which looks once in ``period`` seconds."""
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
        """Ends the thread."""
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


def _flag(arrays: Mapping[str, Array], name: str) -> bool:
    return name in arrays and bool(arrays[name].any())


def _largest(arrays: Mapping[str, Array], name: str, default: int = 1) -> int:
    return int(arrays[name].max()) if name in arrays else default


def _index(arrays: Mapping[str, Array], name: str) -> int:
    return int(arrays[name].flat[0]) if name in arrays else 0
