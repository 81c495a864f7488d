"""An adapter's files, read by PEFT: how it changes each layer of a model."""

import copy
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

INSTALL = "pip install 'peft>=0.21,<0.22'"
# The name that PEFT knows the only adapter of a twin by.
_LABEL = "default"
_PREFIX = "base_model.model."

# Fields of a configuration that PEFT's layers apply, or that do not change the output.
UNDERSTOOD = frozenset(
    (
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "megatron_core",
        "eva_config",
        "ensure_weight_tying",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "lora_bias",
        "init_lora_weights",
    )
)
# Values of init_lora_weights that leave the weights of the base model alone.
INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")

# Held while a twin is built: PEFT and transformers do not say that two threads may build models at once.
# No weights are read or copied meanwhile.
_building = threading.Lock()


@dataclass(frozen=True)
class LayerChange:
    """What an adapter adds to the output of a linear layer: ``inputs @ down.T @ up.T + bias``.

    Attributes:
        down: [rank, inputs].
        up: [outputs, rank], times the adapter's scaling.
        bias: [outputs], times the scaling, or None.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return self.down.nbytes + self.up.nbytes + bias_bytes

    def is_finite(self) -> bool:
        tensors = [self.down, self.up] if self.bias is None else [self.down, self.up, self.bias]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)


def import_peft() -> None:
    """Import PEFT, which takes seconds; warn if it is not there."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        logger.warning(
            "LoRA adapters require PEFT, which cannot be imported (%s): %s", error, INSTALL
        )


def read_changes(model: Any, config: Any, directory: Path) -> dict[str, LayerChange]:
    """Return the changes of a model's layers by their names, on the model's device and in its type.

    Args:
        config: the model's configuration, in a copy that nobody changes meanwhile.

    Raises:
        ValueError: the adapter cannot be used here; PEFT may raise other exceptions.
    """
    changes = {}
    for name, layer in _peft_layers(type(model), config, directory).items():
        down = layer.lora_A[_LABEL]
        up = layer.lora_B[_LABEL]
        scale = layer.scaling[_LABEL]

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(model.device, model.dtype)

        change = LayerChange(
            down=on_device(down.weight),
            up=on_device(up.weight.float() * scale),
            bias=None if up.bias is None else on_device(up.bias.float() * scale),
        )
        # Attention multiplies what it masks by 0: such a value would spread over the whole batch.
        if not change.is_finite():
            raise ValueError(f"{name} contains NaN or infinite values")
        changes[name] = change
    return changes


def _peft_layers(model_class: Any, model_config: Any, directory: Path) -> dict[str, Any]:
    """Return PEFT's layers with the adapter's weights, by the names of the layers that they replace."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import load_peft_weights

    config = _lora_config(directory)
    with _building:
        twin = _twin(model_class, model_config, config)
    layers = {
        name: module for name, module in twin.named_modules() if isinstance(module, LoraLayer)
    }
    _check_layers(twin, layers)
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in load_peft_weights(str(directory), device="cpu").items()
    }
    # By their names in the adapter's file, the names of the weights in the twin.
    names = {
        name.replace(f".{_LABEL}.", "."): name for name in twin.state_dict() if ".lora_" in name
    }
    for name in names.keys() - tensors.keys():
        raise ValueError(f"it lacks the weight {name}")
    for name in tensors.keys() - names.keys():
        raise ValueError(f"its weight {name} is not in its configuration or not in this model")
    weights = {names[name]: tensor for name, tensor in tensors.items()}
    twin.load_state_dict(weights, strict=False, assign=True)
    return layers


def _lora_config(directory: Path) -> Any:
    """Return PEFT's configuration of an adapter, or raise ValueError for one that cannot be applied."""
    from peft import LoraConfig, PeftConfig

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
    return config


def _twin(model_class: Any, model_config: Any, lora_config: Any) -> Any:
    """Return a model of the same form without weights, into which PEFT has put its layers."""
    from peft import inject_adapter_in_model

    with torch.device("meta"):
        twin = model_class(copy.deepcopy(model_config))
        inject_adapter_in_model(lora_config, twin, _LABEL)
    return twin


def _check_layers(twin: Any, layers: dict[str, Any]) -> None:
    """Raise ValueError for layers that the engine cannot change."""
    from peft.tuners.lora import Linear

    for name, layer in layers.items():
        if layer is twin.get_output_embeddings():
            raise ValueError(f"changing the model's output layer, {name}, is not supported")
        if type(layer) is not Linear:
            raise ValueError(f"{name} is not a linear layer")
