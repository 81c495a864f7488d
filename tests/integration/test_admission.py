"""The queue in front of the engine, through Cog's server and the real tritonserver."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.deployment import Deployment
from cog_triton.errors import TritonUnavailable
from cog_triton.request.request import Request
from tests.integration.conftest import settings_for
from tests.support import CogServer, free_port, wait_until

RUNNING, WAITING = 2, 3


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CogServer]:
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "SIMULATED_INTER_TOKEN_MS": "20",
        "MAX_RUNNING": str(RUNNING),
        "MAX_WAITING": str(WAITING),
        "PREDICTOR_METRICS_PORT": str(free_port()),
    }
    log = tmp_path_factory.mktemp("admission") / "log"
    with CogServer(environment, log) as server:
        assert server.wait_until_set_up()["status"] == "READY", log.read_text()
        yield server


async def predictions(server: CogServer, count: int, **inputs: Any) -> list[dict[str, Any]]:
    """Predictions that are sent at the same moment."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"input": {"prompt": "Hi", **inputs}}
        sent = [client.post(f"{server.url}/predictions", json=body) for _ in range(count)]
        return [reply.json() for reply in await asyncio.gather(*sent)]


def test_so_many_run_so_many_wait_and_the_others_are_told_to_come_again(server: CogServer) -> None:
    bodies = asyncio.run(predictions(server, RUNNING + WAITING + 2, max_tokens=40))
    assert Counter(body["status"] for body in bodies) == {"succeeded": 5, "failed": 2}
    for body in bodies:
        if body["status"] == "failed":
            refused = "E2106 TritonOverloaded: 2 requests run and 3 wait; try again in 1 s"
            assert refused in body["error"]
    waited = [b["metrics"]["queue_time"] for b in bodies if b["status"] == "succeeded"]
    assert sum(seconds > 0 for seconds in waited) == WAITING
    assert len({"".join(b["output"]) for b in bodies if b["status"] == "succeeded"}) == 1


def test_metrics_tell_how_many_run_and_wait(server: CogServer) -> None:
    address = f"http://127.0.0.1:{server.environment['PREDICTOR_METRICS_PORT']}/metrics"

    def figures() -> dict[str, float]:
        lines = httpx.get(address, trust_env=False).text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}

    async def test() -> None:
        running = asyncio.create_task(predictions(server, RUNNING + 1, max_tokens=50))
        expected = (float(RUNNING), 1.0)
        await asyncio.to_thread(
            wait_until,
            lambda: (
                (
                    figures()["cog_triton_requests_running"],
                    figures()["cog_triton_requests_waiting"],
                )
                == expected
            ),
            10,
            f"{expected} requests running and waiting",
        )
        await running
        assert figures()["cog_triton_requests_running"] == 0

    asyncio.run(test())


def test_a_deployment_that_closes_tells_its_requests_to_come_again(demo_model: Path) -> None:
    async def first_chunks(deployment: Deployment, begun: asyncio.Event) -> str:
        try:
            async for chunk in deployment.generate(Request("Hi", seed=1, max_tokens=2000)):
                if chunk.output_tokens:
                    begun.set()
        except TritonUnavailable as error:
            return str(error)
        return "no error"

    async def test() -> None:
        settings = settings_for(
            demo_model, ENGINE="simulated", SIMULATED_INTER_TOKEN_MS="10", MAX_RUNNING="1"
        )
        deployment = await Deployment.start(settings)
        try:
            begun = asyncio.Event()
            tasks = [asyncio.create_task(first_chunks(deployment, begun)) for _ in range(2)]
            await begun.wait()
            deployment.close()
            for text in await asyncio.gather(*tasks):
                assert text.startswith("E2105 ")
                assert "send the request again" in text
            assert not await deployment.healthy()
        finally:
            await deployment.stop()

    asyncio.run(test())
