"""Responses of Triton, well-formed and not, and the streams of a client without a Triton."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from cog_triton import errors
from cog_triton.client import http_transport, stream
from cog_triton.client.arrivals import Arrivals
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.responses import Response, TensorOutputs, read_frame, read_tensors
from cog_triton.client.stream import TritonClient
from cog_triton.protocol.frames import Frame, encode_frames
from cog_triton.protocol.log_probs import TokenLogProb, packed_log_probs
from cog_triton.protocol.names import ENGINE, LOG_PROBS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(
            errors.PromptTooLong,
            "Prompt length (9) exceeds maximum input length (8).",
            id="prompt of TensorRT-LLM",
        ),
        pytest.param(
            errors.PromptTooLong,
            "Request sequence length is potentially greater than max input length.",
            id="sequence of TensorRT-LLM",
        ),
        pytest.param(
            errors.InvalidParameter,
            "LoRA task 5 not found in cache. Please send LoRA weights with request",
            id="unknown adapter",
        ),
        pytest.param(
            errors.InvalidParameter,
            "Assertion failed: lora module attn_q not enabled for this model",
            id="adapter of other modules",
        ),
        pytest.param(
            errors.InvalidParameter,
            "Invalid low_rank (64). low_rank must be smaller than mMaxLowRank (8)",
            id="adapter of too high a rank",
        ),
        pytest.param(
            errors.InvalidParameter,
            "EndId (99) is not within acceptable range [-1, 5)",
            id="end id",
        ),
        pytest.param(
            errors.InvalidParameter,
            "in ensemble 'ensemble', top_p must be between 0 and 1, not 2.0",
            id="parameter, within an ensemble",
        ),
        pytest.param(
            errors.TritonOverloaded,
            "PEFT Cache is full. Could not store taskId=5",
            id="full cache of adapters",
        ),
        pytest.param(
            errors.TritonOverloaded,
            "Maximum queue size of 5 has been reached, please try again later",
            id="full queue",
        ),
        pytest.param(
            errors.TritonOverloaded, "Exceeds maximum queue size", id="full queue, in short"
        ),
        pytest.param(
            errors.TritonOverloaded,
            "the LoRA cache is full: adapter a does not fit beside the adapters in use",
            id="full cache of adapters of the embedded engine",
        ),
        pytest.param(
            errors.TritonTokenizerError,
            "the request(s) for model 'preprocessing', message: x",
            id="preprocessing",
        ),
        pytest.param(
            errors.TritonUnavailable,
            "the engine has stopped: out of memory",
            id="engine that has stopped",
        ),
        pytest.param(errors.TritonUnknownError, "something else", id="unknown text"),
        pytest.param(errors.TritonUnknownError, "", id="no text"),
    ],
)
def test_errors_by_their_texts(error: type[errors.CogTritonError], text: str) -> None:
    assert type(errors.error_from_text(text)) is error


# Responses


def tensors(**values: list[Any]) -> TensorOutputs:
    return TensorOutputs(values, final=False)


def test_a_response_of_tensorrt_llm() -> None:
    outputs = tensors(output_ids=[5, 6, -1], sequence_length=[2], num_input_tokens=[9])
    response = read_tensors(outputs, None)
    assert response == Response([5, 6], 9, final=False)
    assert not response.keeps_end_token


def test_ids_that_look_like_a_frame_are_ids() -> None:
    values = encode_frames([Frame(1, 0, [5, 6], 9, final=True)]).tolist()
    for ids in ([2, 2, 7, 8], values):
        outputs = tensors(output_ids=ids, sequence_length=[len(ids)])
        assert read_tensors(outputs, None).ids == ids


@pytest.mark.parametrize(
    ("start", "place", "whole"), [(0, 0, True), (2, 2, True), (1, 0, False), (0, 2, False)]
)
@pytest.mark.parametrize("final", [False, True])
def test_frames_behind_a_gap_or_twice_are_refused(
    start: int, place: int, whole: bool, final: bool
) -> None:
    frame = Frame(1, start, [5, 6], 9, final)
    if whole:
        assert read_frame(frame, place, wants_log_probs=False) == Response([5, 6], 9, final)
    else:
        with pytest.raises(errors.TritonMalformedEvent, match=f"^E2104.*after {place} tokens"):
            read_frame(frame, place, wants_log_probs=False)


LIKELY = [TokenLogProb(5, -0.5, ((5, -0.5), (9, -1.5))), TokenLogProb(6, -2.0)]
LACKING = "lacks the log probabilities"


def test_log_probabilities_in_a_frame() -> None:
    frame = Frame(1, 0, [5, 6], 9, final=False, log_probs=LIKELY, prompt_log_probs=LIKELY[:1])
    response = read_frame(frame, 0, wants_log_probs=True)
    assert response.log_probs == LIKELY
    assert response.prompt_log_probs == LIKELY[:1]
    frame.log_probs = LIKELY[:1]
    assert read_frame(frame, 0, wants_log_probs=False).ids == [5, 6]
    with pytest.raises(errors.TritonMalformedEvent, match=LACKING):
        read_frame(frame, 0, wants_log_probs=True)


def test_log_probabilities_in_tensors() -> None:
    values = packed_log_probs(LIKELY, 2).tolist()
    outputs = {"output_ids": [5, 6], "sequence_length": [2]}
    assert read_tensors(tensors(**outputs, **{LOG_PROBS: values}), 2).log_probs == LIKELY
    assert read_tensors(tensors(**outputs, **{LOG_PROBS: values}), None).log_probs == []
    for count in (0, 1):
        with pytest.raises(errors.TritonMalformedEvent, match=LACKING):
            read_tensors(tensors(**outputs, **{LOG_PROBS: values[:count]}), 2)


# Streams


class Scripted(TritonClient):
    """A client whose transport is a list of responses and errors.

    Attributes:
        needed: how many stops end the streams.
        failing: how many stops fail.
    """

    def __init__(self, *script: Response | errors.CogTritonError, **timeouts: float) -> None:
        super().__init__(**{"response_timeout": 60, **timeouts})
        self._script = script
        self.needed, self.failing = 1, 0
        self.stops: list[str] = []
        self.streams: list[Arrivals[Any]] = []

    async def _send(self, model: str, request_id: str, *_: Any) -> Arrivals[Any]:
        arrivals: Arrivals[Any] = Arrivals()
        if model == ENGINE:
            self.stops.append(request_id)
            failed = len(self.stops) <= self.failing
            arrivals.end(errors.TritonUnavailable("cut") if failed else None)
            for stream in self.streams if len(self.stops) == self.needed else ():
                stream.end()
        else:
            self.streams.append(arrivals)
            for item in self._script:
                arrivals.add(item)
        return arrivals

    def _parse(self, message: Response | errors.CogTritonError) -> TensorOutputs:
        if isinstance(message, errors.CogTritonError):
            raise message
        outputs: dict[str, list[Any]] = {"output_ids": message.ids}
        outputs["sequence_length"] = [len(message.ids)]
        outputs["num_input_tokens"] = [message.input_tokens]
        return TensorOutputs(outputs, message.final)

    async def _disconnect(self) -> None:
        pass


FIRST = Response([1], None, final=False)


async def consume(client: TritonClient) -> list[Response]:
    async with aclosing(client.stream("id", {})) as responses:
        return [response async for response in responses]


@pytest.mark.parametrize(
    ("text", "models"),
    [
        pytest.param(
            "Stub process 'preprocessing_0_1' is not healthy.", ["preprocessing"], id="given up"
        ),
        pytest.param("the engine has stopped", [], id="another error"),
    ],
)
async def test_an_error_tells_of_a_models_process_that_triton_gave_up(
    text: str, models: list[str]
) -> None:
    client = Scripted(errors.error_from_text(f"in ensemble 'ensemble', {text}"))
    client.needed = 1
    named: list[str] = []
    client.on_given_up = named.append
    with pytest.raises(errors.TritonUnavailable):
        await consume(client)
    await client.aclose()
    assert named == models


async def test_what_arrived_together_is_handed_on_together() -> None:
    client = Scripted(Response([1], 7, False), Response([2, 3], 7, False), Response([], None, True))
    assert await consume(client) == [Response([1, 2, 3], 7, final=True)]
    await client.aclose()
    assert client.stops == []


@pytest.mark.parametrize(
    ("script", "failing", "stops"),
    [
        ([FIRST], 0, 1),  # it has begun: one stop that is confirmed will do
        ([FIRST], 1, 2),
        ([], 0, 3),  # the stop may overtake it
    ],
)
async def test_a_request_is_stopped_until_that_is_certain(
    script: list[Response], failing: int, stops: int
) -> None:
    client = Scripted(*script)
    client.failing, client.needed = failing, stops
    task = asyncio.create_task(consume(client))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await client.aclose()
    assert client.stops == ["id"] * stops


async def stopped(client: Scripted, times: int) -> None:
    while len(client.stops) < times:
        await asyncio.sleep(0)


async def test_a_stop_waits_for_as_long_as_its_request_stands_in_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "STOP_PAUSES", (0.001, 60.0))
    monkeypatch.setattr(stream, "STOP_SECONDS", 60.0)
    client = Scripted()
    client.needed = 100  # the engine does not have it
    task = asyncio.create_task(consume(client))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    (queued,) = client.streams
    closed = asyncio.Event()
    queued.close = closed.set
    await asyncio.wait_for(stopped(client, 2), 20)
    for _ in range(100):
        await asyncio.sleep(0)
    assert (len(client.stops), closed.is_set()) == (2, False)
    queued.add(FIRST)  # it comes out of the queue: a stop follows at once, not after the pause
    await asyncio.wait_for(stopped(client, 3), 20)
    assert not closed.is_set()
    queued.end()
    await asyncio.wait_for(closed.wait(), 20)
    assert len(client.stops) == 3


async def test_a_client_that_is_closed_gives_stops_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CLOSE_SECONDS", 0.05)
    client = Scripted()
    client.needed = 10**6
    task = asyncio.create_task(consume(client))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.wait_for(client.aclose(), 20)
    (queued,) = client.streams
    assert not queued.ended


@pytest.mark.parametrize(
    ("timeouts", "others", "error"),
    [
        ({"response_timeout": 0.01, "stall_timeout": 5}, 0, errors.TritonTimeout),
        # Others go on, so this one is not whole.
        ({"stall_timeout": 0.01}, 60, errors.TritonMalformedEvent),
    ],
)
async def test_silence_fails_the_request_and_stops_it(
    timeouts: dict[str, float], others: float, error: type[errors.CogTritonError]
) -> None:
    client, other = Scripted(FIRST, **timeouts), Arrivals[Any]()
    client._silence.running.add(other)
    other.last_arrival = asyncio.get_running_loop().time() + others
    with pytest.raises(error, match=r"sent nothing for 0\.01 s"):
        await consume(client)
    await client.aclose()
    assert client.stops == ["id"]


@pytest.mark.parametrize(("script", "others"), [([FIRST], 0), ([], 60)])
async def test_streams_that_are_silent_together_or_wait_for_their_first_token_are_let_be(
    script: list[Response], others: float
) -> None:
    client = Scripted(*script, stall_timeout=0.01)
    client._silence._last_of_ended = asyncio.get_running_loop().time() + others
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(consume(client), 0.05)
    await client.aclose()


@pytest.mark.parametrize(
    ("error", "stops"),
    [
        (errors.TritonMalformedEvent("a gap"), ["id"]),
        (errors.TritonUnavailable("cut"), ["id"]),
        (errors.TritonUnknownError("of the engine"), []),
    ],
)
async def test_an_error_comes_after_what_arrived_and_a_broken_stream_is_stopped(
    error: errors.CogTritonError, stops: list[str]
) -> None:
    client = Scripted(FIRST, error)
    async with aclosing(client.stream("id", {})) as responses:
        assert await anext(responses) == FIRST
        with pytest.raises(type(error)):
            await anext(responses)
    await client.aclose()
    assert client.stops == stops


async def test_a_stream_that_ends_with_an_error_hands_on_what_came_before() -> None:
    """Both are there before the consumer looks, and nothing more will wake it."""
    arrivals: Arrivals[int] = Arrivals()
    arrivals.add(1)
    arrivals.end(errors.TritonOverloaded("no more"))
    assert await arrivals.take() == [1]
    with pytest.raises(errors.TritonOverloaded):
        await asyncio.wait_for(arrivals.take(), 60)


async def test_closing_a_client_ends_the_streams_that_its_transport_forgets() -> None:
    client = Scripted(FIRST)
    async with aclosing(client.stream("1", {})) as responses:
        await anext(responses)
        closing = asyncio.create_task(client.aclose())
        with pytest.raises(errors.TritonUnavailable, match="was closed"):
            await asyncio.wait_for(anext(responses), 60)
    await closing


@pytest.mark.parametrize("transport", [GrpcClient, HttpClient])
async def test_a_client_that_is_closed_begins_no_stream(transport: Any) -> None:
    client = transport("127.0.0.1:1", response_timeout=1)
    await client.aclose()
    with pytest.raises(errors.TritonUnavailable, match="was closed"):
        await consume(client)


def frame(*, start: int, ids: list[int], final: bool) -> Frame:
    return Frame(sequence=1, start=start, ids=ids, input_tokens=9, final=final)


def frames_event(*frames: Frame) -> str:
    """The JSON of an event that has frames."""
    return json.dumps({"frames": encode_frames(frames).tolist()})


@dataclass(frozen=True)
class Reply:
    """What Triton answers over HTTP: events of a stream, or a body of JSON."""

    status: int = 200
    events: Sequence[str] | None = None
    body: str = ""

    def text(self) -> str:
        events = "".join(f"data: {event}\n\n" for event in self.events or ())
        kind = "application/json" if self.events is None else "text/event-stream"
        head = f"HTTP/1.1 {self.status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        return head + events + self.body


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        pytest.param(Reply(events=["{oops"]), "E2103", id="no JSON"),
        pytest.param(Reply(events=["[1]"]), "E2104", id="no object"),
        pytest.param(Reply(events=[]), "E2104.*lost data after 0 tokens", id="no event"),
        pytest.param(Reply(events=["{}"]), "E2104.*lacks 'output_ids'", id="no ids"),
        pytest.param(
            Reply(events=['{"output_ids": "text"}']),
            "E2104.*is malformed: output_ids, text",
            id="text for ids",
        ),
        pytest.param(
            Reply(events=['{"output_ids": 1099511627776}']),
            "is malformed: output_ids, 10995",
            id="an id out of range",
        ),
        pytest.param(
            Reply(events=['{"output_ids": 1, "sequence_length": []}']),
            "E2104.*lacks list index",
            id="no length",
        ),
        pytest.param(
            Reply(events=[frames_event(frame(start=0, ids=[5, 6], final=False))]),
            "lost data after 2 tokens",
            id="frame, and no last one",
        ),
        pytest.param(
            Reply(
                events=[
                    frames_event(frame(start=0, ids=[5, 6], final=False)),
                    frames_event(frame(start=3, ids=[8], final=True)),
                ]
            ),
            "lost data after 2 tokens",
            id="frames with a gap",
        ),
        pytest.param(
            Reply(
                events=[
                    frames_event(
                        frame(start=0, ids=[5, 6], final=False),
                        frame(start=0, ids=[5, 6], final=False),
                    )
                ]
            ),
            "2 frames instead of one",
            id="two frames at once",
        ),
        pytest.param(
            Reply(events=['{"frames": [2, 2, 7, 8]}']),
            "E2104.*frames of another format",
            id="frames of another format",
        ),
        pytest.param(
            Reply(
                events=[
                    '{"output_ids": 5, "sequence_length": 1}',
                    '{"error": "Exceeds maximum queue size"}',
                ]
            ),
            "E2106",
            id="error after a token",
        ),
        pytest.param(
            Reply(status=400, body='{"error": "unknown model"}'), "E2100", id="error's status"
        ),
        pytest.param(Reply(status=500, body=""), "E2103", id="nothing with an error's status"),
        pytest.param(
            Reply(status=502, body="<html>"), "E2103", id="no JSON with an error's status"
        ),
    ],
)
async def test_http_replies_that_end_in_an_error(reply: Reply, problem: str) -> None:
    with pytest.raises(errors.CogTritonError, match=problem):
        await consume_over_http(reply)


async def test_an_http_event_that_is_too_long_has_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "LINE_BYTES", 1000)
    reply = Reply(events=[json.dumps({"output_ids": [5] * 10_000})])
    with pytest.raises(errors.TritonMalformedEvent, match=r"E2104.*more than 1000 bytes"):
        await consume_over_http(reply)


async def consume_over_http(reply: Reply) -> None:
    """Consume a stream of a server that answers with this reply."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(reply.text().encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with aclosing(HttpClient(f"127.0.0.1:{port}", response_timeout=5)) as client:
            await consume(client)
