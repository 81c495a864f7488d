"""A LoRA adapter as the two tensors that TensorRT-LLM's C++ backend takes with a request.

For m adapted modules, of which the largest has D values:

- ``lora_config``, int32 [1, m, 3]: the number of the kind of module, the layer, the rank;
- ``lora_weights``, of the engine's data type, [1, m, D]: A, [rank, inputs], then B, [outputs, rank], times
  the scaling; zeros fill the rest.

NVIDIA's ``hf_lora_convert.py`` writes them as two files; PEFT's are converted here. The format is read off
that script and TensorRT-LLM's documentation; with a real engine it is unchecked.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import load_file

from cog_triton.adapters.directory import CONFIG, CONVERTED, WEIGHTS, adapter_path
from cog_triton.errors import NOT_CACHED, InvalidParameter

Array = npt.NDArray[Any]
Inputs = Mapping[str, Array]
T = TypeVar("T")
Send = Callable[[str, Inputs], AsyncGenerator[T, None]]

# NVIDIA's script writes the two bytes of a bfloat16 as "V2".
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The data types of engines that can have adapters, by their names in TensorRT-LLM's configuration.
DTYPES = {"float16": np.dtype("f2"), "bfloat16": BFLOAT16, "float32": np.dtype("f4")}
TRITON_DTYPES = {"float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "float32": "TYPE_FP32"}

# A module of Hugging Face's models → TensorRT-LLM's number of its kind.
_KINDS = {
    "qkv_proj": 0,
    "q_proj": 1,
    "k_proj": 2,
    "v_proj": 3,
    "o_proj": 4,
    "dense": 4,
    "gate_proj": 5,
    "gate_up_proj": 5,
    "down_proj": 6,
    "up_proj": 7,
}
_NAME = re.compile(
    r"(?:.+\.)?layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<module>\w+)\.lora_(?P<part>[AB])\.weight"
)
# Fields of adapter_config.json that change the weights in a way that those tensors cannot express.
_NOT_CONVERTED = ("use_dora", "alpha_pattern", "modules_to_save", "layer_replication", "lora_bias")


@dataclass(frozen=True)
class AdapterTensors:
    """The adapters of a directory, for the inputs of requests."""

    directory: Path
    # The engine's, a key of ``DTYPES``.
    dtype: str

    async def stream(self, send: Send[T], name: str, inputs: Inputs) -> AsyncGenerator[T, None]:
        """Yield the responses to a request, which is sent again with its adapter if that is not cached."""
        try:
            async with aclosing(send(name, inputs)) as responses:
                async for response in responses:
                    yield response
            return
        except InvalidParameter as error:
            if not re.search(NOT_CACHED, error.message):
                raise
        # Under another name, so that a stop that comes now finds it. The adapter may be large, so it is
        # read again each time.
        async with aclosing(send(f"{name}-adapter", await self.added(inputs))) as responses:
            async for response in responses:
                yield response

    async def added(self, inputs: Inputs) -> dict[str, Array]:
        """Return a request's inputs with the tensors of the adapter that its ``lora_task_id`` names."""
        task_id = int(inputs["lora_task_id"].flat[0])
        try:
            path = adapter_path(self.directory, task_id)
        except LookupError as error:
            raise InvalidParameter(f"lora_task_id {task_id}: {error}") from None
        try:
            return {**inputs, **await asyncio.to_thread(read_adapter, path, self.dtype)}
        except (OSError, ValueError) as error:
            raise InvalidParameter(f"adapter {path.name!r} cannot be used: {error}") from None


@dataclass(frozen=True)
class _Tensors:
    """An adapter's weights, [modules, values], and rows of the configuration, int32 [modules, 3]."""

    weights: Array
    rows: Array


@dataclass(frozen=True)
class _Module:
    """The weights of one adapted module: A, [rank, inputs], and B, [outputs, rank]."""

    a: Array
    b: Array


def read_adapter(directory: Path, dtype: str) -> dict[str, Array]:
    """Return the inputs ``lora_weights`` and ``lora_config`` of an adapter, in either of its two forms.

    Args:
        dtype: the engine's, one of ``DTYPES``.

    Raises:
        OSError, ValueError: the files cannot be read, or do not fit the engine.
    """
    if all((directory / name).is_file() for name in CONVERTED):
        adapter = _read_converted(directory)
    else:
        adapter = _read_peft(directory, dtype)
    weights = adapter.weights
    if weights.dtype != DTYPES[dtype]:
        raise ValueError(f"its weights are {weights.dtype}, but the engine's are {dtype}")
    modules = adapter.rows.size // 3
    width = weights.shape[-1]
    if not modules or weights.size != modules * width:
        raise ValueError(
            f"its weights have the shape {weights.shape}, which does not fit {modules} modules"
        )
    return {
        "lora_weights": np.ascontiguousarray(weights).reshape(1, modules, width),
        "lora_config": np.ascontiguousarray(adapter.rows).reshape(1, modules, 3),
    }


