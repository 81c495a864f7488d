"""Check a checkpoint's files before anything is started on them, without reading the weights.

The names of the weights are in the headers of safetensors files. What needs the model's class is checked
when the engine loads it, in ``cog_triton.engines.transformers_loading``.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from cog_triton.engines.model_config import first_names
from cog_triton.errors import ConfigurationError

# Components of names that wrappers of a model leave in a checkpoint that was saved through them.
_WRAPPERS = frozenset(
    (
        "_orig_mod",
        "_forward_module",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "base_layer",
    )
)
_WRAPPER_PREFIXES = ("module.", "base_model.model.")
# The layers of a language model, and not those of an encoder of images or sounds beside it.
_LAYER = re.compile(r"(?:(?:model|language_model|transformer|gpt_neox)\.)*(?:layers|h)\.(\d+)\.")
# Numbers of layers that predict further tokens; they stand behind the others in a checkpoint.
_PREDICTION_COUNTS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
)
# Parts that such layers alone have, where the configuration has lost their number.
_PREDICTION_PARTS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})
_POINTER = b"version https://git-lfs"
_PICKLE = b"\x80"
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_weight_files(directory: Path) -> set[str]:
    """Check that all files of weights are there and whole; return the names in safetensors files."""
    for index in (directory / name for name in WEIGHT_INDEXES):
        missing = sorted(name for name in shards(index) if not (directory / name).is_file())
        if missing:
            raise ConfigurationError(
                f"{index} lists files that do not exist: {', '.join(missing)}; download them again"
            )
    files = sorted(directory.glob("*.safetensors"))
    if not files and not any(directory.glob("*.bin")):
        raise ConfigurationError(f"{directory} contains no weights (*.safetensors or *.bin)")
    names: set[str] = set()
    for file in files:
        try:
            # Opening it checks the file's length against its header.
            with safetensors.safe_open(file, framework="numpy") as opened:
                names.update(opened.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigurationError(
                f"{file} is damaged or incomplete: {_safetensors_problem(file, error)}"
            ) from None
    for file in directory.glob("pytorch_model*.bin"):
        problem = _pickle_problem(file)
        if problem is not None and not files:
            raise ConfigurationError(f"{file} is damaged or incomplete: {problem}")
    return names


def _pointer_problem(file: Path) -> str | None:
    """Return what is wrong with a file that Git LFS has left in the place of the real one.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) != _POINTER:
            return None
    return "it is a Git LFS pointer, not the file itself; run `git lfs pull`"


def _safetensors_problem(file: Path, error: Exception) -> str:
    """Return what is wrong with a file that safetensors refuses with an error."""
    try:
        return _pointer_problem(file) or str(error)
    except OSError as read_error:
        return f"it cannot be read: {read_error.strerror}"


def _pickle_problem(file: Path) -> str | None:
    """Return what is wrong with a file of torch.save(), by its ends: a zip file, or a pickle."""
    try:
        with file.open("rb") as opened:
            is_pickle = opened.read(1) == _PICKLE
        if is_pickle or zipfile.is_zipfile(file):
            return None
        return _pointer_problem(file) or "it is truncated, or torch.save() did not write it"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def refuse_adapter(directory: Path) -> None:
    """Refuse the directory of an adapter alone, whose model is somewhere else."""
    patterns = ("*.safetensors", "*.bin")
    files = [file for pattern in patterns for file in directory.glob(pattern)]
    if any(not file.name.startswith("adapter_") for file in files):
        return
    base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
    of_base = f" of {base}" if base else ""
    raise ConfigurationError(
        f"{directory} contains an adapter{of_base}, not a model; set MODEL to the model and LORA_DIR to "
        "the directory above the adapter's, or merge the two with PEFT's merge_and_unload()"
    )


def shards(index: Path) -> set[str]:
    """Return the files that an index of shards names; none if there is no index."""
    if not index.is_file():
        return set()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigurationError(f"{index} is not a valid index of shards: it has no weight_map")
    for weight, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigurationError(
                f"{index} is not a valid index of shards: its weight_map maps {weight} to {file!r}, which "
                "is not a file name"
            )
    return set(weight_map.values())


def check_weight_names(directory: Path, names: set[str]) -> None:
    """Refuse names that no model has: those of a wrapped model."""
    wrapped = [name for name in names if _is_wrapped(name)]
    if wrapped:
        raise ConfigurationError(
            f"{len(wrapped)} of {len(names)} weights in {directory} are named as in a model wrapped by "
            f"torch.compile, DDP, FSDP or PEFT: {first_names(wrapped)}; save the unwrapped model "
            "instead (for an adapter, after merge_and_unload())"
        )


def _is_wrapped(name: str) -> bool:
    return name.startswith(_WRAPPER_PREFIXES) or not _WRAPPERS.isdisjoint(name.split("."))


def unused_layers(config: Mapping[str, Any], names: set[str]) -> str | None:
    """Return a warning of layers that a checkpoint has and its configuration does not; None without any.

    Engines pass over them in silence, and the model that is left writes nonsense.
    """
    text_config = config.get("text_config") or config
    named = text_config.get("num_hidden_layers", text_config.get("n_layer"))
    if type(named) is not int:
        return None
    predicting: set[int] = set()
    layers: set[int] = set()
    for name in names:
        found = _LAYER.match(name)
        if found is None:
            continue
        layers.add(int(found[1]))
        if not _PREDICTION_PARTS.isdisjoint(name.split(".")):
            predicting.add(int(found[1]))
    count = max(layers - predicting, default=-1) + 1
    counts = [text_config.get(field) or config.get(field) for field in _PREDICTION_COUNTS]
    further = max((number for number in counts if type(number) is int), default=0)
    if count <= named + further:
        return None
    return (
        f"config.json says num_hidden_layers={named}, but the checkpoint has {count} layers: layers "
        f"{named} to {count - 1} are not used; if the model writes nonsense, correct config.json"
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object of a model's or an engine's file, or raise ConfigurationError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is not the configuration of a model or an engine")
    return content
