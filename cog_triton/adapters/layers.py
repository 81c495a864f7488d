"""LoRA adapters in a running model, several in one batch.

PEFT reads an adapter into a copy of the model without weights, so that the running one is left alone, and
says which layers it changes and how. They are applied here: in PEFT an adapter is active for a whole batch,
or named for each of its rows, but here the tokens of all requests stand behind each other in one row. So a
hook behind each layer adds the change to the tokens of the requests that have the adapter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

LABEL = "default"  # of the adapter in the copy

# Fields of a configuration that PEFT's layers apply, or that do not change the output.
UNDERSTOOD = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "megatron_core", "eva_config", "ensure_weight_tying"),
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "lora_bias", "init_lora_weights"),
    }
)
# Of init_lora_weights; the others change the model's own weights, too.
INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Change:
    """The change of one layer by an adapter, scaled.

    Attributes:
        down: shape [rank, inputs].
        up: [outputs, rank].
        bias: [outputs], if it has one.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the addition to the layer's output for inputs of the shape [rows, inputs]."""
        return linear(linear(rows.to(self.down.dtype), self.down), self.up, self.bias)


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter on the model's device.

    Attributes:
        number: never given to another one.
        changes: by the names of the layers.
        problem: the reason why it turned out not to be usable.
    """

    number: int
    changes: dict[str, Change]
    problem: str | None = None

    @property
    def size(self) -> int:
        """In bytes."""
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
        """Read an adapter; the model is left as it is.

        Raises:
            ImportError: PEFT is not installed.
            Exception: the adapter is not valid, or cannot be used with this model or in this way.
        """
        changes = {
            name: self._change(name, layer)
            for name, layer in _read_layers(self._model, directory).items()
        }
        self._wait_for_device()
        return LoadedAdapter(next(self._numbers), changes)

    def put(self, adapter: LoadedAdapter) -> None:
        """Hook the layers that an adapter changes."""
        with self.lock:
            for name in adapter.changes.keys() - self._hooked:
                layer = self._model.get_submodule(name)
                layer.register_forward_hook(partial(self._add, name))
                self._hooked.add(name)

    def remove(self, adapter: LoadedAdapter) -> None:
        """Free an adapter's memory."""
        with self.lock:
            self._wait_for_device()
            adapter.changes.clear()

    def begin_step(self, parts: Sequence[tuple[LoadedAdapter | None, int]]) -> None:
        """Set, for each request of the next step's batch, its adapter and number of tokens."""
        places: dict[LoadedAdapter, list[int]] = {}
        start = 0
        for adapter, length in parts:
            if adapter is not None:
                places.setdefault(adapter, []).extend(range(start, start + length))
            start += length
        self._tokens = start
        device = self._model.device
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
        """Add the changes of this step's adapters to a layer's output, shape [..., features]."""
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


def _read_layers(model: Any, directory: Path) -> dict[str, Any]:
    """Return PEFT's layers with an adapter's weights, by name, of a copy of the model without weights."""
    from peft import LoraConfig, PeftConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", None)
        raise ValueError(f"it is not a LoRA adapter: its peft_type is {kind}")
    _check_config(config.to_dict(), LoraConfig().to_dict())
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


def _check_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for what cannot be applied to some requests of a batch only."""
    for name, value in config.items():
        if value and value != defaults.get(name) and name not in UNDERSTOOD:
            raise ValueError(f"{name}={value!r} is not supported beside other adapters in a batch")
    initialization = config.get("init_lora_weights", True)
    if initialization not in INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={initialization!r} changes the model's own weights; "
            "PEFT can save such an adapter as a plain one"
        )
