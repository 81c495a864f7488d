"""What the images are made of: cog.yaml, the Dockerfile, the requirements of both.

tests/integration/test_container_image.py builds the Dockerfile's and runs it.
"""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import httpx
import image_requirements
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from packaging.requirements import Requirement
from packaging.version import Version

from cog_triton.cli import serve
from cog_triton.deployment.engine_choice import VLLM_RELEASES
from cog_triton.settings import read_settings
from tests.support import ROOT, QuietHandler, free_port, http_server

CONTRACTS = ROOT / "tests" / "contracts"
DOCKERFILE = ROOT / "Dockerfile"
COG = yaml.safe_load((ROOT / "cog.yaml").read_text())
COG_VLLM = yaml.safe_load((ROOT / "cog.vllm.yaml").read_text())
IMAGES = json.loads((CONTRACTS / "tensorrt_llm_llm_api.json").read_text())["images"]
# What NVIDIA's image brings; pip must not touch it. The versions are those that TensorRT-LLM 1.2.1 pins.
BROUGHT = {"tensorrt_llm": "1.2.1", "torch": "2.9.1", "transformers": "4.57.3"}


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


def test_build_arguments_choose_the_base_image() -> None:
    """docker build --build-arg; TRITON_IMAGE is also passed by the test that builds the Dockerfile."""

    def base_image(**arguments: str) -> str:
        variables: dict[str, str] = {}
        for step in STEPS:
            if step.name == "FROM":
                return Template(step.argument).substitute(variables)
            name, _, default = step.argument.partition("=")
            variables[name] = arguments.get(name, Template(default).substitute(variables))
        raise AssertionError("no FROM")

    assert next(iter(IMAGES)).startswith(base_image(TRITON_VERSION="26.04"))
    pinned = "nvcr.io/nvidia/tritonserver@sha256:0123"
    assert base_image(TRITON_IMAGE=pinned, TRITON_VERSION="26.03") == pinned


def test_compose_publishes_what_the_container_exposes() -> None:
    exposed = only("EXPOSE").split()
    assert exposed[0] == environment()["PORT"]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    service = compose["services"]["cog-triton"]
    assert [port.split(":")[-1] for port in service["ports"]] == exposed
    variables = {**service["environment"], "MODEL": ""}
    assert read_settings(variables).openai_port == int(exposed[1])


def test_compose_starts_with_one_command_and_keeps_to_its_schema() -> None:
    import check_jsonschema  # type: ignore[import-untyped, unused-ignore]

    files = [ROOT / "deploy" / name for name in ("compose.yaml", "compose.gpu.yaml")]
    with pytest.raises(SystemExit) as ended:
        check_jsonschema.main(["--builtin-schema", "vendor.compose-spec", *map(str, files)])
    assert ended.value.code == 0
    # Every variable has a default, so that none must be set.
    names = re.findall(r"^[^#\n]*\$\{(\w+)(:-)?", files[0].read_text(), re.MULTILINE)
    assert names
    assert [name for name, default in names if not default] == []
    base, gpu = (yaml.safe_load(file.read_text()) for file in files)
    assert base["services"].keys() == gpu["services"].keys()
    grace = int(base["services"]["cog-triton"]["stop_grace_period"].removesuffix("s"))
    settings = read_settings({})
    assert grace > settings.drain_seconds + settings.stop_timeout


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
    both = {f"{name}={variables[name]}" for name in ("TOKIO_WORKER_THREADS", "OPENAI_HOST")}
    assert both == {*COG["environment"]}
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
    # grpcio is tritonclient's, numpy that step's.
    assert needed <= requirements("cog_vllm.txt").keys() | {"grpcio", "numpy"}


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


# What pip is told about the image's packages


def pretend_installed(packages: Path, name: str, version: str, *needs: str) -> None:
    directory = packages / f"{name}-{version}.dist-info"
    directory.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    (directory / "METADATA").write_text("\n".join(lines) + "\n")


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


# The health check


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
