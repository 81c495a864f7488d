"""What Triton sends, well-formed and not, without a Triton."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.arrivals import Arrivals
from cog_triton.client.grpc_transport import (
    GrpcClient,
    _infer_response,
    infer_request,
    parse_response,
    set_parameters,
)
from cog_triton.client.http_transport import HttpClient, parse_event
from cog_triton.client.stream import (
    Response,
    ResponseStream,
    TritonClient,
    _joined,
    error_from_text,
    wanted_log_probs,
)
from cog_triton.errors import (
    CogTritonError,
    InvalidParameter,
    PromptTooLong,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonOverloaded,
    TritonTimeout,
    TritonTokenizerError,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.wire import (
    LOG_PROBS,
    TokenLogProb,
    checksum,
    packed_log_probs,
    packed_prompt_log_probs,
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Prompt length (9) exceeds maximum input length (8).", PromptTooLong),
        ("LoRA task 5 not found in cache. Please send LoRA weights with request", InvalidParameter),
        ("PEFT Cache is full. Could not store taskId=5", TritonOverloaded),
        ("Assertion failed: lora module attn_q not enabled for this model", InvalidParameter),
        (
            "Invalid low_rank (64). low_rank must be smaller than mMaxLowRank (8)",
            InvalidParameter,
        ),
        ("Request sequence length is potentially greater than max input length.", PromptTooLong),
        ("Maximum queue size of 5 has been reached, please try again later", TritonOverloaded),
        ("Exceeds maximum queue size", TritonOverloaded),
        ("the LoRA cache is full: adapter a does not fit beside those in use", TritonOverloaded),
        ("EndId (99) is not within acceptable range [-1, 5)", InvalidParameter),
        ("in ensemble 'ensemble', top_p must be between 0 and 1, not 2.0", InvalidParameter),
        (
            "Failed to process the request(s) for model 'preprocessing', message: x",
            TritonTokenizerError,
        ),
        ("the engine has stopped: out of memory", TritonUnavailable),
        ("something else", TritonUnknownError),
        ("", TritonUnknownError),
    ],
)
def test_errors_by_their_texts(text: str, error: type[CogTritonError]) -> None:
    mapped = error_from_text(text)
    assert type(mapped) is error
    assert str(mapped).startswith(mapped.code)


def test_an_error_has_no_names_of_inner_models_and_no_traceback() -> None:
    text = (
        "in ensemble 'ensemble_ids', Failed to process the request(s) for model instance "
        "'preprocessing_0_0', message: TypeError: no text\n\nAt:\n  model.py(9): execute\n"
    )
    assert str(error_from_text(text)) == "E2102 TritonTokenizerError: TypeError: no text"


def grpc_response(**tensors: np.ndarray) -> service_pb2.ModelInferResponse:  # type: ignore[type-arg]
    response = service_pb2.ModelInferResponse()
    for name, value in tensors.items():
        response.outputs.add(name=name)
        response.raw_output_contents.append(value.tobytes())
    response.parameters["triton_final_response"].bool_param = True
    return response


def test_a_grpc_response() -> None:
    response = grpc_response(
        output_ids=np.array([[[5, 6, -1]]], np.int32),
        sequence_length=np.array([[2]], np.int32),
        num_input_tokens=np.array([[9]], np.int32),
    )
    assert parse_response(response) == Response([5, 6], 9, final=True)


def test_a_grpc_response_without_its_ids() -> None:
    with pytest.raises(TritonMalformedEvent, match=r"^E2104.*output_ids"):
        parse_response(grpc_response(sequence_length=np.array([[2]], np.int32)))


def test_a_grpc_message_that_cannot_be_read() -> None:
    with pytest.raises(TritonMalformedEvent, match="cannot be read"):
        _infer_response(b"\xff")


def checked(*ids: int, place: int) -> list[int]:
    """The ids as an embedded engine sends them after ``place`` others."""
    return [checksum(ids, place), *ids]


def checked_grpc(ids: list[int], total: int | None = None) -> service_pb2.ModelInferResponse:
    tensors = {} if total is None else {"num_output_tokens": np.array([[total]], np.int32)}
    response = grpc_response(output_ids=np.array([[ids]], np.int32), **tensors)
    response.parameters["triton_final_response"].bool_param = total is not None
    return response


def checked_http(ids: list[int], total: int | None = None) -> dict[str, object]:
    return {"output_ids": ids, **({} if total is None else {"num_output_tokens": total})}


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_ids_behind_their_checksum(transport: str) -> None:
    def parsed(ids: list[int], place: int, total: int | None = None) -> Response:
        if transport == "grpc":
            return parse_response(checked_grpc(ids, total), place)
        return parse_event(checked_http(ids, total), place)

    assert parsed(checked(5, 6, place=0), 0) == Response([5, 6], None, final=False)
    assert parsed(checked(7, place=2), 2, total=3) == Response([7], None, final=True)
    assert parsed(checked(place=3), 3, total=3) == Response([], None, final=True)
    whole = checked(5, 6, place=2)
    for ids, place in [
        (whole, 1),  # something before it was lost
        (whole, 4),  # it came twice
        (whole[:-1], 2),
        ([*whole[:-1], 7], 2),
        (whole[1:], 2),
        ([], 2),
    ]:
        with pytest.raises(TritonMalformedEvent, match=f"^E2104.*after {place} tokens"):
            parsed(ids, place)
    with pytest.raises(TritonMalformedEvent, match=r"^E2104.*4 tokens of 5"):
        parsed(whole, 2, total=5)


LIKELY = [TokenLogProb(5, -0.5, ((5, -0.5), (9, -1.5))), TokenLogProb(6, -2.0)]


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("keeps_end_token", [True, False])
def test_log_probabilities_of_a_response(transport: str, keeps_end_token: bool) -> None:
    ids = checked(5, 6, place=0) if keeps_end_token else [5, 6]
    values = packed_log_probs(LIKELY, 2)
    length = {} if keeps_end_token else {"sequence_length": np.array([[2]], np.int32)}
    tensors = {"output_ids": np.array([[ids]], np.int32), **length, LOG_PROBS: values}

    def parsed(tensors: dict[str, Any], top: int | None) -> list[TokenLogProb]:
        if transport == "grpc":
            response = grpc_response(**tensors)
            response.parameters["triton_final_response"].bool_param = False
            return parse_response(response, 0, top).log_probs
        event = {name: value.ravel().tolist() for name, value in tensors.items()}
        return parse_event(event, 0, top).log_probs

    assert parsed(tensors, 2) == LIKELY
    assert parsed(tensors, None) == []
    for short in ({LOG_PROBS: values[:-1]}, {LOG_PROBS: None}):
        given = {name: v for name, v in {**tensors, **short}.items() if v is not None}
        with pytest.raises(TritonMalformedEvent, match="lacks the log probabilities"):
            parsed(given, 2)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_log_probabilities_of_a_prompt(transport: str) -> None:
    places = [((3, 0.0),), ((4, -1.0), (8, -0.5), (4, -1.0))]
    values = np.append(packed_prompt_log_probs(places, 2), packed_log_probs(LIKELY, 2))

    def parsed(values: Any) -> Response:
        ids = np.array([[checked(5, 6, place=0)]], np.int32)
        if transport == "grpc":
            response = grpc_response(output_ids=ids, **{LOG_PROBS: values})
            response.parameters["triton_final_response"].bool_param = False
            return parse_response(response, 0, 2)
        event = {"output_ids": ids.ravel().tolist(), LOG_PROBS: values.tolist()}
        return parse_event(event, 0, 2)

    first = parsed(values)
    assert first.log_probs == LIKELY
    assert first.prompt_log_probs == [
        TokenLogProb(3, 0.0),
        TokenLogProb(4, -1.0, ((8, -0.5), (4, -1.0))),
    ]
    assert _joined([first, parsed(packed_log_probs(LIKELY, 2))]).prompt_log_probs == (
        first.prompt_log_probs
    )
    with pytest.raises(TritonMalformedEvent, match="lacks the log probabilities"):
        parsed(values[1:])


def test_log_probabilities_that_arrived_together_are_joined() -> None:
    parts = [Response([t.id], None, False, log_probs=[t]) for t in LIKELY]
    assert _joined(parts).log_probs == LIKELY


@pytest.mark.parametrize(
    ("inputs", "parameters", "wanted"),
    [
        ({}, {}, None),
        ({}, {"top_logprobs": 3}, None),
        ({"return_log_probs": np.array([[False]])}, {}, None),
        ({"return_log_probs": np.array([[True]])}, {}, 0),
        ({"return_log_probs": np.array([[True]])}, {"top_logprobs": 3}, 3),
    ],
)
def test_what_a_request_wants(inputs: Any, parameters: Any, wanted: int | None) -> None:
    assert wanted_log_probs(inputs, parameters) == wanted


def test_parameters_of_a_grpc_request() -> None:
    request = infer_request("ensemble", "id1", {}, ())
    set_parameters(request, {"a": True, "b": 5, "c": "text"})
    assert request.parameters["a"].bool_param is True
    assert request.parameters["b"].int64_param == 5
    assert request.parameters["c"].string_param == "text"


def test_a_grpc_stream_that_ends_without_the_engines_count() -> None:
    response = checked_grpc(checked(5, place=0))
    response.parameters["triton_final_response"].bool_param = True
    with pytest.raises(TritonMalformedEvent, match="1 tokens of \\?"):
        parse_response(response)


def test_a_grpc_request() -> None:
    inputs = {"text_input": np.array([[b"Hi"]], object), "seed": np.array([[2**64 - 1]], np.uint64)}
    request = infer_request("ensemble", "id1", inputs, ("output_ids",))
    assert request.id == "id1"
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [
        ("text_input", "BYTES", [1, 1]),
        ("seed", "UINT64", [1, 1]),
    ]
    assert request.raw_input_contents[1] == b"\xff" * 8
    assert [output.name for output in request.outputs] == ["output_ids"]


@pytest.mark.parametrize(
    ("event", "ids"),
    [
        ({"output_ids": [5, 6, 7], "sequence_length": 3}, [5, 6, 7]),
        ({"output_ids": 5, "sequence_length": 1}, [5]),
        ({"output_ids": [], "sequence_length": 0}, []),
        ({"output_ids": [5, -1], "sequence_length": [1]}, [5]),
    ],
)
def test_an_http_event(event: dict[str, object], ids: list[int]) -> None:
    assert parse_event(event).ids == ids


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"output_ids": "text", "sequence_length": 1},
        {"output_ids": [2**40], "sequence_length": 1},
        {"output_ids": [1], "sequence_length": []},
    ],
)
def test_a_malformed_http_event(event: dict[str, object]) -> None:
    with pytest.raises(TritonMalformedEvent, match=r"^E2104"):
        parse_event(event)


def http_error(body: str, content_type: str = "text/event-stream", status: int = 200) -> str:
    """The error that an HTTP reply ends in."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(f"127.0.0.1:{port}", response_timeout=5)
            try:
                async with client.stream("id", {}) as responses:
                    async for _ in responses:
                        pass
            finally:
                await client.aclose()

    with pytest.raises(CogTritonError) as caught:
        asyncio.run(main())
    return str(caught.value)


