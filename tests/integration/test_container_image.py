"""The Dockerfile's images, built by buildah on stand-ins for NVIDIA's, and run on a read-only root.

tests/fakes/images has what makes the bases and what runs the results; it needs root that may mount.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from packaging.requirements import Requirement

from cog_triton.server.installation import locate
from cog_triton.settings import read_settings
from tests.stand_in.build import library
from tests.stand_in.engine import make_engine
from tests.support import (
    ROOT,
    START_TIMEOUT,
    chunks,
    free_port,
    limit,
    streamed_prediction,
    wait_until,
)
from tests.unit.test_images import BROUGHT, requirements
from tools.benchmark.processes import tree

pytestmark = pytest.mark.rare

SCRIPTS = ROOT / "tests" / "fakes" / "images"
NEEDS = ("buildah", "mmdebstrap", "unshare", "setpriv")
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
DEBIAN, BASE = "localhost/debian", "localhost/tritonserver"
# What NVIDIA's images bring: of what TensorRT-LLM 1.2.1 and vLLM 0.27.1 need, what the Dockerfile adds to.
# tritonserver of the wheel wants NumPy 1.
NEEDED = {
    "tensorrt_llm": [f"transformers=={BROUGHT['transformers']}", "numpy<2", "pydantic>=2"],
    "vllm": [
        "aiohttp>=3.13.3",
        "fastapi[standard]<0.137.0,>=0.133.0",
        "numpy<2",
        "prometheus_client>=0.18.0",
        f"protobuf>=5.29.6,!=6.33.0.*,{','.join(f'!=6.{n}.*' for n in (30, 31, 32))}",
        "pydantic>=2.12.0",
        "starlette>=1.0.1",
        "tokenizers>=0.21.1",
        "transformers>=5.5.3",
    ],
}
VERSIONS = {
    "tensorrt_llm": {name: BROUGHT[name] for name in ("tensorrt_llm", "torch")},
    "vllm": {"vllm": "0.27.1", "torch": "2.13.0"},
}
ENGINES = {  # what serves there: vLLM itself is not in the stand-in
    "tensorrt_llm": {"ENGINE_DIR": "/engine", "STAND_IN_INTER_TOKEN_MS": "10"},
    "vllm": {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "10"},
}
both = pytest.mark.parametrize("image", [*NEEDED], indirect=True, scope="module")
PROMPT = {"prompt": "What is machine learning?"}
SCHEMA = "openapi_schema.json"


@dataclass
class Image:
    """An unpacked image, and what its configuration says."""

    engine: str  # the package that its base brings
    root: Path
    config: dict[str, Any]

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Run a command in a container, by default the image's; read-only, as user 10001."""
        words = [*self.config["Entrypoint"], *(command or self.config["Cmd"])]
        runner = [*NAMESPACES, str(SCRIPTS / "run.sh"), str(self.root), self.config["WorkingDir"]]
        environment = dict(item.split("=", 1) for item in self.config["Env"]) | variables
        return subprocess.Popen(
            [*runner, *words], env=environment, stdout=subprocess.PIPE, text=True
        )

    def output(self, *command: str, **variables: str) -> tuple[int, str]:
        process = self.start(*command, **variables)
        return process.wait(limit(60)), process.communicate()[0]

    def health(self, **variables: str) -> int:
        """The status of its health check."""
        kind, *command = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.output(*command, **variables)[0]


