"""The tensorrt_llm_bls model: the ensemble's work in a program, by calls of the other models.

They are called one after the other. Postprocessing, which decodes, gets the tokens before each response, so
that spaces and characters that are split over responses come out right with any backend in tensorrt_llm.

Speculative decoding with a draft model and encoders of images are not supported: a configuration that names
one is refused, and so is a request for draft tokens.
"""

import logging
import threading
import uuid
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from cog_triton.errors import InvalidParameter, TritonUnknownError
from cog_triton.models import stub
from cog_triton.models.names import (
    BLS_TO_ENGINE,
    BLS_TO_PREPROCESSING,
    ENGINE_TO_POSTPROCESSING,
    PREPROCESSING_TO_ENGINE,
    UNSUPPORTED_BLS_VARIABLES,
)
from cog_triton.models.stub import Array, Client, Contexts, Inputs, Tensors, flag
from cog_triton.models.tensors import STOP_WORDS_TEXT
from cog_triton.protocol.names import (
    ADD_SPECIAL_TOKENS,
    ENGINE,
    LOGIT_BIAS,
    MIN_P,
    PROMPT_IDS,
    TOP_LOG_PROBS,
)
from cog_triton.protocol.parameters import stop_inputs

logger = logging.getLogger(__name__)

NAME = "tensorrt_llm_bls"
# Asking Triton is a round trip.
CANCELLATION_CHECK_SECONDS = 1.0
# A call occupies one of the 32 threads that Triton has for an instance until its first response is
# there. With none left, the responses of the other requests would have to wait for that as well.
STARTING_AT_ONCE = 24

