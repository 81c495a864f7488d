"""What the images are made of: cog.yaml, the Dockerfile, the requirements of both.

No image is built here, that takes a Docker engine and NVIDIA's registry. What can be run without, is:
the Dockerfile's RUN steps in a fresh virtual environment, its CMD and its HEALTHCHECK.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import httpx
import image_requirements
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from packaging.requirements import Requirement
from packaging.version import Version

from cog_triton.cli import serve
from cog_triton.deployment.preparation import VLLM_RELEASES
from cog_triton.settings import read_settings
from tests.support import ROOT, CogServer, QuietHandler, free_port, http_server

CONTRACTS = ROOT / "tests" / "contracts"
DOCKERFILE = ROOT / "Dockerfile"
COG = yaml.safe_load((ROOT / "cog.yaml").read_text())
COG_VLLM = yaml.safe_load((ROOT / "cog.vllm.yaml").read_text())
IMAGES = json.loads((CONTRACTS / "tensorrt_llm_llm_api.json").read_text())["images"]
# What NVIDIA's image brings; pip must not touch it. The versions are those that TensorRT-LLM 1.2.1 pins.
BROUGHT = {"tensorrt_llm": "1.2.1", "torch": "2.9.1", "transformers": "4.57.3"}
NEEDED = {
    "tensorrt_llm": ("torch>=2.9", "transformers==4.57.3", "numpy<2", "onnx>=1.18", "pydantic>=2"),
    "onnx": ("numpy>=1.22", "protobuf>=4.25.1"),
}
NO_INDEX = re.compile(r"Temporary failure in name resolution|Failed to establish|timed out|Network")


# The Dockerfile


class Step(NamedTuple):
    """An instruction of a Dockerfile, its continued lines joined."""

    name: str
    argument: str

    @property
    def words(self) -> list[str]:
        """An argument of words, without its options."""
        return [word for word in shlex.split(self.argument) if not word.startswith("--")]


TEXT = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
STEPS = [Step(*line.split(maxsplit=1)) for line in TEXT.splitlines() if line]


def named(name: str) -> list[Step]:
    return [step for step in STEPS if step.name == name]


def only(name: str) -> str:
    (found,) = named(name)
    return found.argument


def environment() -> dict[str, str]:
    """The variables that the image sets."""
    return dict(word.split("=", 1) for step in named("ENV") for word in step.words)


def command(argument: str) -> list[str]:
    """The words of a CMD, with this Python."""
    words: list[str] = json.loads(argument.rpartition("CMD ")[2])
    assert words[0] == "python3"
    return [sys.executable, *words[1:]]


def test_the_base_image_is_the_newest_release_of_nvidias_that_the_docs_know() -> None:
    (version,) = re.findall(r"^ARG TRITON_VERSION=(.+)$", TEXT, re.MULTILINE)
    assert next(iter(IMAGES)).endswith(f" to {version}")
    assert (
        only("FROM") == "${TRITON_IMAGE}"
    )  # which --build-arg may replace, by one with its digest


def test_the_container_runs_cogs_server_as_a_user_of_its_own() -> None:
    users = [step.argument for step in named("USER")]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])  # Kubernetes' runAsNonRoot wants a number
    assert f"--uid {users[-1].partition(':')[0]} " in DOCKERFILE.read_text()
    chowned = [step.argument for step in named("COPY") if "/src" in step.words]
    assert chowned == [f"--chown={users[-1]} . /src"]
    assert command(only("CMD"))[1:] == ["-m", "cog.server.http"]
    assert only("STOPSIGNAL") == "SIGTERM"
    assert only("WORKDIR") == "/src"
    # NVIDIA's entrypoint is not replaced, and ADD would unpack and download.
    assert not {"ENTRYPOINT", "ADD"} & {step.name for step in STEPS}


def test_compose_publishes_what_the_container_exposes() -> None:
    exposed = only("EXPOSE").split()
    assert exposed[0] == environment()["PORT"]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    service = compose["services"]["cog-triton"]
    assert [port.split(":")[-1] for port in service["ports"]] == exposed
    assert read_settings(service["environment"]).openai_port == int(exposed[1])


# The build context


def is_ignored(path: PurePosixPath) -> bool:
    """Docker's rules: patterns are anchored, ``**`` is any depth, and a match takes what is below it."""
    ignored = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#"):
            name = re.escape(pattern.lstrip("!"))
            expression = name.replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if any(re.fullmatch(expression, str(part)) for part in [path, *path.parents][:-1]):
                ignored = not pattern.startswith("!")
    return ignored


