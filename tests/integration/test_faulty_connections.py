"""Streams through a proxy that splits, delays, cuts and loses: never a wrong or a missing token."""

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import Streams, TritonClient
from cog_triton.errors import CogTritonError
from cog_triton.request.request import Request, triton_inputs
from cog_triton.text.end_tokens import EndTokens
from tests.faulty_proxy import Faults, FaultyProxy
from tests.integration.conftest import Triton

STREAMS = int(os.environ.get("FAULTY_STREAMS", "80"))
REQUESTS = [Request(f"Prompt number {seed}", seed, max_tokens=40) for seed in range(20)]
AT_ONCE = 32
# Seconds until a silence is an error, and until Triton over HTTP is asked again. SLOW loses nothing, and a
# busy machine may be silent for long.
PATIENT, IMPATIENT = (60.0, 10.0), (3.0, 1.0)

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
def server(paced_triton: Triton) -> Triton:
    """At its pace every token is a response, so that there are many to be lost."""
    return paced_triton


async def ids_of(streams: Streams, request: Request, ids: list[int]) -> list[int]:
    """Adds the ids to a list as they come, and returns it."""
    async for response in streams.stream(secrets.token_hex(8), triton_inputs(request)):
        ids += response.ids
    return ids


@pytest.fixture(scope="module")
def expected(server: Triton) -> list[list[int]]:
    """The uninterrupted answers."""

    async def main() -> list[list[int]]:
        async with contextlib.aclosing(GrpcClient(server.endpoints.grpc, response_timeout=60)) as c:
            return await asyncio.gather(*(ids_of(c, request, []) for request in REQUESTS))

    return asyncio.run(main())


def create(transport: str, address: str, response: float, stall: float) -> TritonClient:
    if transport == "grpc":
        return GrpcClient(address, response_timeout=response)
    return HttpClient(address, response_timeout=response, stall_timeout=stall)


async def compare(streams: Streams, expected: Sequence[list[int]]) -> Counter[str]:
    """How many streams ended right, or with an error, by its code, after right ids."""
    ends, numbers = Counter[str](), iter(range(STREAMS))

    async def worker() -> None:
        for number in numbers:
            request, right = REQUESTS[number % len(REQUESTS)], expected[number % len(REQUESTS)]
            ids: list[int] = []
            end = "right"
            try:
                await ids_of(streams, request, ids)
            except CogTritonError as error:
                right, end = right[: len(ids)], error.code
            assert ids == right
            ends[end] += 1

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return ends


def run(
    server: Triton, transport: str, expected: Sequence[list[int]], faults: Faults
) -> tuple[Counter[str], ResumingClient, FaultyProxy]:
    async def main() -> tuple[Counter[str], ResumingClient, FaultyProxy]:
        async with FaultyProxy(getattr(server.endpoints, transport), faults).running() as proxy:
            client = create(transport, proxy.address, *(PATIENT if faults is SLOW else IMPATIENT))
            streams = ResumingClient(SameServer(client), attempts=3, end_tokens=EndTokens())
            ends = await compare(streams, expected)
            await client.aclose()
            return ends, streams, proxy

    return asyncio.run(main())


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_what_comes_in_pieces_and_late_is_right(
    server: Triton, transport: str, expected: Sequence[list[int]]
) -> None:
    ends, streams, proxy = run(server, transport, expected, SLOW)
    assert ends == {"right": STREAMS}
    # Triton 2.51 loses events of HTTP by itself when its threads get no processor.
    assert not streams.retries or transport == "http"
    assert min(proxy.counts["split"], proxy.counts["delay"]) > 0


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_what_is_cut_or_lost_goes_on_or_fails_and_is_never_wrong(
    server: Triton, transport: str, expected: Sequence[list[int]]
) -> None:
    ends, streams, proxy = run(server, transport, expected, BROKEN[transport])
    print(transport, ends, f"tried again: {streams.retries}", dict(proxy.counts))
    assert ends.total() == STREAMS
    assert ends.keys() - {"right"} <= CODES
    assert min(proxy.counts["cut"] + proxy.counts["drop"], streams.retries, ends["right"]) > 0
