"""TensorRT-LLM's commands and scripts on this machine, and the steps of a build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml

from cog_triton.errors import ConfigurationError
from cog_triton.text.tokenizer import names_remote_code
from tools.engine_builder.config import LIMITS, PARALLEL, EngineConfig

EXAMPLES = (Path("/app/tensorrt_llm/examples"), Path("/app/examples"))
"""TensorRT-LLM's examples in NVIDIA's images: its own, and Triton's with it."""
FIRST_WITHOUT_PARALLEL = (0, 12)
FIRST_WITHOUT_ENGINES = (1, 3)
_VERSION = 'import importlib.metadata; print(importlib.metadata.version("tensorrt_llm"))'


@dataclass(frozen=True)
class Family:
    """One directory of TensorRT-LLM's examples with a convert_checkpoint.py.

    Attributes:
        collection: its place under ``examples/models`` since TensorRT-LLM 0.18.
        model_dir: the argument for the model's directory; the next three are alike.
        pp_size: None for a script that cannot split a model by its layers.
        extra: arguments that are always given.
    """

    name: str
    collection: str = "core"
    model_dir: str = "--model_dir"
    output_dir: str = "--output_dir"
    tp_size: str = "--tp_size"
    pp_size: str | None = "--pp_size"
    extra: tuple[str, ...] = ()

    def scripts(self, examples: Path) -> list[Path]:
        """Return its script's possible places, those of the newest TensorRT-LLM first."""
        other = "core" if self.collection == "contrib" else "contrib"
        folders = [
            f"models/{self.collection}/{self.name}",
            f"models/{other}/{self.name}",
            self.name,
            *(["chatglm"] if self.name == "glm-4-9b" else []),
        ]
        return [examples / folder / "convert_checkpoint.py" for folder in folders]


_TABLES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
FAMILIES = {name: Family(name, **fields) for name, fields in _TABLES["families"].items()}
MODEL_TYPES: dict[str, str] = _TABLES["model_types"]
"""``model_type`` in a model's config.json, and the family whose script reads such models."""


def named(name: str) -> Family:
    """Return the family of that name; one that is not ours takes the common arguments."""
    return FAMILIES.get(name, Family(name))


def find_family(config: EngineConfig, model: Path) -> Family:
    """Return the configuration's family, else that of the model's model_type.

    Raises:
        ConfigurationError: no script is known, or it cannot do what is asked.
    """
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
        model_type = str(found["model_type"])
    except (OSError, ValueError, LookupError, TypeError):
        model_type = None
    if config.family is not None:
        family = named(config.family)
    elif model_type in MODEL_TYPES:
        family = FAMILIES[MODEL_TYPES[model_type]]
    elif config.convert_script is not None:
        family = named("none")
    elif model_type is None:
        raise ConfigurationError(
            f"{model}/config.json has no model_type: name the model's family in the build "
            "configuration"
        )
    else:
        raise ConfigurationError(
            f"no conversion script is known for model_type {model_type!r}. Known are "
            f"{', '.join(sorted(MODEL_TYPES))}. Name a directory of TensorRT-LLM's examples with "
            "family, or a script with convert_script, in the build configuration"
        )
    if config.pp_size > 1 and family.pp_size is None:
        raise ConfigurationError(
            f"pp_size: {config.pp_size}: TensorRT-LLM's conversion of {family.name} models has no "
            "pipeline parallelism; split the layers instead, with tp_size"
        )
    return family


