"""The LoRA adapters in the transformers engine's model: loaded when a request asks for one, evicted later.

A thread of its own reads them while the model computes. An adapter stays until its files are replaced or
removed, or until its room is needed for another; and in any case as long as a request has it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from cog_triton.adapters.directory import AdapterVersion, current_version
from cog_triton.adapters.layers import LoadedAdapter, LoraLayers
from cog_triton.errors import EngineError, EngineUnavailable

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30  # TensorRT-LLM's default for lora_cache_host_memory_bytes
INSTALL = "pip install 'peft>=0.21,<0.22'"


class Holder(Protocol):
    """A running request, which holds its adapter."""

    adapter: LoadedAdapter | None


class Adapters:
    """The adapters of one engine. Methods may be called from any thread.

    Attributes:
        layers: those of the model; its runner calls their ``begin_step``.
    """

    def __init__(
        self,
        model: Any,
        directory: Path,
        in_use: Callable[[], Set[LoadedAdapter]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Start to import PEFT, which takes seconds.

        Args:
            in_use: the adapters that requests have.
            cache_bytes: most bytes of all adapters in the model.
        """
        self.layers = LoraLayers(model)
        self._directory = directory
        self._in_use = in_use
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._loaded: dict[AdapterVersion, LoadedAdapter] = {}  # the least recently used first
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._loader.submit(_import_peft)

    def assign(self, task_id: int, holder: Holder) -> bool:
        """Give a request its adapter, if that is in the model.

        Raises:
            EngineError: there is no such adapter.
        """
        version = current_version(task_id, self._directory)
        with self._lock:
            adapter = self._loaded.pop(version, None)
            if adapter is not None:
                self._loaded[version] = holder.adapter = adapter
        return adapter is not None

    def load(self, task_id: int, holder: Holder) -> Future[None]:
        """Load an adapter and give it to a request.

        Raises:
            EngineUnavailable: this has been closed.
            EngineError: from the future: it cannot be used.
        """
        try:
            return self._loader.submit(self._load, task_id, holder)
        except RuntimeError:
            raise EngineUnavailable("the engine has stopped: it was closed") from None

    def tidy(self) -> None:
        """Evict, on the loader's thread, the unused adapters whose files were replaced or removed."""
        try:
            self._loader.submit(self._evict_stale)
        except RuntimeError:
            logger.debug("nothing to tidy: the engine has been closed")

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    # The rest runs on the loader's thread.

    def _load(self, task_id: int, holder: Holder) -> None:
        if self.assign(task_id, holder):
            return
        self._evict_stale()
        version = current_version(task_id, self._directory)
        name = version.path.name
        try:
            adapter = self.layers.read(version.path)
            self._make_room(name, adapter.size)
            self.layers.put(adapter)
        except EngineError:
            raise
        except ImportError as error:
            raise EngineError(
                f"lora_task_id needs PEFT, which cannot be imported ({error}): {INSTALL}"
            ) from error
        except Exception as error:  # whatever an adapter's files may cause
            reason = (" ".join(str(error).split()) or repr(error))[:500]
            text = f"lora_task_id {task_id}: the adapter {name} cannot be used: {reason}"
            raise EngineError(text) from error
        with self._lock:
            self._loaded[version] = holder.adapter = adapter
        logger.info("adapter %s loaded: %d bytes", name, adapter.size)

    def _make_room(self, name: str, size: int) -> None:
        if size > self._cache_bytes:
            raise ValueError(
                f"it has {size} bytes, and lora_cache_host_memory_bytes is {self._cache_bytes}"
            )
        while sum(adapter.size for adapter in self._copy().values()) + size > self._cache_bytes:
            if not self._evict(list(self._copy())):
                raise EngineUnavailable(
                    f"the LoRA cache is full: adapter {name} does not fit beside those in use; "
                    "try again later, or raise lora_cache_host_memory_bytes"
                )

    def _evict_stale(self) -> None:
        while self._evict([version for version in self._copy() if not version.is_current]):
            pass

    def _copy(self) -> dict[AdapterVersion, LoadedAdapter]:
        with self._lock:
            return dict(self._loaded)

    def _evict(self, candidates: list[AdapterVersion]) -> bool:
        """Evict the first of these that no request has; return whether there was one."""
        with self._lock:
            used = self._in_use()
            idle = next((v for v in candidates if self._loaded[v] not in used), None)
            if idle is None:
                return False
            adapter = self._loaded.pop(idle)
        self.layers.remove(adapter)
        logger.info("adapter %s unloaded", idle.path.name)
        return True


def _import_peft() -> None:
    try:
        importlib.import_module("peft")
    except ImportError as error:
        logger.warning("LoRA adapters need PEFT, which cannot be imported (%s): %s", error, INSTALL)
