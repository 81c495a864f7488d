"""Whether there is room for what a build makes."""

from __future__ import annotations

import shutil
from pathlib import Path

from cog_triton.errors import ConfigurationError
from tools.engine_builder.config import EngineConfig

_SHARE = {
    "none": 1.0,
    **dict.fromkeys(("fp8", "fp8_pc_pt", "int8_sq", "int8_wo"), 0.6),
    **dict.fromkeys(("int4_awq", "w4a8_awq", "int4_wo", "nvfp4"), 0.4),
}
"""Size of a checkpoint relative to the model's; the embeddings stay as they are."""


def bytes_needed(config: EngineConfig, model: Path) -> int:
    """Bytes of the checkpoint, roughly; the engine is as large, and so is the tar."""
    if config.checkpoint is not None:
        return weights_size(config.checkpoint)
    return int(weights_size(model) * _SHARE[config.quantization])


def weights_size(directory: Path) -> int:
    """Bytes of the weights in a directory, of one copy of them."""
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        sizes = [file.stat().st_size for file in directory.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0


def check_space(workdir: Path, target: Path, needed: int) -> None:
    """Fails now instead of in an hour, when a disk is surely too small.

    Args:
        workdir: gets a checkpoint and an engine.
        target: gets a tar.
        needed: bytes of each of the three.

    Raises:
        ConfigurationError: with what is needed and what is free.
    """
    demands: dict[int, tuple[Path, int]] = {}
    for directory, share in ((workdir, 2 * needed), (target, needed)):
        device = directory.stat().st_dev
        path, already = demands.get(device, (directory, 0))
        demands[device] = (path, already + share)
    for path, demand in demands.values():
        free = shutil.disk_usage(path).free
        if free < demand:
            raise ConfigurationError(
                f"not enough space in {path}: the build needs about {demand / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free"
            )
