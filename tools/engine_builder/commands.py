"""The command of every step, from the configuration alone: nothing here reads or runs anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.engine_builder.arguments import LIMITS, PARALLEL
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.families import Family
from tools.engine_builder.tools import Tools, release

FIRST_WITHOUT_PARALLEL = (0, 12)


@dataclass(frozen=True)
class Step:
    """One command, and the directory that it fills.

    Attributes:
        name: convert, quantize or build.
    """

    name: str
    command: tuple[str, ...]
    output: Path


@dataclass(frozen=True)
class Layout:
    """The directories and scripts of one build.

    Attributes:
        model: in Hugging Face format.
        script: of the first step, None when there is a checkpoint already.
    """

    model: Path
    checkpoint: Path
    engine: Path
    script: Path | None
    family: Family


def steps(
    config: EngineConfig, tools: Tools, layout: Layout, version: str | None = None
) -> list[Step]:
    """What is run, in this order.

    Args:
        version: of TensorRT-LLM; None when it is not known.
    """
    build = build_command(config, tools, layout.checkpoint, layout.engine, version)
    last = Step("build", tuple(build), layout.engine)
    if layout.script is None:
        return [last]
    if config.quantized:
        name, command = "quantize", quantize_command(config, tools, layout)
    else:
        name, command = "convert", convert_command(config, tools, layout)
    return [Step(name, tuple(command), layout.checkpoint), last]


def convert_command(config: EngineConfig, tools: Tools, layout: Layout) -> list[str]:
    """A family's convert_checkpoint.py: a Hugging Face model to a TensorRT-LLM checkpoint."""
    family = layout.family
    command = [tools.python, str(layout.script), *family.extra]
    command += [family.model_dir, str(layout.model), family.output_dir, str(layout.checkpoint)]
    command += option("--dtype", config.dtype)
    if config.tp_size > 1:
        command += [family.tp_size, str(config.tp_size)]
    if config.pp_size > 1 and family.pp_size:
        command += [family.pp_size, str(config.pp_size)]
    return command + options(config.convert_args)


def quantize_command(config: EngineConfig, tools: Tools, layout: Layout) -> list[str]:
    """quantize.py: a Hugging Face model to a quantized TensorRT-LLM checkpoint."""
    command = [tools.python, str(layout.script)]
    command += ["--model_dir", str(layout.model), "--output_dir", str(layout.checkpoint)]
    command += option("--dtype", config.dtype)
    command += option("--qformat", config.quantization)
    command += option("--kv_cache_dtype", config.kv_cache_dtype)
    command += option("--calib_size", config.calib_size)
    command += option("--calib_dataset", config.calib_dataset)
    command += option("--awq_block_size", config.awq_block_size)
    command += option("--tp_size", config.tp_size if config.tp_size > 1 else None)
    command += option("--pp_size", config.pp_size if config.pp_size > 1 else None)
    return command + options(config.quantize_args)


def build_command(
    config: EngineConfig,
    tools: Tools,
    checkpoint: Path,
    engine: Path,
    version: str | None = None,
) -> list[str]:
    """trtllm-build: a TensorRT-LLM checkpoint to one engine file per rank."""
    command = [tools.trtllm_build, "--checkpoint_dir", str(checkpoint), "--output_dir", str(engine)]
    command += options(config.plugins)
    command += option("--kv_cache_type", config.kv_cache_type)
    for name in LIMITS:
        command += option(f"--{name}", getattr(config, name))
    without = () if takes_parallel(version) else PARALLEL
    return command + options({k: v for k, v in config.build_args.items() if k not in without})


def takes_parallel(version: str | None) -> bool:
    """Whether trtllm-build still takes --tp_size and the like; one of unknown age is not patronized."""
    return version is None or release(version) < FIRST_WITHOUT_PARALLEL


def option(flag: str, value: object) -> list[str]:
    """A flag with its value, nothing when that is None."""
    return [] if value is None else [flag, str(value)]


def options(args: Mapping[str, Any]) -> list[str]:
    """Arguments on a command line: None and true are bare flags, false is none at all."""
    words: list[str] = []
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not None and value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words
