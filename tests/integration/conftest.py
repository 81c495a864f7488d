"""Real servers, started once for all tests that only send them requests."""

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.deployment.engine_choice import resolve_engine
from cog_triton.deployment.restart_policy import STARVED
from cog_triton.deployment.template_variables import Values, merge, template_values
from cog_triton.errors import TritonStartError
from cog_triton.repository.fill import fill_repository
from cog_triton.server.command import Endpoints, Launch
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, read_settings
from tests.openai_server import OpenAIBesideCog, OpenAIServer, streamed_chat
from tests.support import (
    CogServer,
    EngineCounters,
    alive,
    children,
    free_port,
    limit,
    slowness,
    started_by,
    wait_until,
)

if TYPE_CHECKING:
    import openai

ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}
PACE_MS = 20.0


def settings_for(model: Path, **environment: str) -> Settings:
    return read_settings({"MODEL": str(model), **ANY_PORTS, **environment})


def make_server(
    settings: Settings,
    directory: Path,
    overrides: Values | None = None,
    *,
    launch: Launch | None = None,
    temporary: bool = False,
) -> TritonServer:
    repository = directory / "repository"
    values = merge(template_values(settings, resolve_engine(settings)), overrides or {})
    fill_repository(settings.model_repository, repository, values)
    return TritonServer(repository, directory, settings, temporary, launch or Launch())


def start(server: TritonServer) -> None:
    """Starts a server; as a deployment does, again where the machine is too busy for Triton's patience."""
    for _ in range(4):
        try:
            server.start()
            return
        except TritonStartError as error:
            if not STARVED.search(str(error)):
                raise
            server.stop()
            # A start needs a directory without the files of another; a deployment makes a new one.
            shutil.rmtree(server.runtime / "backends")
    server.start()


@contextmanager
def running(server: TritonServer) -> Iterator[TritonServer]:
    """The server, started, and stopped at the end."""
    start(server)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session", autouse=True)
def _measured_machine() -> None:
    """Measure the machine for ``limit`` before the tests: an event loop would wait meanwhile."""
    slowness()


LIST_TOKEN = "the token of those who may list"


@pytest.fixture(params=["grpc", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def engine_name(request: pytest.FixtureRequest) -> str:
    """What ENGINE is for the tests of whole answers: --engine."""
    return str(request.config.getoption("--engine"))


@dataclass(frozen=True)
class SharedTriton:
    """The Triton of a Cog server, for tests that only send it requests."""

    cog: CogServer

    @property
    def endpoints(self) -> Endpoints:
        return self.cog.endpoints

    @property
    def guard_pid(self) -> int:
        """Id of the process that starts and ends tritonserver."""
        (pid,) = started_by(self.cog.process.pid, "server/guard.py")
        return pid

    @property
    def shm_prefix(self) -> str:
        """What the names of the server's shared memory begin with."""
        arguments: list[str] = psutil.Process(self.guard_pid).cmdline()
        script = next(place for place, text in enumerate(arguments) if text.endswith("guard.py"))
        return arguments[script + 2]

    def is_ready(self) -> bool:
        url = f"http://{self.endpoints.http}/v2/health/ready"
        return httpx.get(url, trust_env=False, timeout=limit(60)).status_code == 200


Triton: TypeAlias = TritonServer | SharedTriton


@pytest.fixture(scope="session")
def cog_server(
    demo_model: Path, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    """Cog with the demo model, OpenAI's API beside it, and Triton's ports and BLS.

    The one start for all tests that only send requests to an engine that computes.
    """
    directory = tmp_path_factory.mktemp("cog")
    (directory / "config.yaml").write_text("server:\n  tensorrt_llm_bls:\n")
    (directory / "adapters").mkdir()
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": engine_name,
        "LORA_DIR": str(directory / "adapters"),  # empty, but for a test of adapters
        "COG_TRITON_CONFIG": str(directory / "config.yaml"),
        "REPLICATE_LIST_TOKEN": LIST_TOKEN,
    }
    with CogServer({**environment, **every_port()}, directory / "log") as server:
        server.wait_until_ready()
        yield server
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="session")
def paced_cog_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    """As ``cog_server``, with the simulated engine at PACE_MS a token, and two processes for OpenAI's API.

    At its end, both APIs answer: ``check_common_end``.
    """
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "SIMULATED_INTER_TOKEN_MS": str(PACE_MS),
        "OPENAI_WORKERS": "2",
    }
    log = tmp_path_factory.mktemp("paced_cog") / "log"
    with CogServer({**environment, **every_port()}, log) as server:
        server.wait_until_ready()
        server.wait_for_line("its processes are ready")
        yield server
        check_common_end(server)


def check_common_end(server: CogServer) -> None:
    """Stop Cog's server while both of its APIs answer: the answers end first, then all processes.

    Those of OpenAI's API take longer, so that Cog alone would not wait for them.
    """
    processes = children(server.process.pid)
    openai_url = f"http://127.0.0.1:{server.environment['OPENAI_PORT']}"
    short: dict[str, Any] = {"max_tokens": 30, "min_tokens": 30}
    long = {"max_tokens": 200, "min_tokens": 200}
    with ExitStack() as streams:
        # Whichever process gets them.
        chats = [streams.enter_context(streamed_chat(openai_url, **long)) for _ in range(4)]
        prediction = streams.enter_context(server.stream(prompt="Hello", **short))
        for events in (*chats, prediction):
            next(events)
        server.process.send_signal(signal.SIGTERM)
        for chat in chats:
            *_, last, done = chat
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        *_, (_, completed) = prediction
        assert completed["status"] == "succeeded"
        assert completed["metrics"]["output_token_count"] == 30
    assert server.process.wait(limit(60)) == 0
    wait_until(lambda: not any(map(alive, processes)), 60, "the end of all processes")


def every_port() -> dict[str, str]:
    """Return settings that open OpenAI's API and the ports of Triton."""
    names = ("OPENAI_PORT", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT")
    return {name: str(free_port()) for name in names}


@pytest.fixture(scope="session")
def triton(cog_server: CogServer) -> SharedTriton:
    """Triton with the demo model, by the ensembles and by BLS."""
    return SharedTriton(cog_server)


@pytest.fixture(scope="session")
def paced_triton(paced_cog_server: CogServer) -> SharedTriton:
    """Triton with the simulated engine, at PACE_MS a token."""
    return SharedTriton(paced_cog_server)


@pytest.fixture(scope="session")
def openai_server(cog_server: CogServer) -> OpenAIServer:
    """OpenAI's API with the demo model."""
    return OpenAIBesideCog(cog_server)


@pytest.fixture
def server(openai_server: OpenAIServer) -> OpenAIServer:
    """The one that ``client`` asks; a module may have another."""
    return openai_server


def attached(
    triton: Triton, model: Path, log: Path, *arguments: str, **environment: str
) -> OpenAIServer:
    """Return OpenAI's API, in a process of its own, for a Triton that runs already."""
    endpoint = f"http://{triton.endpoints.grpc}"
    options = ["--triton-endpoint", endpoint, "--tokenizer", str(model)]
    return OpenAIServer(environment, log, *options, "--served-model-name", "demo", *arguments)


def engine_counters(server: Triton) -> EngineCounters:
    return EngineCounters(server.endpoints.metrics)


@pytest.fixture
def client(server: OpenAIServer) -> Iterator["openai.OpenAI"]:
    """PyPI's client of the server with OpenAI's API that a module's tests use."""
    import openai  # not in every environment of the tests

    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
        yield client
