"""LoRA adapters in the transformers engine's model, several in one batch.

PEFT reads an adapter (``peft_files``) and says which layers it changes and how. In PEFT an adapter is
active for a whole batch or for some of its rows, but here the tokens of all requests are in one row. So a
hook behind each layer adds the change to the tokens of the requests with the adapter.
"""

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch.nn.functional import linear

from cog_triton.adapters.directory import AdapterVersion, current_version, version_of
from cog_triton.adapters.peft_files import INSTALL, LayerChange, read_changes
from cog_triton.errors import EngineError, EngineUnavailable

logger = logging.getLogger(__name__)

# TensorRT-LLM's default for lora_cache_host_memory_bytes.
CACHE_BYTES = 1 << 30


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in memory.

    Attributes:
        number: never used again for another adapter.
        changes: by the names of the layers.
        problem: why it cannot be used; found when it was applied.
        used: when a request last got it, by the monotonic clock.
    """

    number: int
    changes: dict[str, LayerChange]
    problem: str | None = None
    used: float = field(default_factory=monotonic)

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for change in self.changes.values())


@dataclass(frozen=True)
class _Tokens:
    """The places of one adapter's tokens in a step."""

    adapter: LoadedAdapter
    places: torch.Tensor


class Adapters:
    """The adapters of one engine. One stays while a request has it, and until another needs its room."""

    def __init__(
        self,
        model: Any,
        directory: Path,
        in_use: Callable[[], Set[LoadedAdapter]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Load nothing yet.

        Args:
            model: gets hooks behind the layers that adapters change.
            in_use: returns the adapters that running requests have.
            cache_bytes: the limit of all loaded adapters together.
        """
        self._model = model
        self._directory = directory
        # A copy made now, because the model sets and deletes fields in each step.
        self._config = copy.deepcopy(model.config)
        self._in_use = in_use
        self._cache_bytes = cache_bytes
        # Guards the next two. No file is read while it is held.
        self._lock = threading.Lock()
        self._loaded: dict[AdapterVersion, LoadedAdapter] = {}
        self._loading: dict[AdapterVersion, Future[LoadedAdapter]] = {}
        self._numbers = count(1)
        # The next three are used by the thread that computes.
        self._hooked: set[str] = set()
        self._step_length = 0
        self._step: list[_Tokens] = []

    def assign(self, task_id: int, request: Any) -> None:
        """Set ``request.adapter``, once that is loaded; raise EngineError if it cannot be used."""
        version = current_version(task_id, self._directory)
        adapter = self._loaded_once(task_id, version)
        request.adapter = adapter
        adapter.used = monotonic()

    def begin_step(self, parts: Sequence[tuple[LoadedAdapter | None, int]]) -> None:
        """Note the adapter and the number of tokens of each request in the next step.

        Called on the thread that computes.
        """
        places: dict[LoadedAdapter, list[int]] = defaultdict(list)
        length = 0
        for adapter, tokens in parts:
            if adapter is not None:
                places[adapter] += range(length, length + tokens)
            length += tokens
        device = self._model.device
        self._step_length = length
        self._step = [
            _Tokens(adapter, torch.tensor(indices, device=device))
            for adapter, indices in places.items()
        ]
        # Here, so that no layer gets a hook while the model computes.
        for adapter in places:
            for layer in adapter.changes.keys() - self._hooked:
                hook = partial(self._add_changes, layer)
                self._model.get_submodule(layer).register_forward_hook(hook)
                self._hooked.add(layer)

    def _add_changes(
        self, layer: str, _: Any, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> None:
        """Add the changes of a layer to its output; the hook behind the layer."""
        if not self._step:
            return
        rows = inputs[0].flatten(0, -2)
        changed = output.flatten(0, -2)
        for tokens in self._step:
            change = tokens.adapter.changes.get(layer)
            if change is None:
                continue
            if len(rows) != self._step_length:
                tokens.adapter.problem = f"{layer} does not process each token exactly once"
                continue
            inner = linear(rows[tokens.places].to(change.down.dtype), change.down)
            added = linear(inner, change.up, change.bias)
            changed.index_add_(0, tokens.places, added.to(changed.dtype))

    def _loaded_once(self, task_id: int, version: AdapterVersion) -> LoadedAdapter:
        """Return a loaded adapter; requests for the same one wait for one load, and others do not wait."""
        with self._lock:
            adapter = self._loaded.get(version)
            if adapter is not None:
                return adapter
            future = self._loading.get(version)
            is_first = future is None
            if future is None:
                future = Future()
                self._loading[version] = future
        if is_first:
            try:
                future.set_result(self._load(task_id, version))
            except BaseException as error:
                future.set_exception(error)
            finally:
                # If it failed, the next request tries again.
                with self._lock:
                    del self._loading[version]
        return future.result()

    def _load(self, task_id: int, version: AdapterVersion) -> LoadedAdapter:
        """Read an adapter and keep it, or raise EngineError with the reason."""
        name = version.path.name
        try:
            changes = read_changes(self._model, self._config, version.path)
            adapter = LoadedAdapter(next(self._numbers), changes)
            self._keep(version, adapter)
        except EngineError:
            raise
        except ImportError as error:
            raise EngineError(
                f"lora_task_id requires PEFT, which cannot be imported ({error}): {INSTALL}"
            ) from error
        except Exception as error:
            # An adapter's files may cause any exception.
            reason = (" ".join(str(error).split()) or repr(error))[:500]
            raise EngineError(
                f"lora_task_id {task_id}: the adapter {name} cannot be used: {reason}"
            ) from error
        logger.info("adapter %s loaded: %d bytes", name, adapter.nbytes)
        return adapter

    def _keep(self, version: AdapterVersion, adapter: LoadedAdapter) -> None:
        """Keep an adapter, and evict others that no request has until it fits."""
        size = adapter.nbytes
        if size > self._cache_bytes:
            raise ValueError(
                f"it has {size} bytes, more than the lora_cache_host_memory_bytes of {self._cache_bytes}"
            )
        # Outside of the lock, because this looks at files.
        replaced = {kept for kept in tuple(self._loaded) if version_of(kept.path) != kept}
        with self._lock:
            self._make_room(version.path.name, size, replaced)
            self._loaded[version] = adapter

    def _make_room(self, name: str, size: int, replaced: Set[AdapterVersion]) -> None:
        """Evict adapters that no request has: all that are ``replaced``, then the least recently used."""
        in_use = self._in_use()
        idle = [version for version, adapter in self._loaded.items() if adapter not in in_use]
        idle.sort(key=lambda version: (version not in replaced, self._loaded[version].used))
        free = self._cache_bytes - sum(adapter.nbytes for adapter in self._loaded.values())
        for version in idle:
            if version not in replaced and free >= size:
                break
            free += self._loaded.pop(version).nbytes
            logger.info("adapter %s unloaded", version.path.name)
        if free < size:
            raise EngineUnavailable(
                f"the LoRA cache is full: adapter {name} does not fit beside the adapters in use; try "
                "again later, or raise lora_cache_host_memory_bytes"
            )
