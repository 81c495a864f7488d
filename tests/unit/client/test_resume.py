"""Answers that go on after their server ended, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.client.resume import TWO_ENDED, ResumingClient, Trials
from cog_triton.client.stream import Inputs, Response, TritonClient
from cog_triton.errors import (
    CogTritonError,
    InvalidParameter,
    PromptTooLong,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.wire import NO_PARAMETERS, Parameters

END = 9
Script = list[Response | CogTritonError]


class ScriptedClient:
    """Answers a request by the next script, and notes what it was given."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.given: list[tuple[str, dict[str, int], list[int]]] = []
        self.parameters: list[Parameters] = []

    @asynccontextmanager
    async def stream(
        self,
        request_id: str,
        inputs: Inputs,
        continued: Sequence[int] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> AsyncIterator[Any]:
        numbers = {name: int(value.flat[0]) for name, value in inputs.items()}
        self.given.append((request_id, numbers, list(continued)))
        self.parameters.append(parameters)

        async def responses() -> AsyncIterator[Response]:
            for item in self._scripts.pop(0):
                if isinstance(item, CogTritonError):
                    raise item
                yield item

        yield responses()


class OneClient:
    """Stands for a server that is back at once."""

    def __init__(self, client: ScriptedClient) -> None:
        self._client = cast(TritonClient, client)
        self.failed = 0

    async def client(self, failed: TritonClient | None) -> TritonClient:
        self.failed += failed is not None
        return self._client


def tokens(*ids: int, prompt: int | None = None, final: bool = False) -> Response:
    return Response(list(ids), prompt, final)


def inputs(**values: int) -> Inputs:
    return {name: np.array([[value]], np.int32) for name, value in values.items()}


class OneAdapter(AdapterTensors):
    async def added(self, inputs: Inputs) -> dict[str, Any]:
        return {**inputs, "lora_weights": np.array([[1]])}


ADAPTER = OneAdapter(Path("adapters"), "float16")


def run(
    client: ScriptedClient,
    given: Inputs,
    attempts: int = 3,
    servers: OneClient | None = None,
    adapters: AdapterTensors | None = None,
) -> list[Response]:
    async def responses() -> list[Response]:
        resuming = ResumingClient(
            servers or OneClient(client), attempts=attempts, end_id=END, adapters=adapters
        )
        async with resuming.stream("id", given, parameters={"logit_bias": "{}"}) as stream:
            return [response async for response in stream]

    return asyncio.run(responses())


GONE = TritonUnavailable("gone")


def test_it_goes_on_from_what_was_delivered() -> None:
    client = ScriptedClient(
        [tokens(1, 2, prompt=5), tokens(3), GONE],
        [GONE],
        [tokens(4, prompt=8), tokens(5, final=True)],
    )
    responses = run(client, inputs(max_tokens=8, min_tokens=2, seed=7))
    assert [response.ids for response in responses] == [[1, 2], [3], [4], [5]]
    assert [response.input_tokens for response in responses] == [5, None, 5, None]
    first = {"max_tokens": 8, "min_tokens": 2, "seed": 7}
    rest = {"max_tokens": 5, "min_tokens": 0, "seed": 7}
    assert client.given == [
        ("id", first, []),
        ("id-1", rest, [1, 2, 3]),
        ("id-2", rest, [1, 2, 3]),
    ]
    assert client.parameters == [{"logit_bias": "{}"}] * 3


@pytest.mark.parametrize("broken", [TritonMalformedEvent("a gap"), TritonMalformedJSON("half")])
def test_a_stream_that_is_not_whole_goes_on_where_it_stands(broken: CogTritonError) -> None:
    client = ScriptedClient([tokens(1, 2, prompt=5), broken], [tokens(3, prompt=7, final=True)])
    servers = OneClient(client)
    responses = run(client, inputs(max_tokens=8), servers=servers)
    assert [response.ids for response in responses] == [[1, 2], [3]]
    assert client.given[1][2] == [1, 2]
    assert not servers.failed  # that server is there, and not waited for


def test_a_stream_that_is_never_whole_fails() -> None:
    gap: Script = [TritonMalformedEvent("a gap")]
    client = ScriptedClient(gap, gap, gap)
    with pytest.raises(TritonMalformedEvent):
        run(client, inputs(max_tokens=9), attempts=2)


def test_a_request_without_a_token_begins_anew() -> None:
    client = ScriptedClient([GONE], [tokens(1, prompt=5, final=True)])
    assert run(client, inputs(max_tokens=1)) == [tokens(1, prompt=5, final=True)]


@pytest.mark.parametrize(
    ("delivered", "why"), [((1, 2, 3), "max_tokens"), ((1, END), "the end token")]
)
def test_an_answer_that_lacked_its_end_alone_is_complete(
    delivered: tuple[int, ...], why: str
) -> None:
    client = ScriptedClient([tokens(*delivered, prompt=5), GONE])
    responses = run(client, inputs(max_tokens=3))
    assert responses == [tokens(*delivered, prompt=5), tokens(final=True)], why
    assert len(client.given) == 1


def test_a_requests_own_end_token_counts() -> None:
    client = ScriptedClient([tokens(1, END, prompt=5), GONE], [tokens(4, prompt=7, final=True)])
    assert len(run(client, inputs(max_tokens=9, end_id=3))) == 2


def test_a_full_context_is_the_end() -> None:
    client = ScriptedClient([tokens(1, prompt=5), GONE], [PromptTooLong("full")])
    assert run(client, inputs(max_tokens=9))[-1] == tokens(final=True)


def test_a_prompt_that_is_too_long_is_refused() -> None:
    with pytest.raises(PromptTooLong):
        run(ScriptedClient([PromptTooLong("long")]), inputs(max_tokens=9))


def test_attempts_are_counted() -> None:
    client = ScriptedClient([GONE], [GONE], [GONE])
    with pytest.raises(TritonUnavailable):
        run(client, inputs(max_tokens=9), attempts=2)
    assert len(client.given) == 3
    with pytest.raises(TritonUnavailable):
        run(ScriptedClient([tokens(1, prompt=5), GONE]), inputs(max_tokens=9), attempts=0)


def test_other_errors_are_the_requests_own() -> None:
    client = ScriptedClient([tokens(1, prompt=5), TritonTimeout("silent")])
    with pytest.raises(TritonTimeout):
        run(client, inputs(max_tokens=9))
    assert len(client.given) == 1


def test_a_server_that_begins_anew_is_not_believed() -> None:
    client = ScriptedClient([tokens(1, prompt=5), GONE], [tokens(1, prompt=5)])
    with pytest.raises(TritonUnknownError, match="cannot continue"):
        run(client, inputs(max_tokens=9))
    assert len(client.given) == 2


def test_a_cancel_between_two_lives_of_the_server_ends_the_wait() -> None:
    class NoServer(OneClient):
        """There is no next life."""

        async def client(self, failed: TritonClient | None) -> TritonClient:
            if failed is not None:
                waits.set()
                await asyncio.Event().wait()
            return await super().client(failed)

    waits = asyncio.Event()

    async def test() -> None:
        servers = NoServer(ScriptedClient([tokens(1), GONE]))
        resuming = ResumingClient(servers, attempts=3, end_id=END)

        async def responses() -> None:
            async with resuming.stream("id", inputs(max_tokens=8)) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(responses())
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(test())


MISSING = InvalidParameter("LoRA task 5 not found in cache. Please send LoRA weights with request")


def test_an_adapter_that_the_engine_does_not_have_is_sent() -> None:
    """Of all attempts to go on as well, which are not used up by it."""
    client = ScriptedClient(
        [MISSING],
        [tokens(1, prompt=5), GONE],
        [MISSING],
        [tokens(2, prompt=6, final=True)],
    )
    given = inputs(max_tokens=8, lora_task_id=5)
    responses = run(client, given, attempts=1, adapters=ADAPTER)
    assert [response.ids for response in responses] == [[1], [2]]
    alone = {"max_tokens": 8, "lora_task_id": 5}
    rest = {"max_tokens": 7, "lora_task_id": 5}
    assert client.given == [
        ("id", alone, []),
        ("id-adapter", {**alone, "lora_weights": 1}, []),
        ("id-1", rest, [1]),
        ("id-1-adapter", {**rest, "lora_weights": 1}, [1]),
    ]


def test_an_adapter_that_nobody_can_send() -> None:
    client = ScriptedClient([MISSING])
    with pytest.raises(InvalidParameter, match="LoRA task 5 not found in cache"):
        run(client, inputs(max_tokens=8, lora_task_id=5))
    client = ScriptedClient([MISSING], [MISSING])
    with pytest.raises(InvalidParameter, match="LoRA task 5 not found in cache"):
        run(client, inputs(max_tokens=8, lora_task_id=5), adapters=ADAPTER)


class Engines:
    """Servers of which each ends when a poisonous request begins; and the clients of them."""

    def __init__(self, poison: int) -> None:
        self._poison = poison
        self.ended: list[asyncio.Event] = []
        self._present = self._start()

    def _start(self) -> TritonClient:
        self.ended.append(asyncio.Event())
        return cast(TritonClient, EndingClient(self.ended[-1], self._poison))

    async def client(self, failed: TritonClient | None) -> TritonClient:
        if failed is self._present:
            await self.ended[-1].wait()
            self._present = self._start()
        return self._present


class EndingClient:
    """A server's client: each request gets four tokens, and those that run end with the server."""

    def __init__(self, ended: asyncio.Event, poison: int) -> None:
        self._ended, self._poison = ended, poison

    @asynccontextmanager
    async def stream(
        self, _: str, inputs: Inputs, continued: Sequence[int] = (), parameters: object = None
    ) -> AsyncIterator[Any]:
        assert parameters == {}

        async def responses() -> AsyncIterator[Response]:
            for token in range(len(continued), 4):
                await asyncio.sleep(0)  # others go on
                if int(inputs["seed"].flat[0]) == self._poison and token == 2:
                    self._ended.set()
                if self._ended.is_set():
                    raise GONE
                yield tokens(token, final=token == 3)

        yield responses()


def test_a_request_that_ends_its_servers_is_not_tried_a_third_time_and_others_go_on() -> None:
    servers = Engines(poison=7)

    async def ids(resuming: ResumingClient, seed: int) -> list[int]:
        given = inputs(max_tokens=8, seed=seed)
        async with resuming.stream(f"id-{seed}", given) as stream:
            return [token async for response in stream for token in response.ids]

    async def test() -> list[Any]:
        resuming = ResumingClient(servers, attempts=9, end_id=END)
        running = [asyncio.create_task(ids(resuming, seed)) for seed in range(20)]
        answers = await asyncio.gather(*running, return_exceptions=True)
        # It takes no part in what comes later.
        assert await asyncio.wait_for(ids(resuming, 30), 10) == [0, 1, 2, 3]
        return answers

    answers = asyncio.run(test())
    poisoned = answers.pop(7)
    assert isinstance(poisoned, TritonUnavailable)
    assert TWO_ENDED in str(poisoned)
    assert answers == [[0, 1, 2, 3]] * 19
    # The first server ends after its first tokens, the next two with it alone.
    assert len(servers.ended) == 4


def test_a_suspect_that_is_cancelled_while_it_waits_holds_no_other_up() -> None:
    async def test() -> None:
        trials = Trials()
        async with trials.trial(alone=False):
            suspect = asyncio.create_task(trials.trial(alone=True).__aenter__())
            await asyncio.sleep(0)
            suspect.cancel()
            await asyncio.wait([suspect])
            async with trials.trial(alone=False):
                pass

    asyncio.run(asyncio.wait_for(test(), 10))
