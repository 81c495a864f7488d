"""What Triton sends, well-formed and not, without a Triton."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client import grpc_transport, http_transport
from cog_triton.client.grpc_transport import GrpcClient, infer_request
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.stream import (
    Arrivals,
    Inputs,
    Response,
    ResponseStream,
    TritonClient,
    decode_response,
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
    error_from_text,
)
from cog_triton.wire import (
    LOG_PROBS,
    Parameters,
    TokenLogProb,
    ids_text,
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


def grpc_message(**tensors: Any) -> service_pb2.ModelInferResponse:
    message = service_pb2.ModelInferResponse()
    for name, value in tensors.items():
        message.outputs.add(name=name)
        message.raw_output_contents.append(np.asarray(value).tobytes())
    return message


def outputs_over(transport: str, **tensors: Any) -> dict[str, list[Any]]:
    """The outputs as a transport hands them to ``decode_response``."""
    if transport == "grpc":
        return grpc_transport.flat_outputs(grpc_message(**tensors))
    event = {name: value.ravel().tolist() for name, value in tensors.items()}
    # Triton writes a tensor of a single element as a scalar.
    return http_transport.flat_outputs(
        {name: value[0] if len(value) == 1 else value for name, value in event.items()}
    )


def ints(*values: int) -> Any:
    return np.array([[values]], np.int32)


def counted(*ids: int, place: int) -> Any:
    """The ids as an embedded engine sends them after ``place`` others."""
    return ints(place + len(ids), *ids)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_response_of_tensorrt_llm(transport: str) -> None:
    tensors = {
        "output_ids": ints(5, 6, -1),
        "sequence_length": ints(2),
        "num_input_tokens": ints(9),
    }
    response = decode_response(outputs_over(transport, **tensors), 3, None, final=True)
    assert response == Response([5, 6], 9, final=True)
    assert not response.keeps_end_token
    del tensors["output_ids"]
    with pytest.raises(TritonMalformedEvent, match=r"^E2104.*output_ids"):
        decode_response(outputs_over(transport, **tensors), 0, None)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_ids_behind_their_running_count(transport: str) -> None:
    def decoded(ids: Any, place: int, total: int | None = None, **given: Any) -> Response:
        tensors = {} if total is None else {"num_output_tokens": ints(total)}
        outputs = outputs_over(transport, output_ids=ids, **tensors)
        return decode_response(outputs, place, None, **given)

    assert decoded(counted(5, 6, place=0), 0) == Response([5, 6], None, final=False)
    assert decoded(counted(7, place=2), 2, total=3) == Response([7], None, final=True)
    assert decoded(counted(place=3), 3, total=3) == Response([], None, final=True)
    whole = counted(5, 6, place=2)
    for ids, place in [
        (whole, 1),  # something before it was lost
        (whole, 4),  # it came twice
        (whole[..., :-1], 2),
        (whole[..., 1:], 2),
        (ints(), 2),
    ]:
        with pytest.raises(TritonMalformedEvent, match=f"^E2104.*after {place} tokens"):
            decoded(ids, place)
    for total in (5, None):  # the engine's count is another, or did not come
        with pytest.raises(TritonMalformedEvent, match=r"^E2104.*after 2 tokens"):
            decoded(whole, 2, total=total, final=True)


LIKELY = [TokenLogProb(5, -0.5, ((5, -0.5), (9, -1.5))), TokenLogProb(6, -2.0)]


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("embedded", [True, False])
def test_log_probabilities_of_a_response(transport: str, embedded: bool) -> None:
    values = packed_log_probs(LIKELY, 2)
    tensors = {"output_ids": counted(5, 6, place=0) if embedded else ints(5, 6)}
    if not embedded:
        tensors["sequence_length"] = ints(2)

    def decoded(values: Any, top: int | None) -> list[TokenLogProb]:
        outputs = outputs_over(transport, **tensors, **{LOG_PROBS: values})
        return decode_response(outputs, 0, top).log_probs

    assert decoded(values, 2) == LIKELY
    assert decoded(values, None) == []
    for short in (values[:-1], values[:0]):
        with pytest.raises(TritonMalformedEvent, match="lacks the log probabilities"):
            decoded(short, 2)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_log_probabilities_of_a_prompt(transport: str) -> None:
    places = [((3, 0.0),), ((4, -1.0), (8, -0.5), (4, -1.0))]
    values = np.append(packed_prompt_log_probs(places, 2), packed_log_probs(LIKELY, 2))

    def decoded(values: Any) -> Response:
        tensors = {"output_ids": counted(5, 6, place=0), LOG_PROBS: values}
        return decode_response(outputs_over(transport, **tensors), 0, 2)

    first = decoded(values)
    assert first.log_probs == LIKELY
    assert first.prompt_log_probs == [
        TokenLogProb(3, 0.0),
        TokenLogProb(4, -1.0, ((8, -0.5), (4, -1.0))),
    ]
    with pytest.raises(TritonMalformedEvent, match="lacks the log probabilities"):
        decoded(values[1:])


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
        decode_response(http_transport.flat_outputs(event), 0, None)


def test_a_grpc_request() -> None:
    inputs = {
        "text_input": np.array([[b"Hi"]], object),
        "seed": np.array([[2**64 - 1]], np.uint64),
        "words": np.zeros((1, 0), object),
    }
    parameters: Parameters = {"a": True, "b": 5, "c": "text"}
    request = infer_request("ensemble", "id1", inputs, ("output_ids",), parameters)
    assert request.id == "id1"
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [
        ("text_input", "BYTES", [1, 1]),
        ("seed", "UINT64", [1, 1]),
        ("words", "BYTES", [1, 0]),
    ]
    assert list(request.raw_input_contents) == [b"\2\0\0\0Hi", b"\xff" * 8, b""]
    assert [output.name for output in request.outputs] == ["output_ids"]
    assert request.parameters["a"].bool_param is True
    assert request.parameters["b"].int64_param == 5
    assert request.parameters["c"].string_param == "text"


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
    first = f"data: {json.dumps({'output_ids': [2, 5, 6]})}\n\n"
    lost = f"data: {json.dumps({'output_ids': [4, 8], 'num_output_tokens': 4})}\n\n"
    assert "lost something after 2 tokens" in http_error(first + lost)
    assert "lost something after 2 tokens" in http_error(first)
    assert http_error(good + 'data: {"error": "Exceeds maximum queue size"}\n\n').startswith(
        "E2106"
    )
    assert http_error('{"error": "unknown model"}', "application/json", 400).startswith("E2100")
    assert http_error("", "application/json", 500).startswith(TritonMalformedJSON.code)
    assert http_error("<html>", "text/html", 502).startswith(TritonMalformedJSON.code)


class Scripted(TritonClient):
    """A client whose transport is a list of responses and errors, and which waits for stops at the end.

    Attributes:
        needed: how many stops end the streams.
    """

    def __init__(self, responses: list[Response | CogTritonError], **timeouts: float) -> None:
        super().__init__(**{"response_timeout": 60, **timeouts})
        self._script = responses
        self.needed = 1
        self.stopped: list[str] = []
        self.begun: list[tuple[ResponseStream, Inputs, Parameters]] = []

    async def _begin(
        self, stream: ResponseStream, _: str, inputs: Inputs, parameters: Parameters
    ) -> None:
        self.begun.append((stream, inputs, parameters))
        for item in self._script:
            if isinstance(item, CogTritonError):
                stream.end(item)
            else:
                stream.add(item)
                if item.final:
                    stream.end()

    async def _send_stop(self, request_id: str) -> None:
        self.stopped.append(request_id)
        if len(self.stopped) == self.needed:
            for stream, *_ in self.begun:
                stream.end()

    async def _disconnect(self) -> None:
        pass


async def consume(client: TritonClient) -> None:
    async with client.stream("id", {}) as responses:
        async for _ in responses:
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


def test_a_request_that_has_begun_is_stopped_once() -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False)])
        async with client.stream("id", {}) as responses:
            await anext(aiter(responses))
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id"]


def test_a_request_that_a_stop_may_overtake_is_stopped_until_it_ends() -> None:
    async def main() -> list[str]:
        client = Scripted([])
        client.needed = 3
        task = asyncio.create_task(consume(client))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id"] * 3


@pytest.mark.parametrize(
    ("timeouts", "error"),
    [
        ({"response_timeout": 0.01}, TritonTimeout),
        ({"response_timeout": 0.01, "stall_timeout": 5}, TritonTimeout),
    ],
)
def test_silence_fails_the_request_and_stops_it(
    timeouts: dict[str, float], error: type[CogTritonError]
) -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False)], **timeouts)
        with pytest.raises(error, match=r"sent nothing for 0\.01 s"):
            await consume(client)
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id"]


def test_a_stream_that_stands_still_while_others_go_on_is_not_whole() -> None:
    async def main() -> list[str]:
        client = Scripted([Response([1], None, False)], stall_timeout=0.01)
        client._last_ended = asyncio.get_running_loop().time() + 60
        with pytest.raises(TritonMalformedEvent, match=r"sent nothing for 0\.01 s"):
            await consume(client)
        await client.aclose()
        return client.stopped

    assert asyncio.run(main()) == ["id"]


def test_streams_that_are_silent_together_or_wait_for_their_first_token_are_let_be() -> None:
    async def main() -> None:
        together = Scripted([Response([1], None, False)], stall_timeout=0.01)
        waiting = Scripted([], stall_timeout=0.01)
        waiting._last_ended = asyncio.get_running_loop().time() + 60  # another goes on
        for client in (together, waiting):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consume(client), 0.05)
            await client.aclose()

    asyncio.run(main())


def test_parameters_that_every_request_has() -> None:
    async def main() -> Any:
        client = Scripted([Response([], None, True)])
        inputs = {"return_log_probs": np.array([[True]])}
        async with client.stream("id", inputs, [5, 6], {"top_logprobs": 3}):
            pass
        async with client.stream("id", {}, [], {"top_logprobs": 3}):
            pass
        return client.begun

    (first, _, parameters), (second, _, others) = asyncio.run(main())
    asked = {"top_logprobs": 3, "counted_ids": True}
    assert parameters == {**asked, "continued_ids": ids_text([5, 6])}
    assert others == asked
    assert (first.top, second.top) == (3, None)


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
        with pytest.raises(type(error)):
            await consume(client)
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
        client.needed = 2
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
