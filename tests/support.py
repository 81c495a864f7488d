"""What the integration tests share: real servers on free ports, and what they say of themselves."""

import contextlib
import functools
import gc
import http.server
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, cycle, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from cog_triton.cli import main
from cog_triton.server.command import Endpoints
from tools.benchmark.processes import free_port as free_port
from tools.benchmark.processes import tree
from tools.server_sent_events import EventParser

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT = 330  # longer than TRITON_START_TIMEOUT, whose error says what was still loading
SHARED_MEMORY = Path("/dev/shm")


def split(items: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut into pieces of these sizes, over and over."""
    ends: list[int] = [0, *takewhile(len(items).__gt__, accumulate(cycle(sizes))), len(items)]
    return [items[start:end] for start, end in pairwise(ends)]


class QuietServer(http.server.ThreadingHTTPServer):
    """A server that is silent about clients that go away."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """For a server of a test's own."""

    # A handler writes its headers and its body one after the other. The kernel would hold the body back
    # until the client has acknowledged the headers, which takes a client on a kept connection 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server of a test's own; yields its URL."""
    with QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def script(
    name: str, *arguments: str, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script of scripts/, run to its end."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=600,
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of cog-triton, or of a checkout's tools, in this process, which has its imports.

    The environment variables that its options set do not outlive it.
    """
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def run_until_killed(program: str, **environ: str) -> str:
    """What a Python program prints that ends by SIGKILL, so that nothing in it can clean up."""
    starter = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert starter.returncode == -signal.SIGKILL
    return starter.stdout.strip()


QUIET_START_SECONDS = 1.0  # of the process below, on a machine that does nothing else
MAX_SLOWNESS = 10.0


@functools.cache
def slowness() -> float:
    """How many times longer than on a quiet machine the start of a process takes; measured once."""
    began = time.monotonic()
    imports = "import httpx, numpy, pydantic, tokenizers"
    subprocess.run([sys.executable, "-c", imports], check=True)
    took = time.monotonic() - began
    return min(max(took / QUIET_START_SECONDS, 1.0), MAX_SLOWNESS)


def limit(seconds: float) -> float:
    """A time limit for this machine: ``seconds`` on one that is quick and does nothing else."""
    return seconds * slowness()


def pass_over_old_objects() -> None:
    """Let no later collection of garbage look at what lives now.

    All that other tests imported and made takes half a second to look through.
    """
    gc.collect()
    gc.freeze()


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll what nothing signals, within ``limit(seconds)``; return the first true value."""
    began = time.monotonic()
    while True:
        if value := condition():
            return value
        took = time.monotonic() - began
        # How slow the machine is matters only, and is measured only, where the wait is a long one.
        if took > seconds and took > limit(seconds):
            raise AssertionError(f"{what} did not happen within {took:.1f} s")
        time.sleep(0.01)


def metrics(address: str) -> dict[str, float]:
    """The metrics of Triton or of OpenAI's API, by name and labels as they stand there."""
    text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=limit(60)).text
    samples = re.findall(r"^([a-z_:]+(?:\{[^}]*\})?) ([-+.\de]+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in samples}


class EngineCounters:
    """The embedded engine's counters, by way of Triton's metrics."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __getitem__(self, name: str) -> float:
        labels = {
            "generated": 'tokens{kind="generated"}',
            "stopped": 'requests{outcome="stopped"}',
            "active": "active_requests",
        }
        return metrics(self._address)[f"cog_triton_engine_{labels[name]}"]


def processes(text: str) -> list[int]:
    """Ids of the processes whose command line has ``text``."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if text in " ".join(process.info["cmdline"] or [])]


def marked(mark: str) -> list[int]:
    """Ids of the processes that have the text in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # one that has ended
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def started_by(pid: int, text: str) -> list[int]:
    """Ids of the processes that descend from ``pid`` and whose command line has ``text``."""
    own = children(pid)
    return [found for found in processes(text) if found in own]


def regions_left() -> set[str]:
    """Shared memory of servers of ours whose starter has ended, or is this process.

    Other Tritons name their regions otherwise, and another run's server is that of a running process.
    """
    return {
        region.name
        for region in SHARED_MEMORY.glob("cog_triton_*")
        if (starter := re.match(r"cog_triton_(\d+)_", region.name))
        and (int(starter[1]) == os.getpid() or not alive(int(starter[1])))
    }


def left_of(prefix: str) -> list[int | Path]:
    """Processes and shared memory of the server with that prefix."""
    return [*processes(prefix), *SHARED_MEMORY.glob(f"{prefix}*")]


FAKE_TRITON = ROOT / "tests" / "fakes" / "triton" / "bin" / "tritonserver.py"


def fake_triton(**behaviour: str) -> dict[str, str]:
    """Settings that run the stand-in for tritonserver, which says what it may be told to do.

    For tests of what is around Triton: it starts in a tenth of a second.
    """
    told = {f"FAKE_TRITON_{name.upper()}": value for name, value in behaviour.items()}
    return {"TRITONSERVER": str(FAKE_TRITON), "ENGINE": "simulated", "TRANSPORT": "http", **told}


Event = tuple[str, dict[str, Any]]


class Server:
    """A script of scripts/ that serves, in a process of its own on free ports."""

    script = ""
    directory = ROOT

    def __init__(self, environment: dict[str, str], log: Path, *arguments: str) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.engine = EngineCounters(f"127.0.0.1:{self.metrics_port}")
        self.log = log
        self.command = [sys.executable, str(ROOT / "scripts" / self.script), *arguments]
        self.environment = {
            **os.environ,
            "PORT": str(self.port),
            "TRITON_HTTP_PORT": "0",
            "TRITON_GRPC_PORT": "0",
            "TRITON_METRICS_PORT": str(self.metrics_port),
            "STORE": "0",
            **environment,
        }

    @property
    def endpoints(self) -> Endpoints:
        """Of its Triton, whose ports were given."""
        http, grpc = (int(self.environment[f"TRITON_{name}_PORT"]) for name in ("HTTP", "GRPC"))
        return Endpoints("127.0.0.1", http, grpc, self.metrics_port)

    def __enter__(self) -> "Self":
        self.log.unlink(missing_ok=True)  # a part of an earlier process may still write to it
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.directory,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for_line(self, text: str = "ready: ") -> None:
        """Waits until the log has it."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return text in self.log.read_text()

        wait_until(is_there, START_TIMEOUT, text)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ends it; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            return self.process.wait(timeout=limit(60))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class CogServer(Server):
    """A real Cog server with the predictor, as `make serve` runs it."""

    script = "serve.py"

    def wait_until_ready(self) -> None:
        """Waits for the end of setup, which has to be good."""

        def end_of_setup() -> Any:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"{self.url}/health-check", trust_env=False).json()["status"]
                # A busy machine may be too slow for a health check.
                return status not in ("STARTING", "UNHEALTHY") and status

        assert wait_until(end_of_setup, START_TIMEOUT, "setup") == "READY", self.log.read_text()

    def predict(self, **inputs: Any) -> dict[str, Any]:
        """One prediction, as JSON."""
        url = f"{self.url}/predictions"
        reply = httpx.post(url, json={"input": inputs}, timeout=limit(60), trust_env=False)
        body: dict[str, Any] = reply.json()
        return {"http_status": reply.status_code, **body}

    def stream(
        self, prediction_id: str | None = None, **inputs: Any
    ) -> AbstractContextManager[Iterator[Event]]:
        """One prediction, as a stream of server-sent events."""
        return streamed_prediction(self.url, prediction_id, **inputs)


@contextmanager
def streamed_prediction(
    url: str, prediction_id: str | None = None, **inputs: Any
) -> Iterator[Iterator[Event]]:
    """The events of a prediction at a Cog server."""
    method, path = ("PUT", f"/{prediction_id}") if prediction_id else ("POST", "")
    with httpx.stream(
        method,
        f"{url}/predictions{path}",
        json={"input": inputs},
        headers={"Accept": "text/event-stream"},
        timeout=limit(60),
        trust_env=False,
    ) as reply:
        assert reply.status_code == 200, reply.read()
        yield ((name, json.loads(data)) for name, data in server_sent_events(reply))


def server_sent_events(reply: httpx.Response) -> Iterator[tuple[str, bytes]]:
    """The name and the data of each event of a stream, as they come."""
    parser = EventParser()
    for part in reply.iter_raw():
        for name, data in parser.feed(part):
            yield name, data.strip()


def chunks(events: Iterator[Event]) -> list[str]:
    """The output of a stream, piece by piece."""
    return [data["chunk"] for name, data in events if name == "output"]


def children(pid: int) -> list[int]:
    """Ids of the processes that descend from ``pid``."""
    return [process.pid for process in tree(pid)[1:] if alive(process.pid)]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
