"""Which adapter a request means, and which version of its files that is.

An adapter's files may be replaced under the same name while the server runs. What an engine keeps of an
adapter, it keeps by version, so that nothing of the old files is served for the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cog_triton.adapters import CONFIG, WEIGHTS, adapter_path
from cog_triton.engines.base import EngineError

Stamp = tuple[int, int, int]  # a file's time of change in nanoseconds, its size and its inode


@dataclass(frozen=True)
class AdapterVersion:
    """An adapter's files as they were when they were looked at."""

    path: Path
    stamps: tuple[Stamp | None, ...]

    @classmethod
    def of(cls, path: Path) -> AdapterVersion:
        """The version that is there now; of an adapter that is gone, one that no adapter has."""
        return cls(path, tuple(_stamp(path / name) for name in (CONFIG, *WEIGHTS)))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_current(self) -> bool:
        """Whether its files are still there, and the same."""
        return AdapterVersion.of(self.path) == self


def current_version(task_id: int, directory: Path | None) -> AdapterVersion:
    """The LoRA adapter of a number; see ``cog_triton.adapters``.

    Raises:
        EngineError: there is none.
    """
    if directory is None:
        raise EngineError("lora_task_id needs lora_prefetch_dir, the directory of the adapters")
    try:
        return AdapterVersion.of(adapter_path(directory, task_id))
    except LookupError as error:
        raise EngineError(f"lora_task_id {task_id}: there is no such adapter: {error}") from None


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
