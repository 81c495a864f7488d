"""The predictor's own metrics, read over HTTP."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from cog_triton.deployment.deployment import Metrics
from cog_triton.errors import ConfigurationError, TritonOverloaded
from cog_triton.request.admission import Admission


def test_they_tell_of_the_queue() -> None:
    async def test() -> str:
        metrics = Metrics()
        admission = Admission(1, 0, 1.0)
        metrics.watch(admission, lambda: 3)
        with metrics.served("127.0.0.1", 0) as port:
            async with admission.acquire(), httpx.AsyncClient(trust_env=False) as client:
                with pytest.raises(TritonOverloaded):
                    await admission.acquire().__aenter__()
                return (await client.get(f"http://127.0.0.1:{port}/metrics")).text

    lines = asyncio.run(test()).splitlines()
    for line in (
        "cog_triton_requests_running 1.0",
        "cog_triton_requests_waiting 0.0",
        "cog_triton_restarts 3.0",
        'cog_triton_requests_total{outcome="admitted"} 1.0',
        'cog_triton_requests_total{outcome="full"} 1.0',
        'cog_triton_queue_seconds_bucket{le="0.001"} 1.0',
    ):
        assert line in lines


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with (
            pytest.raises(ConfigurationError, match=f"PREDICTOR_METRICS_PORT={port}: .*in use"),
            Metrics().served("127.0.0.1", port),
        ):
            pass
