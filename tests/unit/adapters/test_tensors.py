import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from cog_triton.adapters.tensors import BFLOAT16, AdapterTensors, Array, converted, read_adapter
from cog_triton.errors import InvalidParameter
from cog_triton.protocol.parameters import adapter_task_id

LAYER = "base_model.model.model.layers.3"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}


def module(name: str, rank: int = 2, inputs: int = 3, outputs: int = 4) -> dict[str, Array]:
    """A module's tensors by PEFT's names, of numbers that are all different."""
    a = np.arange(rank * inputs, dtype=np.float32).reshape(rank, inputs)
    b = 100 + np.arange(outputs * rank, dtype=np.float32).reshape(outputs, rank)
    return {f"{LAYER}.{name}.lora_A.weight": a, f"{LAYER}.{name}.lora_B.weight": b}


Q, DOWN = module("self_attn.q_proj"), module("mlp.down_proj", rank=1)
WIDE = {**Q, f"{LAYER}.self_attn.q_proj.lora_B.weight": np.ones((4, 5), np.float32)}
SCALED = {**Q, f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": np.ones(4, np.float32)}


def test_the_tensors_of_an_adapter() -> None:
    """A row a module: A, B times alpha / rank, and zeros; beside it the kind, the layer and the rank."""
    weights, rows = converted(CONFIG, {**Q, **DOWN})
    assert rows.tolist() == [[6, 3, 1], [1, 3, 2]]
    assert rows.dtype == np.int32
    down = [0, 1, 2, *(8 * v for v in (100, 101, 102, 103))]
    q = [0, 1, 2, 3, 4, 5, *(4 * v for v in range(100, 108))]
    assert weights.tolist() == [[*down, *[0] * (len(q) - len(down))], q]
    by_root, _ = converted({**CONFIG, "use_rslora": True}, Q)
    assert by_root[0, 6:].tolist() == pytest.approx([8 / math.sqrt(2) * v for v in range(100, 108)])


def test_the_halves_of_a_fused_projection_change_places() -> None:
    weights, rows = converted({**CONFIG, "lora_alpha": 2}, module("mlp.gate_up_proj"))
    assert rows.tolist() == [[5, 3, 2]]
    assert weights[0, 6:].tolist() == [104, 105, 106, 107, 100, 101, 102, 103]


def saved(directory: Path, tensors: dict[str, Array], **config: Any) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {}, "it has no weights"),
        (dict(list(Q.items())[:1]), {}, "layers.3 q_proj has no lora_B"),
        (WIDE, {}, r"q_proj has lora_A \(2, 3\) and lora_B \(4, 5\)"),
        (
            module("mlp.gate_up_proj", outputs=5),
            {},
            "layers.3 gate_up_proj cannot be split in half",
        ),
        (SCALED, {}, "does not support its tensor .*lora_magnitude_vector"),
        (module("mlp.experts.0.w1"), {}, "does not support its tensor .*experts"),
        (Q, {"use_dora": True}, "does not support use_dora"),
        (Q, {"alpha_pattern": {"q_proj": 4}}, "does not support alpha_pattern"),
        (Q, {"bias": "all"}, "does not support bias all"),
        (Q, {"peft_type": "IA3"}, "does not describe a LoRA adapter"),
        (Q, {"lora_alpha": None}, "has no lora_alpha"),
    ],
)
def test_what_is_broken_or_cannot_be_said(
    tensors: dict[str, Array], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        converted({**CONFIG, **config}, tensors)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    adapter = saved(tmp_path / "a", Q)
    (adapter / "adapter_model.safetensors").write_bytes(save(Q)[:-1])
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        read_adapter(adapter, "float16")
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is not JSON"):
        read_adapter(adapter, "float16")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match="it could run code"):
        read_adapter(adapter, "float16")


@pytest.mark.parametrize(("value", "dtype"), [(7e4, "float16"), (math.inf, "bfloat16")])
def test_a_weight_that_is_no_number_of_the_type(tmp_path: Path, value: float, dtype: str) -> None:
    adapter = saved(tmp_path / "a", {name: np.full_like(v, value) for name, v in DOWN.items()})
    with pytest.raises(ValueError, match=f"NaN, infinite or out of range in {dtype}"):
        read_adapter(adapter, dtype)


# What NVIDIA's script writes

HALF = np.ones((1, 2, 5), np.float16)


def by_script(directory: Path, weights: Array, rows: Array) -> Path:
    directory.mkdir(exist_ok=True)
    np.save(directory / "model.lora_weights.npy", weights)
    np.save(directory / "model.lora_config.npy", rows)
    return directory


@pytest.mark.parametrize(("dtype", "view"), [("float16", np.float16), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("columns", [3, 4])
def test_files_of_the_script(tmp_path: Path, dtype: str, view: Any, columns: int) -> None:
    weights, rows = np.ones((1, 2, 5), np.float16).view(view), np.ones((1, 2, columns), np.int32)
    rows[..., 3:] = 0  # of DoRA, in newer releases
    tensors = read_adapter(by_script(tmp_path / "a", weights, rows), dtype)
    assert tensors["lora_weights"].dtype == view
    assert tensors["lora_weights"].tobytes() == weights.tobytes()
    assert np.array_equal(tensors["lora_config"], rows[..., :3])


@pytest.mark.parametrize(
    ("weights", "rows", "message"),
    [
        (HALF.astype(np.float32), np.ones((1, 2, 3)), "are float32, but the engine's are float16"),
        (HALF, np.ones((1, 3, 3)), r"shape \(1, 2, 5\), which does not fit 3 modules"),
        (HALF, np.ones((1, 2, 2)), r"has the unexpected shape \(1, 2, 2\)"),
        (HALF, np.ones((1, 2, 4)), "does not support DoRA"),
    ],
)
def test_files_of_the_script_that_cannot_be_used(
    tmp_path: Path, weights: Array, rows: Array, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_adapter(by_script(tmp_path / "a", weights, rows), "float16")


def test_the_inputs_of_a_request(tmp_path: Path) -> None:
    saved(tmp_path / "poet", Q)
    saved(tmp_path / "broken", dict(list(Q.items())[:1]))
    adapters = AdapterTensors(tmp_path, "float16")

    def added(name: str) -> dict[str, Array]:
        task_id = np.array([[adapter_task_id(name)]], np.uint64)
        return asyncio.run(adapters.added({"lora_task_id": task_id}))

    assert added("poet").keys() == {"lora_task_id", "lora_weights", "lora_config"}
    with pytest.raises(InvalidParameter, match=r"adapter 'broken' cannot be used: .* has no lora_"):
        added("broken")
    with pytest.raises(InvalidParameter, match=r"lora_task_id \d+: no adapter"):
        added("bard")
