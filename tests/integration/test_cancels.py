"""Storms of cancels, by every door: none is lost, and the engine is idle a second later.

pytest tests/integration/test_cancels.py --cancels 5000
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc
from tritonclient.utils import np_to_triton_dtype

from tests.support import CogServer, QuietHandler, free_port, http_server, wait_until

TOGETHER = 60
PAST_ANY_TEST = 5000  # tokens: 100 seconds at 20 ms a token
INPUTS = {"prompt": "What is machine learning?", "max_tokens": PAST_ANY_TEST}


class Storm:
    """A server, and where its engine can be asked."""

    def __init__(self, server: CogServer, openai: str, grpc: str) -> None:
        self.server, self.openai, self.grpc = server, openai, grpc
        self.client = httpx.AsyncClient(
            trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None)
        )

    async def delay(self) -> None:
        """Wait for a moment anywhere in the start of a request."""
        await asyncio.sleep(random.choice([0, 0.001, 0.01, 0.12]) * random.random())


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CogServer]:
    log = tmp_path_factory.mktemp("cancels") / "log"
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "SIMULATED_INTER_TOKEN_MS": "20",
        "OPENAI_PORT": str(free_port()),
        "TRITON_GRPC_PORT": str(free_port()),
        "LOG_LEVEL": "warning",
    }
    with CogServer(environment, log) as server:
        assert server.wait_until_set_up()["status"] == "READY", log.read_text()
        yield server


async def cancelled_by_route(storm: Storm) -> None:
    """A prediction that answers JSON, cancelled under its id."""
    path = f"{storm.server.url}/predictions/{uuid.uuid4().hex}"
    running = asyncio.create_task(storm.client.put(path, json={"input": INPUTS}))
    await storm.delay()
    while (await storm.client.post(f"{path}/cancel")).status_code == 404:  # it has not come yet
        assert not running.done(), running.result().text
    assert (await running).json()["status"] == "canceled"


async def disconnected(
    storm: Storm, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> None:
    """A request whose client goes away."""
    running = asyncio.create_task(storm.client.post(url, json=body, headers=headers))
    await storm.delay()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def json_disconnect(storm: Storm) -> None:
    await disconnected(storm, f"{storm.server.url}/predictions", {"input": INPUTS})


async def sse_disconnect(storm: Storm) -> None:
    headers = {"Accept": "text/event-stream"}
    await disconnected(storm, f"{storm.server.url}/predictions", {"input": INPUTS}, headers)


async def chat_disconnect(storm: Storm) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": PAST_ANY_TEST,
        "model": "demo",
        "stream": random.random() < 0.5,
    }
    await disconnected(storm, f"{storm.openai}/v1/chat/completions", body)


async def messages_disconnect(storm: Storm) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": PAST_ANY_TEST,
        "model": "demo",
        "stream": random.random() < 0.5,
    }
    await disconnected(storm, f"{storm.openai}/v1/messages", body)


def tensors(**values: Any) -> list[grpc.InferInput]:
    """The inputs of a request to Triton, of one row."""
    made = []
    for name, value in values.items():
        data = np.array([[value]], object if isinstance(value, bytes) else None)
        data = data.astype(np.int32) if data.dtype == np.int64 else data
        made.append(grpc.InferInput(name, [1, 1], np_to_triton_dtype(data.dtype)))
        made[-1].set_data_from_numpy(data)
    return made


async def ensemble_stopped_by_id(storm: Storm) -> None:
    """A stream of the ensemble, stopped under its id as generate() does: again until it has ended."""
    identifier = uuid.uuid4().hex
    ended = asyncio.Event()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        inputs = tensors(text_input=b"Hello", max_tokens=PAST_ANY_TEST, stream=True)
        common = {"request_id": identifier, "enable_empty_final_response": True}
        yield {"model_name": "ensemble", "inputs": inputs, **common}
        await storm.delay()
        stop = tensors(input_ids=1, input_lengths=1, request_output_len=1, stop=True)
        while not ended.is_set():
            yield {"model_name": "tensorrt_llm", "inputs": stop, "request_id": identifier}
            await asyncio.sleep(0.1)

    async with grpc.InferenceServerClient(storm.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param:
                ended.set()


DOORS = [
    cancelled_by_route,
    json_disconnect,
    sse_disconnect,
    chat_disconnect,
    messages_disconnect,
    ensemble_stopped_by_id,
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_cancel_is_lost(
    server: CogServer, door: Callable[[Storm], Awaitable[None]], cancels: int
) -> None:
    lost = asyncio.run(storm_at(server, door, cancels))
    assert lost == 0, f"{lost} of {cancels} cancels were lost"


async def storm_at(
    server: CogServer, door: Callable[[Storm], Awaitable[None]], cancels: int
) -> int:
    """Return how many requests run a second after the last cancel of each wave."""
    environment = server.environment
    storm = Storm(
        server,
        f"http://127.0.0.1:{environment['OPENAI_PORT']}",
        f"127.0.0.1:{environment['TRITON_GRPC_PORT']}",
    )
    lost = 0
    async with storm.client:
        for begun in range(0, cancels, TOGETHER):
            count = min(TOGETHER, cancels - begun)
            await asyncio.gather(*(door(storm) for _ in range(count)))
            lost += await still_running(server)
    return lost


async def still_running(server: CogServer) -> int:
    """Return how many requests the engine has, once it had a second to stop them."""
    for _ in range(10):
        await asyncio.sleep(0.1)
        # What the engine reports of this one is newer than what it was told before.
        await asyncio.to_thread(server.predict, prompt="Hi", max_tokens=2)
        if server.engine["active"] == 0:
            return 0
    return int(server.engine["active"])


def test_asynchronous_predictions_end_as_canceled(server: CogServer, cancels: int) -> None:
    """Cancelled at once; their webhooks say how they ended."""
    ends: dict[str, dict[str, Any]] = {}

    class Hook(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ends[body["id"]] = body
            self.send_response(200)
            self.end_headers()

    def start_and_cancel(client: httpx.Client) -> str:
        identifier = uuid.uuid4().hex
        reply = client.put(
            f"/predictions/{identifier}",
            json={"input": INPUTS, "webhook": url, "webhook_events_filter": ["completed"]},
            headers={"Prefer": "respond-async"},
        )
        assert reply.status_code == 202, reply.text
        assert client.post(f"/predictions/{identifier}/cancel").status_code == 200
        return identifier

    with (
        http_server(Hook) as url,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        begun = list(pool.map(lambda _: start_and_cancel(client), range(cancels)))
        wait_until(lambda: len(ends) == cancels, 30, "the webhooks")
    assert [ends[name]["status"] for name in begun] == ["canceled"] * cancels
    assert not [end["error"] for end in ends.values() if end.get("error")]
