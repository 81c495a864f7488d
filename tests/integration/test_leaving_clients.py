"""Clients that leave while Triton does not get on: the requests of the others notice nothing."""

import asyncio
import contextlib
import os
import random
import signal
import string

import pytest

from cog_triton.client import stream
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import TritonClient
from cog_triton.request.request import Request
from cog_triton.text.end_tokens import EndTokens
from tests.integration.conftest import SharedTriton, engine_counters
from tests.integration.test_faulty_connections import SameServer, ids_of
from tests.support import limit, metrics, started_by, wait_until

STREAMS, LEAVERS = 6, 5
TOKENS = 150
STOPS = 12  # of each leaver that fail or find no request
LONG_PROMPTS = 60


def long_prompt(seed: int) -> str:
    """A prompt that takes a tokenizer a tenth of a second: it knows none of the words."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(5_000))


def endless(prompt: str) -> Request:
    return Request(prompt=prompt, seed=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("stopped", ["preprocessing", "tensorrt_llm"])
def test_streams_go_on_when_others_leave_a_queue_that_stands_still(
    stopped: str, paced_triton: SharedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STOP_PAUSES", (0.05,))
    monkeypatch.setattr(stream, "STOP_SECONDS", 0.2)
    engine = engine_counters(paced_triton)
    (stub,) = started_by(paced_triton.guard_pid, f"/{stopped}/1/model.py")

    async def main() -> None:
        client = GrpcClient(paced_triton.endpoints.grpc, response_timeout=300)
        stops = count_stops(client, monkeypatch)
        resuming = ResumingClient(SameServer(client), attempts=0, end_tokens=EndTokens())
        answers: list[list[int]] = [[] for _ in range(STREAMS)]
        running = [
            asyncio.create_task(ids_of(resuming, endless(f"stream {i}"), ids))
            for i, ids in enumerate(answers)
        ]
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(client.aclose)
            while not all(answers):
                await asyncio.sleep(0.01)
            os.kill(stub, signal.SIGSTOP)
            closing.callback(os.kill, stub, signal.SIGCONT)
            leaving = [
                asyncio.create_task(ids_of(resuming, endless(f"leaver {i}"), []))
                for i in range(LEAVERS)
            ]
            while len(client._silence.running) < STREAMS + LEAVERS:
                await asyncio.sleep(0.01)
            for task in leaving:
                task.cancel()
            # Triton itself ends what has waited for an engine's stub for a second.
            while client._tasks and len(stops) < STOPS * LEAVERS:
                await asyncio.sleep(0.01)
            os.kill(stub, signal.SIGCONT)
            assert [len(ids) for ids in await asyncio.gather(*running)] == [TOKENS] * STREAMS
            # The leavers' requests end as well: none is left in the ensemble.
            await asyncio.gather(*client._tasks)

    asyncio.run(asyncio.wait_for(main(), limit(120)))
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")


def count_stops(client: TritonClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that has the id of each stop request once it has been sent."""
    stops: list[str] = []
    send_stop = client._send_stop

    async def counted(request_id: str) -> None:
        stops.append(request_id)
        await send_stop(request_id)

    monkeypatch.setattr(client, "_send_stop", counted)
    return stops


def test_prompts_of_clients_that_left_are_dropped_before_they_are_tokenized(
    paced_triton: SharedTriton,
) -> None:
    engine = engine_counters(paced_triton)
    failures = 'nv_inference_request_failure{model="ensemble_ids",reason="OTHER",version="1"}'

    def dropped() -> float:
        return metrics(paced_triton.endpoints.metrics)[failures]

    before = dropped()

    async def main() -> None:
        client = GrpcClient(paced_triton.endpoints.grpc, response_timeout=300)
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(client.aclose)
            resuming = ResumingClient(SameServer(client), attempts=0, end_tokens=EndTokens())
            stayed = asyncio.create_task(ids_of(resuming, endless(long_prompt(0)), []))
            leaving = [
                asyncio.create_task(ids_of(resuming, endless(long_prompt(seed)), []))
                for seed in range(1, LONG_PROMPTS)
            ]
            # Their stops follow their prompts on the same stream.
            while len(client._silence.running) < LONG_PROMPTS:
                await asyncio.sleep(0.01)
            for task in leaving:
                task.cancel()
            assert len(await stayed) == TOKENS
            await asyncio.gather(*client._tasks)

    asyncio.run(asyncio.wait_for(main(), limit(120)))
    assert dropped() > before
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")
