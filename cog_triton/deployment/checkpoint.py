"""Check a checkpoint's files before anything is started on them, without reading the weights.

The names of the weights are in the headers of safetensors files. What needs the model's class is checked
when the engine loads it, in ``cog_triton.engines.transformers_loading``.
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors

from cog_triton.engines.model_config import first_names
from cog_triton.errors import ConfigurationError
from cog_triton.text.tokenizer import without_torch

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
# Last components of the names of what belongs to a quantized weight.
_QUANTIZATION_PARTS = frozenset(
    (
        *(
            "weight_scale",
            "weight_scale_inv",
            "weight_scale_2",
            "weight_zero_point",
            "weight_packed",
        ),
        *("input_scale", "qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "SCB"),
    )
)
_HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
    "RewardModel",
)
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
# The files that transformers looks for; others of a checkpoint are found by an index.
_ENTRY_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
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
                f"{file} is damaged or incomplete: {_pointer_problem(file) or error}"
            ) from None
    for file in directory.glob("pytorch_model*.bin"):
        problem = _pickle_problem(file)
        if problem is not None and not files:
            raise ConfigurationError(f"{file} is damaged or incomplete: {problem}")
    return names


def _pointer_problem(file: Path) -> str | None:
    """Return what is wrong with a file that Git LFS has left in the place of the real one."""
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) != _POINTER:
            return None
    return "it is a Git LFS pointer, not the file itself; run `git lfs pull`"


def _pickle_problem(file: Path) -> str | None:
    """Return what is wrong with a file of torch.save(), by its ends: a zip file, or a pickle."""
    with file.open("rb") as opened:
        is_pickle = opened.read(1) == _PICKLE
    if is_pickle or zipfile.is_zipfile(file):
        return None
    return _pointer_problem(file) or "it is truncated, or torch.save() did not write it"


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


def transformers_problems(
    directory: Path, config: Mapping[str, Any], names: set[str]
) -> Iterator[str]:
    """Yield what keeps transformers from loading the checkpoint as its author meant it."""
    architectures = config.get("architectures") or []
    head = next((one for one in architectures if str(one).endswith(_HEADS)), None)
    if head is not None:
        yield (
            f"{directory} contains a {head}, which does not generate text; "
            "use the checkpoint of a causal language model (…ForCausalLM)"
        )
    if not any((directory / name).is_file() for name in _ENTRY_FILES):
        files = sorted(
            file.name for pattern in ("*.safetensors", "*.bin") for file in directory.glob(pattern)
        )
        yield (
            f"{directory} contains the weights {first_names(files)} but none of the files that "
            f"transformers looks for ({', '.join(_ENTRY_FILES)}); the download may be incomplete"
        )
    yield from _quantization_problems(directory, config, names)
    yield from _token_problems(directory, config)


def _token_problems(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what transformers cannot read of the ids that the files name, which it says in riddles."""
    ends = config.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int for token in listed):
        yield f"{directory}/config.json: eos_token_id must be a token id or a list of them, not {ends!r}"
    generation: Mapping[str, Any] = {}
    if (directory / "generation_config.json").is_file():
        generation = read_json(directory / "generation_config.json")
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        padding = content.get("pad_token_id")
        if padding is not None and type(padding) is not int:
            yield f"{directory}/{name}: pad_token_id must be a token id, not {padding!r}"


def family_problem(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return why transformers generates no text with a model of this family; None if it does.

    This imports transformers, which takes most of a second.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or "auto_map" in config:
        # The loader says what is wrong, and a model's code may do anything.
        return None
    without_torch()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if family in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return None
    if family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return (
            f"{directory} is a vision-language model ({family}), but ENGINE=transformers supports only "
            "text models; ENGINE=vllm supports many models of this kind"
        )
    return (
        f"the installed transformers cannot generate text with the model type {family!r} in "
        f"{directory}/config.json; try ENGINE=vllm or a newer transformers that cog-triton[local] allows"
    )


def _quantization_problems(
    directory: Path, config: Mapping[str, Any], names: set[str]
) -> Iterator[str]:
    text_config = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text_config.get("quantization_config")
    if quantization is None:
        # The first releases of llm-compressor wrote this.
        quantization = config.get("compression_config")
    elsewhere = "use ENGINE=vllm or a checkpoint that is not quantized"
    if isinstance(quantization, Mapping):
        in_bits = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
        method = "bitsandbytes" if in_bits else quantization.get("quant_method")
        known = quantization_methods()
        if method not in known:
            yield (
                f"transformers does not support the quantization {method!r} in {directory}/config.json "
                f"(it supports {', '.join(known)}); {elsewhere}"
            )
    elif (directory / "hf_quant_config.json").is_file():
        yield (
            f"{directory} was quantized with NVIDIA's ModelOpt (hf_quant_config.json), which "
            f"transformers does not support; {elsewhere}"
        )
    else:
        parts = [name for name in names if name.rpartition(".")[2] in _QUANTIZATION_PARTS]
        if parts:
            yield (
                f"{directory} contains {len(parts)} scales or zero points of quantized weights "
                f"({first_names(parts)}), but its config.json has no quantization_config; use the "
                "config.json that was saved with the quantized checkpoint"
            )


def quantization_methods() -> list[str]:
    """Return the quantizations that the installed transformers knows."""
    without_torch()
    # Here, because it takes a second.
    from transformers.utils.quantization_config import QuantizationMethod

    return sorted(method.value for method in QuantizationMethod)


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
