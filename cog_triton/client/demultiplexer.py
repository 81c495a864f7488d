"""From the messages of a stream to the frames of each request, in order. No I/O, and no clock.

    messages, as they come          deliveries
    [7: ids 0-3][9: ids 2-5]   ──▶  request 7: ids 0-3
    [9: ids 0-2]               ──▶  request 9: ids 0-2, ids 2-5

All requests of a client share a stream, and a message may have frames of several of them. The rules:

- A frame belongs to the request with its sequence's number. Frames of a request are delivered in the order
  of their ids: one that comes early waits until those before it are there. Triton answers on several
  threads, so neighbours may change places.
- A gap that stays is a loss. ``overdue`` names the requests whose gap is older than ``GAP_SECONDS``.
- A message without frames is of TensorRT-LLM's C++ backend, or of a stop. It belongs to the request with
  its model and its id.
- An error has the id alone. A stop has the id of the request that it stops, which nobody reads any more:
  the error belongs to the stop, if there is one.
- After its last frame or an error, a request is forgotten. What belongs to no request is dropped: its
  reader has left.
"""

from dataclasses import dataclass, field

from cog_triton.client.messages import frames_of, is_final, read
from cog_triton.errors import TritonMalformedEvent
from cog_triton.protocol.frames import LARGEST_NUMBER, Frame
from cog_triton.protocol.names import ENGINE, IDS_ENSEMBLE
from cog_triton.protocol.triton_messages import service_pb2

# The frames of a request may come on different threads' responses at about the same time. What has not
# come after this time is lost.
GAP_SECONDS = 1.0


@dataclass(slots=True)
class Delivery:
    """Something for one request: a frame, another response, or a problem of a response."""

    sequence: int
    item: Frame | service_pb2.ModelStreamInferResponse | TritonMalformedEvent
    last: bool


@dataclass(slots=True)
class _Expected:
    """What is known of one request."""

    model: str
    request_id: str
    # Number of the ids that have been delivered.
    place: int = 0
    # Frames behind a gap, by their starts.
    early: dict[int, Frame] = field(default_factory=dict)
    gap_began: float | None = None


class Demultiplexer:
    """Sorts messages by requests. The caller says what time it is."""

    def __init__(self) -> None:
        # By sequence.
        self._expected: dict[int, _Expected] = {}
        # The sequence, by model and request id.
        self._by_name: dict[tuple[str, str], int] = {}
        # Sequences of the requests that have a gap.
        self._with_gap: set[int] = set()
        self._last_sequence = 0

    def new_sequence(self) -> int:
        """Return a number for the sequence of a request, which is not expected yet."""
        self._last_sequence = self._last_sequence % LARGEST_NUMBER + 1
        return self._last_sequence

    def expect(self, sequence: int, model: str, request_id: str) -> None:
        """Add a request, which is about to be sent."""
        self._expected[sequence] = _Expected(model, request_id)
        self._by_name[model, request_id] = sequence

    def forget(self, sequence: int) -> None:
        """Drop what comes for a request from now on."""
        expected = self._expected.pop(sequence, None)
        if expected is None:
            return
        self._with_gap.discard(sequence)
        name = (expected.model, expected.request_id)
        # A later request may have the same id.
        if self._by_name.get(name) == sequence:
            del self._by_name[name]

    def receive(self, message: bytes, now: float) -> list[Delivery]:
        """Return what a message has for the requests, or raise TritonMalformedEvent if it is unreadable."""
        answer = read(message)
        try:
            frames = frames_of(answer)
        except TritonMalformedEvent as error:
            return self._deliver(answer, error, last=True)
        if not frames:
            last = bool(answer.error_message) or is_final(answer.infer_response)
            return self._deliver(answer, answer, last=last)
        deliveries = []
        for frame in frames:
            expected = self._expected.get(frame.sequence)
            if expected is None:
                continue
            if frame.start == expected.place and not expected.early:
                expected.place = frame.end
                ready = [frame]
            else:
                ready = self._in_order(expected, frame, now)
            for each in ready:
                deliveries.append(Delivery(each.sequence, each, each.final))
                if each.final:
                    self.forget(each.sequence)
        return deliveries

    def overdue(self, now: float) -> dict[int, int]:
        """Forget the requests whose gap will not close; return them, with how many ids came before it."""
        lost = {}
        for sequence in list(self._with_gap):
            expected = self._expected[sequence]
            if expected.gap_began is not None and now - expected.gap_began >= GAP_SECONDS:
                lost[sequence] = expected.place
                self.forget(sequence)
        return lost

    @property
    def has_gaps(self) -> bool:
        return bool(self._with_gap)

    def has_early_end(self, sequence: int) -> bool:
        """Whether the last frame of a request has come, ahead of others."""
        expected = self._expected.get(sequence)
        return expected is not None and any(frame.final for frame in expected.early.values())

    def _deliver(
        self,
        answer: service_pb2.ModelStreamInferResponse,
        item: service_pb2.ModelStreamInferResponse | TritonMalformedEvent,
        *,
        last: bool,
    ) -> list[Delivery]:
        """Deliver an item to the request that an answer names."""
        sequence = self._sequence_of(answer)
        if sequence is None:
            return []
        if last:
            self.forget(sequence)
        return [Delivery(sequence, item, last)]

    def _sequence_of(self, answer: service_pb2.ModelStreamInferResponse) -> int | None:
        """Return the request that an answer names by its model and id; an error may name no model."""
        response = answer.infer_response
        models = [response.model_name] if response.model_name else [ENGINE, IDS_ENSEMBLE]
        for model in models:
            sequence = self._by_name.get((model, response.id))
            if sequence is not None:
                return sequence
        return None

    def _in_order(self, expected: _Expected, frame: Frame, now: float) -> list[Frame]:
        """Keep a frame of a request; return those that are ready now."""
        if frame.start >= expected.place:
            expected.early[frame.start] = frame
        frames = []
        ready = expected.early.pop(expected.place, None)
        while ready is not None:
            expected.place = ready.end
            expected.gap_began = None
            frames.append(ready)
            ready = expected.early.pop(expected.place, None)
        if not expected.early:
            self._with_gap.discard(frame.sequence)
        elif expected.gap_began is None:
            expected.gap_began = now
            self._with_gap.add(frame.sequence)
        return frames
