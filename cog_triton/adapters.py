"""LoRA adapters by name: directories beside each other, as PEFT saves them, or converted for TensorRT-LLM.

They are looked for anew each time, so that one that appears while the server runs can be used at once. A
request names its adapter to the engine by a number, TensorRT-LLM's ``lora_task_id``; see
``wire.adapter_task_id``.
"""

from __future__ import annotations

from pathlib import Path

from cog_triton.errors import InvalidParameter
from cog_triton.wire import adapter_task_id

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CONVERTED = ("model.lora_weights.npy", "model.lora_config.npy")
"""What NVIDIA's hf_lora_convert.py makes of those; see ``cog_triton.adapter_tensors``."""


def adapter_names(directory: Path | None) -> tuple[str, ...]:
    """The names of the adapters that are there and whole, in order; without a directory there are none."""
    return tuple(path.name for path in _adapters(directory))


def adapter_path(directory: Path, task_id: int) -> Path:
    """Where an adapter is.

    Raises:
        LookupError: there is none, or more than one, of that number.
    """
    paths = _adapters(directory, task_id)
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths)
        raise LookupError(f"the adapters {names} have the same number" if names else "no adapter")
    return paths[0]


def check_adapter(name: str, directory: Path | None) -> None:
    """Refuses the name of an adapter that is not there; without a directory only the engine knows.

    Raises:
        InvalidParameter: naming those that are there.
    """
    if directory is None or not name or name in (names := adapter_names(directory)):
        return
    known = f"those of LORA_DIR are {', '.join(names)}" if names else "LORA_DIR has none"
    raise InvalidParameter(f"adapter {name!r} does not exist; {known}")


def _adapters(directory: Path | None, task_id: int | None = None) -> list[Path]:
    """The adapters that are whole, of one number if it is given: only those are looked into."""
    if directory is None or not directory.is_dir():
        return []
    paths = directory.iterdir()
    if task_id is not None:
        paths = (path for path in paths if adapter_task_id(path.name) == task_id)
    return sorted(path for path in paths if is_whole(path))


def is_whole(path: Path) -> bool:
    """Whether an adapter's files are there; what is being copied often has a name with a dot before it."""
    if path.name.startswith("."):
        return False
    converted = all((path / name).is_file() for name in CONVERTED)
    return converted or (
        (path / CONFIG).is_file() and any((path / name).is_file() for name in WEIGHTS)
    )
