"""The simulated engine's failures in the real Triton, as generate() meets them."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from cog_triton.deployment.running import create_client
from cog_triton.engines.base import GenerationRequest
from cog_triton.engines.simulated import Failure, FailureKind, Failures
from cog_triton.errors import CogTritonError, TritonOverloaded, TritonTimeout, TritonUnknownError
from cog_triton.generation import Chunk, generate
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import engine_counters, make_server, running, settings_for
from tests.support import wait_until

KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
RATE = 0.5


@pytest.fixture(scope="module")
def settings(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    config = tmp_path_factory.mktemp("instances") / "config.yaml"
    config.write_text("server: {tensorrt_llm: {args: {tensorrt_llm_instance_count: 2}}}")
    return settings_for(
        demo_model,
        ENGINE="simulated",
        COG_TRITON_CONFIG=str(config),
        SIMULATED_INTER_TOKEN_MS="10",
        SIMULATED_FAILURE_RATE=str(RATE),
        SIMULATED_FAILURES=",".join(KINDS),
        SIMULATED_TEXT="Un, deux, trois 🚀. ",
        TRITON_RESPONSE_TIMEOUT="2",
    )


@pytest.fixture(scope="module")
def server(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with running(make_server(settings, tmp_path_factory.mktemp("simulated"))) as server:
        yield server


def prompt_that_fails(
    tokenizer: Tokenizer, kind: FailureKind | None, max_tokens: int
) -> tuple[Request, Failure | None]:
    """A request by how it will fail, if at all."""
    for i in range(1000):
        ids = tokenizer(f"Prompt {i}").input_ids
        failure = Failures(RATE, KINDS).of(GenerationRequest("", ids, max_tokens))
        if (failure and failure.kind) == kind:
            return Request(prompt=f"Prompt {i}", seed=0, max_tokens=max_tokens), failure
    raise AssertionError(f"no prompt for {kind}")


async def collect(
    request: Request, settings: Settings, server: TritonServer, tokenizer: Tokenizer
) -> tuple[list[Chunk], CogTritonError | None]:
    """What came, and the error that it ended with."""
    got = []
    async with contextlib.aclosing(create_client(settings, server)) as client:
        try:
            async for chunk in generate(request, client, tokenizer):
                got.append(chunk)
        except CogTritonError as error:
            return got, error
    return got, None


def test_each_instance_stops_what_runs_in_the_other(
    settings: Settings, server: TritonServer, tokenizer: Tokenizer
) -> None:
    engine, (request, _) = engine_counters(server), prompt_that_fails(tokenizer, None, 2000)
    stopped = engine["stopped"]

    async def leave() -> None:
        async def begin() -> None:
            async with contextlib.aclosing(generate(request, client, tokenizer)) as chunks:
                await anext(chunks)

        async with contextlib.aclosing(create_client(settings, server)) as client:
            await asyncio.gather(*(begin() for _ in range(16)))

    asyncio.run(leave())
    wait_until(lambda: engine["stopped"] == stopped + 16, 60, "the stops")
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")


@pytest.mark.parametrize(
    ("kind", "raised", "message"),
    [
        (None, None, ""),
        ("error", TritonUnknownError, r"^E2100 .*a simulated failure after \d+ tokens"),
        ("stall", TritonTimeout, r"^E2101 .*sent nothing for 2 s"),
        ("refuse", TritonOverloaded, r"^E2106 .*Maximum queue size of \d+ has been reached"),
    ],
)
def test_a_request_is_answered_or_fails_as_its_prompt_says(
    settings: Settings,
    server: TritonServer,
    tokenizer: Tokenizer,
    transport: str,
    kind: FailureKind | None,
    raised: type[CogTritonError] | None,
    message: str,
) -> None:
    engine = engine_counters(server)
    request, failure = prompt_that_fails(tokenizer, kind, 40)
    settings = settings.model_copy(update={"transport": transport})
    for _ in range(2):  # the same request fails in the same way
        got, error = asyncio.run(collect(request, settings, server, tokenizer))
        if raised is None:
            assert error is None
            assert "Un, deux, trois 🚀. " in "".join(chunk.text for chunk in got)
            assert got[-1].output_tokens == 40
            continue
        assert isinstance(error, raised)
        assert re.search(message, str(error))
        if kind == "stall":
            assert failure is not None
            assert got[-1].output_tokens == failure.after
        if kind == "refuse":
            assert not got
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")
