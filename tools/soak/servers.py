"""The servers of a soak, each with the faces by which it is asked."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.settings import Settings, read_settings
from tools.benchmark.processes import free_port
from tools.benchmark.servers import ANY_PORTS, cog_server, openai_server
from tools.soak.faces import CogJson, CogSse, Face, Generate, SoakedDeployment, TritonIds
from tools.soak.openai_faces import OpenAiChat, OpenAiFlood
from tools.soak.streams import SILENCE_SECONDS

Healthy = Callable[[], Awaitable[bool]]
HEALTHY = ("READY", "BUSY")
POLL_SECONDS = 0.1
SEVERAL = ("--workers", "2")
# So that one of them is told to come again, and the next one resumes.
IMPATIENT = {"RESUME_TIMEOUT": "1"}
_ACTIVE = re.compile(r"^cog_triton_engine_active_requests(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """The surroundings of a server.

    Attributes:
        transport: to Triton.
        environment: of the server.
        log: for what it prints.
        streams: that are put on it.
    """

    transport: str
    environment: Mapping[str, str]
    log: Path
    streams: int

    @property
    def flood(self) -> int:
        """So many requests that, with the streams, there is no place for all."""
        return 4 * self.streams

    @property
    def queue(self) -> dict[str, str]:
        """Settings: each of two processes has places for all streams and some of a flood."""
        return {"MAX_RUNNING": str(self.streams), "MAX_WAITING": str(2 * self.streams)}

    def settings(self, **ports: int) -> Settings:
        """Those of a deployment in this process."""
        given = {name: str(port) for name, port in ports.items()}
        return read_settings({**self.environment, **ANY_PORTS, **given})


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        faces: the first is asked for the expected answers.
        metrics: host:port of Triton's.
    """

    faces: list[Face]
    healthy: Healthy
    metrics: str

    async def busy_after(self, seconds: float) -> float:
        """Return the number of requests in the engine after a time, or less if that is none."""
        deadline = time.monotonic() + seconds
        async with _session() as session:
            while (active := await self._active(session)) and time.monotonic() < deadline:
                await asyncio.sleep(POLL_SECONDS)
        return active

    async def _active(self, session: aiohttp.ClientSession) -> float:
        """Of an engine that counts them: TensorRT-LLM's C++ backend has other names."""
        async with session.get(f"http://{self.metrics}/metrics") as reply:
            counts = _ACTIVE.findall(await reply.text())
        return sum(map(float, counts))


@asynccontextmanager
async def deployment(place: Place) -> AsyncIterator[Server]:
    """generate() in this process."""
    async with _deployed(place) as (running, settings):
        metrics = f"{settings.host}:{settings.metrics_port}"
        yield Server([Generate(running)], running.healthy, metrics)


@asynccontextmanager
async def cog(place: Place) -> AsyncIterator[Server]:
    """Cog's server, the OpenAI face beside it, and the Triton in it on its own port."""
    openai = f"http://127.0.0.1:{(port := free_port())}"
    environment = {**place.environment, "OPENAI_PORT": str(port), "OPENAI_HOST": "127.0.0.1"}
    async with AsyncExitStack() as stack:
        running = stack.enter_context(cog_server(environment, place.log))
        session = await stack.enter_async_context(_session())
        http = place.transport == "http"
        client = (HttpClient if http else GrpcClient)(
            running.http if http else running.grpc, response_timeout=SILENCE_SECONDS
        )
        stack.push_async_callback(client.aclose)
        faces: list[Face] = [CogSse(session, running.url), CogJson(session, running.url)]
        faces.append(OpenAiChat(session, openai, await _model(session, openai)))
        faces.append(TritonIds(client, place.transport))
        yield Server(faces, lambda: _cog_is_healthy(session, running.url), running.metrics)


@asynccontextmanager
async def openai(place: Place) -> AsyncIterator[Server]:
    """The OpenAI face in several processes, and the Triton of its own."""
    environment = {**place.environment, **place.queue}
    async with AsyncExitStack() as stack:
        running = stack.enter_context(openai_server(environment, place.log, *SEVERAL))
        session = await stack.enter_async_context(_session())
        yield await _openai_server(session, running.url, running.metrics, place.flood)


@asynccontextmanager
async def attached(place: Place) -> AsyncIterator[Server]:
    """The OpenAI face in several processes on a Triton that somebody else starts again: this process."""
    async with AsyncExitStack() as stack:
        _, settings = await stack.enter_async_context(_deployed(place))
        environment = {**place.environment, **place.queue, **IMPATIENT}
        endpoint = f"http://{settings.host}:{settings.grpc_port}"
        there = ("--triton-endpoint", endpoint, *SEVERAL)
        running = stack.enter_context(openai_server(environment, place.log, *there))
        session = await stack.enter_async_context(_session())
        metrics = f"{settings.host}:{settings.metrics_port}"
        yield await _openai_server(session, running.url, metrics, place.flood)


SERVERS: Mapping[str, Callable[[Place], AbstractAsyncContextManager[Server]]] = {
    "deployment": deployment,
    "cog": cog,
    "openai": openai,
    "attached": attached,
}


@asynccontextmanager
async def _deployed(place: Place) -> AsyncIterator[tuple[SoakedDeployment, Settings]]:
    """A deployment whose ports are the same in all lives of its Triton."""
    ports = {"TRITON_GRPC_PORT": free_port(), "TRITON_METRICS_PORT": free_port()}
    settings = place.settings(**ports)
    running = await SoakedDeployment.start(settings)
    assert isinstance(running, SoakedDeployment)
    try:
        yield running, settings
    finally:
        await running.stop()


async def _openai_server(
    session: aiohttp.ClientSession, url: str, metrics: str, flood: int
) -> Server:
    of = (session, url, await _model(session, url))
    faces: list[Face] = [
        OpenAiChat(*of, several=True),
        OpenAiFlood(*of, several=True, flood=flood),
    ]
    return Server(faces, lambda: _openai_is_ready(session, url), metrics)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    """The name under which the OpenAI face has its model."""
    async with session.get(f"{url}/v1/models") as reply:
        return str((await reply.json())["data"][0]["id"])


async def _cog_is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health-check") as reply:
            return (await reply.json())["status"] in HEALTHY
    except aiohttp.ClientError:
        return False


async def _openai_is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health/ready") as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False
