"""Engine directories for the stand-in."""

import json
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).with_name("engine.json")
VOCAB_SIZE = 1024  # the demo model's


def make_engine(
    directory: Path,
    *,
    world_size: int = 1,
    dtype: str = "float16",
    version: str = "1.2.1",
    vocab_size: int = VOCAB_SIZE,
    **build: Any,
) -> Path:
    """An engine directory with everything but weights.

    Args:
        world_size: GPUs that it is for.
        dtype: of its weights.
        version: of the TensorRT-LLM that built it.
        vocab_size: number of its logits; models pad the tokenizer's vocabulary.
        build: members of config.json's build_config in place of those in engine.json.
    """
    directory.mkdir(parents=True)
    config = json.loads(CONFIG.read_text()) | {"version": version}
    config["pretrained_config"]["dtype"] = dtype
    config["pretrained_config"]["vocab_size"] = vocab_size
    config["pretrained_config"]["mapping"] |= {"world_size": world_size, "tp_size": world_size}
    config["build_config"] |= build
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(world_size):
        (directory / f"rank{rank}.engine").write_bytes(b"no weights")
    return directory
