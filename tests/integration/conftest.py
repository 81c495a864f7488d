"""Real servers, started once for all tests that only send them requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cog_triton.deployment.preparation import Values, merge, resolve_engine, template_values
from cog_triton.deployment.restart_policy import STARVED
from cog_triton.errors import TritonStartError
from cog_triton.repository.fill import fill_repository
from cog_triton.server.command import Launch
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, read_settings
from tests.openai_server import OpenAIServer
from tests.support import CogServer, EngineCounters, free_port

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
    server.start()


@contextmanager
def running(server: TritonServer) -> Iterator[TritonServer]:
    """The server, started, and stopped at the end."""
    start(server)
    try:
        yield server
    finally:
        server.stop()


LIST_TOKEN = "the token of those who may list"


@pytest.fixture(params=["grpc", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def engine_name(request: pytest.FixtureRequest) -> str:
    """What ENGINE is for the tests of whole answers: --engine."""
    return str(request.config.getoption("--engine"))


@pytest.fixture(scope="session")
def triton(
    demo_model: Path, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Triton with the demo model, by the ensembles and by BLS."""
    settings = settings_for(demo_model, ENGINE=engine_name)
    directory = tmp_path_factory.mktemp("triton")
    with running(make_server(settings, directory, {"tensorrt_llm_bls": {}})) as server:
        yield server


@pytest.fixture(scope="session")
def paced_triton(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Triton with the simulated engine, at PACE_MS a token."""
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_INTER_TOKEN_MS=str(PACE_MS))
    with running(make_server(settings, tmp_path_factory.mktemp("paced"))) as server:
        yield server


@pytest.fixture(scope="session")
def cog_server(
    demo_model: Path, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    """Cog with the demo model, and Triton's own ports and BLS beside it."""
    directory = tmp_path_factory.mktemp("cog")
    (directory / "config.yaml").write_text("server:\n  tensorrt_llm_bls:\n")
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": engine_name,
        "COG_TRITON_CONFIG": str(directory / "config.yaml"),
        "REPLICATE_LIST_TOKEN": LIST_TOKEN,
        "TRITON_HTTP_PORT": str(free_port()),
        "TRITON_GRPC_PORT": str(free_port()),
    }
    with CogServer(environment, directory / "log") as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session")
def paced_cog_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    """Cog with OpenAI's API beside it and the simulated engine, at PACE_MS a token."""
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "SIMULATED_INTER_TOKEN_MS": str(PACE_MS),
        "OPENAI_PORT": str(free_port()),
        "TRITON_GRPC_PORT": str(free_port()),
    }
    with CogServer(environment, tmp_path_factory.mktemp("paced_cog") / "log") as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session")
def openai_server(
    demo_model: Path, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """OpenAI's API with the demo model."""
    log = tmp_path_factory.mktemp("openai") / "log"
    with OpenAIServer({"MODEL": str(demo_model), "ENGINE": engine_name}, log) as server:
        yield server
    assert "Traceback" not in log.read_text()


@pytest.fixture
def server(openai_server: OpenAIServer) -> OpenAIServer:
    """The one that ``client`` asks; a module may have another."""
    return openai_server


def engine_counters(server: TritonServer) -> EngineCounters:
    return EngineCounters(server.endpoints.metrics)


@pytest.fixture
def client(server: OpenAIServer) -> Iterator["openai.OpenAI"]:
    """PyPI's client of the server with OpenAI's API that a module's tests use."""
    import openai  # not in every environment of the tests

    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
        yield client
