"""LoRA adapters in the layers of a running model, several in one batch, by PEFT.

PEFT puts its layers into the model, keeps each adapter's weights there by a label, and knows how they are
scaled. Its own ways to apply them do not fit a batch in which the tokens of all requests stand behind each
other in one row: an adapter is active for a whole batch, or named for each of its rows. So PEFT's layers
stay disabled here, which makes them what they were before, and a hook behind each adds what an adapter
changes, to the tokens of the requests that have it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

PREFIX = "base_model.model."  # PEFT's, before the names of a model's layers
KIND = ".lora_"  # behind them

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
class AdapterWeights:
    """An adapter as it was read: PEFT's configuration, and tensors on the model's device."""

    config: Any
    tensors: Mapping[str, torch.Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that is in the model.

    Attributes:
        number: never given to another one.
        size: of its weights, in bytes.
        problem: why it turned out to be of no use.
    """

    number: int
    size: int
    problem: str | None = None

    @property
    def label(self) -> str:
        """PEFT's name for it."""
        return f"adapter{self.number}"


class LoraLayers:
    """The adapters in one model.

    Attributes:
        lock: held by who computes with the model, and by who changes its layers.
    """

    def __init__(self, model: Any) -> None:
        self.lock = threading.Lock()
        self._model = model
        self._numbers = count(1)
        self._tokens = 0
        self._places: list[tuple[LoadedAdapter, torch.Tensor]] = []

    def read(self, directory: Path) -> AdapterWeights:
        """Reads an adapter; the model is left as it is.

        Raises:
            ImportError: there is no PEFT.
            Exception: the adapter is not valid, or cannot be used with this model or in this way.
        """
        from peft import LoraConfig, PeftConfig
        from peft.utils import load_peft_weights

        config = PeftConfig.from_pretrained(str(directory))
        if not isinstance(config, LoraConfig):
            raise ValueError(
                f"it is no LoRA adapter: its peft_type is {getattr(config.peft_type, 'value', None)}"
            )
        check_config(config.to_dict(), LoraConfig().to_dict())
        config.inference_mode, config.init_lora_weights = True, True
        tensors = load_peft_weights(str(directory), device="cpu")
        self._check_tensors(tensors)
        own = {"device": self._model.device, "dtype": self._model.dtype}
        tensors = {name: tensor.to(**own) for name, tensor in tensors.items()}
        self._wait_for_device()
        return AdapterWeights(config, tensors)

    def put(self, weights: AdapterWeights) -> LoadedAdapter:
        """Puts an adapter into the model, which computes as before but for those that have it.

        Raises:
            Exception: it does not fit this model, which is as it was then.
        """
        adapter = LoadedAdapter(next(self._numbers), weights.size)
        with self.lock:
            try:
                self._inject(adapter.label, weights)
                self._take_over()
            except Exception:
                self._take_over()
                self._delete(adapter.label)
                raise
        return adapter

    def remove(self, adapter: LoadedAdapter) -> None:
        """Frees an adapter's memory."""
        with self.lock:
            self._wait_for_device()
            self._delete(adapter.label)

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

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            layer, kind, _ = name.removeprefix(PREFIX).partition(KIND)
            if not kind:
                raise ValueError(f"{name} is no weight of LoRA")
            self._check_layer(layer)
            # Attention multiplies what it masks by 0: such a value would spread over the whole batch.
            if not tensor.isfinite().all():
                raise ValueError(f"{name} has values that are not finite")

    def _check_layer(self, name: str) -> None:
        from peft.tuners.lora import Linear
        from transformers.pytorch_utils import Conv1D

        try:
            layer = self._model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"the model has no layer {name}") from None
        if not isinstance(layer, (torch.nn.Linear, Conv1D, Linear)):
            raise ValueError(f"{name} is no linear layer")
        if layer is self._model.get_output_embeddings():
            raise ValueError(
                f"{name} is the model's last layer, which adapters may not change here"
            )

    def _inject(self, label: str, weights: AdapterWeights) -> None:
        from peft import inject_adapter_in_model
        from peft.utils import set_peft_model_state_dict

        model = self._model
        inject_adapter_in_model(weights.config, model, label, low_cpu_mem_usage=True)
        result = set_peft_model_state_dict(model, weights.tensors, label, low_cpu_mem_usage=True)
        if result.unexpected_keys:
            raise ValueError(f"its target_modules do not name {result.unexpected_keys[0]}")
        missing = [name for name in result.missing_keys if f".{label}." in name]
        if missing:
            raise ValueError(f"it has no weights for {missing[0].replace(f'.{label}.', '.')}")

    def _delete(self, label: str) -> None:
        from peft.tuners.tuners_utils import delete_adapter

        delete_adapter(self._model, label, "lora_")

    def _take_over(self) -> None:
        """Leaves PEFT's layers to the hooks."""
        from peft.tuners.lora import LoraLayer

        self._model.__dict__.pop("peft_config", None)  # of which PEFT warns at the next adapter
        for name, layer in self._model.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            layer.set_adapter([])
            if not layer.disable_adapters:
                layer.enable_adapters(False)
                layer.register_forward_hook(partial(self._add, name))

    def _add(
        self, name: str, layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> None:
        """Adds what the adapters of this step change in a layer's output, shape [..., features]."""
        if not self._places:
            return
        rows, out = inputs[0].flatten(0, -2), output.flatten(0, -2)
        for adapter, places in self._places:
            if (
                adapter.label not in layer.lora_A
            ):  # of other layers, or removed from under who is gone
                continue
            if len(rows) != self._tokens:
                adapter.problem = f"{name} does not see each token once"
                continue
            down, up = layer.lora_A[adapter.label], layer.lora_B[adapter.label]
            change = up(down(rows[places].to(down.weight.dtype))) * layer.scaling[adapter.label]
            out.index_add_(0, places, change.to(out.dtype))

    def _wait_for_device(self) -> None:
        # The model computes on a stream of its own there.
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


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
