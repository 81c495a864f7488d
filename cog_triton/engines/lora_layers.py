"""LoRA adapters in a running model, several in one batch.

PEFT reads an adapter and says which layers it changes, of which ranks and how much: by a copy of the model
that has no weights, so that the running one is left alone. Applied they are here. PEFT's own ways do not
fit a batch in which the tokens of all requests stand behind each other in one row: an adapter is active
there for a whole batch, or named for each of its rows. So a hook behind each layer adds what an adapter
changes to the tokens of the requests that have it.
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

PREFIX = "base_model.model."  # PEFT's, before the names of a model's layers
LABEL = "default"  # of an adapter in the copy

# What a configuration may say beside its defaults: PEFT's layers do it, or it says nothing of the answers.
UNDERSTOOD = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "megatron_core", "eva_config", "ensure_weight_tying"),
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "lora_bias", "init_lora_weights"),
    }
)
# Of how an adapter was begun; the other ways change the model's own weights, too.
BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Change:
    """What an adapter does to one layer, scaled.

    Attributes:
        down: shape [rank, inputs].
        up: [outputs, rank].
        bias: [outputs], if it has one.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output for these inputs, shape [rows, inputs]."""
        return linear(linear(rows.to(self.down.dtype), self.down), self.up, self.bias)

    @property
    def size(self) -> int:
        """In bytes."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.down.nbytes + self.up.nbytes + bias


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter on the model's device.

    Attributes:
        number: never given to another one.
        changes: by the names of the layers.
        size: in bytes.
        problem: why it turned out to be of no use.
    """

    number: int
    changes: dict[str, Change]
    size: int
    problem: str | None = None


class LoraLayers:
    """The layers of one model that adapters change.

    Attributes:
        lock: held by who computes with the model, and by who changes its hooks.
    """

    def __init__(self, model: Any) -> None:
        self.lock = threading.Lock()
        self._model = model
        self._numbers = count(1)
        self._hooked: set[str] = set()
        self._tokens = 0
        self._places: list[tuple[LoadedAdapter, torch.Tensor]] = []

    def read(self, directory: Path) -> LoadedAdapter:
        """Reads an adapter; the model is left as it is.

        Raises:
            ImportError: there is no PEFT.
            Exception: the adapter is not valid, or cannot be used with this model or in this way.
        """
        from peft import LoraConfig, PeftConfig
        from peft.utils import load_peft_weights

        config = PeftConfig.from_pretrained(str(directory))
        if not isinstance(config, LoraConfig):
            kind = getattr(config.peft_type, "value", None)
            raise ValueError(f"it is no LoRA adapter: its peft_type is {kind}")
        check_config(config.to_dict(), LoraConfig().to_dict())
        config.init_lora_weights = True
        read = load_peft_weights(str(directory), device="cpu")
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read.items()}
        layers = lora_layers(self._model, config)
        check_tensors(tensors, expected_shapes(layers))
        changes = {name: self._change(name, layer, tensors) for name, layer in layers.items()}
        self._wait_for_device()
        size = sum(change.size for change in changes.values())
        return LoadedAdapter(next(self._numbers), changes, size)

    def put(self, adapter: LoadedAdapter) -> None:
        """Readies the model for an adapter."""
        with self.lock:
            for name in adapter.changes.keys() - self._hooked:
                layer = self._model.get_submodule(name)
                layer.register_forward_hook(partial(self._add, name))
                self._hooked.add(name)

    def remove(self, adapter: LoadedAdapter) -> None:
        """Frees an adapter's memory."""
        with self.lock:
            self._wait_for_device()
            adapter.changes.clear()

    def begin_step(self, parts: Sequence[tuple[LoadedAdapter | None, int]]) -> None:
        """Says who has which adapter in the next step: for each request of the batch, its tokens in it."""
        places: dict[LoadedAdapter, list[int]] = {}
        start = 0
        for adapter, length in parts:
            if adapter is not None:
                places.setdefault(adapter, []).extend(range(start, start + length))
            start += length
        self._tokens = start
        device = self._model.device
        self._places = [(a, torch.tensor(places[a], device=device)) for a in places]

    def _change(self, name: str, layer: Any, tensors: Mapping[str, torch.Tensor]) -> Change:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.to(device=self._model.device, dtype=self._model.dtype)
            # Attention multiplies what it masks by 0: such a value would spread over the whole batch.
            if not moved.isfinite().all():
                raise ValueError(f"{name} has values that are not finite")
            return moved

        scale = layer.scaling[LABEL]
        bias = tensors.get(f"{name}.lora_B.bias")
        return Change(
            own(tensors[f"{name}.lora_A.weight"]),
            own(tensors[f"{name}.lora_B.weight"].float() * scale),
            None if bias is None else own(bias.float() * scale),
        )

    def _add(self, name: str, _: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        """Adds what the adapters of this step change in a layer's output, shape [..., features]."""
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


def lora_layers(model: Any, config: Any) -> dict[str, Any]:
    """PEFT's layers for an adapter in a copy of a model, by name; all without weights.

    Raises:
        ValueError: the adapter changes other layers than linear ones, or the last one; or none.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer

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
            raise ValueError(f"{name} is no linear layer")
    return layers


def expected_shapes(layers: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights that an adapter has to have."""
    return {
        f"{name}.{part}.{kind}": tuple(parameter.shape)
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
        for kind, parameter in getattr(layer, part)[LABEL].named_parameters()
    }


def check_tensors(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Whether an adapter's weights are those that its configuration gives it in this model.

    Raises:
        ValueError: naming one that is not.
    """
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"it has no weight {name}")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name} has the shape {tuple(tensors[name].shape)}, and should have {shape}"
            )
    for name in tensors.keys() - expected.keys():
        raise ValueError(f"its configuration and this model have no weight {name}")


def check_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses what could not be applied to some requests of a batch alone.

    Raises:
        ValueError: the adapter needs that.
    """
    for name, value in config.items():
        if value and value != defaults.get(name) and name not in UNDERSTOOD:
            raise ValueError(f"{name}={value!r} is not supported beside other adapters in a batch")
    beginning = config.get("init_lora_weights", True)
    if beginning not in BEGINNINGS:
        raise ValueError(
            f"init_lora_weights={beginning!r} changes the model's own weights; "
            "PEFT can save such an adapter as a plain one"
        )
