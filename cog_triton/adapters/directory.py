"""LoRA adapters by name: each a directory, as PEFT saves it, or converted for TensorRT-LLM.

Adapters are looked up for each request, so an adapter that appears while the server runs can be used at
once. Names that begin with a dot are ignored: an adapter is copied and deleted under such a name. A request
names its adapter to the engine by a number, TensorRT-LLM's ``lora_task_id``; see ``adapter_task_id`` in
``cog_triton.protocol.parameters``.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from cog_triton.errors import ConfigurationError, EngineError, InvalidParameter
from cog_triton.protocol.parameters import adapter_task_id
from cog_triton.request.limits import NAME_CHARACTERS

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# The files that NVIDIA's hf_lora_convert.py writes.
CONVERTED = ("model.lora_weights.npy", "model.lora_config.npy")


def adapter_names(directory: Path | None) -> tuple[str, ...]:
    """Return the names of the complete adapters, in order; none without a directory."""
    if directory is None or not directory.is_dir():
        return ()
    return tuple(sorted(path.name for path in directory.iterdir() if _is_complete(path)))


def adapter_path(directory: Path, task_id: int) -> Path:
    """Return the directory of the adapter with a number; raise LookupError unless there is one."""
    paths = directory.iterdir() if directory.is_dir() else ()
    numbered = [path for path in paths if adapter_task_id(path.name) == task_id]
    names = sorted(path.name for path in numbered if _is_complete(path))
    if len(names) != 1:
        if names:
            raise LookupError(
                f"the adapters {', '.join(names)} have the same id; rename one of them"
            )
        raise LookupError("no adapter has this id")
    return directory / names[0]


def check_adapter(name: str, directory: Path | None) -> None:
    """Raise InvalidParameter for an adapter that does not exist.

    Without a directory, nothing is checked: only the engine knows which adapters there are.
    """
    if directory is None or not name:
        return
    names = adapter_names(directory)
    if name in names:
        return
    if not names:
        raise InvalidParameter(f"adapter {name!r} does not exist; LORA_DIR contains no adapters")
    raise InvalidParameter(f"adapter {name!r} does not exist; LORA_DIR contains {', '.join(names)}")


def place_adapter(name: str, files: Path, directory: Path) -> None:
    """Copy an adapter's files to ``directory``/``name``; an error leaves one of that name as it was."""
    _check_name(name)
    if not _is_complete(files):
        raise ConfigurationError(
            f"{files} is not an adapter: it must contain {CONFIG} and {' or '.join(WEIGHTS)}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / _hidden_name(name)
    try:
        shutil.copytree(files, copy)
        with suppress(FileNotFoundError):
            _delete(directory / name)
        copy.rename(directory / name)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def remove_adapter(name: str, directory: Path) -> None:
    """Delete an adapter's files; raise ConfigurationError if there is none of that name."""
    _check_name(name)
    try:
        _delete(directory / name)
    except FileNotFoundError:
        raise ConfigurationError(f"adapter {name!r} does not exist in {directory}") from None


@dataclass(frozen=True)
class FileStamp:
    """What changes when a file is replaced."""

    name: str
    changed_ns: int
    size: int
    inode: int


@dataclass(frozen=True)
class AdapterVersion:
    """An adapter's files at one time. Engines keep adapters by version, so that replaced files are read."""

    path: Path
    stamps: tuple[FileStamp, ...]


def version_of(path: Path) -> AdapterVersion:
    """Return the current version of an adapter's files."""
    stamps = []
    for name in (CONFIG, *WEIGHTS):
        with suppress(OSError):
            status = (path / name).stat()
            stamps.append(FileStamp(name, status.st_mtime_ns, status.st_size, status.st_ino))
    return AdapterVersion(path, tuple(stamps))


def current_version(task_id: int, directory: Path | None) -> AdapterVersion:
    """Return the adapter with a number, for an engine that reads PEFT's files, or raise EngineError."""
    if directory is None:
        raise EngineError("lora_task_id requires lora_prefetch_dir, the directory of the adapters")
    try:
        path = adapter_path(directory, task_id)
    except LookupError as error:
        raise EngineError(f"lora_task_id {task_id}: {error}") from None
    if not (path / CONFIG).is_file():
        raise EngineError(f"lora_task_id {task_id}: {path} has no {CONFIG}")
    return version_of(path)


class LoraRequests:
    """Adapters for vLLM and the LLM API. Each version has a name and a number, equal in all processes."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._versions: dict[int, AdapterVersion] = {}

    def of(self, task_id: int, kind: Callable[[str, int, str], Any]) -> Any:
        """Return an adapter as ``kind``, the engine's ``LoRARequest(name, number, path)``."""
        version = current_version(task_id, self._directory)
        number = adapter_task_id(str(version))
        other = self._versions.setdefault(number, version)
        if other != version:
            raise EngineError(f"{version.path} has the same id as {other.path}; copy it again")
        return kind(f"{version.path.name}:{number}", number, str(version.path))


def _is_complete(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if all((path / name).is_file() for name in CONVERTED):
        return True
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in WEIGHTS)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_CHARACTERS or name.startswith(".") or Path(name).name != name:
        raise ConfigurationError(
            f"{name!r} is not a valid name of an adapter: it must be a directory name of at most "
            f"{NAME_CHARACTERS} characters that does not start with a dot"
        )


def _hidden_name(name: str) -> str:
    """Return a name that nothing has: a killed process may have left files under an earlier one."""
    return f".{name[:40]}.{uuid4().hex}"


def _delete(adapter: Path) -> None:
    hidden = adapter.rename(adapter.with_name(_hidden_name(adapter.name)))
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)
