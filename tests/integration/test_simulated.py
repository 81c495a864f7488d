"""The simulated engine's queue and failures in the real Triton, as generate() meets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from cog_triton.client.stream import TritonClient
from cog_triton.deployment.running import create_client
from cog_triton.engines.base import GenerationRequest
from cog_triton.engines.simulated import Failure, FailureKind, Failures
from cog_triton.errors import (
    CogTritonError,
    TritonOverloaded,
    TritonStartError,
    TritonTimeout,
    TritonUnknownError,
)
from cog_triton.generation import Chunk, generate
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import engine_counters, make_server, running, settings_for
from tests.support import wait_until

KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
RATE = 0.5
TRANSPORTS = ["grpc", "http"]
Use = Callable[[TritonClient], Awaitable[Any]]


@pytest.fixture(scope="module")
def settings(demo_model: Path) -> Settings:
    return settings_for(
        demo_model,
        ENGINE="simulated",
        SIMULATED_INTER_TOKEN_MS="10",
        SIMULATED_MAX_BATCH="2",
        SIMULATED_FAILURE_RATE=str(RATE),
        SIMULATED_FAILURES=",".join(KINDS),
        SIMULATED_TEXT="Un, deux, trois 🚀. ",
        TRITON_RESPONSE_TIMEOUT="2",
    )


@pytest.fixture(scope="module")
def server(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with running(make_server(settings, tmp_path_factory.mktemp("simulated"))) as server:
        yield server


@pytest.fixture(params=TRANSPORTS)
def run(
    settings: Settings, server: TritonServer, request: pytest.FixtureRequest
) -> Callable[[Use], Any]:
    """Runs what uses a client of either transport."""
    settings = settings.model_copy(update={"transport": request.param})

    def run(use: Use) -> Any:
        async def main() -> Any:
            async with contextlib.aclosing(create_client(settings, server)) as client:
                return await use(client)

        return asyncio.run(main())

    return run


class Prompts:
    """Finds requests by how they will fail."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def find(self, kind: FailureKind | None, max_tokens: int) -> tuple[Request, Failure | None]:
        for i in range(1000):
            ids = self._tokenizer(f"Prompt {i}").input_ids
            failure = Failures(RATE, KINDS).of(GenerationRequest("", ids, max_tokens))
            if (failure and failure.kind) == kind:
                return Request(prompt=f"Prompt {i}", seed=0, max_tokens=max_tokens), failure
        raise AssertionError(f"no prompt for {kind}")


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Prompts:
    return Prompts(tokenizer)


async def collect(chunks: AsyncGenerator[Chunk, None]) -> tuple[list[Chunk], CogTritonError | None]:
    """What came, and the error that it ended with."""
    got = []
    try:
        async for chunk in chunks:
            got.append(chunk)
    except CogTritonError as error:
        return got, error
    return got, None


def test_most_requests_are_answered_with_the_text(
    run: Callable[[Use], Any], prompts: Prompts, tokenizer: Tokenizer
) -> None:
    request, _ = prompts.find(None, 40)
    got, error = run(lambda client: collect(generate(request, client, tokenizer)))
    assert error is None
    assert "Un, deux, trois 🚀. " in "".join(chunk.text for chunk in got)
    assert got[-1].output_tokens == 40


@pytest.mark.parametrize(
    ("kind", "raised", "message"),
    [
        ("error", TritonUnknownError, r"^E2100 .*a simulated failure after \d+ tokens"),
        ("stall", TritonTimeout, r"^E2101 .*sent nothing for 2 s"),
        ("refuse", TritonOverloaded, r"^E2106 .*Maximum queue size of \d+ has been reached"),
    ],
)
def test_each_kind_of_failure(
    kind: FailureKind,
    raised: type[CogTritonError],
    message: str,
    run: Callable[[Use], Any],
    server: TritonServer,
    prompts: Prompts,
    tokenizer: Tokenizer,
) -> None:
    engine = engine_counters(server)
    request, failure = prompts.find(kind, 20)
    assert failure is not None
    for _ in range(2):  # the same request fails in the same way
        got, error = run(lambda client: collect(generate(request, client, tokenizer)))
        with pytest.raises(raised, match=message):
            raise error or AssertionError("it did not fail")
        if kind == "stall":
            assert got[-1].output_tokens == failure.after
        if kind == "refuse":
            assert not got
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")


def test_the_batch_is_limited_and_who_waits_begins_when_another_is_stopped(
    run: Callable[[Use], Any], server: TritonServer, prompts: Prompts, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(server)
    request, _ = prompts.find(None, 5000)

    async def use(client: TritonClient) -> int:
        first, second, third = (generate(request, client, tokenizer) for _ in range(3))
        await anext(first)
        await anext(second)
        waiting = asyncio.ensure_future(anext(third))
        await asyncio.to_thread(wait_until, lambda: engine["active"] == 3, 10, "the queue")
        for _ in range(10):  # time enough for the third, if it had a slot
            await anext(first)
        assert not waiting.done()
        await first.aclose()
        chunk = await asyncio.wait_for(waiting, 10)
        await second.aclose()
        await third.aclose()
        return chunk.output_tokens

    assert run(use) >= 1
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")


def test_a_text_without_tokens_is_a_reason_not_to_start(
    demo_model: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_TEXT=str(tokenizer.eos_token))
    server = make_server(settings, tmp_path)
    with pytest.raises(TritonStartError, match=r"simulated_text .* has no tokens that make text"):
        server.start()
