"""The supervisor, with servers that are not processes; tests/integration/test_recovery.py has real ones."""

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cog_triton.deployment import restart_policy
from cog_triton.deployment import running as module
from cog_triton.deployment.restart_policy import RestartPolicy
from cog_triton.deployment.running import Supervisor
from cog_triton.errors import (
    ConfigurationError,
    TritonPortTaken,
    TritonStartError,
    TritonUnavailable,
    error_from_text,
)
from cog_triton.settings import Settings, read_settings


class FakeServer:
    """Runs until ``end`` is set."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        # Its end is certain, before it is noticed.
        self.ending = False

    async def ended(self) -> str:
        await self.end.wait()
        return "it was killed\nand more"

    async def is_ending(self) -> bool:
        return self.ending


class Starter:
    """Starts servers while its gate is open; some attempts fail."""

    def __init__(self, *failing: int, cause: OSError | None = None) -> None:
        self.servers: list[FakeServer] = []
        self.attempts = 0
        self.timeouts: list[float] = []
        self._failing, self._cause = failing, cause
        self.gate = asyncio.Event()
        self.gate.set()

    @asynccontextmanager
    async def __call__(self, settings: Settings) -> AsyncIterator[FakeServer]:
        self.timeouts.append(settings.start_timeout)
        await self.gate.wait()
        self.attempts += 1
        if self.attempts in self._failing:
            error = ConfigurationError if self._cause else TritonStartError
            raise error(f"attempt {self.attempts}") from self._cause
        self.servers.append(FakeServer())
        yield self.servers[-1]


def run(
    starter: Callable[[], Starter], test: Callable[[Starter, Any], Awaitable[None]], **options: Any
) -> None:
    """Run a test with a supervisor that has started its first server."""

    async def supervised() -> None:
        start = starter()
        given = {"restarts": 3, "restart_window": 60.0, **options}
        supervisor = Supervisor(read_settings({}).model_copy(update=given), cast(Any, start))
        await supervisor.start()
        await test(start, supervisor)
        await supervisor.stop()
        assert supervisor.running is None

    asyncio.run(asyncio.wait_for(supervised(), 60))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE", 0.0)


def test_ends_before_the_window_do_not_count() -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        while len(starter.servers) < 4:
            server = supervisor.running
            await asyncio.sleep(0.05)
            server.end.set()
            await supervisor.after(server, 10)

    run(Starter, test, restarts=1, restart_window=0.04)


def test_a_first_start_that_tritons_stubs_abort_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart_policy, "STARVED", re.compile("attempt 1"))

    async def test(starter: Starter, _: Any) -> None:
        assert starter.attempts == 2

    run(lambda: Starter(1), test)


@pytest.mark.parametrize(("longest", "expected"), [(0.0, 300), (3, 60), (9, 90), (40, 300)])
def test_a_restart_gets_ten_times_the_longest_start(longest: float, expected: float) -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        supervisor.policy.longest_start = longest
        supervisor.running.end.set()
        await supervisor.after(supervisor.running, 10)
        assert starter.timeouts == [300, expected]

    run(Starter, test)


def test_waiting_for_a_server_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.01)

    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        assert await supervisor.after(first, 10) is first, "it turned out to be well"
        starter.gate.clear()
        first.end.set()
        with pytest.raises(TritonUnavailable, match=r"did not come back within 0\.05 s"):
            await supervisor.after(first, 0.05)
        starter.gate.set()
        await supervisor.after(first, 10)

    run(Starter, test)


def test_a_server_that_is_about_to_end_is_not_taken_for_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, its guard may take longer to clear up than its requests try it again."""
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.01)

    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        first.ending = True
        with pytest.raises(TritonUnavailable, match=r"did not come back within 0\.05 s"):
            await supervisor.after(first, 0.05)
        waiting = asyncio.create_task(supervisor.after(first, 60))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        first.end.set()
        assert await waiting is starter.servers[1]

    run(Starter, test)


@pytest.mark.parametrize(
    ("attempts", "cause", "expected"),
    [
        (9, None, [0, 0.5, 1, 2, 4, 8, 16, 30, 30]),
        (1200, OSError(errno.ENOSPC, "full"), [0, 0.5, 1, 2, 4, *[5] * 1195]),
    ],
)
def test_pauses_grow_with_failed_starts_and_a_full_disk_is_waited_for(
    attempts: int, cause: OSError | None, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        first.end.set()
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert await supervisor.after(first, 10) is starter.servers[1]
        monkeypatch.undo()

    monkeypatch.setattr(restart_policy, "FIRST_PAUSE", 0.5)
    failing = range(2, attempts + 1)
    run(lambda: Starter(*failing, cause=cause), test, restarts=1 if cause else attempts)
    assert pauses == expected


@pytest.mark.parametrize("steps", range(12))
def test_a_waiting_request_can_be_cancelled_at_the_moment_of_a_start(steps: int) -> None:
    async def wait_and_continue(supervisor: Any) -> None:
        await supervisor.after(None, 10)
        await asyncio.sleep(60)

    async def test(starter: Starter, supervisor: Any) -> None:
        starter.gate.clear()
        starter.servers[0].end.set()
        while supervisor.running is not None:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(wait_and_continue(supervisor))
        await asyncio.sleep(0.01)
        starter.gate.set()
        while supervisor.running is None:
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=10)
        assert waiting.cancelled()

    run(Starter, test)


