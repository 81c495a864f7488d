"""Which adapter a request means, and which version of its files that is.

An adapter's files may be replaced under the same name while the server runs. What an engine keeps of an
adapter, it keeps by version, so that nothing of the old files is served for the new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

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
        EngineError: there is none, or it has only TensorRT-LLM's own form.
    """
    if directory is None:
        raise EngineError("lora_task_id needs lora_prefetch_dir, the directory of the adapters")
    try:
        path = adapter_path(directory, task_id)
    except LookupError as error:
        raise EngineError(f"lora_task_id {task_id}: there is no such adapter: {error}") from None
    if not (path / CONFIG).is_file():
        raise EngineError(f"lora_task_id {task_id}: {path} has no {CONFIG}")
    return AdapterVersion.of(path)


class LoraRequests:
    """Adapters as vLLM and the LLM API take them: each version has a number and a name of its own.

    By these they tell adapters apart; vLLM by the name whose blocks of the KV cache a request may share.
    """

    def __init__(self, directory: Path | None) -> None:
        """For a directory of adapters."""
        self._directory = directory
        self._lock = threading.Lock()
        self._count = count(1)
        self._latest: dict[Path, tuple[AdapterVersion, int]] = {}

    def of(self, task_id: int, kind: Callable[[str, int, str], Any]) -> Any:
        """The adapter of a number.

        Args:
            kind: the engine's ``LoRARequest``, of a name, a number above 0 and a path.

        Raises:
            EngineError: there is none.
        """
        version = current_version(task_id, self._directory)
        number = self._number(version)
        return kind(f"{version.name}:{number}", number, str(version.path))

    def _number(self, version: AdapterVersion) -> int:
        with self._lock:
            latest = self._latest.get(version.path)
            if latest is None or latest[0] != version:
                latest = self._latest[version.path] = (version, next(self._count))
            return latest[1]


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
