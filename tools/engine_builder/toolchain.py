"""TensorRT-LLM's commands and scripts on this machine, and the steps of a build."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml

from cog_triton.errors import ConfigurationError
from cog_triton.redaction import without_secrets
from tools.engine_builder.config import LIMITS, QUANTIZED_ONLY, EngineConfig

# TensorRT-LLM's examples in NVIDIA's images: its own, and Triton's with it.
EXAMPLES = (Path("/app/tensorrt_llm/examples"), Path("/app/examples"))


@dataclass(frozen=True)
class Family:
    """One directory of TensorRT-LLM's examples with a convert_checkpoint.py."""

    name: str
    collection: str = "core"  # its place under examples/models since TensorRT-LLM 0.18
    renamed: Mapping[str, str] = field(default_factory=dict)  # arguments with names of their own
    extra: Mapping[str, str] = field(default_factory=dict)  # arguments that are always given
    pipeline: bool = True  # False for a script that cannot split a model by its layers

    def scripts(self, examples: Path) -> list[Path]:
        """Return its script's possible places, those of the newest TensorRT-LLM first."""
        folders = (f"models/{self.collection}", "models/core", "models/contrib", "")
        return [examples / folder / self.name / "convert_checkpoint.py" for folder in folders]


_TABLES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
FAMILIES = {name: Family(name, **fields) for name, fields in _TABLES["families"].items()}
MODEL_TYPES: dict[str, str] = _TABLES["model_types"]  # in a model's config.json, and the family


def find_family(config: EngineConfig, model: Path) -> Family:
    """Return the configuration's family, else that of the model's model_type; it can do what is asked."""
    model_type = read_json(model / "config.json").get("model_type")
    name = config.family or MODEL_TYPES.get(str(model_type))
    if not name and (config.convert_script or not model.is_dir()):
        name = "FAMILY"  # which nothing needs, or which is known once the model is there
    if not name:
        raise ConfigurationError(
            f"no conversion script is known for model_type {model_type!r} of {model}/config.json. "
            f"Known are {', '.join(sorted(MODEL_TYPES))}. Name a directory of TensorRT-LLM's examples "
            "with family, or a script with convert_script, in the build configuration"
        )
    family = FAMILIES.get(name, Family(name))
    if config.pp_size > 1 and not family.pipeline:
        raise ConfigurationError(
            f"pp_size: {config.pp_size}: TensorRT-LLM's conversion of {name} models has no "
            "pipeline parallelism; split the layers instead, with tp_size"
        )
    return family


@dataclass(frozen=True)
class Toolchain:
    """The programs of the steps."""

    python: str = "python3"  # runs the scripts; TensorRT-LLM is installed for it
    trtllm_build: str = "trtllm-build"
    examples: Path = EXAMPLES[0]  # TensorRT-LLM's directory of them

    def check(self, config: EngineConfig) -> None:
        """Raise ConfigurationError now if a command would not be found in an hour."""
        for program in (self.trtllm_build, self.python):
            if shutil.which(program) is None:
                raise ConfigurationError(
                    f"{program} was not found: run where TensorRT-LLM (up to 1.2) is installed, such as "
                    "NVIDIA's tritonserver:…-trtllm-python-py3 image, or set TENSORRT_LLM_PYTHON"
                )
        if config.checkpoint is None:
            require(self.examples)


def require(place: Path) -> None:
    """Refuse a directory or script of TensorRT-LLM's examples that is not there."""
    if not place.exists():
        raise ConfigurationError(
            f"{place} is not there: set TENSORRT_LLM_EXAMPLES to the examples directory of "
            "TensorRT-LLM's repository, at the version installed"
        )


