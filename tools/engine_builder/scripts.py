"""Which script makes the checkpoint, and where it is."""

from __future__ import annotations

import json
from pathlib import Path

from cog_triton.errors import ConfigurationError
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.families import (
    FAMILIES,
    MODEL_TYPES,
    Family,
    family_of,
    named,
    script_candidates,
)
from tools.engine_builder.tools import Tools


def needs_examples(config: EngineConfig) -> bool:
    """Whether one of TensorRT-LLM's scripts is run."""
    script = config.quantize_script if config.quantized else config.convert_script
    return config.checkpoint is None and not (script is not None and script.is_absolute())


def needs_family(config: EngineConfig) -> bool:
    """Whether a conversion script is run; quantize.py and trtllm-build are the same for all models."""
    return config.checkpoint is None and not config.quantized


def find_family(config: EngineConfig, model: Path) -> Family:
    """The configuration's family, else that of the model's model_type.

    Raises:
        ConfigurationError: it is not known which script reads the model, or that cannot do it.
    """
    if config.family is not None:
        family = named(config.family)
    elif config.convert_script is not None:
        family = FAMILIES.get(MODEL_TYPES.get(_model_type(model) or "", ""), named("none"))
    else:
        model_type = _model_type(model)
        if model_type is None:
            raise ConfigurationError(
                f"{model}/config.json has no model_type: name the model's family in the build "
                "configuration"
            )
        family = family_of(model_type)
    if config.pp_size > 1 and family.pp_size is None:
        raise ConfigurationError(
            f"pp_size: {config.pp_size}: TensorRT-LLM's conversion of {family.name} models has no pipeline "
            "parallelism; split the layers instead, with tp_size"
        )
    return family


def _model_type(model: Path) -> str | None:
    try:
        return str(json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def candidates_of(config: EngineConfig, tools: Tools, family: Family | None) -> list[Path]:
    """Where the script of the first step may be; nowhere if there is no such step."""
    if config.checkpoint is not None:
        return []
    if family is None:
        return [tools.examples / config.quantize_script]
    usual = script_candidates(tools.examples, family)
    script = config.convert_script
    if script is None:
        return usual
    return [tools.examples / script, *(path.parent / script for path in usual)]


def existing(candidates: list[Path]) -> Path | None:
    """The first that is there."""
    return next((path for path in candidates if path.is_file()), None)
