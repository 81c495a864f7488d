"""LoRA adapters in the transformers engine's model, several in one batch.

PEFT reads an adapter into a copy of the model without weights, and says which layers it changes and how. In
PEFT an adapter is active for a whole batch or for some of its rows, but here the tokens of all requests are
in one row: so a hook behind each layer adds the change to the tokens of the requests with the adapter.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from cog_triton.adapters.directory import AdapterVersion, current_version
from cog_triton.errors import EngineError, EngineUnavailable

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30  # TensorRT-LLM's default for lora_cache_host_memory_bytes
INSTALL = "pip install 'peft>=0.21,<0.22'"
LABEL = "default"  # of the adapter in the copy

# Fields of a configuration that PEFT's layers apply, or that do not change the output.
UNDERSTOOD = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "megatron_core", "eva_config", "ensure_weight_tying"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "lora_bias", "init_lora_weights"),
}
# Of init_lora_weights; the others change the model's own weights, too.
INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Change:
    """The change of one layer by an adapter, scaled."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]
    bias: torch.Tensor | None  # [outputs]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the addition to the layer's output for inputs of the shape [rows, inputs]."""
        return linear(linear(rows.to(self.down.dtype), self.down), self.up, self.bias)


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter on the model's device."""

    number: int  # never given to another one
    changes: dict[str, Change]  # by the names of the layers
    problem: str | None = None  # found when it was applied

    @property
    def size(self) -> int:
        """Its bytes."""
        tensors = (t for change in self.changes.values() for t in vars(change).values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class LoraLayers:
    """The layers of one model that adapters change.

    Attributes:
        lock: held while the model computes, and while its hooks change.
    """

    def __init__(self, model: Any) -> None:
        self.lock = threading.Lock()
        self._model = model
        self._numbers = count(1)
        self._hooked: set[str] = set()
        self._tokens = 0
        self._places: list[tuple[LoadedAdapter, torch.Tensor]] = []

    def read(self, directory: Path) -> LoadedAdapter:
        """Read an adapter beside the model; any Exception says why it cannot be used with it."""
        layers = _read_layers(self._model, directory)
        changes = {name: self._change(name, layer) for name, layer in layers.items()}
        self._wait_for_device()
        return LoadedAdapter(next(self._numbers), changes)

    def put(self, adapter: LoadedAdapter) -> None:
        """Hook the layers that an adapter changes."""
        with self.lock:
            for name in adapter.changes.keys() - self._hooked:
                self._model.get_submodule(name).register_forward_hook(partial(self._add, name))
                self._hooked.add(name)

    def remove(self, adapter: LoadedAdapter) -> None:
        """Free an adapter's memory."""
        with self.lock:
            self._wait_for_device()
            adapter.changes.clear()

    def begin_step(self, parts: Sequence[tuple[LoadedAdapter | None, int]]) -> None:
        """Set, for each request of the next step's batch, its adapter and number of tokens."""
        places: dict[LoadedAdapter, list[int]] = defaultdict(list)
        self._tokens, device = 0, self._model.device
        for adapter, length in parts:
            if adapter is not None:
                places[adapter] += range(self._tokens, self._tokens + length)
            self._tokens += length
        self._places = [(a, torch.tensor(places[a], device=device)) for a in places]

    def _change(self, name: str, layer: Any) -> Change:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.detach().to(device=self._model.device, dtype=self._model.dtype)
            # Attention multiplies what it masks by 0: such a value would spread over the whole batch.
            if not moved.isfinite().all():
                raise ValueError(f"{name} has values that are not finite")
            return moved

        scale, up = layer.scaling[LABEL], layer.lora_B[LABEL]
        return Change(
            own(layer.lora_A[LABEL].weight),
            own(up.weight.float() * scale),
            None if up.bias is None else own(up.bias.float() * scale),
        )

    def _add(self, name: str, _: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if not self._places:
            return
        rows, out = inputs[0].flatten(0, -2), output.flatten(0, -2)
        for adapter, places in self._places:
            change = adapter.changes.get(name)
            if change is None:  # another layer's, or removed when its request was gone
                continue
            if len(rows) != self._tokens:
                adapter.problem = f"{name} does not see each token once"
                continue
            out.index_add_(0, places, change.of(rows[places]).to(out.dtype))

    def _wait_for_device(self) -> None:
        # The model computes on a stream of its own there.
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


class Adapters:
    """The adapters of one engine: loaded when a request names one, by a thread, while the model computes.

    An adapter stays until its files are replaced or removed, or until another needs its room; and in any
    case as long as a request has it, as its attribute ``adapter``. Methods may be called from any thread.
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
        self._directory, self._in_use, self._cache_bytes = directory, in_use, cache_bytes
        self._lock = threading.Lock()
        self._loaded: dict[AdapterVersion, LoadedAdapter] = {}  # the least recently used first
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._loader.submit(_import_peft)

    def assign(self, task_id: int, request: Any) -> bool:
        """Give a request its adapter, if that is in the model; raise EngineError if there is none."""
        version = current_version(task_id, self._directory)
        with self._lock:
            adapter = self._loaded.pop(version, None)
            if adapter is not None:
                self._loaded[version] = request.adapter = adapter
        return adapter is not None

    def load(self, task_id: int, request: Any) -> Future[None]:
        """Load an adapter and give it to a request.

        Raises:
            EngineUnavailable: this has been closed.
            EngineError: from the future: it cannot be used.
        """
        try:
            return self._loader.submit(self._load, task_id, request)
        except RuntimeError:
            raise EngineUnavailable("the engine has stopped: it was closed") from None

    def tidy(self) -> None:
        """Evict, on the loader's thread, the unused adapters whose files were replaced or removed."""
        with suppress(RuntimeError):  # closed
            self._loader.submit(self._evict_stale)

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    # The rest runs on the loader's thread.

    def _load(self, task_id: int, request: Any) -> None:
        if self.assign(task_id, request):
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
            problem = f"lora_task_id needs PEFT, which cannot be imported ({error}): {INSTALL}"
            raise EngineError(problem) from error
        except Exception as error:  # whatever an adapter's files may cause
            reason = (" ".join(str(error).split()) or repr(error))[:500]
            text = f"lora_task_id {task_id}: the adapter {name} cannot be used: {reason}"
            raise EngineError(text) from error
        with self._lock:
            self._loaded[version] = request.adapter = adapter
        logger.info("adapter %s loaded: %d bytes", name, adapter.size)

    def _make_room(self, name: str, size: int) -> None:
        if size > self._cache_bytes:
            raise ValueError(
                f"it has {size} bytes, and lora_cache_host_memory_bytes is {self._cache_bytes}"
            )
        while sum(a.size for a in tuple(self._loaded.values())) + size > self._cache_bytes:
            if not self._evict_first(tuple(self._loaded)):
                raise EngineUnavailable(
                    f"the LoRA cache is full: adapter {name} does not fit beside those in use; "
                    "try again later, or raise lora_cache_host_memory_bytes"
                )

    def _evict_stale(self) -> None:
        while self._evict_first([v for v in tuple(self._loaded) if not v.is_current]):
            pass

    def _evict_first(self, candidates: Iterable[AdapterVersion]) -> bool:
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


def _read_layers(model: Any, directory: Path) -> dict[str, Any]:
    """Return PEFT's layers with an adapter's weights, by the names of the model's layers."""
    from peft import LoraConfig, PeftConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", None)
        raise ValueError(f"it is not a LoRA adapter: its peft_type is {kind}")
    defaults = LoraConfig().to_dict()
    for name, value in config.to_dict().items():
        if value and value != defaults.get(name) and name not in UNDERSTOOD:
            raise ValueError(f"{name}={value!r} is not supported beside other adapters in a batch")
    if config.init_lora_weights not in INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} changes the model's own weights; "
            "PEFT can save such an adapter as a plain one"
        )
    config.init_lora_weights = True
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
        inject_adapter_in_model(config, twin, LABEL)
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, LoraLayer)}
    for name, layer in layers.items():
        if layer is twin.get_output_embeddings():
            raise ValueError(
                f"{name} is the model's last layer, which adapters may not change here"
            )
        if type(layer) is not Linear:
            raise ValueError(f"{name} is not a linear layer")
    read = load_peft_weights(str(directory), device="cpu")
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in read.items()}
    names = {n.replace(f".{LABEL}.", "."): n for n in twin.state_dict() if ".lora_" in n}
    for name in names.keys() - tensors.keys():
        raise ValueError(f"it has no weight {name}")
    for name in tensors.keys() - names.keys():
        raise ValueError(f"its configuration and this model have no weight {name}")
    weights = {names[name]: tensor for name, tensor in tensors.items()}
    twin.load_state_dict(weights, strict=False, assign=True)
    return layers


def _import_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        logger.warning("LoRA adapters need PEFT, which cannot be imported (%s): %s", error, INSTALL)