def find_toolchain() -> Toolchain:
    """Return the toolchain that TENSORRT_LLM_EXAMPLES and TENSORRT_LLM_PYTHON name.

    Without the former, the examples are those of an image of NVIDIA's. Without the latter, the commands
    are those of the Python that runs this if it has trtllm-build, else the first in PATH.
    """
    usual = next((path for path in EXAMPLES if path.is_dir()), EXAMPLES[0])
    examples = Path(os.environ.get("TENSORRT_LLM_EXAMPLES") or usual)
    python = os.environ.get("TENSORRT_LLM_PYTHON")
    beside = Path(python or sys.executable)
    command = beside.with_name("trtllm-build")
    if command.is_file():
        return Toolchain(str(beside), str(command), examples)
    return Toolchain(python or "python3", examples=examples)


@dataclass(frozen=True)
class Step:
    """A command, named convert, quantize or build, and the directory that it fills."""

    name: str
    command: tuple[str, ...]
    output: Path


def plan(config: EngineConfig, toolchain: Toolchain, workdir: Path) -> list[Step]:
    """Return the steps of a build in ``workdir``. Nothing is fetched, made or run."""
    workdir = workdir.absolute()
    model = model_directory(config.model, workdir)
    checkpoint = config.checkpoint.absolute() if config.checkpoint else workdir / "checkpoint"
    steps = []
    if not config.checkpoint:
        _check_code(config, model)
        name, command = "convert", _convert
        if config.quantized:
            name, command = "quantize", _quantize
        words = command(config, toolchain.examples, model, checkpoint)
        steps.append(Step(name, (toolchain.python, *words), checkpoint))
    engine = workdir / "engine"
    arguments = {"checkpoint_dir": checkpoint, "output_dir": engine, **config.plugins}
    arguments |= {**_given(config, "kv_cache_type", *LIMITS), **config.build_args}
    return [*steps, Step("build", (toolchain.trtllm_build, *options(arguments)), engine)]


def _convert(config: EngineConfig, examples: Path, model: Path, checkpoint: Path) -> list[str]:
    family = find_family(config, model)
    scripts = family.scripts(examples)
    if config.convert_script:
        scripts = [examples / config.convert_script]
    script = next((path for path in scripts if path.is_file()), scripts[0])
    arguments = {"model_dir": model, "output_dir": checkpoint}
    arguments |= _given(config, "dtype", "tp_size", "pp_size")
    arguments = {family.renamed.get(name, name): value for name, value in arguments.items()}
    return [str(script), *options({**family.extra, **arguments, **config.convert_args})]


def _quantize(config: EngineConfig, examples: Path, model: Path, checkpoint: Path) -> list[str]:
    arguments = {"model_dir": model, "output_dir": checkpoint, **_given(config, "dtype")}
    arguments["qformat"] = config.quantization
    arguments |= _given(config, *QUANTIZED_ONLY, "tp_size", "pp_size")
    script = examples / config.quantize_script
    return [str(script), *options({**arguments, **config.quantize_args})]


def _given(config: EngineConfig, *names: str) -> dict[str, Any]:
    given = config.model_dump(exclude_defaults=True)
    return {name: given[name] for name in names if name in given}


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


def _check_code(config: EngineConfig, model: Path) -> None:
    """Refuse a model with code of its own that is not trusted.

    TensorRT-LLM's scripts load every model with ``trust_remote_code``.
    """
    for file in (model / "config.json", model / "tokenizer_config.json"):
        if read_json(file).get("auto_map") and not config.trust_remote_code:
            shown = without_secrets(config.model)
            raise ConfigurationError(
                f"the model brings Python code of its own ({file}: auto_map), which TensorRT-LLM's "
                f"scripts run while they convert it. Read the .py files of {shown}, then put "
                "trust_remote_code: true in the build configuration"
            )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if it is missing or broken."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def model_directory(source: str, workdir: Path) -> Path:
    """Return a local directory, or the place of a fetched one, with its repository's or tar file's name."""
    path = Path(source.removeprefix("file://")).expanduser()
    if path.is_dir():
        return path.absolute()
    name = PurePosixPath(urlsplit(source).path).name.partition("@")[0]
    name = re.sub(r"\.(tar|tgz)(\.\w+)?$", "", name)
    return workdir / "models" / (re.sub(r"[^\w.-]", "_", name) or "model")
