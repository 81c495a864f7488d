"""The tensorrt_llm_bls model: the ensemble's work in a program, by calls of the other models.

Preprocessing, tensorrt_llm and postprocessing are called one after the other. Postprocessing, which
decodes, gets the tokens before each response, so that spaces and characters that are split over responses
come out right with any backend in tensorrt_llm. Nothing here knows a tokenizer.

Speculative decoding with a draft model and encoders of images are not supported: a configuration
that names one is refused, and so is a request for draft tokens.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cog_triton.errors import InvalidParameter, TritonUnknownError
from cog_triton.models import stub
from cog_triton.models.stub import Array, Client, flag
from cog_triton.models.tensors import NAMES
from cog_triton.processes import end_with_parent
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.wire import (
    ADD_SPECIAL_TOKENS,
    ENGINE,
    LOGIT_BIAS,
    MIN_P,
    NO_PARAMETERS,
    PROMPT_IDS,
    TOP_LOG_PROBS,
    stop_inputs,
)

logger = logging.getLogger(__name__)

NAME = "tensorrt_llm_bls"
CANCELLATION_CHECK_SECONDS = 1.0  # asking Triton is a round trip
# A call occupies one of the 32 threads that Triton has for an instance until its first response is
# there. With none left, the responses of the other requests would have to wait for that as well.
STARTING_AT_ONCE = 24

_DRAFTING = ("num_draft_tokens", "use_draft_logits")
# Parameters of a request that are handed down, as an ensemble hands down all. Not those by which a client
# asks for token ids in place of what postprocessing reads.
PARAMETERS = {PROMPT_IDS, ADD_SPECIAL_TOKENS, LOGIT_BIAS, MIN_P, TOP_LOG_PROBS}
_UNSUPPORTED_PARAMETERS = {
    "tensorrt_llm_draft_model_name": "speculative decoding with a draft model",
    "multimodal_encoders_name": "encoding images",
}


@dataclass
class _Sequence:
    """The last ids of one sequence, and the text of each of its beams if that is kept, UTF-8."""

    context: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    finished: bool = False


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        config = json.loads(args["model_config"])
        parameters = stub.parameters(config)
        for name, what in _UNSUPPORTED_PARAMETERS.items():
            if name in parameters:
                raise ValueError(f"{name}: {what} is not supported")
        self._llm = parameters.get("tensorrt_llm_model_name", ENGINE)
        self._accumulates = parameters.get("accumulate_tokens") == "true"
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._starting = threading.BoundedSemaphore(STARTING_AT_ONCE)
        self._running: dict[Client, str] = {}  # to the ids of their requests
        self._closed = threading.Event()
        # The requests' own threads mostly wait for the next response.
        self._watch = threading.Thread(
            target=self._stop_cancelled, name="cancellation", daemon=True
        )
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        # Calls of other models block, even in a coroutine.
        for request in requests:
            threading.Thread(target=self._serve, args=[request], daemon=True).start()

    def finalize(self) -> None:
        self._closed.set()
        self._watch.join()
        stub.forget_requests()

    def _serve(self, request: Any) -> None:
        client = Client(request)
        try:
            inputs, names = stub.received(request)
            request_id = stub.request_id(request) or f"bls-{uuid.uuid4()}"
            parameters = stub.request_parameters(request)
            self._check(inputs)
            self._running[client] = request_id
            with closing(self._responses(request_id, inputs, parameters)) as responses:
                for tensors, last in responses:
                    client.send(stub.response(tensors, names), last=last)
            if not client.closed:
                client.send(last=True)
        except Exception as error:
            client.fail(NAME, error)
        finally:
            self._running.pop(client, None)

    def _check(self, inputs: Mapping[str, Array]) -> None:
        if any(flag(inputs, name) for name in _DRAFTING):
            raise InvalidParameter(f"{NAME} does not support speculative decoding")
        streams = flag(inputs, "stream")
        if streams and _largest(inputs, "beam_width") > 1:
            raise InvalidParameter(f"{NAME} does not stream with beam_width > 1")
        if (streams or _sequences(inputs) > 1) and not self._decoupled:
            what = "streaming" if streams else "more than one answer to a request"
            raise InvalidParameter(f"{what} needs decoupled_mode true in the {NAME} model")

    def _responses(
        self, request_id: str, inputs: Mapping[str, Array], parameters: Mapping[str, Any]
    ) -> Generator[tuple[dict[str, Array], bool], None, None]:
        """Yield the tensors of each response, and whether it is known to be the last one.

        Not every backend in tensorrt_llm marks the last response. What is left to generate is stopped if
        this fails or is closed.
        """
        parameters = {name: value for name, value in parameters.items() if name in PARAMETERS}
        queries = _renamed(inputs, NAMES["bls_to_preprocessing"])
        call = self._request("preprocessing", request_id, queries, parameters)
        prompts = _renamed(_outputs(call.exec()), NAMES["preprocessing_to_llm"])
        for name in inputs.keys() - NAMES["bls_to_preprocessing"].keys() - set(_DRAFTING):
            prompts[NAMES["bls_to_llm"].get(name, name)] = inputs[name]
        whole, unfinished = not flag(inputs, "stream"), _sequences(inputs)
        sequences: dict[tuple[int, int], _Sequence] = defaultdict(_Sequence)
        try:
            with self._starting:
                call = self._request(self._llm, request_id, prompts, parameters)
                responses = call.exec(decoupled=True)
            for response in responses:
                unfinished -= response.has_error()
                tensors = _outputs(response)
                final = whole or flag(tensors, "is_final")
                unfinished -= final
                if "output_ids" in tensors:
                    sequence = sequences[stub.sequence_of(tensors)]
                    ids, lengths = tensors["output_ids"], tensors["sequence_length"]
                    text = self._decode(request_id, sequence, ids, lengths, final=final)
                    yield {**tensors, "text_output": text}, unfinished == 0
        except BaseException:
            if unfinished > 0:
                self._stop(request_id)
            raise
        # The backend did not say which response was the last: text may still be held back.
        nothing = np.zeros((1, 1, 0), np.int32), np.zeros((1, 1), np.int32)
        for place, sequence in sequences.items():
            before = sequence.texts[:1]
            if sequence.finished:
                continue
            text = self._decode(request_id, sequence, *nothing, final=True)
            if text.item() not in (b"", *before):
                yield {"text_output": text, **stub.indices(*place)}, False

    def _decode(
        self, request_id: str, sequence: _Sequence, ids: Array, lengths: Array, *, final: bool
    ) -> Array:
        """Return the text to send, shape [beams]; of ``final`` responses no part is held back."""
        inputs = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths, "IS_FINAL": np.array([[final]])}
        if sequence.context:
            inputs["CONTEXT_IDS"] = np.array([sequence.context], np.int32)
        texts = _outputs(self._request("postprocessing", request_id, inputs).exec())["OUTPUT"]
        sequence.finished = final
        new_ids = ids[0, 0, : lengths[0, 0]].tolist()
        sequence.context = (sequence.context + new_ids)[-CONTEXT_TOKENS:]
        if not self._accumulates:
            return texts
        before = sequence.texts or [b""] * texts.size
        sequence.texts = [old + new for old, new in zip(before, texts.flat, strict=True)]
        return np.array(sequence.texts, np.object_)

    def _request(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Any] = NO_PARAMETERS,
    ) -> Any:
        return stub.pb_utils.InferenceRequest(
            model_name=model,
            request_id=request_id,
            inputs=[stub.pb_utils.Tensor(*item) for item in stub.as_sent(inputs).items()],
            requested_output_names=[],  # all that there are
            parameters=dict(parameters),
        )

    def _stop(self, request_id: str) -> None:
        for response in self._request(self._llm, request_id, stop_inputs()).exec(decoupled=True):
            if response.has_error():
                logger.warning(
                    "%s: stopping %s: %s", self._llm, request_id, response.error().message()
                )

    def _stop_cancelled(self) -> None:
        # Again and again until the request has ended: what is to be stopped may not have begun.
        while not self._closed.wait(CANCELLATION_CHECK_SECONDS):
            for client, request_id in self._running.copy().items():
                try:
                    if client.gone():
                        self._stop(request_id)
                except Exception:
                    logger.exception("a request could not be looked after")


def _outputs(response: Any) -> dict[str, Array]:
    if not response.has_error():
        return stub.arrays(response.output_tensors())
    error = response.error()
    refused = error.code() == stub.pb_utils.TritonError.INVALID_ARG
    raise (InvalidParameter if refused else TritonUnknownError)(error.message())


def _renamed(arrays: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
    return {names[name]: array for name, array in arrays.items() if name in names}


def _largest(inputs: Mapping[str, Array], name: str) -> int:
    return int(inputs[name].max()) if name in inputs else 1


def _sequences(inputs: Mapping[str, Array]) -> int:
    return len(inputs["text_input"]) * _largest(inputs, "num_return_sequences")
