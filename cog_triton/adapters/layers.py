"""LoRA adapters in the transformers engine's model, several in one batch.

PEFT reads an adapter into a copy of the model without weights, and says which layers it changes and how. In
PEFT an adapter is active for a whole batch or for some of its rows, but here the tokens of all requests are
in one row: so a hook behind each layer adds the change to the tokens of the requests with the adapter.
"""

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from cog_triton.adapters.directory import AdapterVersion, current_version, version_of
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


class Change(NamedTuple):
    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank], scaled like the bias
    bias: torch.Tensor | None  # [outputs]


@dataclass(eq=False)
class LoadedAdapter:
    number: int  # never given to another one
    changes: dict[str, Change]  # by the names of the layers
    problem: str | None = None  # found when it was applied
    used: float = field(default_factory=monotonic)  # when a request last got it

    @property
    def size(self) -> int:
        tensors = (tensor for change in self.changes.values() for tensor in change)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Adapters:
    """The adapters of one engine; one stays while a request has it, and until another needs its room."""

    def __init__(
        self,
        model: Any,
        directory: Path,
        in_use: Callable[[], Set[LoadedAdapter]],  # the adapters that requests have
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._model, self._directory = model, directory
        self._config = copy.deepcopy(model.config)  # now: each step sets fields and deletes them
        self._in_use, self._cache_bytes = in_use, cache_bytes
        self._loading = threading.Lock()  # held by the thread that changes the next
        self._loaded: dict[AdapterVersion, LoadedAdapter] = {}
        self._numbers = count(1)
        self._hooked: set[str] = set()
        self._tokens = 0  # of the step, and those of each adapter
        self._places: list[tuple[LoadedAdapter, torch.Tensor]] = []

    def assign(self, task_id: int, request: Any) -> None:
        """Give a request its adapter, once that is loaded; raise EngineError if it cannot be used."""
        version = current_version(task_id, self._directory)
        if (adapter := self._loaded.get(version)) is None:
            with self._loading:
                adapter = self._loaded.get(version) or self._load(task_id, version)
        request.adapter, adapter.used = adapter, monotonic()

    # The next two are called on the thread that computes.

    def begin_step(self, parts: Sequence[tuple[LoadedAdapter | None, int]]) -> None:
        """Set, for each request of the next step's batch, its adapter and number of tokens."""
        places: dict[LoadedAdapter, list[int]] = defaultdict(list)
        self._tokens, device = 0, self._model.device
        for adapter, length in parts:
            if adapter is not None:
                places[adapter] += range(self._tokens, self._tokens + length)
            self._tokens += length
        self._places = [(a, torch.tensor(places[a], device=device)) for a in places]
        # Here, so that no layer gets a hook while the model computes.
        for layer in {name for adapter in places for name in adapter.changes} - self._hooked:
            self._model.get_submodule(layer).register_forward_hook(partial(self._add, layer))
            self._hooked.add(layer)

    def _add(self, name: str, _: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        # The hook behind a layer.
        if not self._places:
            return
        rows, out = inputs[0].flatten(0, -2), output.flatten(0, -2)
        for adapter, places in self._places:
            if (change := adapter.changes.get(name)) is None:
                continue
            if len(rows) != self._tokens:
                adapter.problem = f"{name} does not process each token exactly once"
                continue
            inner = linear(rows[places].to(change.down.dtype), change.down)
            out.index_add_(0, places, linear(inner, change.up, change.bias).to(out.dtype))

    def _load(self, task_id: int, version: AdapterVersion) -> LoadedAdapter:
        name = version.path.name
        try:
            changes = _changes(self._model, self._config, version.path)
            adapter = LoadedAdapter(next(self._numbers), changes)
            self._make_room(name, adapter.size)
        except EngineError:
            raise
        except ImportError as error:
            problem = f"lora_task_id requires PEFT, which cannot be imported ({error}): {INSTALL}"
            raise EngineError(problem) from error
        except Exception as error:  # whatever an adapter's files may cause
            reason = (" ".join(str(error).split()) or repr(error))[:500]
            text = f"lora_task_id {task_id}: the adapter {name} cannot be used: {reason}"
            raise EngineError(text) from error
        self._loaded[version] = adapter
        logger.info("adapter %s loaded: %d bytes", name, adapter.size)
        return adapter

    def _make_room(self, name: str, size: int) -> None:
        """Evict adapters that no request has: those without their files, then the least recently used."""
        if size > self._cache_bytes:
            raise ValueError(
                f"it has {size} bytes, more than the lora_cache_host_memory_bytes of {self._cache_bytes}"
            )
        used = self._in_use()
        loaded = self._loaded.items()
        idle = [(version_of(v.path) == v, a.used, v) for v, a in loaded if a not in used]
        free = self._cache_bytes - sum(a.size for a in self._loaded.values())
        for current, _, version in sorted(idle, key=itemgetter(0, 1)):
            if current and free >= size:
                break
            free += self._loaded.pop(version).size
            logger.info("adapter %s unloaded", version.path.name)
        if free < size:
            raise EngineUnavailable(
                f"the LoRA cache is full: adapter {name} does not fit beside the adapters in use; try "
                "again later, or raise lora_cache_host_memory_bytes"
            )


def _changes(model: Any, config: Any, directory: Path) -> dict[str, Change]:
    changes = {}
    for name, layer in _peft_layers(type(model), config, directory).items():
        up, scale = layer.lora_B[LABEL], layer.scaling[LABEL]
        bias = None if up.bias is None else up.bias.float() * scale
        read = [layer.lora_A[LABEL].weight, up.weight.float() * scale, bias]
        kind: Any = model.device, model.dtype
        own: list[Any] = [None if t is None else t.detach().to(*kind) for t in read]
        # Attention multiplies what it masks by 0: such a value would spread over the whole batch.
        if not all(tensor is None or tensor.isfinite().all() for tensor in own):
            raise ValueError(f"{name} contains NaN or infinite values")
        changes[name] = Change(*own)
    return changes


def _peft_layers(kind: Any, own: Any, directory: Path) -> dict[str, Any]:
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
            f"init_lora_weights={config.init_lora_weights!r} changes the base model's weights; have PEFT "
            "convert it to a plain LoRA adapter"
        )
    config.init_lora_weights = True
    with torch.device("meta"):
        twin = kind(copy.deepcopy(own))
        inject_adapter_in_model(config, twin, LABEL)
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, LoraLayer)}
    for name, layer in layers.items():
        if layer is twin.get_output_embeddings():
            raise ValueError(f"changing the model's output layer, {name}, is not supported")
        if type(layer) is not Linear:
            raise ValueError(f"{name} is not a linear layer")
    read = load_peft_weights(str(directory), device="cpu")
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in read.items()}
    names = {n.replace(f".{LABEL}.", "."): n for n in twin.state_dict() if ".lora_" in n}
    for name in names.keys() - tensors.keys():
        raise ValueError(f"it lacks the weight {name}")
    for name in tensors.keys() - names.keys():
        raise ValueError(f"its weight {name} is not in its configuration or not in this model")
    weights = {names[name]: tensor for name, tensor in tensors.items()}
    twin.load_state_dict(weights, strict=False, assign=True)
    return layers


def import_peft() -> None:
    """Import PEFT, which takes seconds; warn if it is not there."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        logger.warning(
            "LoRA adapters require PEFT, which cannot be imported (%s): %s", error, INSTALL
        )
