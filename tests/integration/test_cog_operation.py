"""The operator's side of Cog's server: weights by URL, the other transport, the queue, the end."""

import asyncio
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import (
    CogServer,
    alive,
    children,
    fake_triton,
    free_port,
    http_server,
    limit,
    metrics,
    wait_until,
)

RUNNING, WAITING = 2, 3


def second_servers_environment() -> dict[str, str]:
    """What docs/operations.md sets for the Triton of a second server on a machine."""
    page = Path(__file__).parents[2].joinpath("docs", "operations.md").read_text()
    (command,) = re.findall(r"^\$ (TRITON_.*) make serve PORT=5001$", page, re.MULTILINE)
    return dict(item.split("=") for item in command.split())


@pytest.fixture(scope="module")
def server(
    demo_model: Path, paced_cog_server: CogServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    """A second server, with a trained model as Replicate hands it over: a tar file's URL."""
    assert paced_cog_server.process.poll() is None
    directory = tmp_path_factory.mktemp("operation")
    with tarfile.open(directory / "model.tar", "w") as tar:
        for file in demo_model.iterdir():
            tar.add(file, file.name)
    with http_server(partial(SimpleHTTPRequestHandler, directory=str(directory))) as url:
        environment = {
            **second_servers_environment(),
            # Over HTTP.
            **fake_triton(token_ms="20"),
            "COG_WEIGHTS": f"{url}/model.tar",
            "WEIGHTS_CACHE": str(directory / "cache"),
            "MODEL": "no/such/model",
            "MAX_RUNNING": str(RUNNING),
            "MAX_WAITING": str(WAITING),
            "PREDICTOR_METRICS_PORT": str(free_port()),
            "DRAIN_SECONDS": "0.5",
        }
        with CogServer(environment, directory / "log") as server:
            server.wait_until_ready()
            yield server


def test_weights_from_a_url_answer_over_http(server: CogServer) -> None:
    assert server.predict(prompt="Hi", max_tokens=50)["metrics"]["output_token_count"] == 50


async def predictions(server: CogServer, count: int, **inputs: Any) -> list[dict[str, Any]]:
    """Predictions that are sent at the same moment."""
    async with httpx.AsyncClient(trust_env=False, timeout=limit(60)) as client:
        body = {"input": {"prompt": "Hi", **inputs}}
        sent = [client.post(f"{server.url}/predictions", json=body) for _ in range(count)]
        return [reply.json() for reply in await asyncio.gather(*sent)]


def test_so_many_run_so_many_wait_and_the_others_are_told_to_come_again(server: CogServer) -> None:
    bodies = asyncio.run(predictions(server, RUNNING + WAITING + 2, max_tokens=40))
    assert Counter(body["status"] for body in bodies) == {"succeeded": 5, "failed": 2}
    for body in bodies:
        if body["status"] == "failed":
            refused = (
                "E2106 TritonOverloaded: 2 requests are running and 3 are waiting; try again in 1 s"
            )
            assert refused in body["error"]
    waited = [b["metrics"]["queue_time"] for b in bodies if b["status"] == "succeeded"]
    assert sum(seconds > 0 for seconds in waited) == WAITING
    assert len({"".join(b["output"]) for b in bodies if b["status"] == "succeeded"}) == 1


def running_and_waiting(server: CogServer) -> tuple[float, float]:
    figures = metrics(f"127.0.0.1:{server.environment['PREDICTOR_METRICS_PORT']}")
    return figures["cog_triton_requests_running"], figures["cog_triton_requests_waiting"]


def test_what_does_not_end_in_time_may_be_sent_again_and_nothing_is_left(
    server: CogServer, paced_cog_server: CogServer
) -> None:
    """But the other server of the machine."""
    started = children(server.process.pid)
    assert len(started) > 4
    assert running_and_waiting(server) == (0, 0)
    with ThreadPoolExecutor(RUNNING + 1) as pool:
        ask = partial(server.predict, prompt="Hi", max_tokens=2000)
        ends = [pool.submit(ask) for _ in range(RUNNING + 1)]
        wait_until(lambda: running_and_waiting(server) == (RUNNING, 1), 60, "the requests")
        assert server.stop() == 0
    for end in ends:
        body = end.result()
        assert body["status"] == "failed"
        assert body["metrics"]["finish_reason"] == "error"
        assert "E2105 TritonUnavailable: the server is being stopped; send" in body["error"]
    assert not [pid for pid in started if alive(pid)]
    assert paced_cog_server.predict(prompt="Hi", max_tokens=5)["status"] == "succeeded"