@pytest.mark.parametrize("place", ["its start", "its supervision"])
def test_an_error_that_nobody_expected_is_a_failed_start(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> str:
        raise RuntimeError("can't start new thread")

    class Broken(Starter):
        @asynccontextmanager
        async def __call__(self, settings: Settings) -> AsyncIterator[FakeServer]:
            async with super().__call__(settings) as server:
                if self.attempts == 2 and place == "its start":
                    await fails()
                if self.attempts == 2:
                    server.ended = fails  # type: ignore[method-assign]
                yield server

    async def test(starter: Starter, supervisor: Any) -> None:
        supervisor.running.end.set()
        while starter.attempts < 3 or supervisor.running is None:
            await asyncio.sleep(0.01)
        assert supervisor.running is starter.servers[-1]
        assert "can't start new thread" in caplog.text

    run(Broken, test)


def test_who_waits_for_a_server_learns_that_there_will_be_none() -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        waiting = asyncio.create_task(supervisor.after(first, 60))
        first.end.set()
        with pytest.raises(TritonUnavailable, match=r"will not be restarted: .*attempt 4"):
            await waiting
        assert len(starter.servers) == 1

    run(lambda: Starter(2, 3, 4), test, restarts=3)


def policy_at(now: list[float], **settings: Any) -> RestartPolicy:
    given = {"restarts": 2, "restart_window": 60.0, **settings}
    return RestartPolicy(read_settings({}).model_copy(update=given), lambda: now[0])


def test_too_many_ends_within_the_window_are_the_last() -> None:
    now = [0.0]
    policy = policy_at(now)
    for moment in (0, 50, 100):  # the first is forgotten by then
        now[0] = moment
        policy.on_end()
    assert not policy.gives_up
    policy.on_failed_start(TritonStartError("no"))
    assert policy.gives_up


def test_a_start_without_its_port_is_repeated_at_once_and_not_for_ever() -> None:
    policy = policy_at([0.0])
    taken = TritonPortTaken("the port 8001 is in use")
    assert [policy.repeats_at_once(taken) for _ in range(3)] == [True, True, False]
    assert not policy.repeats_at_once(TritonStartError("no model"))
    policy.on_started(3.0)
    assert policy.repeats_at_once(taken)
    assert policy.recent == 0


class SilentServer:
    """A server process that is alive until it is killed."""

    end = "it was killed"

    def __init__(self) -> None:
        self.alive = True

    def kill(self) -> None:
        self.alive = False

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(("hang_timeout", "silence"), [(8.0, 7.9), (8.0, 8.1), (0.0, 9e9)])
def test_a_server_that_is_silent_for_too_long_is_killed(
    hang_timeout: float, silence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)
    server: Any = SilentServer()
    client: Any = SimpleNamespace(silence=lambda: silence)
    running = module.RunningServer(server, client, cast(Any, None), hang_timeout)

    async def end_of_it() -> str:
        ended = asyncio.create_task(running.ended())
        for _ in range(10):
            await asyncio.sleep(0)
        is_killed = not server.alive
        server.kill()
        reason = await ended
        assert is_killed == ("Triton hangs" in reason)
        return reason

    expected = "Triton hangs: no running request has received a response for 8 s"
    assert asyncio.run(end_of_it()) == (expected if silence == 8.1 else "it was killed")


def test_a_server_that_gave_up_a_models_process_is_killed_at_once() -> None:
    """The process may go on with memory that Triton has freed, and answer one request with another's."""
    server: Any = SilentServer()
    client: Any = SimpleNamespace(silence=lambda: 0.0)
    running = module.RunningServer(server, client, cast(Any, None), hang_timeout=0.0)
    error = error_from_text("Stub process 'preprocessing_0_1' is not healthy.")
    assert isinstance(error, TritonUnavailable)
    client.on_given_up(error.given_up_model)
    assert not server.alive
    assert asyncio.run(running.is_ending())
    expected = "Triton gave up the process of model preprocessing: no sign of life for a second"
    assert asyncio.run(running.ended()) == expected


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_listen_is_about_to_end(listens: bool) -> None:
    server: Any = SimpleNamespace(listens=lambda: listens)
    running = module.RunningServer(server, cast(Any, SimpleNamespace()), cast(Any, None), 0.0)
    assert asyncio.run(running.is_ending()) != listens
