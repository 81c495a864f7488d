"""Weights that Cog mounts: found by cog.yaml, weights.lock and the files in them."""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton.deployment.model_files import model_name, with_files, with_managed_weights
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.weights import managed
from cog_triton.weights.managed import Managed, Role, managed_weights
from tests.support import ROOT

SCHEMA = json.loads((ROOT / "tests/contracts/cog_config_schema_v1.0.json").read_text())
FILES = {
    Role.MODEL: {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}"},
    Role.ENGINE: {"engine/rank0.engine": "engine", "engine/config.json": "{}"},
    Role.TOKENIZER: {"tokenizer.json": "{}", "tokenizer_config.json": "{}"},
    None: {"README": "nothing"},
}


class Project:
    """A directory with cog.yaml, and what Cog has mounted for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "weights.json"
        self.mounts = root / "mounts"

    def mount(self, name: str, role: Role | None) -> Path:
        directory = self.mounts / name
        for path, text in FILES[role].items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)
        return directory

    def declare(self, *names: str) -> None:
        entries = [{**self.entry(name), "source": {"uri": f"hf://org/{name}"}} for name in names]
        build = {"gpu": True, "python_version": "3.12"}
        config = {"build": build, "predict": "predict.py:Predictor", "weights": entries}
        jsonschema.validate(config, SCHEMA)
        (self.root / "cog.yaml").write_text(yaml.safe_dump(config))

    def lock(self, *names: str, **changes: Any) -> None:
        """Write weights.lock as `cog weights import` does, with changes to each entry."""
        entries = []
        for name in names:
            directory = self.mounts / name
            files = [
                {
                    "path": str(file.relative_to(directory)),
                    "size": file.stat().st_size,
                    "digest": f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}",
                    "layer": "sha256:00",
                }
                for file in sorted(directory.rglob("*"))
                if file.is_file()
            ]
            entries.append({**self.entry(name), "setDigest": "sha256:00", "files": files} | changes)
        document = {"version": 1, "envelopeFormat": "sha256:00", "weights": entries}
        (self.root / "weights.lock").write_text(json.dumps(document))

    def entry(self, name: str) -> dict[str, str]:
        return {"name": name, "target": str(self.mounts / name)}

    def found(self) -> tuple[Managed, ...]:
        return managed_weights([self.root], self.manifest)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    project = Project(tmp_path)
    monkeypatch.setattr(managed, "ROOT", tmp_path)
    monkeypatch.setattr(managed_weights, "__defaults__", (None, project.manifest))
    return project


@pytest.mark.parametrize("locked", [False, True], ids=["no-lock", "lock"])
@pytest.mark.parametrize("role", list(FILES))
def test_a_mounted_directory_is_what_its_files_make_it(
    project: Project, role: Role | None, locked: bool
) -> None:
    directory = project.mount("one", role)
    project.declare("one")
    if locked:
        project.lock("one")
    assert project.found() == (Managed("one", directory, role),)


def test_an_image_without_cog_yaml_has_cogs_list(project: Project) -> None:
    directory = project.mount("one", Role.MODEL)
    entry = {**project.entry("one"), "setDigest": "sha256:00"}
    project.manifest.write_text(json.dumps({"weights": [entry]}))
    assert project.found() == (Managed("one", directory, Role.MODEL),)


def test_without_declared_weights_there_are_none(project: Project) -> None:
    assert project.found() == ()
    (project.root / "cog.yaml").write_text("build: {gpu: true}\nweights: null\n")
    assert project.found() == ()
    assert managed_weights() == ()


def test_a_mounted_model_is_served_without_a_variable(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory = project.mount("llama", Role.MODEL)
    project.declare("llama")
    settings = with_files(read_settings({}))
    assert (settings.model, settings.tokenizer_dir) == (str(directory), str(directory))
    assert model_name(read_settings({})) == "llama"
    assert f"using the weights llama, which Cog mounts at {directory}, as the model" in caplog.text


def test_a_mounted_engine_and_a_tokenizer_are_used_together(project: Project) -> None:
    engine = project.mount("engine", Role.ENGINE)
    tokenizer = project.mount("tokenizer", Role.TOKENIZER)
    project.declare("tokenizer", "engine")
    settings = with_files(read_settings({}))
    assert settings.engine_dir == engine / "engine"
    assert settings.tokenizer_dir == str(tokenizer)


@pytest.mark.parametrize("variable", ["MODEL", "COG_WEIGHTS", "ENGINE_DIR"])
def test_a_variable_comes_before_what_is_mounted(
    project: Project, variable: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    project.mount("llama", Role.MODEL)
    other = project.mount("other", Role.MODEL)
    project.declare("llama")
    settings = read_settings({variable: str(other)})
    assert model_name(settings) == "other"
    assert str(project.mounts / "llama") not in with_files(settings).model_dump_json()
    assert f"using the model of {variable}, not the weights that Cog" in caplog.text
    caplog.clear()
    (project.root / "cog.yaml").unlink()
    with_managed_weights(settings, log=True)
    assert not caplog.text  # there is nothing to choose from


def test_a_named_tokenizer_comes_before_a_mounted_one(project: Project) -> None:
    project.mount("model", Role.MODEL)
    project.mount("tokenizer", Role.TOKENIZER)
    project.declare("model", "tokenizer")
    other = project.root / "tokenizer"
    other.mkdir()
    settings = with_managed_weights(read_settings({"TOKENIZER": str(other)}))
    assert settings.tokenizer == str(other)
    assert settings.model == str(project.mounts / "model")


def test_of_two_models_the_first_is_used_and_the_log_says_so(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        project.mount(name, Role.MODEL)
    project.declare("first", "second")
    assert with_managed_weights(read_settings({})).model == str(project.mounts / "first")
    assert "the weights second are not used, because first comes first in cog.yaml" in caplog.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("missing", "model.safetensors is missing; run `cog weights pull`"),
        ("cut", "model.safetensors has 3 bytes instead of 7"),
        ("other", "model.safetensors has different content"),
        ("empty", "config.json is missing (and 2 more)"),
        ("unmounted", "the weights llama are not mounted: the directory"),
        ("moved", "weights.lock places llama at /elsewhere, but cog.yaml places it at"),
        (
            "unlocked",
            "weights.lock lacks llama, which cog.yaml declares; run `cog weights import`",
        ),
        ("newer", "weights.lock has version 2, but this release supports version 1"),
        ("broken", "weights.lock cannot be read: "),
        ("malformed", "weights.lock cannot be read: weights.0.files.0.size"),
    ],
)
def test_weights_that_are_not_those_of_the_lock_are_refused(
    project: Project, change: str, problem: str
) -> None:
    directory = project.mount("llama", Role.MODEL)
    project.declare("llama")
    project.lock("llama")
    weights, lock = directory / "model.safetensors", project.root / "weights.lock"
    if change == "missing":
        weights.unlink()
    elif change == "cut":
        weights.write_text("wei")
    elif change == "other":
        weights.write_text("WEIGHTS")
    elif change in ("empty", "unmounted"):
        for file in directory.iterdir():
            file.unlink()
        if change == "unmounted":
            directory.rmdir()
    elif change == "moved":
        project.lock("llama", target="/elsewhere")
    elif change == "unlocked":
        project.lock("llama", name="other")
    elif change == "newer":
        lock.write_text(lock.read_text().replace('"version": 1', '"version": 2'))
    elif change == "broken":
        lock.write_text("{")
    else:
        lock.write_text(re.sub(r'"size": \d+', '"size": -1', lock.read_text()))
    with pytest.raises(ConfigurationError) as caught:
        with_files(read_settings({}))
    assert problem in str(caught.value)


def test_the_documented_cog_yaml_is_that_of_the_image_and_passes_cogs_schema() -> None:
    page = (ROOT / "docs" / "replicate.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    documented = yaml.safe_load(block)
    jsonschema.validate(documented, SCHEMA)
    (entry,) = documented.pop("weights")
    assert entry["target"].startswith("/src/weights/")
    assert documented.pop("model")
    assert documented == yaml.safe_load((ROOT / "cog.yaml").read_text())
    assert "!weights.lock" in (ROOT / ".dockerignore").read_text().split()