def test_http_replies_that_end_in_an_error() -> None:
    good = 'data: {"output_ids": 5, "sequence_length": 1}\n\n'
    assert http_error("data: {oops\n\n").startswith(TritonMalformedJSON.code)
    assert http_error("data: [1]\n\n").startswith(TritonMalformedEvent.code)
    assert http_error("").startswith(TritonMalformedEvent.code)
    first = f"data: {json.dumps(checked_http(checked(5, 6, place=0)))}\n\n"
    lost = f"data: {json.dumps(checked_http(checked(8, place=3), 4))}\n\n"
    assert "a gap or an error after 2 tokens" in http_error(first + lost)
    assert "2 tokens of ?" in http_error(first)
    assert http_error(good + 'data: {"error": "Exceeds maximum queue size"}\n\n').startswith(
        "E2106"
    )
    assert http_error('{"error": "unknown model"}', "application/json", 400).startswith("E2100")
    assert http_error("", "application/json", 500).startswith(TritonMalformedJSON.code)
    assert http_error("<html>", "text/html", 502).startswith(TritonMalformedJSON.code)


class Scripted(TritonClient):
    """A client whose transport is a list of responses and errors, which waits for a stop at the end."""

    def __init__(
        self,
        responses: list[Response | CogTritonError],
        response_timeout: float = 60,
        stall_timeout: float | None = None,
    ) -> None:
        super().__init__(response_timeout=response_timeout, stall_timeout=stall_timeout)
        self._script = responses
        self.stopped: list[str] = []
        self.begun: list[ResponseStream] = []

    async def _begin(self, *_: object) -> ResponseStream:
        stream = ResponseStream(self._response_timeout)
        self.begun.append(stream)
        for item in self._script:
            if isinstance(item, CogTritonError):
                stream.end(item)
            else:
                stream.add(item)
                if item.final:
                    stream.end()
        return stream

    async def _send_stop(self, request_id: str) -> None:
        self.stopped.append(request_id)
        if len(self.stopped) == 2:  # the first overtook its request
            for stream in self.begun:
                stream.end()

    async def _disconnect(self) -> None:
        pass


