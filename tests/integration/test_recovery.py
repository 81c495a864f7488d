"""Parts that die while requests run: what the requests, the health check and the machine see of it."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.deployment import Deployment
from cog_triton.deployment.running import RunningServer
from cog_triton.errors import TritonUnavailable
from cog_triton.request.request import Request
from cog_triton.server.command import choose_ports
from tests.integration.conftest import Triton, settings_for
from tests.late import torch, transformers
from tests.support import ROOT, fake_triton, free_port, left_of, processes

pytestmark = pytest.mark.anyio
STREAMS = 16
TOKENS = 60
SECONDS = 300  # only a fault takes this long, on a busy machine too


@asynccontextmanager
async def deployed(model: Path, **environment: str) -> AsyncIterator[Deployment]:
    # A restart takes as long as the machine needs.
    defaults = {"SIMULATED_INTER_TOKEN_MS": "15", "RESUME_TIMEOUT": str(SECONDS)}
    deployment = await Deployment.start(settings_for(model, **{**defaults, **environment}))
    try:
        yield deployment
    finally:
        await deployment.stop()


def request(number: int, tokens: int = TOKENS) -> Request:
    return Request(
        prompt=f"What is machine learning? {number}",
        seed=number,
        max_tokens=tokens,
        min_tokens=tokens - 10,
        temperature=1.0,
        top_p=0.95,
        presence_penalty=0.3,
        repetition_penalty=1.1,
    )


async def answer(
    deployment: Deployment, asked: Request, kill: Callable[[], None] = lambda: None
) -> tuple[str, Any]:
    """The text of an answer, and its last chunk without it; ``kill`` is called after some tokens."""
    text = ""
    async for chunk in deployment.generate(asked):
        text += chunk.text
        if chunk.output_tokens >= 5:
            kill()
    return text, (chunk.output_tokens, chunk.input_tokens, chunk.finish_reason)


async def answers(
    deployment: Deployment,
    killed: tuple[str, signal.Signals] | None = None,
    tokens: int = TOKENS,
    streams: int = STREAMS,
) -> Any:
    """The answers to all requests, during which a part may be killed; that one restarts."""
    life = deployment.supervisor.running
    kill = once(partial(os.kill, *victim(deployment, *killed))) if killed else lambda: None
    running = [answer(deployment, request(i, tokens), kill) for i in range(streams)]
    texts = await asyncio.wait_for(asyncio.gather(*running), SECONDS)
    if killed:
        # An answer does not need every part to its end, so the server's end may be noticed after it.
        await asyncio.wait_for(next_life(deployment, life), SECONDS)
    return texts


async def next_life(deployment: Deployment, ended: RunningServer | None) -> None:
    while await deployment.supervisor.after(ended, SECONDS) is ended:
        pass


def once(do: Callable[[], None]) -> Callable[[], None]:
    """``do``, the first time it is called."""
    left = [do]
    return lambda: left.pop()() if left else None


def victim(deployment: Deployment, name: str, number: signal.Signals) -> tuple[int, signal.Signals]:
    """What to kill a part with: its process is looked for before, so that the kill takes no time."""
    life = deployment.supervisor.running
    assert life is not None
    return part(life.server.shm_prefix, name), number


def part(prefix: str, name: str) -> int:
    """The process id of a server's part: its guard, tritonserver, or the stub of a model.

    A model may have several stubs on a machine with many cores: then one of them, and of vLLM's the
    one that started the engine core.
    """
    named = [pid for pid in processes(prefix) if name == part_name(pid)]
    with_children = [pid for pid in named if psutil.Process(pid).children()]
    return (with_children or named)[0]


def part_name(pid: int) -> str:
    process = psutil.Process(pid)
    arguments = process.cmdline()
    if Path(arguments[0]).name == "triton_python_backend_stub":
        return Path(arguments[1]).parent.parent.name
    return "guard" if "guard.py" in "".join(arguments[:5]) else str(process.name())


Kill = tuple[str, signal.Signals]
STUB: Kill = ("tensorrt_llm", signal.SIGKILL)
GUARD: Kill = ("guard", signal.SIGKILL)
HANG: Kill = ("tensorrt_llm", signal.SIGSTOP)


async def test_streams_go_on_as_if_nothing_had_happened(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP, when tritonserver crashes; and over gRPC, when the process of a model is killed."""
    async with deployed(demo_model, ENGINE="simulated", TRANSPORT="http") as deployment:
        # The next server, and that after it, are asked over gRPC.
        supervisor = deployment.supervisor
        supervisor.settings = supervisor.settings.model_copy(update={"transport": "grpc"})
        await check_recoveries(deployment, [("tritonserver", signal.SIGSEGV), STUB])
        check_stub_is_named("tensorrt_llm", caplog.text)
        await check_no_answer_comes_from_a_process_that_was_given_up(deployment)


