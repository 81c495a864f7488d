"""The arguments of trtllm-build: what they take now, and what became of older ones.

They stand in arguments.yaml. The names of now are those of TensorRT-LLM 0.13 to 1.2. The older ones are
those of ``trtllm-build`` before that, and of the ``build.py`` scripts that TensorRT-LLM had up to 0.7, as
guides of that time have them. The changes are in TensorRT-LLM's release notes, mostly 0.11 and 0.12.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from tools.engine_builder.tables import read


class _Tables(BaseModel):
    """The file; it says what each table is."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    plugins: dict[str, list[str] | None]
    limits: list[str]
    others: list[str]
    parallel: list[str]
    renamed: dict[str, str]
    dropped: dict[str, str]
    refused: dict[str, str]
    to_convert: list[str]
    convert_renamed: dict[str, str]
    quantize_fields: dict[str, str]
    dtypes: dict[str, str]
    old_scripts: dict[str, str]
    paths: dict[str, list[str]]


_TABLES = read("arguments.yaml", _Tables)
PLUGINS = _TABLES.plugins
LIMITS = _TABLES.limits
OTHERS = _TABLES.others
PARALLEL = _TABLES.parallel
RENAMED = _TABLES.renamed
DROPPED = _TABLES.dropped
REFUSED = _TABLES.refused
TO_CONVERT = _TABLES.to_convert
CONVERT_RENAMED = _TABLES.convert_renamed
QUANTIZE_FIELDS = _TABLES.quantize_fields
DTYPES = _TABLES.dtypes
OLD_SCRIPTS = _TABLES.old_scripts
PATHS = _TABLES.paths


def plugin_value(name: str, value: Any) -> Any:
    """A plugin's value as trtllm-build spells it: true, false and a bare flag are words there."""
    choices = PLUGINS[name]
    if choices is None:
        return value
    if value is None or value is True:
        return choices[0]
    return "disable" if value is False else value


def plugin_problem(name: str, value: Any) -> str | None:
    """What is wrong with a plugin's value, or None."""
    choices = PLUGINS[name]
    if choices is None:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if whole else f"expected a whole number above 0, got {value!r}"
    return None if value in choices else f"expected {' or '.join(choices)}, got {value!r}"


def dtype(value: Any) -> Any:
    """A data type under its name of now; what is none of those is left as it is."""
    return DTYPES.get(value, value) if isinstance(value, str) else value