def test_what_arrived_together_is_handed_on_together() -> None:
    async def main() -> list[Response]:
        client = Scripted(
            [Response([1], 7, False), Response([2, 3], None, False), Response([], None, True)]
        )
        async with client.stream("id", {}) as responses:
            taken = [response async for response in responses]
        await client.aclose()
        assert client.stopped == []
        return taken

    assert asyncio.run(main()) == [Response([1, 2, 3], 7, final=True)]


def test_leaving_early_stops_until_the_stream_has_ended() -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False)])
        async with client.stream("id", {}) as responses:
            await anext(aiter(responses))
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id", "id"]


def test_a_cancelled_consumer_stops_the_request() -> None:
    async def main() -> list[str]:
        client = Scripted([])

        async def consume() -> None:
            async with client.stream("id", {}) as responses:
                async for _ in responses:
                    pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id", "id"]


def test_silence_fails_the_request_and_stops_it() -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False)], response_timeout=0.01)

        async def consume() -> None:
            async with client.stream("id", {}) as responses:
                async for _ in responses:
                    pass

        with pytest.raises(TritonTimeout, match=r"^E2101"):
            await consume()
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id", "id"]


def test_a_stream_that_fails_raises_after_what_arrived() -> None:
    async def main() -> None:
        stream = ResponseStream(60)
        stream.add(Response([1], None, False))
        stream.end(TritonUnavailable("gone"))
        assert await anext(stream) == Response([1], None, False)
        with pytest.raises(TritonUnavailable):
            await anext(stream)
        stream.close()

    asyncio.run(main())