@pytest.mark.parametrize(
    ("kills", "environment"),
    [
        pytest.param(
            [("tritonserver", signal.SIGSEGV), ("preprocessing", signal.SIGKILL), GUARD],
            fake_triton(),
            id="tritonserver's stand-in",
        ),
        pytest.param(
            [STUB, GUARD, HANG],
            # Long enough that a server on a busy machine is not taken for one that hangs.
            {"ENGINE": "simulated", "TRANSPORT": "grpc", "TRITON_HANG_TIMEOUT": "8"},
            id="grpc",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            [("preprocessing", signal.SIGKILL), GUARD],
            {"ENGINE": "simulated", "TRANSPORT": "http"},
            id="http",
            marks=pytest.mark.rare,
        ),
    ],
)
async def test_each_part_may_die_in_turn(
    demo_model: Path,
    kills: list[Kill],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_TRITON_TOKEN_MS", "15")
    async with deployed(demo_model, **environment) as deployment:
        await check_recoveries(deployment, kills)
    for name, number in kills:
        if name in ("tensorrt_llm", "preprocessing") and number == signal.SIGKILL:
            check_stub_is_named(name, caplog.text)


async def check_recoveries(deployment: Deployment, kills: list[Kill]) -> None:
    """Check that no stream sees a kill, and that what is left of a server has gone before the next."""
    uninterrupted = await answers(deployment)
    for number, kill in enumerate(kills, 1):
        killed = deployment.supervisor.running
        assert killed is not None
        assert await answers(deployment, kill) == uninterrupted, kill
        assert deployment.supervisor.restarts == number
        assert await deployment.healthy()
        assert not left_of(killed.server.shm_prefix)
        assert not killed.server.runtime.exists()


async def check_no_answer_comes_from_a_process_that_was_given_up(deployment: Deployment) -> None:
    """Check that the server is replaced after it waited too long for the process of a model.

    That process would go on with memory that Triton has freed: it crashes, or answers each request with the
    response to the one before it.
    """
    uninterrupted = await answers(deployment)
    stopped = deployment.supervisor.running
    assert stopped is not None
    restarts = deployment.supervisor.restarts
    os.kill(part(stopped.server.shm_prefix, "preprocessing"), signal.SIGSTOP)
    assert await answers(deployment) == uninterrupted
    assert deployment.supervisor.restarts == restarts + 1
    assert not left_of(stopped.server.shm_prefix)


def check_stub_is_named(model: str, log: str) -> None:
    """Check that a log says which model's process was killed."""
    named = f"the process of model {model} ended by signal 9 (SIGKILL)" in log
    # Triton 2.51 aborts at once where a stub held a lock: one that sends may.
    aborted = model == "tensorrt_llm" and "interprocess::lock_exception" in log
    assert named or aborted


@pytest.mark.rare
async def test_sampled_text_goes_on_as_it_would_have(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over gRPC, when a model's process is killed.

    With weights of double precision: how a sum is rounded depends on the batch, and may choose between two
    tokens that come at the same time but for that.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float64)
    shutil.copytree(demo_model, tmp_path / "double")
    model.save_pretrained(tmp_path / "double")
    async with deployed(tmp_path / "double", ENGINE="transformers") as deployment:
        # So many that the engine does not make them all before the first few have been read.
        tokens = 4 * TOKENS
        uninterrupted = await answers(deployment, tokens=tokens, streams=4)
        assert await answers(deployment, STUB, tokens, 4) == uninterrupted
        assert deployment.supervisor.restarts == 1
    check_stub_is_named("tensorrt_llm", caplog.text)


@pytest.mark.rare
async def test_a_restart_while_requests_are_cancelled_loses_no_place(demo_model: Path) -> None:
    """The first kill comes in the prefill: no token was delivered."""
    environment = {"MAX_RUNNING": "2", "SIMULATED_PREFILL_MS": "300", "TRITON_STOP_TIMEOUT": "1"}
    async with deployed(demo_model, ENGINE="simulated", **environment) as deployment:
        uninterrupted = await answer(deployment, request(0))
        running = [asyncio.create_task(answer(deployment, request(0))) for _ in range(20)]
        life = deployment.supervisor.running
        assert life is not None
        while not life.client.busy:
            await asyncio.sleep(0.01)
        os.kill(*victim(deployment, "tensorrt_llm", signal.SIGKILL))
        for task in random.Random(0).sample(running, 14):
            task.cancel()
            await asyncio.sleep(0.05)
        ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), SECONDS)
        whole = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
        assert whole == [uninterrupted] * 6
        assert (deployment.admission.running, deployment.admission.waiting) == (0, 0)
        assert deployment.supervisor.restarts == 1


