"""Which convert_checkpoint.py reads which model, and how it names what all of them need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass

from cog_triton.errors import ConfigurationError
from tools.engine_builder.tables import read

SCRIPT = "convert_checkpoint.py"


@dataclass(frozen=True)
class Family:
    """One directory of TensorRT-LLM's examples with a convert_checkpoint.py.

    Attributes:
        name: of the directory.
        collection: where TensorRT-LLM 0.18 and later keep it, under ``examples/models``.
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


class _Tables(BaseModel):
    """The file families.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    families: dict[str, dict[str, Any]]
    model_types: dict[str, str]


_TABLES = read("families.yaml", _Tables)
FAMILIES = {name: Family(name, **fields) for name, fields in _TABLES.families.items()}
MODEL_TYPES = _TABLES.model_types
"""``model_type`` in a model's config.json, and the family whose script reads such models."""


def family_of(model_type: str) -> Family:
    """The family of a ``model_type``.

    Raises:
        ConfigurationError: naming the known ones, and what to do about an unknown one.
    """
    try:
        return FAMILIES[MODEL_TYPES[model_type]]
    except KeyError:
        raise ConfigurationError(
            f"no conversion script is known for model_type {model_type!r}. Known are "
            f"{', '.join(sorted(MODEL_TYPES))}. Name a directory of TensorRT-LLM's examples with "
            "family, or a script with convert_script, in the build configuration"
        ) from None


def named(name: str) -> Family:
    """The family of that name; a name that is none of ours takes the common arguments."""
    return FAMILIES.get(name, Family(name))


def script_candidates(examples: Path, family: Family) -> list[Path]:
    """Where a family's script may be, the layout of the newest TensorRT-LLM first."""
    other_collection = "core" if family.collection == "contrib" else "contrib"
    directories = [
        examples / "models" / family.collection / family.name,
        examples / "models" / other_collection / family.name,
        examples / family.name,
    ]
    if family.name == "glm-4-9b":
        directories.append(examples / "chatglm")
    return [directory / SCRIPT for directory in directories]