def context() -> Iterator[PurePosixPath]:
    """Every file that is sent to the builder."""
    for directory, directories, files in os.walk(ROOT):
        here = PurePosixPath(Path(directory).relative_to(ROOT).as_posix())
        directories[:] = [name for name in directories if not is_ignored(here / name)]
        yield from (here / name for name in files if not is_ignored(here / name))


def test_the_context_is_the_source_alone() -> None:
    for name in ("models/llama/model.safetensors", ".env", "tools/__pycache__/x.pyc"):
        assert is_ignored(PurePosixPath(name)), name
    assert not is_ignored(PurePosixPath(".cog/tmp/build/requirements.txt"))  # Cog's own
    files = set(context())
    assert not {path.parts[0] for path in files} & {".git", ".venv", "docs", "models", "tests"}
    copied = {file for step in named("COPY") for file in step.words[:-1]}
    assert set(map(PurePosixPath, copied - {"."})) <= files


# cog.yaml


@pytest.mark.parametrize("config", [COG, COG_VLLM], ids=["cog.yaml", "cog.vllm.yaml"])
def test_cog_yaml_fits_its_schema(config: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    schema = json.loads((CONTRACTS / "cog_config_schema_v1.0.json").read_text())
    jsonschema.Draft7Validator(schema).validate(config)


def test_all_images_run_the_same() -> None:
    variables, served = environment(), serve.environment({})
    assert COG["predict"] == variables["COG_PREDICT_TYPE_STUB"] == "predict.py:Predictor"
    assert COG["train"] == variables["COG_TRAIN_TYPE_STUB"] == "train.py:train"
    assert served["COG_PREDICT_TYPE_STUB"] == str(ROOT / COG["predict"])
    for name in ("COG_MAX_CONCURRENCY", "TOKIO_WORKER_THREADS"):
        assert variables[name] == served[name]
    assert variables["COG_MAX_CONCURRENCY"] == str(COG["concurrency"]["max"])
    assert {f"{n}={variables[n]}" for n in ("TOKIO_WORKER_THREADS", "OPENAI_HOST")} == {
        *COG["environment"]
    }
    assert serve.environment({"TOKIO_WORKER_THREADS": "4"})["TOKIO_WORKER_THREADS"] == "4"
    # All make the package importable in Triton's Python stubs by the same command.
    (command,) = COG["build"]["run"]
    steps = [step.argument for step in STEPS if ".pth" in step.argument]
    assert steps == [re.sub("^python ", "python3 ", command)]


def test_with_vllm_cogs_image_differs_in_what_it_installs_only() -> None:
    assert {**COG_VLLM, "build": COG["build"]} == COG
    ours, theirs = COG_VLLM["build"], COG["build"]
    for key in ("gpu", "python_version", "sdk_version"):
        assert ours[key] == theirs[key]
    triton, importable = ours["run"]
    assert [importable] == theirs["run"]
    assert "--no-deps" in triton
    packages = shlex.split(triton)[-2:]
    assert packages[0] == f"nvidia-pytriton=={pin('cog.txt', 'nvidia-pytriton')}"
    assert Requirement(packages[1]) == requirements("cog.txt")["numpy"]


# Requirements


def requirements(name: str) -> dict[str, Requirement]:
    """A requirements file, by name; lines that are options are left out."""
    text = (ROOT / "requirements" / name).read_text()
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    parsed = [Requirement(line) for line in lines if line and not line.startswith("-")]
    assert len({r.name for r in parsed}) == len(parsed)
    return {r.name: r for r in parsed}


def pin(file: str, name: str) -> str:
    (specifier,) = requirements(file)[name].specifier
    assert specifier.operator == "=="
    return specifier.version


def dependencies() -> dict[str, Requirement]:
    """Those of the project, without extras."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")
    texts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


# Engines bring their transformers, Cog adds itself, and a step of its own installs NumPy for vLLM.
@pytest.mark.parametrize(
    ("file", "lacks"),
    [
        ("image.in", {"transformers"}),
        ("cog.txt", {"cog", "transformers"}),
        ("cog_vllm.txt", {"cog", "numpy", "transformers"}),
    ],
)
def test_an_image_gets_the_dependencies_of_the_project(file: str, lacks: set[str]) -> None:
    project, added = dependencies(), requirements(file)
    assert project.keys() - added.keys() == lacks
    for name in project.keys() & added.keys():
        wide, narrow = project[name].specifier, added[name].specifier
        if name in ("cog", "numpy", "protobuf"):
            assert all(bound in {*wide} or wide.contains(bound.version) for bound in narrow)
        else:
            assert narrow == wide, name


def test_images_agree_about_what_is_pinned() -> None:
    assert pin("image.in", "cog") == pin("image.in", "coglet") == COG["build"]["sdk_version"]
    assert not requirements("image.in").keys() & BROUGHT.keys()
    for name in ("tensorrt_llm", "torch"):
        assert pin("cog.txt", name) == BROUGHT[name]
    assert Version(pin("cog_vllm.txt", "vllm")) in VLLM_RELEASES
    # tritonserver's wheel is installed alone there, and what it needs is named.
    texts = importlib.metadata.requires("nvidia-pytriton") or []
    needed = {Requirement(text).name for text in texts if "extra ==" not in text}
    indirect = {"grpcio", "numpy"}  # tritonclient's, and that step's
    assert needed - indirect <= requirements("cog_vllm.txt").keys()


def test_the_lock_fits_what_it_is_made_of() -> None:
    """`make lock` was run after a change of image.in."""
    text = (ROOT / "requirements" / "image.txt").read_text()
    assert not re.search(r"://|^-|@", text, re.MULTILINE), "names an index"
    locked = {}
    for block in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
        requirement = Requirement(block.partition("\\")[0])
        if requirement.marker is None or requirement.marker.evaluate():
            (locked[requirement.name],) = requirement.specifier
    for file in ("image.in", "tensorrt_llm.txt"):
        for name, asked in requirements(file).items():
            assert asked.specifier.contains(locked[name].version), f"{name}: run `make lock`"


# The steps, run for real


class Container:
    """A stand-in for a container of NVIDIA's image: a virtual environment, /src, /tmp and /usr/local/bin.

    It has pip, no `python`, and packages that are not to be changed.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.source, self.bin = root, root / "src", root / "venv" / "bin"
        venv.create(root / "venv", symlinks=True)
        (self.packages,) = (root / "venv").glob("lib/*/site-packages")
        for link in self.bin.glob("python*"):
            link.unlink()
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        (self.bin / "python3").symlink_to(base)
        ours = Path(sysconfig.get_path("purelib"))
        copied = ("pip", "numpy", "numpy.libs", *(path.name for path in ours.glob("numpy-*")))
        for name in copied:
            if (ours / name).exists():
                shutil.copytree(ours / name, self.packages / name)
        for name, version in BROUGHT.items():
            pretend_installed(self.packages, name, version, *NEEDED.get(name, ()))
        for directory in ("src", "tmp", "tools"):
            (root / directory).mkdir()
        for tool in ("ln", "rm"):
            (root / "tools" / tool).symlink_to(str(shutil.which(tool)))
        hidden = ("PYTHON", "VIRTUAL_ENV", "COG_", "TRITON")
        outer = {n: value for n, value in os.environ.items() if not n.startswith(hidden)}
        path = f"{self.bin}:{root / 'tools'}"
        self.environment = {**outer, **environment(), "HOME": outer.get("HOME", "/"), "PATH": path}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a step of the Dockerfile, with the container's paths made this one's."""
        places = {"/tmp": self.root / "tmp", "/src": self.source, "/usr/local/bin": self.bin}
        for path, here in places.items():
            command = re.sub(rf"(?<![\w/]){path}\b", str(here), command)
        words, where = ["/bin/sh", "-ec", command], self.source
        result = subprocess.run(
            words, cwd=where, env=self.environment, capture_output=True, text=True
        )
        if result.returncode and NO_INDEX.search(result.stderr):
            pytest.skip("no package index can be reached")
        return result

    def copy(self, step: Step) -> None:
        *sources, destination = step.words
        target = self.root / destination.lstrip("/")
        for path in context() if sources == ["."] else map(PurePosixPath, sources):
            # COPY of files takes them out of their directories.
            place = target / (path if sources == ["."] else path.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, place)
        # One of an earlier run, which the context has, is not what a step has made.
        shutil.rmtree(target / ".cog", ignore_errors=True)

    def installed(self) -> dict[str, str]:
        found = importlib.metadata.distributions(path=[str(self.packages)])
        return {re.sub("[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in found}


def pretend_installed(packages: Path, name: str, version: str, *needs: str) -> None:
    directory = packages / f"{name}-{version}.dist-info"
    directory.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    (directory / "METADATA").write_text("\n".join(lines) + "\n")
    (directory / "RECORD").touch()  # without it pip could not uninstall it


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    """What the Dockerfile makes, but for its user and base image."""
    container = Container(tmp_path_factory.mktemp("container"))
    before = container.installed()
    for step in STEPS:
        if step.name == "COPY":
            container.copy(step)
        elif step.name == "RUN" and not step.argument.startswith("useradd"):
            result = container.run(step.argument)
            assert result.returncode == 0, result.stdout + result.stderr
    after = container.installed()
    assert {name: after.get(name) for name in before} == before
    return container


@pytest.mark.rare
def test_the_steps_install_what_is_asked_for_and_make_the_schema(container: Container) -> None:
    installed = container.installed()
    for name, requirement in requirements("image.in").items():
        assert requirement.specifier.contains(installed[name]), name
    assert not list((container.root / "tmp").iterdir())
    made = json.loads((container.source / ".cog" / "openapi_schema.json").read_text())
    shipped = ROOT / "cog_triton" / "cli" / "openapi_schema.json"
    assert made == json.loads(shipped.read_text())
    # Triton's stubs are isolated from PYTHONPATH, as -I is, and may be started anywhere.
    program = "import cog_triton; print(cog_triton.__file__)"
    command = [str(container.bin / "python3"), "-Ic", program]
    found = subprocess.check_output(command, cwd=container.root, text=True)
    assert Path(found.strip()).is_relative_to(container.source)
    shown = subprocess.check_output([container.bin / "cog-triton", "--help"], text=True)
    assert shown.startswith("usage: cog-triton COMMAND")


@pytest.mark.rare
def test_pip_fails_rather_than_change_what_tensorrt_llm_needs(tmp_path: Path) -> None:
    container = Container(tmp_path)
    pretend_installed(container.packages, "pydantic", "2.1.0")
    (copied,) = (step for step in named("COPY") if "requirements/image.txt" in step.words)
    container.copy(copied)
    (installs,) = (step.argument for step in named("RUN") if "pip install" in step.argument)
    result = container.run(installs)
    assert result.returncode
    assert "(constraint) pydantic==2.1.0" in result.stdout + result.stderr
    assert container.installed()["pydantic"] == "2.1.0"


# What pip is told about the image's packages


def test_constraints_hold_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("typing_extensions", "protobuf", "mpi4py", "flask", "other", "grpcio"):
        pretend_installed(tmp_path, name, "1")
    pretend_installed(tmp_path, "torch", "1", "Typing.Extensions", "web[full]")
    pretend_installed(tmp_path, "onnx", "1", "protobuf>=4.25.1", "torch")
    extras = ("more; extra == 'full'", "other; extra == 'dev'")
    pretend_installed(tmp_path, "web", "1", "onnx", *extras)
    pretend_installed(tmp_path, "more", "1", "grpcio>=1.60", "grpcio<2")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    refused = image_requirements.main("/nonexistent")
    assert refused == "neither TensorRT-LLM nor vLLM with PyTorch is installed in this image"
    needs = ["torch", "Onnx>=1.18,<2", "absent", "mpi4py; python_version < '3'"]
    pretend_installed(tmp_path, "tensorrt_llm", "1", *needs)
    assert [*image_requirements.constraints(["tensorrt_llm", "torch"]).values()] == [
        *("grpcio<2,>=1.60", "more==1", "onnx==1", "protobuf>=4.25.1"),
        *("tensorrt-llm==1", "torch==1", "typing-extensions==1", "web==1"),
    ]


# The server, and the health check


@pytest.mark.rare
def test_the_server_starts_and_setup_fails_without_a_tritonserver(
    container: Container, tmp_path: Path
) -> None:
    server = CogServer({}, tmp_path / "log")
    server.command = [str(container.bin / "python3"), *command(only("CMD"))[1:]]
    server.directory = container.source
    server.environment = {
        **container.environment,
        "PORT": str(server.port),
        "TRITONSERVER": "/nonexistent",
        "MODEL": str(container.source),
    }
    problem = "setup failed: .* TRITONSERVER=/nonexistent is no file"
    with server, pytest.raises(AssertionError, match=problem):
        server.wait_until_ready()
    assert server.stop() == 0


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_healthy_is_ready(status: int, expected: int) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()

    def check(port: object) -> int:
        # The proxy, which does not exist, is not asked for what is in the container.
        variables = {**os.environ, "PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
        variables.pop("no_proxy", None)
        words = command(only("HEALTHCHECK"))
        return subprocess.run(words, env=variables, capture_output=True).returncode

    with http_server(Handler) as url:
        assert check(httpx.URL(url).port) == expected
    assert check(free_port()) == 1  # Docker knows no status but 0 and 1


def test_the_page_has_every_image_and_its_tensorrt_llm() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    lines = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    for image, version in IMAGES.items():
        name = re.sub(r"^.*tritonserver:|-trtllm-python-py3", "", image).replace("/", ", ")
        assert [name, version.removeprefix("TensorRT-LLM ")] in rows, name