_DRAFTING = ("num_draft_tokens", "use_draft_logits")
# The parameters of a request that the other models get. An ensemble passes on all. Here those are left out
# by which a client asks for frames, because postprocessing cannot read them.
PASSED = {PROMPT_IDS, ADD_SPECIAL_TOKENS, LOGIT_BIAS, MIN_P, TOP_LOG_PROBS}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config, parameters = stub.begin(args)
        for name, what in UNSUPPORTED_BLS_VARIABLES.items():
            if name in parameters:
                raise ValueError(f"{name}: {what} is not supported")
        self._llm = parameters.get("tensorrt_llm_model_name", ENGINE)
        # The variable is set for an engine in Python, which also finds stop words in texts.
        self._engine_finds_texts = parameters.get("decoding_context") == "true"
        self._accumulates = parameters.get("accumulate_tokens") == "true"
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._starting = threading.BoundedSemaphore(STARTING_AT_ONCE)
        # The clients whose requests run, and the ids of these requests.
        self._running: dict[Client, str] = {}
        self._closed = threading.Event()
        # The requests' own threads mostly wait for the next response.
        self._watch = threading.Thread(target=self._stop_cancelled, name="cancels", daemon=True)
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
        """Answer one request, on its thread; whatever fails is its error."""
        client = Client(request)
        try:
            received = stub.received(request)
            request_id = received.request_id or f"bls-{uuid.uuid4()}"
            self._check(received.inputs)
            self._running[client] = request_id
            responses = self._responses(request_id, received.inputs, received.parameters)
            with closing(responses):
                for tensors, last in responses:
                    client.send(stub.response(tensors, received.names), last=last)
            if not client.closed:
                client.send(last=True)
        except Exception as error:
            client.fail(NAME, error)
        finally:
            self._running.pop(client, None)

    def _check(self, inputs: Inputs) -> None:
        if any(flag(inputs, name) for name in _DRAFTING):
            raise InvalidParameter(f"{NAME} does not support speculative decoding")
        streams = flag(inputs, "stream")
        if streams and _largest(inputs, "beam_width") > 1:
            raise InvalidParameter(f"{NAME} does not stream with beam_width > 1")
        if (streams or _sequences(inputs) > 1) and not self._decoupled:
            what = "streaming" if streams else "more than one answer to a request"
            raise InvalidParameter(f"{what} needs decoupled_mode true in the {NAME} model")

    def _responses(
        self, request_id: str, inputs: Inputs, parameters: Mapping[str, Any]
    ) -> Generator[tuple[Tensors, bool], None, None]:
        """Yield each response's tensors, and whether it is known to be the last; stop what is left."""
        parameters = {name: value for name, value in parameters.items() if name in PASSED}
        queries = _renamed(inputs, BLS_TO_PREPROCESSING)
        tokenized = _outputs(self._call("preprocessing", request_id, queries, parameters))
        prompts = _renamed(tokenized, PREPROCESSING_TO_ENGINE)
        if not self._engine_finds_texts:
            # TensorRT-LLM's C++ backend has no input for them.
            prompts.pop(STOP_WORDS_TEXT, None)
        for name in inputs.keys() - BLS_TO_PREPROCESSING.keys() - set(_DRAFTING):
            prompts[BLS_TO_ENGINE.get(name, name)] = inputs[name]
        streams = flag(inputs, "stream")
        unfinished = _sequences(inputs)
        other_end_ids = tokenized.get("OUT_OTHER_END_IDS", np.empty(0, np.int32))
        end_ids = frozenset(other_end_ids.reshape(-1).tolist())
        contexts = Contexts(streaming=streams)
        texts: dict[tuple[int, int], Array] = {}
        try:
            with self._starting:
                responses = self._call(self._llm, request_id, prompts, parameters, decoupled=True)
            for response in responses:
                if response.has_error():
                    # ``_outputs`` raises the error. Its sequence has ended, so only others need a stop.
                    unfinished -= 1
                tensors = stub.without_end_token(_outputs(response), end_ids)
                if not streams or flag(tensors, "is_final"):
                    unfinished -= 1
                if "output_ids" not in tensors:
                    continue
                for part in contexts.add(tensors, last=False):
                    text = self._decode(request_id, part)
                    yield self._answer(part, text, texts), unfinished == 0
        except BaseException:
            if unfinished > 0:
                self._stop(request_id)
            raise
        if unfinished <= 0:
            return
        # The backend did not say which response was the last: text may still be held back.
        for part in contexts.add({}, last=True):
            text = self._decode(request_id, part)
            if text.item():
                yield self._answer(part, text, texts), False

    def _decode(self, request_id: str, tensors: Inputs) -> Array:
        """Return the text of a response with its context, UTF-8, shape [beams]."""
        inputs = _renamed(tensors, ENGINE_TO_POSTPROCESSING)
        if not inputs["CONTEXT_IDS"].size:
            del inputs["CONTEXT_IDS"]
        return _outputs(self._call("postprocessing", request_id, inputs))["OUTPUT"]

    def _answer(self, tensors: Inputs, text: Array, texts: dict[tuple[int, int], Array]) -> Tensors:
        place = stub.sequence_of(tensors)
        if self._accumulates:
            if place in texts:
                text = texts[place] + text
            texts[place] = text
        return {**tensors, "text_output": text}

    def _call(
        self, model: str, request_id: str, inputs: Inputs, parameters: Any = (), **options: bool
    ) -> Any:
        """Return a model's response; with ``decoupled``, its responses as they come."""
        request = stub.pb_utils.InferenceRequest(
            model_name=model,
            request_id=request_id,
            inputs=[stub.pb_utils.Tensor(*item) for item in stub.as_sent(inputs).items()],
            # All outputs.
            requested_output_names=[],
            parameters=dict(parameters),
        )
        return request.exec(**options)

    def _stop(self, request_id: str) -> None:
        for response in self._call(self._llm, request_id, stop_inputs(), decoupled=True):
            if response.has_error():
                reason = response.error().message()
                logger.warning("%s: stopping %s: %s", self._llm, request_id, reason)

    def _stop_cancelled(self) -> None:
        # Again and again until the request has ended, because it may not have begun in the engine.
        while not self._closed.wait(CANCELLATION_CHECK_SECONDS):
            for client, request_id in self._running.copy().items():
                try:
                    if client.gone():
                        self._stop(request_id)
                except Exception:
                    logger.exception("supervising a request failed")


def _outputs(response: Any) -> dict[str, Array]:
    if not response.has_error():
        return stub.arrays(response.output_tensors())
    error = response.error()
    if error.code() == stub.pb_utils.TritonError.INVALID_ARG:
        raise InvalidParameter(error.message())
    raise TritonUnknownError(error.message())


def _renamed(arrays: Inputs, names: Mapping[str, str]) -> dict[str, Array]:
    return {names[name]: array for name, array in arrays.items() if name in names}


def _largest(inputs: Inputs, name: str) -> int:
    return int(inputs[name].max()) if name in inputs else 1


def _sequences(inputs: Inputs) -> int:
    return len(inputs["text_input"]) * _largest(inputs, "num_return_sequences")
