"""What a build would run, as far as it can be known before anything is fetched."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.text import remote_code
from tools.engine_builder import package
from tools.engine_builder.arguments import PARALLEL
from tools.engine_builder.commands import Layout, Step, steps, takes_parallel
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.families import Family, named
from tools.engine_builder.redaction import Redactor, secrets_in
from tools.engine_builder.scripts import candidates_of, existing, find_family, needs_family
from tools.engine_builder.tools import Tools, check_version, tensorrt_llm_version
from tools.engine_builder.workdir import linked, local_directory


@dataclass(frozen=True)
class Plan:
    """What would be run, as far as it can be known before the model is there.

    Attributes:
        shown: each step's name and command line, without secrets.
    """

    steps: list[Step]
    shown: list[tuple[str, str]]
    notes: list[str]


def plan(config: EngineConfig, tools: Tools, workdir: Path) -> Plan:
    """The commands of a build in ``workdir``. Nothing is fetched, made or run but for a version.

    Raises:
        ConfigurationError: as ``build``, for what can be seen already.
    """
    workdir, notes = workdir.absolute(), []
    version = tensorrt_llm_version(tools.python)
    check_version(version)
    model = local_directory(config.model) or linked(config.model, workdir)
    check_code(config, model)
    family = None
    if needs_family(config):
        if config.family is None and not model.is_dir():
            notes.append("FAMILY is read from the model's config.json once it is there")
            family = named("FAMILY")
        else:
            family = find_family(config, model)
    candidates = candidates_of(config, tools, family)
    script = existing(candidates) or next(iter(candidates), None)
    todo = steps(config, tools, layout_of(config, workdir, model, family, script), version)
    hide = Redactor(secrets_in(config.plain()))
    shown = [(step.name, shlex.join(masked(step.command, hide))) for step in todo]
    return Plan(todo, shown, notes + dropped(config, version))


def layout_of(
    config: EngineConfig, workdir: Path, model: Path, family: Family | None, script: Path | None
) -> Layout:
    """The directories of a build in ``workdir``; a family that is not needed is none."""
    checkpoint = config.checkpoint.absolute() if config.checkpoint else workdir / "checkpoint"
    return Layout(model, checkpoint, workdir / package.ENGINE, script, family or named("none"))


def check_code(config: EngineConfig, model: Path) -> None:
    """Refuses a model with code of its own that is not trusted.

    TensorRT-LLM's scripts load every model with ``trust_remote_code``, whether it is theirs to give or not.
    """
    if config.trust_remote_code or config.checkpoint is not None:
        return
    if (file := remote_code.brought_by(model)) is not None:
        raise ConfigurationError(
            f"the model brings Python code of its own ({file}: auto_map), which TensorRT-LLM's scripts "
            f"run while they convert it. Read the .py files of {config.model}, then put "
            "trust_remote_code: true in the build configuration"
        )


def dropped(config: EngineConfig, version: str | None) -> list[str]:
    """A note on each argument that this version of trtllm-build no longer takes."""
    if takes_parallel(version):
        return []
    return [
        f"build_args.{name}: dropped, trtllm-build {version} takes it from the checkpoint"
        for name in config.build_args
        if name in PARALLEL
    ]


def masked(command: tuple[str, ...], hide: Redactor) -> list[str]:
    """A command without secrets."""
    return [hide(word) for word in command]