POISON = 666
DIES = f"""
import os
from cog_triton.models import engine

generation_requests = engine.generation_requests

def die_of_one(*arguments):
    generations = generation_requests(*arguments)
    if generations[0].sampling.seed == {POISON}:
        os._exit(1)
    return generations

engine.generation_requests = die_of_one
"""


@pytest.mark.rare
async def test_a_request_that_ends_servers_fails_alone(demo_model: Path, tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(ROOT / "triton_model_repo", templates)
    with (templates / "tensorrt_llm" / "1" / "model.py").open("a") as file:
        file.write(DIES)
    poisonous = dataclasses.replace(request(0), seed=POISON)
    environment = {"ENGINE": "simulated", "TRITON_MODEL_REPO": str(templates)}
    async with deployed(demo_model, **environment) as deployment:
        uninterrupted = await answers(deployment)
        poison: list[asyncio.Task[Any]] = []
        send = once(lambda: poison.append(asyncio.create_task(answer(deployment, poisonous))))
        running = [answer(deployment, request(i), send) for i in range(STREAMS)]
        assert await asyncio.wait_for(asyncio.gather(*running), SECONDS) == uninterrupted
        with pytest.raises(TritonUnavailable, match="two servers crashed"):
            await asyncio.wait_for(poison[0], SECONDS)
        assert deployment.supervisor.restarts == 2
        assert await answers(deployment) == uninterrupted


@pytest.fixture
def taken_ports(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first choice is taken in the last moment, by another Triton, which says there it is ready."""
    taken = dataclasses.replace(triton.endpoints, grpc_port=free_port(), metrics_port=free_port())
    choices = iter([lambda _: taken])
    monkeypatch.setattr(
        "cog_triton.server.tritonserver.choose_ports",
        lambda given: next(choices, choose_ports)(given),
    )
    yield
    assert next(choices, None) is None


@pytest.mark.rare
@pytest.mark.usefixtures("taken_ports")
async def test_without_resuming_requests_fail_until_the_server_is_given_up(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    environment = {"ENGINE": "simulated", "RESUME_ATTEMPTS": "0", "TRITON_RESTARTS": "1"}
    async with deployed(demo_model, **environment) as deployment:
        life = deployment.supervisor.running
        # A first end: what runs fails at once, and may be sent again.
        with pytest.raises(TritonUnavailable):
            await answers(deployment, ("tensorrt_llm", signal.SIGKILL))
        await asyncio.wait_for(next_life(deployment, life), SECONDS)
        assert (await answer(deployment, request(1)))[1][0] == TOKENS
        # A second one is the last.
        with pytest.raises(TritonUnavailable):
            await answers(deployment, ("tensorrt_llm", signal.SIGKILL))
        with pytest.raises(TritonUnavailable, match="will not be restarted: tritonserver died"):
            await next_life(deployment, deployment.supervisor.running)
        with pytest.raises(TritonUnavailable):
            await answer(deployment, request(1))
        assert not await deployment.healthy()
    assert "not restarting Triton" in caplog.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount no file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.rare
async def test_a_runtime_directory_that_was_full_recovers_when_there_is_room(
    demo_model: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it was full: that is no end of a server."""
    environment = {"RUNTIME_DIR": str(small_disk), "TRITON_RESTARTS": "1"}
    async with deployed(demo_model, ENGINE="simulated", **environment) as deployment:
        life = deployment.supervisor.running
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.kill(*victim(deployment, "tritonserver", signal.SIGKILL))
        while caplog.text.count("No space left on device") < 3:
            await asyncio.sleep(0.05)  # nothing signals it
        assert not await deployment.healthy()
        ballast.unlink()
        await asyncio.wait_for(next_life(deployment, life), SECONDS)
        assert (await answer(deployment, request(1)))[1][0] == TOKENS
