"""The responses of the model tensorrt_llm to one request."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cog_triton.engines.serving import Output
from cog_triton.models import stub
from cog_triton.models.stub import Array, Client
from cog_triton.models.tensors import frames_tensor, response_tensors
from cog_triton.protocol.names import ENGINE

# Asking Triton is a round trip: for each token, it would halve the throughput.
CANCELLATION_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class Responses:
    """The responses of one request, which may be a batch of several sequences.

    Attributes:
        inputs: the request's; dropped with the last response, because Triton owns their memory.
        names: the outputs that the request asks for.
        unfinished: the number of sequences that have not ended.
        as_frames: send frames, which may be of other requests of the client as well.
        top: alternatives to each log probability, in TensorRT-LLM's tensors.
        placeholders: further outputs, the same in each response.
        stops: functions that stop the sequences.
        abandoned: nothing is sent any more, because the request has got an error.
    """

    client: Client
    inputs: dict[str, Array]
    names: frozenset[str]
    unfinished: int
    as_frames: bool = False
    top: int = 0
    placeholders: dict[str, Array] = field(default_factory=dict)
    stops: list[Callable[[], object]] = field(default_factory=list)
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    checked: float = field(default_factory=time.monotonic)

    def stop(self) -> None:
        for stop in self.stops:
            stop()

    def abandon(self) -> None:
        """Stop all sequences, and send none of their outputs."""
        self.abandoned = True
        self.stop()

    def send(self, index: int, output: Output, *others: Output) -> None:
        """Send an output of the sequence at a place in the batch, and those of other requests."""
        if self.abandoned:
            return
        if output.error is not None:
            response = stub.failure(ENGINE, output.error)
        else:
            response = stub.response(self._tensors(index, output, others), self.names)
        # The last response must not overtake another sequence's.
        with self.lock:
            unfinished = self.unfinished - 1 if output.finished else self.unfinished
            if not unfinished:
                # Each of ``stops`` leads back here, so what Triton owns would stay until that is collected.
                self.inputs = {}
            self.client.send(response, last=not unfinished)
            # Not if sending failed: then an error follows.
            self.unfinished = unfinished
        self._stop_if_gone()

    def _tensors(self, index: int, output: Output, others: Sequence[Output]) -> dict[str, Array]:
        if self.as_frames:
            return frames_tensor([output, *others])
        tensors = response_tensors(index, output, inputs=self.inputs, top=self.top)
        return {**tensors, **self.placeholders}

    def _stop_if_gone(self) -> None:
        """Stop the sequences if the client has left, now and then.

        This is for clients of this model itself: Triton passes no cancellation down from an ensemble.
        """
        now = time.monotonic()
        if now - self.checked <= CANCELLATION_CHECK_SECONDS:
            return
        self.checked = now
        if self.client.gone():
            self.stop()
