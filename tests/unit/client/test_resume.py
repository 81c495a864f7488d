"""Answers that go on after their server ended, without a server."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.client import resume
from cog_triton.client.responses import Inputs, Response
from cog_triton.client.resume import ResumingClient, Trials
from cog_triton.client.stream import TritonClient
from cog_triton.errors import (
    CogTritonError,
    InvalidParameter,
    PromptTooLong,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
    blameless,
)
from cog_triton.protocol.names import CONTINUED, NO_PARAMETERS, Parameters
from cog_triton.protocol.parameters import ids_text
from cog_triton.text.end_tokens import EndTokens

END, OTHER_END = 9, 8
Script = list[Response | CogTritonError]


class Server:
    """A server, back at once whenever it ends, and its client: answers requests by the next script."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.failed = 0
        self.given: list[tuple[str, dict[str, int], list[int]]] = []
        self.parameters: list[Parameters] = []

    async def client(self, failed: TritonClient | None) -> TritonClient:
        self.failed += failed is not None
        return cast(TritonClient, self)

    async def stream(
        self,
        request_id: str,
        inputs: Inputs,
        continued: Sequence[int] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> AsyncGenerator[Response, None]:
        numbers = {name: int(value.flat[0]) for name, value in inputs.items()}
        self.given.append((request_id, numbers, list(continued)))
        self.parameters.append(parameters)
        for item in self._scripts.pop(0):
            if isinstance(item, CogTritonError):
                raise item
            yield item


def tokens(*ids: int, prompt: int | None = None, final: bool = False) -> Response:
    return Response(list(ids), prompt, final)


def inputs(**values: int) -> Inputs:
    return {name: np.array([[value]], np.int32) for name, value in values.items()}


class OneAdapter(AdapterTensors):
    async def added(self, inputs: Inputs) -> dict[str, Any]:
        return {**inputs, "lora_weights": np.array([[1]])}


ADAPTER = OneAdapter(Path("adapters"), "float16")
BIAS: Parameters = {"logit_bias": "{}"}


def run(
    server: Server,
    given: Inputs,
    attempts: int = 3,
    adapters: AdapterTensors | None = None,
    parameters: Parameters = BIAS,
) -> list[Response]:
    async def responses() -> list[Response]:
        resuming = ResumingClient(server, attempts, EndTokens((END, OTHER_END)), adapters)
        return [response async for response in resuming.stream("id", given, parameters=parameters)]

    return asyncio.run(responses())


GONE = TritonUnavailable("gone")
GAP = TritonMalformedEvent("a gap")
MISSING = InvalidParameter("LoRA task 5 not found in cache. Please send LoRA weights with request")


def test_it_goes_on_from_what_was_delivered() -> None:
    server = Server(
        [tokens(1, 2, prompt=5), tokens(3), GONE],
        [GONE],
        [tokens(4, prompt=8), GAP],
        [TritonMalformedJSON("half")],
        [tokens(5, prompt=9, final=True)],
    )
    responses = run(server, inputs(max_tokens=8, min_tokens=2, seed=7), attempts=4)
    assert [response.ids for response in responses] == [[1, 2], [3], [4], [5]]
    assert [response.input_tokens for response in responses] == [5, None, 5, 5]
    first = {"max_tokens": 8, "min_tokens": 2, "seed": 7}
    rest = {"max_tokens": 5, "min_tokens": 0, "seed": 7}
    last = {"max_tokens": 4, "min_tokens": 0, "seed": 7}
    assert server.given == [
        ("id", first, []),
        ("id-1", rest, [1, 2, 3]),
        ("id-2", rest, [1, 2, 3]),
        ("id-3", last, [1, 2, 3, 4]),
        ("id-4", last, [1, 2, 3, 4]),
    ]
    assert server.parameters == [{"logit_bias": "{}"}] * 5
    assert server.failed == 2  # where a stream only broke, no next server is waited for


def test_it_goes_on_from_what_another_deployment_delivered() -> None:
    server = Server([tokens(3, prompt=7), GONE], [tokens(4, prompt=8, final=True)])
    begun: Parameters = {CONTINUED: ids_text([1, 2])}
    responses = run(server, inputs(max_tokens=3), parameters=begun)
    assert [(response.ids, response.input_tokens) for response in responses] == [([3], 5), ([4], 5)]
    rest = [({"max_tokens": 3}, [1, 2]), ({"max_tokens": 2}, [1, 2, 3])]
    assert [given[1:] for given in server.given] == rest


def test_a_guide_of_tensorrt_llm_fails_rather_than_begin_anew() -> None:
    server = Server([GONE], [replace(tokens(1, prompt=5), keeps_end_token=False), GONE])
    with pytest.raises(TritonUnavailable, match="cannot resume structured output"):
        run(server, inputs(max_tokens=8, guided_decoding_guide_type=0))
    assert len(server.given) == 2  # before its first token it is tried again


def others_fault(kind: type[CogTritonError] = TritonMalformedEvent) -> CogTritonError:
    return blameless(kind("lost with another request"))


NOT_COUNTED: dict[str, Script] = {
    "another request's fault": [others_fault()],
    "refused, or the connection was lost": [others_fault(TritonUnavailable)],
    "unavailable after new tokens": [tokens(1), GONE],
}


@pytest.mark.parametrize("script", NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_what_others_cause_does_not_count(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "FIRST_PAUSE", 0.0)
    server = Server(*[script] * 20, [GAP], [tokens(2, final=True)])
    responses = run(server, inputs(max_tokens=50), attempts=1)
    assert [each.ids for each in responses if each.ids] == [[1]] * (len(responses) - 1) + [[2]]
    with pytest.raises(CogTritonError):  # with none, nothing is tried again
        run(Server(script), inputs(max_tokens=50), attempts=0)


def test_what_others_cause_ends_after_many_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "FIRST_PAUSE", 0.0)
    most = resume.MOST_BLAMELESS
    scripts: list[Script] = [[others_fault()]] * most
    broken: list[Script] = [*scripts, [tokens(1), others_fault()], *scripts]
    server = Server(*broken, [others_fault()])
    with pytest.raises(TritonMalformedEvent):
        run(server, inputs(max_tokens=50))
    assert len(server.given) == 2 * most + 1


LAST = tokens(final=True)


@pytest.mark.parametrize(
    ("scripts", "end_id", "expected"),
    [
        ([[GONE], [tokens(1, prompt=5, final=True)]], END, [tokens(1, prompt=5, final=True)]),
        # Only the mark of the end was missing: all tokens came, or the end token did.
        ([[tokens(1, 2, 3, prompt=5), GONE]], END, [tokens(1, 2, 3, prompt=5), LAST]),
        ([[tokens(1, END, prompt=5), GONE]], END, [tokens(1, END, prompt=5), LAST]),
        (
            [[tokens(1, END, prompt=5), GONE], [tokens(4, prompt=7, final=True)]],
            3,
            [tokens(1, END, prompt=5), tokens(4, prompt=5, final=True)],
        ),
        ([[tokens(1, OTHER_END, prompt=5), GONE]], None, [tokens(1, OTHER_END, prompt=5), LAST]),
        (
            [[tokens(1, OTHER_END, prompt=5), GONE], [tokens(4, prompt=7, final=True)]],
            END,
            [tokens(1, OTHER_END, prompt=5), tokens(4, prompt=5, final=True)],
        ),
        # The context was full.
        ([[tokens(1, prompt=5), GONE], [PromptTooLong("full")]], END, [tokens(1, prompt=5), LAST]),
    ],
    ids=[
        "anew",
        "max_tokens",
        "end token",
        "another end token",
        "the model's other one",
        "not the request's",
        "context",
    ],
)
def test_an_output_that_is_complete(
    scripts: list[Script], end_id: int | None, expected: list[Response]
) -> None:
    server = Server(*scripts)
    named = {} if end_id is None else {"end_id": end_id}
    assert run(server, inputs(max_tokens=3, **named)) == expected
    assert len(server.given) == len(scripts)


@pytest.mark.parametrize(
    ("scripts", "attempts", "error"),
    [
        ([[PromptTooLong("long")]], 3, PromptTooLong),
        ([[GONE], [GONE], [GONE]], 2, TritonUnavailable),
        ([[GAP], [GAP], [GAP]], 2, TritonMalformedEvent),
        ([[tokens(1, prompt=5), GONE]], 0, TritonUnavailable),
        ([[tokens(1, prompt=5), TritonTimeout("silent")]], 3, TritonTimeout),
        ([[MISSING]], 3, InvalidParameter),  # of an adapter that nobody can send
        # A server whose preprocessing is another's begins anew.
        ([[tokens(1, prompt=5), GONE], [tokens(1, prompt=5)]], 3, TritonUnknownError),
    ],
)
def test_a_request_that_fails(
    scripts: list[Script], attempts: int, error: type[CogTritonError]
) -> None:
    server = Server(*scripts)
    with pytest.raises(error):
        run(server, inputs(max_tokens=9), attempts=attempts)
    assert len(server.given) == len(scripts)


class Mortal(Server):
    """A server whose end another one follows, with another client."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(*scripts)
        self.following: Mortal | None = None

    async def client(self, failed: TritonClient | None) -> TritonClient:
        last = self
        while last.following is not None:
            last = last.following
        if failed is cast(TritonClient, last):
            last.following = last = Mortal()
            last._scripts = self._scripts
        return cast(TritonClient, last)


def test_a_request_that_ends_each_server_before_its_first_token_is_not_sent_to_a_third() -> None:
    server = Mortal([GONE], [GONE], [tokens(1, final=True)])
    with pytest.raises(TritonUnavailable, match="two servers crashed as they started this request"):
        run(server, inputs(max_tokens=9), attempts=9)
    assert len(server._scripts) == 1
    answering = Mortal([tokens(1), GONE], [GONE], [tokens(2, final=True)])
    assert [one.ids for one in run(answering, inputs(max_tokens=9), attempts=9)] == [[1], [2]]


def test_an_adapter_that_the_engine_does_not_have_is_sent() -> None:
    """Of all attempts to go on as well, which are not used up by it."""
    server = Server(
        [MISSING], [tokens(1, prompt=5), GONE], [MISSING], [tokens(2, prompt=6, final=True)]
    )
    responses = run(server, inputs(max_tokens=8, lora_task_id=5), attempts=1, adapters=ADAPTER)
    assert [response.ids for response in responses] == [[1], [2]]
    alone = {"max_tokens": 8, "lora_task_id": 5}
    rest = {"max_tokens": 7, "lora_task_id": 5}
    assert server.given == [
        ("id", alone, []),
        ("id-adapter", {**alone, "lora_weights": 1}, []),
        ("id-1", rest, [1]),
        ("id-1-adapter", {**rest, "lora_weights": 1}, [1]),
    ]


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

    asyncio.run(asyncio.wait_for(test(), 60))
