"""Engine directories for the stand-in, and the settings of a server that runs one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1024  # the demo model's


def make_engine(
    directory: Path, *, world_size: int = 1, dtype: str = "float16", **build: Any
) -> Path:
    """An engine directory with everything but weights.

    Args:
        world_size: GPUs that it is for.
        dtype: of its weights.
        build: members of config.json's build_config in place of those here.
    """
    directory.mkdir(parents=True)
    config = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": dtype,
            "num_hidden_layers": 4,
            "vocab_size": VOCAB_SIZE,
            "mapping": {"world_size": world_size, "tp_size": world_size, "pp_size": 1},
        },
        "build_config": {
            "max_input_len": 1024,
            "max_seq_len": 2048,
            "max_batch_size": 64,
            "max_num_tokens": 8192,
            "max_beam_width": 4,
            "plugin_config": {"context_fmha": True, "remove_input_padding": True},
            **build,
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(world_size):
        (directory / f"rank{rank}.engine").write_bytes(b"no weights")
    return directory
