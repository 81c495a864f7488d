"""Third-party routers, smg and Ray Serve, in front of servers of OpenAI's API, one of which is killed."""

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.openai_server import OpenAIServer
from tests.support import ROOT, START_TIMEOUT, limit, wait_until

pytestmark = pytest.mark.rare

SMG, RAY = ROOT / ".venv-clients" / "bin" / "smg", ROOT / ".venv-ray" / "bin" / "python"
# `serve run examples.ray.app:application` on a port of its own.
RAY_PROGRAM = """
import sys; from ray import serve; from examples.ray.app import application
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(application, blocking=True)
"""
STREAMS = 12
ENVIRONMENT = {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "10"}


class Router(OpenAIServer):
    """A router, which has the routes of the servers behind it."""

    def healthy_servers(self) -> int:
        with contextlib.suppress(httpx.TransportError, ValueError):
            return int(self.get("/readiness").json().get("healthy_workers", 0))
        return 0

    def wait_for_line(self, text: str = "") -> None:  # noqa: ARG002
        """Wait for both servers; Ray's logs a line."""

        def both_serve() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return self.healthy_servers() == 2 or "is ready at" in self.log.read_text()

        wait_until(both_serve, START_TIMEOUT, "both servers behind the router")

    def running_requests(self) -> int:
        return sum(load["num_running_reqs"] for load in self.get("/get_loads").json()["loads"])

    def ending(self, number: int, begun: Event, tokens: int = 400) -> str:
        asked = [{"role": "user", "content": f"{number:02}" * 20}]
        try:
            with self.stream(messages=asked, max_tokens=tokens, ignore_eos=True) as events:
                first = next(events)
                begun.set()
                *_, last, done = first, *events
        except httpx.RemoteProtocolError:
            return "cut"
        assert done == "[DONE]"
        return "error" if "error" in last else "whole"

    @contextlib.contextmanager
    def streams(self) -> Iterator[list[Future[str]]]:
        """Streams that run; what comes when the block has ended gets whole answers."""
        with ThreadPoolExecutor(STREAMS) as pool:
            running = []
            for number in range(STREAMS):
                running.append(pool.submit(self.ending, number, begun := Event()))
                assert begun.wait(limit(60))
            yield running
            assert {self.ending(number, Event(), 4) for number in range(90, 98)} == {"whole"}


@pytest.mark.skipif(not SMG.exists(), reason="smg is not installed: make test-clients")
def test_servers_behind_smg(demo_model: Path, tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "MODEL": str(demo_model)}
    one, two = (OpenAIServer(environment, tmp_path / name) for name in ("one", "two"))
    router = Router({}, tmp_path / "log")
    command = f"{SMG} launch --host 127.0.0.1 --port {router.port} --policy cache_aware"
    command += " --health-check-interval-secs 1 --health-failure-threshold 1"
    command += f" --load-monitor-interval 1 --prometheus-port {router.metrics_port}"
    router.command = f"{command} --worker-urls {one.url} {two.url}".split()
    with one, two, router:
        body = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
        assert router.post("/v1/responses", body).json()["status"] == "incomplete"
        with router.streams() as running:
            wait_until(lambda: router.running_requests() == STREAMS, 60, "the servers' loads")
            assert 0 < one.engine["active"] < STREAMS
            one.process.terminate()
        assert {stream.result() for stream in running} == {"whole"}
        assert one.process.wait(limit(60)) == 0
        with one:
            wait_until(lambda: router.healthy_servers() == 2, 60, "the return of a server")
            with router.streams() as running:
                two.process.kill()
            assert {stream.result() for stream in running} == {"whole", "error"}


@pytest.mark.skipif(
    not RAY.with_name("serve").exists(), reason="Ray is not installed: make test-clients"
)
def test_replicas_of_ray_serve(demo_model: Path, tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="ray-") as directory:  # not tmp_path: names of sockets are short
        own = {"MODEL": str(demo_model), "RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"}
        router = Router({**ENVIRONMENT, **own, "TRITON_METRICS_PORT": "0"}, tmp_path / "log")
        router.command = [str(RAY), "-c", RAY_PROGRAM, str(router.port)]
        with router:
            process = psutil.Process(router.process.pid)
            family = process.children(recursive=True)
            replicas = [one for one in family if "ServeReplica" in " ".join(one.cmdline())]
            with router.streams() as running:
                replicas[0].kill()
            assert {stream.result() for stream in running} == {"whole", "cut"}
            family += process.children(recursive=True)
            router.stop(signal.SIGINT)
        assert psutil.wait_procs(family, 30)[1] == []
