"""Weights that Cog manages: cog.yaml declares them, weights.lock pins them, and Cog mounts them.

An entry of ``weights`` in cog.yaml is mounted as a directory at its ``target``. An image has the same list
in /.cog/weights.json. What a directory is good for is seen in its files.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import BaseModel, Field, ValidationError

from cog_triton import ROOT
from cog_triton.errors import ConfigurationError

MANIFEST = Path("/.cog/weights.json")
CONFIG = "cog.yaml"
LOCK = "weights.lock"
LOCK_VERSION = 1
# A larger file is checked by its size: to read all weights would double the time of a start.
DIGEST_BYTES = 16 << 20
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class Role(Enum):
    """What a directory of weights is used as."""

    ENGINE = "engine"
    MODEL = "model"
    TOKENIZER = "tokenizer"


class LockedFile(BaseModel):
    """A file of an entry in weights.lock, which has more fields than are used."""

    path: str
    size: Annotated[int, Field(ge=0)]
    digest: str


class Entry(BaseModel):
    """An entry of cog.yaml, weights.lock or weights.json."""

    name: str
    target: str
    # Only the lock has them.
    files: tuple[LockedFile, ...] | None = None


class _Document(BaseModel):
    weights: tuple[Entry, ...] | None = None
    # Only the lock has one.
    version: int | None = None


@dataclass(frozen=True)
class Managed:
    """A mounted directory of weights."""

    name: str
    directory: Path
    # None for files that are no model, engine or tokenizer.
    role: Role | None


def managed_weights(
    roots: Sequence[Path] | None = None, manifest: Path = MANIFEST
) -> tuple[Managed, ...]:
    """Return the weights that Cog mounts, in the order of their declaration; none where it has none.

    Args:
        roots: directories that may have cog.yaml and weights.lock; the first that declares weights counts.
            By default those of this program and of the process.
        manifest: the list that Cog puts into an image.

    Raises:
        ConfigurationError: a directory is not mounted, or its files are not those of the lock.
    """
    roots = (ROOT, Path.cwd()) if roots is None else roots
    for root in roots:
        declared = _declared(root, manifest)
        if declared:
            return tuple(_checked(entry) for entry in declared)
    return ()


def declares_weights(roots: Sequence[Path] | None = None, manifest: Path = MANIFEST) -> bool:
    """Return whether Cog is to mount weights, which may be wrong or absent."""
    roots = (ROOT, Path.cwd()) if roots is None else roots
    with suppress(ConfigurationError):
        return any(_declared(root, manifest) for root in roots)
    return True


def role_of(directory: Path) -> Role | None:
    """Return what a directory can be used as, by its files."""
    if engine_in(directory) is not None:
        return Role.ENGINE
    if any(True for pattern in WEIGHT_FILES for _ in directory.glob(pattern)):
        return Role.MODEL
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        return Role.TOKENIZER
    return None


def engine_in(directory: Path) -> Path | None:
    """Return the directory of a TensorRT-LLM engine, as build_engine.py packs it or by itself."""
    for place in (directory / "engine", directory):
        if any(place.glob("*.engine")):
            return place
    return None


def _declared(root: Path, manifest: Path) -> list[Entry]:
    """Return the entries by the files that there are; the lock knows best what Cog has mounted."""
    config = _read(root / CONFIG)
    lock = _read(root / LOCK)
    in_image = _read(manifest)
    if lock.version not in (None, LOCK_VERSION):
        raise ConfigurationError(
            f"{root / LOCK} has version {lock.version}, but this release supports version {LOCK_VERSION}"
        )
    declared = list(in_image.weights or config.weights or ())
    locked = {entry.name: entry for entry in lock.weights or ()}
    found = []
    for entry in declared:
        pinned = locked.get(entry.name)
        if pinned is None and locked:
            raise ConfigurationError(
                f"{root / LOCK} lacks {entry.name}, which {CONFIG} declares; run `cog weights import`"
            )
        if pinned is not None and pinned.target != entry.target:
            raise ConfigurationError(
                f"{root / LOCK} places {entry.name} at {pinned.target}, but {CONFIG} places it at "
                f"{entry.target}; run `cog weights import`"
            )
        found.append(pinned or entry)
    return found


def _read(file: Path) -> _Document:
    try:
        read = yaml.safe_load if file.name == CONFIG else json.loads
        content: Any = read(file.read_bytes())
        return _Document.model_validate({} if content is None else content)
    except (FileNotFoundError, NotADirectoryError):
        return _Document()
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigurationError(f"{file} cannot be read: {' '.join(reason.split())}") from None


def _checked(entry: Entry) -> Managed:
    directory = Path(entry.target)
    if not directory.is_dir():
        raise ConfigurationError(
            f"the weights {entry.name} are not mounted: the directory {directory} does not exist; run "
            "`cog weights import` and then `cog predict` or `cog serve`, or set MODEL"
        )
    found = [_problem(directory, file) for file in entry.files or ()]
    problems = [problem for problem in found if problem is not None]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigurationError(
            f"the weights {entry.name} in {directory} do not match {LOCK}: {problems[0]}{more}; run "
            "`cog weights pull`"
        )
    return Managed(entry.name, directory, role_of(directory))


def _problem(directory: Path, locked: LockedFile) -> str | None:
    file = directory / locked.path
    if not file.is_file():
        return f"{locked.path} is missing"
    size = file.stat().st_size
    if size != locked.size:
        return f"{locked.path} has {size} bytes instead of {locked.size}"
    if size > DIGEST_BYTES or not locked.digest.startswith("sha256:"):
        return None
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return None if locked.digest == f"sha256:{digest}" else f"{locked.path} has different content"
