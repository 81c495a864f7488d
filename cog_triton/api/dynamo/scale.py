"""Dynamo's frontend and workers on one machine, each in a process of its own; one that ends is replaced."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import httpx

from cog_triton.errors import ConfigurationError
from cog_triton.processes import temporary_directory
from cog_triton.server.guard import signal_with_parent
from cog_triton.server.log import log_to
from cog_triton.settings import read_settings
from cog_triton.terminal import end_at_once_on_signals

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# Of the command that is printed.
QUESTION = "What is a KV cache?"
_THIS_MACHINE = "127.0.0.1"
_KV_DIRECTORY = "DYN_FILE_KV"
_RPC_HOST = "DYN_TCP_RPC_HOST"
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
# Of one request, to other workers.
_MIGRATIONS = ("--migration-limit", "3")
_ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}


def run(host: str, port: int, workers: int) -> int:
    """Serve; return 0, 130 after Ctrl-C, 1 if a process could not start; or raise ConfigurationError."""
    settings = read_settings()
    log_to(settings.log_level)
    with temporary_directory("cog-triton-dynamo.") as directory:
        environment = {**_ANY_PORTS, **dynamo_variables(directory), **os.environ}
        processes = Processes(environment, directory, start_timeout=settings.start_timeout)
        return asyncio.run(processes.run(host, port, workers))


def dynamo_variables(directory: str) -> dict[str, str]:
    """Return Dynamo's variables for processes that meet in a directory."""
    return {
        # Dynamo would take the first address that others can reach.
        _RPC_HOST: _THIS_MACHINE,
        "DYN_TCP_RESPONSE_STREAM_HOST": _THIS_MACHINE,
        "DYN_EVENT_PLANE_HOST": _THIS_MACHINE,
        _KV_DIRECTORY: directory,
        "DYN_LOG": "warn",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        # A stream's headers wait so long for its first token: sent by themselves, they hold it back until
        # the client acknowledges them, 40 ms on Linux.
        "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "10000",
    }


class Processes:
    """The frontend and its workers, from their start to a signal."""

    def __init__(
        self, environment: Mapping[str, str], directory: str, *, start_timeout: float
    ) -> None:
        """Start nothing yet.

        Args:
            environment: of the processes.
            directory: exists for as long as they do.
            start_timeout: seconds until all must be ready.
        """
        self._environment = environment
        self._directory = directory
        self._start_timeout = start_timeout
        self._running: set[asyncio.subprocess.Process] = set()
        self._ready = False
        self._stopping = asyncio.Event()
        self._received_signal: int | None = None

    async def run(self, host: str, port: int, workers: int) -> int:
        """Start all, and keep them running until a signal; return the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        commands = [_frontend(host, port)]
        commands += [_worker() for _ in range(workers)]
        kept = [asyncio.create_task(self._keep(command)) for command in commands]
        url = f"http://{host.replace('0.0.0.0', _THIS_MACHINE)}:{port}"
        waiting = asyncio.create_task(self._wait(url, workers))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            command = waiting.result()
            self._ready = True
            print(f"ready: {url} (Ctrl-C stops it); try", flush=True)
            print(f"  {command}", flush=True)
        await stopping
        await asyncio.gather(*kept)
        waiting.cancel()
        if self._received_signal is None:
            return 1
        return 128 + signal.SIGINT if self._received_signal == signal.SIGINT else 0

    def _stop(self, number: int) -> None:
        """End everything: running requests first, within DRAIN_SECONDS; a second signal, at once."""
        self._received_signal = number
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(name)
        end_at_once_on_signals()
        self._end()

    def _end(self) -> None:
        self._stopping.set()
        for process in self._running:
            process.terminate()

    async def _keep(self, command: Sequence[str]) -> None:
        """Run a process, and another after each that ends once all were ready; until the end of all."""
        name = shlex.join(command[1:3])
        while not self._stopping.is_set():
            try:
                await self._run_one(command)
            except Exception as error:
                logger.error("%s cannot be started: %s; stopping all of them", name, error)
                self._end()
                return
            if self._stopping.is_set():
                return
            forget_dead(self._environment)
            if not self._ready:
                logger.error("%s ended before it was ready; stopping all of them", name)
                self._end()
                return
            logger.error("%s ended; starting another", name)

    async def _run_one(self, command: Sequence[str]) -> None:
        """Run a process to its end, or raise OSError if it cannot be started."""
        events = {"KV_EVENTS_ENDPOINT": f"ipc://{self._directory}/{secrets.token_hex(4)}"}
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**self._environment, **events},
            start_new_session=True,
            # If this process is killed, its workers end as they do when it is stopped.
            preexec_fn=partial(signal_with_parent, signal.SIGTERM),
        )
        self._running.add(process)
        if self._stopping.is_set():
            # The end of all came while it was started.
            process.terminate()
        await process.wait()
        self._running.discard(process)

    async def _wait(self, url: str, workers: int) -> str:
        """Wait until so many workers are in the frontend's list; return a command that asks them."""
        async with httpx.AsyncClient(trust_env=False) as client:
            deadline = asyncio.get_running_loop().time() + self._start_timeout
            while True:
                with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
                    health = (await client.get(f"{url}/health")).json()
                    serving = [one for one in health["instances"] if one["endpoint"] == "generate"]
                    models = (await client.get(f"{url}/v1/models")).json()["data"]
                    if len(serving) >= workers and models:
                        return await example(client, url, str(models[0]["id"]))
                if asyncio.get_running_loop().time() > deadline:
                    raise ConfigurationError(f"not ready in {self._start_timeout:g} s")
                await asyncio.sleep(POLL_SECONDS)


async def example(client: httpx.AsyncClient, url: str, model: str) -> str:
    """Return a command that asks the model: as a chat, unless it has no template and refuses one."""
    path = "/v1/chat/completions"
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
    }
    try:
        answer = await client.post(f"{url}{path}", json={**body, "max_tokens": 1}, timeout=30.0)
        is_chat = answer.status_code == httpx.codes.OK
    except httpx.HTTPError:
        is_chat = False
    if not is_chat:
        path = "/v1/completions"
        body = {"model": model, "prompt": QUESTION, "max_tokens": 64}
    header = "-H 'Content-Type: application/json'"
    return f"curl -s {url}{path} {header} -d {shlex.quote(json.dumps(body))}"


def forget_dead(environment: Mapping[str, str]) -> None:
    """Remove from Dynamo's directory this machine's workers that have died; it lists them for 10 s more."""
    for entry in Path(environment[_KV_DIRECTORY]).glob("v1/instances/[!.]*"):
        # It may be gone, or half written.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            address = json.loads(entry.read_text())["transport"]["tcp"].partition("/")[0]
            host, _, port = address.rpartition(":")
            if host == environment[_RPC_HOST] and not _listens(host, int(port)):
                entry.unlink()


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _frontend(host: str, port: int) -> list[str]:
    listening = ("--http-host", host, "--http-port", str(port))
    return [sys.executable, "-m", "dynamo.frontend", *listening, *_PLANES, *_MIGRATIONS]


def _worker() -> list[str]:
    program = str(Path(sys.executable).with_name("cog-triton"))
    return [program, "worker", "--discovery-backend", "file"]