def test_an_error_that_arrives_with_something_comes_after_it() -> None:
    """Both are there before the consumer looks, and nothing more will wake it."""

    async def main() -> None:
        arrivals: Arrivals[int] = Arrivals()
        arrivals.add(1)
        arrivals.add(2)
        arrivals.end(TritonOverloaded("no more"))
        assert await arrivals.ends_within(5)
        assert await arrivals.take() == [1, 2]
        with pytest.raises(TritonOverloaded):
            await asyncio.wait_for(arrivals.take(), 5)

    asyncio.run(main())


def test_what_has_ended_hands_on_nothing() -> None:
    async def main() -> None:
        arrivals: Arrivals[int] = Arrivals()
        arrivals.add(1)
        assert await arrivals.take() == [1]
        arrivals.end()
        assert await asyncio.wait_for(arrivals.take(), 5) == []

    asyncio.run(main())


def test_a_stream_that_stands_still_while_others_go_on_is_not_whole() -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False)], stall_timeout=0.02)
        async with client.stream("stalls", {}) as stalled, client.stream("goes on", {}) as other:
            assert await anext(stalled) == Response([1], None, False)

            async def others() -> None:
                while True:
                    other._last = asyncio.get_running_loop().time()
                    await asyncio.sleep(0.001)

            going_on = asyncio.create_task(others())
            with pytest.raises(TritonMalformedEvent, match=r"stood still for 0\.02 s"):
                await anext(stalled)
            going_on.cancel()
        await client.aclose()
        return client.stopped

    assert "stalls" in asyncio.run(main())


