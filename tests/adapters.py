"""A LoRA adapter as PEFT saves it, made by hand, and the model that it makes of another."""

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

RANK, ALPHA = 4, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(model: Path, directory: Path, *, seed: int = 0) -> Path:
    """Writes an adapter with random weights for the attention of a Llama model."""
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": PROJECTIONS,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for name, weight in _adapted(load_file(model / "model.safetensors")).items():
        outputs, inputs = weight.shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = _normal(random, RANK, inputs)
        tensors[f"{module}.lora_B.weight"] = _normal(random, outputs, RANK)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(model: Path, adapter: Path, directory: Path) -> Path:
    """Writes the model whose weights have the adapter's in them."""
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in _adapted(weights):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (tensors[f"{module}.lora_{part}.weight"] for part in "AB")
        weights[name] = weights[name] + b @ a * np.float32(ALPHA / RANK)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def _adapted(weights: dict[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    return {
        name: weight
        for name, weight in weights.items()
        if name.split(".")[-2] in PROJECTIONS and name.startswith("model.layers.")
    }


def _normal(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return random.normal(0, 0.2, shape).astype(np.float32)
