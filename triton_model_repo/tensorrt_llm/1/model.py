"""The tensorrt_llm slot with an embedded engine: tensors in, one call per sequence, tensors out."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.engines.base import EngineError, EngineUnavailable, create_engine
from cog_triton.engines.serving import Output, Serving
from cog_triton.models import stub
from cog_triton.models.engine_metrics import EngineMetrics
from cog_triton.models.tensors import (
    generation_requests,
    placeholders,
    response_tensors,
    top_log_probs,
)
from cog_triton.processes import end_with_parent
from cog_triton.wire import COUNTED_IDS, IDS_ONLY, continued_ids

CANCELLATION_CHECK_SECONDS = (
    1.0  # asking Triton is a round trip: per token it halves the throughput
)
ENGINE_DIED = 70  # exit status
# After each response the delivery waits for Python's lock, which an engine's thread that computes in Python
# gives away so many seconds later. By default that is 5 ms: 200 responses a second, of all sequences.
SWITCH_SECONDS = 1e-4


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        sys.setswitchinterval(SWITCH_SECONDS)
        config = json.loads(args["model_config"])
        parameters = stub.parameters(config)
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._placeholders = placeholders(config)
        self._prompt_in_output = parameters.get("exclude_input_in_output") == "false"
        engine = create_engine(parameters)
        engine.on_death(end_at_once)
        self._serving = Serving(engine, int(parameters.get("max_tokens_per_response", 0)))
        self._metrics = EngineMetrics(self._serving, pb_utils)
        # What the engine brought stays: a full collection would go through all of it, 0.2 s with torch.
        gc.collect()
        gc.freeze()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except EngineUnavailable as error:
                send_last(sender, stub.error(pb_utils, str(error)))
            except EngineError as error:
                send_last(sender, stub.refusal(pb_utils, str(error)))
            except Exception as error:
                send_last(sender, stub.failure(pb_utils, "tensorrt_llm", error))

    def finalize(self) -> None:
        self._metrics.close()
        self._serving.close()
        del self._metrics, self._serving
        stub.forget_requests()

    def _start(self, request: Any, sender: Any) -> None:
        inputs = stub.arrays(request.inputs())
        request_id, text = request_texts(request)
        if "stop" in inputs and inputs["stop"].any():
            self._stop(request_id, sender)
            return
        parameters = json.loads(text or "{}")
        generations = generation_requests(
            inputs, len(continued(text)), self._serving.engine.features, parameters
        )
        streaming = bool(inputs["streaming"].any()) if "streaming" in inputs else False
        if streaming and not self._decoupled:
            raise EngineError("streaming needs decoupled_mode true in the tensorrt_llm model")
        if len(generations) > 1 and not self._decoupled:
            raise EngineError(
                "a batch of prompts needs decoupled_mode true in the tensorrt_llm model"
            )
        exclude = inputs.get("exclude_input_in_output")
        prompt_in_output = self._prompt_in_output if exclude is None else not exclude.any()
        names = frozenset(request.requested_output_names())
        form = ids_only(parameters)
        zeros = {} if form else self._placeholders
        form = {**form, "top": top_log_probs(parameters)}
        responses = Responses(sender, inputs, names, len(generations), form, zeros)
        try:
            for index, generation in enumerate(generations):
                stop = self._serving.start(
                    request_id,
                    generation,
                    partial(responses.send, index),
                    streaming=streaming,
                    prompt_in_output=prompt_in_output,
                )
                responses.stops.append(stop)
        except Exception:
            responses.abandon()  # the error is the only response to the whole batch
            raise

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise EngineError("a stop request needs the id of the request to stop")
        self._serving.stop(request_id)
        # Without decoupling, Triton wants a response even where there is nothing to say.
        nothing = [] if self._decoupled else [pb_utils.InferenceResponse([])]
        sender.send(*nothing, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Responses:
    """The responses of one request, which may be a batch of several sequences."""

    def __init__(
        self,
        sender: Any,
        inputs: dict[str, stub.Array],
        names: frozenset[str],
        sequences: int,
        form: dict[str, int],
        placeholders: dict[str, stub.Array],
    ) -> None:
        self._sender = sender
        self._inputs = inputs
        self._names = names
        self._form = form
        self._placeholders = placeholders
        self._unfinished = sequences
        self._lock = threading.Lock()
        self._checked = time.monotonic()
        self._abandoned = False
        self.stops: list[Callable[[], object]] = []

    def abandon(self) -> None:
        """Stop the sequences that were started, and send no more."""
        self._abandoned = True
        for stop in self.stops:
            stop()

    def send(self, index: int, output: Output) -> None:
        if self._abandoned:
            return
        last = output.final and self._finish_one()
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        response, sender = self._response(index, output), self._sender
        if last:
            # Each of ``stops`` leads back here: what Triton gave would stay until that is collected.
            self._sender, self._inputs = None, {}
        sender.send(response, flags=flags)
        if not last:
            self._stop_if_cancelled()

    def _response(self, index: int, output: Output) -> Any:
        if output.error is not None:
            say = stub.refusal if output.refused else stub.error
            return say(pb_utils, output.error)
        tensors = response_tensors(index, output, self._inputs, **self._form)
        return stub.response(pb_utils, {**tensors, **self._placeholders}, self._names)

    def _stop_if_cancelled(self) -> None:
        """For clients of this model itself: Triton hands no cancellation down from an ensemble."""
        now = time.monotonic()
        if now - self._checked < CANCELLATION_CHECK_SECONDS:
            return
        self._checked = now
        if self._sender.is_cancelled():
            for stop in self.stops:
                stop()

    def _finish_one(self) -> bool:
        with self._lock:
            self._unfinished -= 1
            return self._unfinished == 0


def request_texts(request: Any) -> tuple[str, str]:
    """The id and the parameters of a request; an ensemble hands both down."""
    try:
        return stub.request_id(request), stub.parameters_text(request)
    except ValueError as error:
        raise EngineError(str(error)) from None


def continued(parameters: str) -> list[int]:
    try:
        return continued_ids(parameters)
    except ValueError as error:
        raise EngineError(str(error)) from None


def ids_only(parameters: dict[str, Any]) -> dict[str, bool]:
    """Return the form of responses for a client that reads only token ids."""
    if parameters.get(COUNTED_IDS) is True:
        return {"ids_only": True, "counted": True}
    return {"ids_only": True} if parameters.get(IDS_ONLY) is True else {}


def end_at_once() -> None:
    """End the stub, and by its guard the server, which is started again: this engine is dead."""
    os._exit(ENGINE_DIED)


def send_last(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
