"""Which LoRA adapters are in a running model: loaded when they are first asked for, forgotten in time.

They are read on a thread of their own, so that the model computes meanwhile and Triton's thread goes on.
An adapter stays until its files are replaced or gone, or until its room is needed for another; and in any
case as long as a request has it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cog_triton.engines.adapter_versions import AdapterVersion, current_version
from cog_triton.engines.base import EngineError, EngineUnavailable, stopped_text
from cog_triton.engines.lora_layers import LoadedAdapter, LoraLayers
from cog_triton.engines.transformers_rows import Row

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30  # TensorRT-LLM's default for lora_cache_host_memory_bytes
INSTALL = "pip install 'peft>=0.21,<0.22'"


class Adapters:
    """The adapters of one engine. Methods may be called from any thread.

    Attributes:
        layers: those of the model, which its runner has to tell of each step.
    """

    def __init__(
        self,
        model: Any,
        directory: Path,
        in_use: Callable[[], Set[LoadedAdapter]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Begins to import PEFT.

        Args:
            in_use: the adapters that requests have.
            cache_bytes: the adapters in the model have at most so many together.
        """
        self.layers = LoraLayers(model)
        self._directory = directory
        self._in_use = in_use
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._loaded: dict[AdapterVersion, LoadedAdapter] = {}  # the least recently asked for first
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._loader.submit(_import_peft)

    def assign(self, row: Row) -> bool:
        """Gives a request its adapter, if that is in the model.

        Raises:
            EngineError: there is no such adapter.
        """
        version = current_version(row.request.lora_task_id, self._directory)
        with self._lock:
            adapter = self._loaded.pop(version, None)
            if adapter is None:
                return False
            self._loaded[version] = row.adapter = adapter
            return True

    def load(self, row: Row) -> Future[None]:
        """Gives a request its adapter, which may have to be loaded first.

        Raises:
            EngineUnavailable: this has been closed.
            EngineError: from the future: it cannot be used.
        """
        try:
            return self._loader.submit(self._load, row)
        except RuntimeError:
            raise EngineUnavailable(stopped_text(None)) from None

    def tidy(self) -> None:
        """Forgets, in a while, the adapters that nobody uses and nobody can ask for any more."""
        try:
            self._loader.submit(self._forget_stale)
        except RuntimeError:
            logger.debug("nothing to tidy: the engine has been closed")

    def close(self) -> None:
        """Ends the thread."""
        self._loader.shutdown(cancel_futures=True)

    # What follows runs on the loader's thread.

    def _load(self, row: Row) -> None:
        if self.assign(row):
            return
        self._forget_stale()
        version = current_version(row.request.lora_task_id, self._directory)
        try:
            adapter = self.layers.read(version.path)
            self._make_room(version.name, adapter.size)
            self.layers.put(adapter)
        except EngineError:
            raise
        except Exception as error:  # whatever an adapter's files may cause
            raise EngineError(refusal(row.request.lora_task_id, version.name, error)) from error
        with self._lock:
            self._loaded[version] = row.adapter = adapter
        logger.info("adapter %s loaded: %d bytes", version.name, adapter.size)

    def _make_room(self, name: str, size: int) -> None:
        if size > self._cache_bytes:
            raise ValueError(
                f"it has {size} bytes, and lora_cache_host_memory_bytes is {self._cache_bytes}"
            )
        while self._size() + size > self._cache_bytes:
            if not self._forget_first(lambda _: True):
                raise EngineUnavailable(
                    f"the LoRA cache is full: adapter {name} does not fit beside those in use; "
                    "try again later, or raise lora_cache_host_memory_bytes"
                )

    def _size(self) -> int:
        with self._lock:
            return sum(adapter.size for adapter in self._loaded.values())

    def _forget_stale(self) -> None:
        while self._forget_first(lambda version: not version.is_current):
            pass

    def _forget_first(self, which: Callable[[AdapterVersion], bool]) -> bool:
        """Forgets the first adapter of such a version that nobody uses; returns whether there was one."""
        with self._lock:
            versions = list(self._loaded)
        candidates = [version for version in versions if which(version)]
        with self._lock:
            used = self._in_use()
            idle = next((v for v in candidates if self._loaded[v] not in used), None)
            if idle is None:
                return False
            adapter = self._loaded.pop(idle)
        self.layers.remove(adapter)
        logger.info("adapter %s unloaded", idle.name)
        return True


def refusal(task_id: int, name: str, error: Exception) -> str:
    """Why an adapter cannot be used, in one line."""
    if isinstance(error, ImportError):
        return f"lora_task_id needs PEFT, which cannot be imported ({error}): {INSTALL}"
    reason = " ".join(str(error).split()) or repr(error)
    return f"lora_task_id {task_id}: the adapter {name} cannot be used: {reason[:500]}"


def _import_peft() -> None:
    """Takes seconds, which the first request with an adapter need not wait for."""
    try:
        importlib.import_module("peft")
    except ImportError as error:
        logger.warning("LoRA adapters need PEFT, which cannot be imported (%s): %s", error, INSTALL)
