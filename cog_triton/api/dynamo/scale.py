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
from cog_triton.settings import Settings, read_settings
from cog_triton.terminal import end_at_once_on_signals

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
QUESTION = "What is a KV cache?"  # of the command that is printed
# The machine's own address: Dynamo would take the first that others can reach.
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
_MIGRATIONS = ("--migration-limit", "3")  # of one request, to other workers
_ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}


def run(host: str, port: int, workers: int) -> int:
    """Serve; return 0, 130 after Ctrl-C, 1 if a process could not start; or raise ConfigurationError."""
    settings = read_settings()
    log_to(settings.log_level)
    with temporary_directory("cog-triton-dynamo.") as directory:
        own = {**dict.fromkeys(_HOSTS, "127.0.0.1"), "DYN_FILE_KV": directory, "DYN_LOG": "warn"}
        own["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "1"
        # A stream's headers wait so long for its first token: sent by themselves, they hold it back
        # until the client acknowledges them, 40 ms on Linux.
        own["DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS"] = "10000"
        processes = Processes({**_ANY_PORTS, **own, **os.environ}, settings, directory)
        return asyncio.run(processes.run(host, port, workers))


class Processes:
    """The frontend and its workers, from their start to a signal."""

    def __init__(self, environment: Mapping[str, str], settings: Settings, own: str) -> None:
        self._environment, self._own, self._start_timeout = environment, own, settings.start_timeout
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping, self._received = asyncio.Event(), 0

    async def run(self, host: str, port: int, workers: int) -> int:
        program = str(Path(sys.executable).with_name("cog-triton"))
        worker = (program, "worker", "--discovery-backend", "file")
        listening = ("--http-host", host, "--http-port", str(port))
        frontend = (sys.executable, "-m", "dynamo.frontend", *listening, *_PLANES, *_MIGRATIONS)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        self._ready = False
        kept = [asyncio.create_task(self._keep(own)) for own in (frontend, *[worker] * workers)]
        url = f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}"
        waiting = asyncio.create_task(self._wait(url, workers))
        await asyncio.wait([waiting, *kept], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done() and not self._stopping.is_set():
            self._ready = True
            print(f"ready: {url} (Ctrl-C stops it); try", flush=True)
            print(f"  {waiting.result()}", flush=True)
        await self._stopping.wait()
        await asyncio.gather(*kept)
        waiting.cancel()
        if not self._received:
            return 1
        return 128 + signal.SIGINT if self._received == signal.SIGINT else 0

    def _stop(self, number: int) -> None:
        """End everything: running requests first, within DRAIN_SECONDS; a second signal, at once."""
        self._received = number
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(name)
        end_at_once_on_signals()
        self._end()

    def _end(self) -> None:
        self._stopping.set()
        for process in self._running:
            process.terminate()

    async def _keep(self, command: Sequence[str]) -> None:
        """Run a process, and another after each that ends once all were ready."""
        while not self._stopping.is_set():
            events = {"KV_EVENTS_ENDPOINT": f"ipc://{self._own}/{secrets.token_hex(4)}"}
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**self._environment, **events},
                start_new_session=True,
                # If this process is killed, its workers end as they do when it is stopped.
                preexec_fn=partial(signal_with_parent, signal.SIGTERM),
            )
            self._running.add(process)
            if self._stopping.is_set():  # meanwhile
                process.terminate()
            await process.wait()
            self._running.discard(process)
            if self._stopping.is_set():
                return
            forget_dead(self._environment)
            name = shlex.join(command[1:3])
            if not self._ready:
                logger.error("%s ended before it was ready; stopping all of them", name)
                self._end()
                return
            logger.error("%s ended; starting another", name)

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
    for entry in Path(environment["DYN_FILE_KV"]).glob("v1/instances/[!.]*"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # gone, half written
            address = json.loads(entry.read_text())["transport"]["tcp"].partition("/")[0]
            host, _, port = address.rpartition(":")
            with socket.socket() as probe:
                if host == environment["DYN_TCP_RPC_HOST"] and probe.connect_ex((host, int(port))):
                    entry.unlink()
