"""Values by model and variable, from a YAML file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.repository.variables import VARIABLES

logger = logging.getLogger(__name__)


def load_overrides(path: Path) -> dict[str, dict[str, object]]:
    """Reads values by model and variable from a YAML file, for ``fill_repository``.

    They stand under ``server: {<model>: {args: {<variable>: <value>}}}``, or, as cog-triton had it,
    under ``instantiate: {server: …}``. Other keys beside ``server`` are somebody else's.

    Raises:
        ConfigurationError: the file cannot be read, or is no such YAML; with its path, and the key, line
            or byte at fault.
    """
    document = _mapping(_load_yaml(path), path, "the file")
    where, server = "server", document.get("server")
    instantiate = document.get("instantiate")
    if isinstance(instantiate, dict) and "server" in instantiate:
        if server is not None:
            raise ConfigurationError(f"{path}: give server or instantiate.server, not both")
        where, server = "instantiate.server", instantiate["server"]
    for model in document.keys() & VARIABLES.keys():
        logger.warning("%s: %s is ignored; it belongs under server", path, model)
    return {
        str(model): _args(entry, path, f"{where}.{model}")
        for model, entry in _mapping(server, path, where).items()
    }


def _load_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    except yaml.reader.ReaderError as error:
        where = f"{path}, byte {error.position + 1}"
        raise ConfigurationError(f"{where}: not valid YAML: {error.reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or error
        raise ConfigurationError(f"{where}: not valid YAML: {reason}") from None


def _mapping(value: object, path: Path, where: str) -> dict[Any, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: {where}: expected a mapping, got {value!r}")
    return value


def _args(entry: object, path: Path, where: str) -> dict[str, object]:
    entry = _mapping(entry, path, where)
    for key in entry:
        if key != "args":
            raise ConfigurationError(f"{path}: {where}.{key}: only args is known here")
    args = _mapping(entry.get("args"), path, f"{where}.args")
    return {str(name): value for name, value in args.items()}