@dataclass(frozen=True)
class Toolchain:
    """The programs of the steps.

    Attributes:
        python: runs the scripts; TensorRT-LLM is installed for it.
        examples: TensorRT-LLM's examples directory.
    """

    python: str = "python3"
    trtllm_build: str = "trtllm-build"
    examples: Path = EXAMPLES[0]

    def check(self, config: EngineConfig) -> None:
        """Fail now if a command would not be found in an hour.

        Raises:
            ConfigurationError: naming what is missing.
        """
        if shutil.which(self.trtllm_build) is None:
            raise ConfigurationError(
                f"{self.trtllm_build} was not found: run where TensorRT-LLM (up to 1.2) is "
                "installed, such as NVIDIA's tritonserver:…-trtllm-python-py3 image"
            )
        if shutil.which(self.python) is None:
            raise ConfigurationError(f"{self.python} was not found; see TENSORRT_LLM_PYTHON")
        script = config.quantize_script if config.quantized else config.convert_script
        own = script is not None and script.is_absolute()
        if config.checkpoint is None and not own and not self.examples.is_dir():
            raise ConfigurationError(
                f"{self.examples} is not there: set TENSORRT_LLM_EXAMPLES to the examples "
                "directory of TensorRT-LLM's repository, at the version installed"
            )

    def version(self) -> str | None:
        """Return TensorRT-LLM's version, None if Python has none. It is not imported.

        Raises:
            ConfigurationError: that version builds no engines.
        """
        try:
            run = subprocess.run(
                [self.python, "-c", _VERSION],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        version = run.stdout.strip() or None
        if version is not None and release(version) >= FIRST_WITHOUT_ENGINES:
            raise ConfigurationError(
                f"TensorRT-LLM {version} builds no engines, they ended with 1.2: use an image "
                "with that, or serve the model as it is with the LLM API"
            )
        return version

    def scripts(self, config: EngineConfig, family: Family) -> list[Path]:
        """Return the possible places of the first step's script; none if there is no such step."""
        if config.checkpoint is not None:
            return []
        if config.quantized:
            return [self.examples / config.quantize_script]
        usual, own = family.scripts(self.examples), config.convert_script
        if own is None:
            return usual
        return [self.examples / own, *(path.parent / own for path in usual)]


def find_toolchain(environ: Mapping[str, str] | None = None) -> Toolchain:
    """Return the toolchain that TENSORRT_LLM_EXAMPLES and TENSORRT_LLM_PYTHON name.

    Without the former, the examples are those of an image of NVIDIA's. Without the latter, the commands
    are those of the Python that runs this if it has trtllm-build, else the first in PATH.
    """
    environ = os.environ if environ is None else environ
    usual = next((path for path in EXAMPLES if path.is_dir()), EXAMPLES[0])
    examples = Path(environ.get("TENSORRT_LLM_EXAMPLES") or usual)
    beside = Path(environ.get("TENSORRT_LLM_PYTHON") or sys.executable)
    command = beside.with_name("trtllm-build")
    if command.is_file():
        return Toolchain(str(beside), str(command), examples)
    return Toolchain(environ.get("TENSORRT_LLM_PYTHON") or "python3", "trtllm-build", examples)


def release(version: str) -> tuple[int, int]:
    """Return major and minor number: (1, 2) of 1.2.0rc3."""
    numbers = re.findall(r"\d+", version)
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 else (0, 0)


@dataclass(frozen=True)
class Step:
    """A command, named convert, quantize or build, and the directory that it fills."""

    name: str
    command: tuple[str, ...]
    output: Path


@dataclass(frozen=True)
class Layout:
    """The directories of a build, and the script of its first step if it has one."""

    model: Path
    checkpoint: Path
    engine: Path
    script: Path | None
    family: Family


def steps(
    config: EngineConfig, toolchain: Toolchain, layout: Layout, version: str | None = None
) -> list[Step]:
    """Return what to run, in order.

    Args:
        version: of TensorRT-LLM; None when it is not known.
    """
    command = [toolchain.trtllm_build]
    command += ["--checkpoint_dir", str(layout.checkpoint), "--output_dir", str(layout.engine)]
    command += options({**config.plugins, **_given(config, "kv_cache_type", *LIMITS)})
    # trtllm-build took these up to 0.11; one of unknown age is not patronized.
    without = PARALLEL if drops_parallel(version) else ()
    command += options({k: v for k, v in config.build_args.items() if k not in without})
    build = Step("build", tuple(command), layout.engine)
    if layout.script is None:
        return [build]
    first = _quantize_command if config.quantized else _convert_command
    name = "quantize" if config.quantized else "convert"
    command = [toolchain.python, str(layout.script), *first(config, layout)]
    return [Step(name, tuple(command), layout.checkpoint), build]


def drops_parallel(version: str | None) -> bool:
    return version is not None and release(version) >= FIRST_WITHOUT_PARALLEL


def _convert_command(config: EngineConfig, layout: Layout) -> list[str]:
    family = layout.family
    words = [*family.extra, family.model_dir, str(layout.model)]
    words += [family.output_dir, str(layout.checkpoint), *options(_given(config, "dtype"))]
    if config.tp_size > 1:
        words += [family.tp_size, str(config.tp_size)]
    if config.pp_size > 1 and family.pp_size:
        words += [family.pp_size, str(config.pp_size)]
    return words + options(config.convert_args)


def _quantize_command(config: EngineConfig, layout: Layout) -> list[str]:
    words = ["--model_dir", str(layout.model), "--output_dir", str(layout.checkpoint)]
    words += options(_given(config, "dtype"))
    words += ["--qformat", config.quantization]
    names = ("kv_cache_dtype", "calib_size", "calib_dataset", "awq_block_size")
    words += options(_given(config, *names))
    for name in ("tp_size", "pp_size"):
        if getattr(config, name) > 1:
            words += options(_given(config, name))
    return words + options(config.quantize_args)


def _given(config: EngineConfig, *names: str) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words: None and true are bare flags, false is none at all."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not None and value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


@dataclass(frozen=True)
class Plan:
    """The steps of a build, as far as they can be known before the model is there.

    Attributes:
        scripts: possible places of the first step's script; none if it needs no script.
    """

    steps: list[Step]
    notes: list[str]
    scripts: list[Path]


def plan(
    config: EngineConfig, toolchain: Toolchain, workdir: Path, version: str | None = None
) -> Plan:
    """Return the commands of a build in ``workdir``. Nothing is fetched, made or run.

    Args:
        version: of TensorRT-LLM; None when it is not known.

    Raises:
        ConfigurationError: as ``build``, for what can be seen already.
    """
    workdir, notes = workdir.absolute(), []
    model = local_directory(config.model) or linked(config.model, workdir)
    check_code(config, model)
    family = named("none")
    if config.checkpoint is None and not config.quantized:
        if config.family is None and not model.is_dir():
            notes.append("FAMILY is read from the model's config.json once it is there")
            family = named("FAMILY")
        else:
            family = find_family(config, model)
    scripts = toolchain.scripts(config, family)
    script = next((path for path in scripts if path.is_file()), next(iter(scripts), None))
    checkpoint = config.checkpoint.absolute() if config.checkpoint else workdir / "checkpoint"
    layout = Layout(model, checkpoint, workdir / "engine", script, family)
    if drops_parallel(version):
        notes += [
            f"build_args.{name}: dropped, trtllm-build {version} takes it from the checkpoint"
            for name in config.build_args
            if name in PARALLEL
        ]
    return Plan(steps(config, toolchain, layout, version), notes, scripts)


def check_code(config: EngineConfig, model: Path) -> None:
    """Refuse a model with code of its own that is not trusted.

    TensorRT-LLM's scripts load every model with ``trust_remote_code``.
    """
    if config.trust_remote_code or config.checkpoint is not None:
        return
    if (file := names_remote_code(model)) is not None:
        raise ConfigurationError(
            f"the model brings Python code of its own ({file}: auto_map), which TensorRT-LLM's "
            f"scripts run while they convert it. Read the .py files of {config.model}, then put "
            "trust_remote_code: true in the build configuration"
        )


def local_directory(source: str) -> Path | None:
    path = Path(source.removeprefix("file://")).expanduser()
    return path.absolute() if path.is_dir() else None


def linked(source: str, workdir: Path) -> Path:
    """Return the place of a fetched model, with the name of its repository or tar file."""
    name = PurePosixPath(urlsplit(source).path).name.partition("@")[0]
    name = re.sub(r"\.(tar|tgz)(\.\w+)?$", "", name)
    return workdir / "models" / (re.sub(r"[^\w.-]", "_", name) or "model")


def gpus() -> list[str]:
    """Return name, compute capability and driver of each GPU: an engine runs on its own kind."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in run.stdout.splitlines() if line.strip()]
