"""The bfloat16 of an adapter for TensorRT-LLM is PyTorch's."""

from pathlib import Path

import numpy as np

from cog_triton.adapters.tensors import BFLOAT16, read_adapter
from tests.late import safetensors_torch, torch
from tests.unit.adapters.test_tensors import Q, saved


def test_bfloat16_is_rounded_to_the_nearest_and_read_as_it_is(tmp_path: Path) -> None:
    values = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    values[0, :3] = torch.tensor([1.00390625, 1.01171875, -1.00390625])  # halfway
    named = {name: values if "_A" in name else values.T.contiguous() for name in Q}
    plain = {name: tensor.numpy() for name, tensor in named.items()}
    read = read_adapter(saved(tmp_path / "a", plain, lora_alpha=2), "bfloat16")
    bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert read["lora_weights"].dtype == BFLOAT16
    assert read["lora_weights"].view(np.uint16)[0, 0, :600].tolist() == bits.ravel().tolist()
    adapter = saved(tmp_path / "b", Q, lora_alpha=2)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}
    safetensors_torch.save_file(rounded, adapter / "adapter_model.safetensors")
    again = read_adapter(adapter, "bfloat16")
    assert again["lora_weights"].tobytes() == read["lora_weights"].tobytes()