def test_streams_that_are_silent_together_or_wait_for_their_first_token_are_let_be() -> None:
    async def main() -> None:
        client = Scripted([Response([1], None, False)], stall_timeout=0.01)
        waiting = Scripted([], stall_timeout=0.01)
        waiting._last_ended = asyncio.get_running_loop().time() + 60  # another goes on
        async with (
            client.stream("first", {}) as first,
            client.stream("second", {}) as second,
            waiting.stream("third", {}) as third,
        ):
            assert (await anext(first)).ids == (await anext(second)).ids == [1]
            for stream in (first, second, third):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.05)
        await asyncio.gather(client.aclose(), waiting.aclose())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TritonMalformedEvent("a gap"), ["id"]),
        (TritonUnavailable("cut"), ["id"]),
        (TritonUnknownError("of the engine"), []),
    ],
)
def test_the_engine_is_told_of_a_stream_that_broke(error: CogTritonError, told: list[str]) -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False), error])

        async def consume() -> None:
            async with client.stream("id", {}) as responses:
                async for _ in responses:
                    pass

        with pytest.raises(type(error)):
            await consume()
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == told


def test_a_stop_that_fails_is_sent_again() -> None:
    class Stubborn(Scripted):
        async def _send_stop(self, request_id: str) -> None:
            await super()._send_stop(request_id)
            if len(self.stopped) == 1:
                raise TritonUnavailable("cut")

    async def main() -> list[str]:
        client = Stubborn([Response([1], None, False)])
        async with client.stream("id", {}) as responses:
            await anext(aiter(responses))
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id", "id"]


def test_closing_a_client_ends_the_streams_that_its_transport_forgets() -> None:
    async def test() -> None:
        client = Scripted([Response([1], 1, final=False)])
        async with client.stream("1", {}) as responses:
            await anext(responses)
            closing = asyncio.create_task(client.aclose())
            with pytest.raises(TritonUnavailable, match="was closed"):
                await anext(responses)
        await closing

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("transport", [GrpcClient, HttpClient])
def test_a_client_that_is_closed_begins_no_stream(transport: Any) -> None:
    async def test() -> None:
        client = transport("127.0.0.1:1", response_timeout=1)
        await client.aclose()
        with pytest.raises(TritonUnavailable, match="was closed"):
            async with client.stream("1", {}):
                pass

    asyncio.run(test())


def test_numbers_that_numpy_has_no_type_for() -> None:
    weights = np.arange(6, dtype=np.uint16).reshape(1, 2, 3)
    message = infer_request("m", "id", {"lora_weights": weights.view(BFLOAT16)}, ())
    (tensor,) = message.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("lora_weights", "BF16", [1, 2, 3])
    assert list(message.raw_input_contents) == [weights.tobytes()]