def _read_converted(directory: Path) -> _Tensors:
    """Return an adapter that NVIDIA's script has written."""
    weights_file, rows_file = CONVERTED
    weights = np.load(directory / weights_file, allow_pickle=False)
    rows = np.load(directory / rows_file, allow_pickle=False)
    if rows.ndim < 2 or rows.shape[-1] not in (3, 4):
        raise ValueError(f"{rows_file} has the unexpected shape {rows.shape}")
    # Newer releases of the script have a fourth column.
    if rows[..., 3:].any():
        raise ValueError("TensorRT-LLM does not support DoRA")
    if weights.dtype == "V2":
        weights = weights.view(BFLOAT16)
    return _Tensors(weights, rows[..., :3].astype(np.int32))


def _read_peft(directory: Path, dtype: str) -> _Tensors:
    """Return an adapter that PEFT has saved, as weights of a type of ``DTYPES``."""
    safe_file, unsafe_file = WEIGHTS
    if not (directory / safe_file).is_file():
        raise ValueError(
            f"it has no {safe_file}; {unsafe_file} is not loaded, because it could run code"
        )
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not JSON: {error}") from None
    try:
        tensors = load_file(directory / safe_file)
    except (safetensors.SafetensorError, TypeError) as error:
        # TypeError: a tensor is of a type that NumPy does not have.
        raise ValueError(f"{safe_file} is damaged or incomplete: {error}") from None
    floats = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    weights, rows = converted(config, floats)
    with np.errstate(over="ignore"):
        weights = weights.astype(DTYPES[dtype])
    if not np.isfinite(weights).all():
        raise ValueError(f"one of its weights is NaN, infinite or out of range in {dtype}")
    return _Tensors(weights, rows)


def converted(config: Any, tensors: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return an adapter of PEFT as weights, float32 [m, D], and rows of the configuration, int32 [m, 3].

    Args:
        config: the content of adapter_config.json.
        tensors: float32, by PEFT's names.

    Raises:
        ValueError: names a part that is missing, of a wrong shape, or not supported.
    """
    alpha = _alpha(config)
    modules: dict[tuple[int, str], dict[str, Array]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in _KINDS:
            raise ValueError(f"TensorRT-LLM does not support its tensor {name}")
        place = (int(match["layer"]), match["module"])
        modules.setdefault(place, {})[match["part"]] = tensor
    if not modules:
        raise ValueError("it has no weights")
    rows = []
    values = []
    for (layer, name), parts in sorted(modules.items()):
        module = _checked_module(f"layers.{layer} {name}", parts)
        rank = len(module.a)
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        rows.append((_KINDS[name], layer, rank))
        values.append(np.concatenate([module.a.ravel(), (module.b * np.float32(scaling)).ravel()]))
    weights = np.zeros((len(values), max(map(len, values))), np.float32)
    for row, flat in zip(weights, values, strict=True):
        row[: len(flat)] = flat
    return weights, np.array(rows, np.int32)


def _alpha(config: Any) -> float:
    """Return the lora_alpha of a configuration that can be converted, or raise ValueError."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG} does not describe a LoRA adapter")
    unsupported = [name for name in _NOT_CONVERTED if config.get(name)]
    bias = config.get("bias", "none")
    if bias != "none":
        unsupported.append(f"bias {bias}")
    if unsupported:
        raise ValueError(f"TensorRT-LLM does not support {', '.join(unsupported)} in {CONFIG}")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float):
        raise ValueError(f"{CONFIG} has no lora_alpha")
    return alpha


def _checked_module(name: str, parts: Mapping[str, Array]) -> _Module:
    """Return the weights of a module in TensorRT-LLM's order, or raise ValueError."""
    for part in ("A", "B"):
        if part not in parts:
            raise ValueError(f"{name} has no lora_{part}")
    a = parts["A"]
    b = parts["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.size or not b.size:
        raise ValueError(f"{name} has lora_A {a.shape} and lora_B {b.shape}, which do not match")
    if "gate_up_proj" in name:
        # TensorRT-LLM has the two halves the other way round.
        if len(b) % 2:
            raise ValueError(f"{name} cannot be split in half: it has {len(b)} outputs")
        b = np.roll(b, len(b) // 2, axis=0)
    return _Module(a, b)