@pytest.fixture(scope="module")
def debian() -> Iterator[None]:
    if os.getuid() or not all(map(shutil.which, NEEDS)):
        pytest.skip(f"needs root, {', '.join(NEEDS)}")
    if subprocess.run([*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode:
        pytest.skip("may not mount")
    directory = tempfile.mkdtemp(dir="/var/tmp")
    # It copies no whole image at each step, and cannot be had on every file system.
    overlay = (
        f"cd {directory}; mkdir l u w m; mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w m"
    )
    driver = "vfs" if subprocess.run([*NAMESPACES, "sh", "-c", overlay]).returncode else "overlay"
    storage = f'driver = "{driver}"\ngraphroot = "{directory}/graph"\nrunroot = "{directory}/run"\n'
    Path(directory, "storage.conf").write_text(f"[storage]\n{storage}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", f"{directory}/storage.conf")
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        try:
            wheel = locate(read_settings({})).server.parents[2]
            run(str(SCRIPTS / "debian.sh"), DEBIAN, str(wheel))
            yield
        finally:
            subprocess.run(["buildah", "rm", "--all"], check=True)
            subprocess.run(["rm", "-rf", directory], check=True)


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest, debian: None) -> Image:  # noqa: ARG001
    brought = (f"{name}=={version}" for name, version in VERSIONS[request.param].items())
    library_and_all = (str(library()), *brought, *NEEDED[request.param])
    run(str(SCRIPTS / "engine.sh"), BASE, DEBIAN, *library_and_all)
    options = ("--quiet", "--format=docker", "--layers=false", f"--build-arg=TRITON_IMAGE={BASE}")
    tag = run("buildah", "build", *options, str(ROOT))
    config = json.loads(run("buildah", "inspect", "--type=image", tag))["Docker"]["config"]
    root = Path(run("buildah", "mount", run("buildah", "from", tag)))
    make_engine(root / "engine")
    return Image(request.param, root, config)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 75:  # EX_TEMPFAIL, of the scripts
        pytest.skip(f"what the base is made of cannot be had: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.strip()


@dataclass
class Container:
    process: subprocess.Popen[str]
    ports: dict[str, str]

    def url(self, port: str = "PORT") -> str:
        return f"http://127.0.0.1:{self.ports[port]}"

    def is_ready(self) -> bool:
        assert self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url()}/health/ready", trust_env=False).status_code == 200
        return False

    def first(self) -> psutil.Process:
        """Its process 1."""
        (process,) = psutil.Process(self.process.pid).children()
        return process

    def completion(self, port: str) -> str:
        body = {**PROMPT, "max_tokens": 20}
        answer = httpx.post(f"{self.url(port)}/v1/completions", json=body, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@contextmanager
def serving(image: Image, *command: str, **variables: str) -> Iterator[Container]:
    ports = {name: str(free_port()) for name in ("PORT", "OPENAI_PORT")}
    ports |= {f"TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    container = Container(image.start(*command, **ports, **variables), ports)
    try:
        wait_until(container.is_ready, START_TIMEOUT, "readiness")
        yield container
    finally:
        for process in tree(container.process.pid):
            process.kill()
        container.process.communicate()


@both
def test_it_has_what_is_asked_for_and_is_writable_where_it_must_be(image: Image) -> None:
    places = "/ /src /src/.cog /opt /usr/local/bin /etc /tmp /home/cog /var/run/cog /dev/shm"
    script = f"id -u; for place in {places}; do test -w $place && echo $place; done; true"
    status, text = image.output("sh", "-c", script)
    assert status == 0
    assert text.split() == ["10001", "/tmp", "/home/cog", "/var/run/cog", "/dev/shm"]
    listed = json.loads(image.output("python3", "-m", "pip", "list", "--format=json")[1])
    installed = {one["name"].lower().replace("_", "-"): one["version"] for one in listed}
    for name, requirement in requirements("image.in").items():
        assert requirement.specifier.contains(installed[name]), name
    for name, version in VERSIONS[image.engine].items():
        assert installed[name.replace("_", "-")] == version
    for requirement in map(Requirement, NEEDED[image.engine]):
        assert requirement.specifier.contains(installed[requirement.name.replace("_", "-")])
    made, shipped = image.root / "src" / ".cog" / SCHEMA, ROOT / "cog_triton" / "cli" / SCHEMA
    assert json.loads(made.read_text()) == json.loads(shipped.read_text())
    # As Triton's stubs import it; and the command of the chart.
    assert image.output("python3", "-Ic", "import cog_triton")[0] == 0
    assert image.output("cog-triton", "--help")[1].startswith("usage: cog-triton COMMAND")


@both
def test_only_what_the_server_needs_is_copied_into_it(image: Image) -> None:
    """A model in the working directory stays out, as do the tests and the environment there."""
    copied = {path.name for path in (image.root / "src").iterdir()} - {"__pycache__"}
    assert {"predict.py", "cog_triton", "triton_model_repo"} <= copied
    rules = (ROOT / ".dockerignore").read_text().split()
    assert copied <= {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert {path.name for path in ROOT.iterdir()} - copied >= {"tests", "docs", ".git"}


@both
def test_cogs_server_and_openais_beside_it(image: Image) -> None:
    """In a pod: Cog says there that it is ready. SIGTERM lets a stream end."""
    with serving(image, **ENGINES[image.engine], KUBERNETES_SERVICE_HOST="10.0.0.1") as container:
        with streamed_prediction(container.url(), **PROMPT, max_tokens=20, seed=0) as events:
            pieces = chunks(events)
        assert len(pieces) > 5
        echoes = "".join(pieces).startswith(PROMPT["prompt"])
        assert echoes or image.engine == "vllm"  # only the stand-in says it again
        assert container.completion("OPENAI_PORT")
        assert image.health(**container.ports) == 0
        assert Path(f"/proc/{container.first().pid}/root/run/cog/ready").is_file()
        with streamed_prediction(container.url(), **PROMPT, max_tokens=100) as events:
            assert next(data for name, data in events if name == "output")
            container.first().send_signal(signal.SIGTERM)
            last, data = list(events)[-1]
        assert (last, data["status"]) == ("completed", "succeeded")
        assert data["metrics"]["output_token_count"] == 100
        assert container.process.wait(timeout=limit(60)) == 0
        assert image.health(**container.ports) == 1


@pytest.mark.parametrize("image", ["tensorrt_llm"], indirect=True, scope="module")
def test_openais_api_on_the_llm_api(image: Image) -> None:
    """The chart's command."""
    with serving(image, "cog-triton", "openai", ENGINE="llmapi") as container:
        assert container.completion("PORT")
        assert image.health(**container.ports) == 0
        container.first().send_signal(signal.SIGTERM)
        assert container.process.wait(timeout=limit(60)) == 0
