"""Streams through a proxy that splits, delays, cuts and loses: never a wrong or a missing token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import TritonClient
from cog_triton.deployment.preparation import Values
from cog_triton.server.tritonserver import TritonServer
from tests.comparison import Outcome, compare, expected_ids, short_request
from tests.faulty_proxy import Faults, FaultyProxy
from tests.integration.conftest import make_server, running, settings_for

STREAMS = int(os.environ.get("FAULTY_STREAMS", "300"))
REQUESTS = {number: short_request(number) for number in range(50)}
RESPONSE_SECONDS = 3.0
STALL_SECONDS = 1.0

SLOW = Faults(split=0.5, delay=0.1)
# Over gRPC all streams have one connection, and a fault of it is one of each.
BROKEN = {
    "grpc": Faults(split=0.2, delay=0.05, cut=0.003, drop=0.002),
    "http": Faults(split=0.2, delay=0.05, cut=0.003, drop=0.006),
}
# No answer at all, not whole, not JSON, cut: errors of a connection.
CODES = {"E2101", "E2103", "E2104", "E2105"}


@dataclass(frozen=True)
class SameServer:
    """A server that lives on, whatever became of a connection."""

    present: TritonClient

    async def client(self, _failed: TritonClient | None) -> TritonClient:
        return self.present


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One token a response, so that there are many to be lost."""
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_INTER_TOKEN_MS="5")
    overrides: Values = {"tensorrt_llm": {"max_tokens_per_response": "1"}}
    directory = tmp_path_factory.mktemp("faulty")
    with running(make_server(settings, directory, overrides)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: TritonServer) -> dict[int, list[int]]:
    async def main() -> dict[int, list[int]]:
        client = GrpcClient(server.endpoints.grpc, response_timeout=60)
        try:
            return await expected_ids(
                ResumingClient(SameServer(client), attempts=0, end_id=None), REQUESTS
            )
        finally:
            await client.aclose()

    return asyncio.run(main())


def create(transport: str, address: str) -> TritonClient:
    if transport == "grpc":
        return GrpcClient(address, response_timeout=RESPONSE_SECONDS)
    return HttpClient(address, response_timeout=RESPONSE_SECONDS, stall_timeout=STALL_SECONDS)


def run(
    server: TritonServer,
    transport: str,
    expected: Mapping[int, list[int]],
    faults: Faults,
) -> tuple[Outcome, ResumingClient, FaultyProxy]:
    async def main() -> tuple[Outcome, ResumingClient, FaultyProxy]:
        async with FaultyProxy(getattr(server.endpoints, transport), faults, 1).running() as proxy:
            client = create(transport, proxy.address)
            streams = ResumingClient(SameServer(client), attempts=3, end_id=None)
            outcome = await compare(streams, REQUESTS, expected, range(STREAMS), at_once=32)
            await client.aclose()
            return outcome, streams, proxy

    return asyncio.run(main())


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_what_comes_in_pieces_and_late_is_right(
    server: TritonServer, transport: str, expected: Mapping[int, list[int]]
) -> None:
    outcome, streams, proxy = run(server, transport, expected, SLOW)
    assert outcome == Outcome(right=STREAMS)
    assert not streams.retries
    assert min(proxy.counts["split"], proxy.counts["delayed"]) > 0


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_what_is_cut_or_lost_goes_on_or_fails_and_is_never_wrong(
    server: TritonServer, transport: str, expected: Mapping[int, list[int]]
) -> None:
    outcome, streams, proxy = run(server, transport, expected, BROKEN[transport])
    print(transport, outcome, f"tried again: {streams.retries}", dict(proxy.counts))
    assert not outcome.wrong
    assert outcome.total == STREAMS
    assert outcome.errors.keys() <= CODES, outcome.examples
    assert min(proxy.counts["cut"] + proxy.counts["dropped"], streams.retries, outcome.right) > 0
