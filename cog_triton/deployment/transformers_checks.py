"""Checks of a checkpoint for the transformers engine, before the engine loads it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cog_triton.deployment.checkpoint import read_json
from cog_triton.engines.model_config import first_names
from cog_triton.text.tokenizer import without_torch

# The last components of the names of scales, zero points and the like, which belong to quantized weights.
_QUANTIZATION_PARTS = frozenset(
    (
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_zero_point",
        "weight_packed",
        "input_scale",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "absmax",
        "quant_map",
        "SCB",
    )
)
# The ends of the names of architectures that do not generate text.
_HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
    "RewardModel",
)
# The files that transformers looks for; others of a checkpoint are found by an index.
_ENTRY_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INSTEAD = "use ENGINE=vllm or a checkpoint that is not quantized"


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
    """Yield what is wrong with the token ids in a checkpoint's files: transformers' errors do not say."""
    ends = config.get("eos_token_id")
    if ends is None:
        listed = []
    elif isinstance(ends, list):
        listed = ends
    else:
        listed = [ends]
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
    """Yield why transformers cannot load the quantized weights of a checkpoint."""
    quantization = _quantization_config(config)
    if quantization is not None:
        problem = _method_problem(directory, quantization)
    elif (directory / "hf_quant_config.json").is_file():
        problem = (
            f"{directory} was quantized with NVIDIA's ModelOpt (hf_quant_config.json), which "
            f"transformers does not support; {_INSTEAD}"
        )
    else:
        problem = _undeclared_problem(directory, names)
    if problem is not None:
        yield problem


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of a configuration on quantization; None without one."""
    text_config = config.get("text_config") or {}
    for quantization in (
        config.get("quantization_config"),
        text_config.get("quantization_config"),
        # The first releases of llm-compressor wrote this.
        config.get("compression_config"),
    ):
        if isinstance(quantization, Mapping) and quantization:
            return quantization
    return None


def _method_problem(directory: Path, quantization: Mapping[str, Any]) -> str | None:
    """Return a problem if transformers does not know the method of a quantization."""
    method = quantization.get("quant_method")
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        method = "bitsandbytes"
    known = quantization_methods()
    if method in known:
        return None
    return (
        f"transformers does not support the quantization {method!r} in {directory}/config.json "
        f"(it supports {', '.join(known)}); {_INSTEAD}"
    )


def _undeclared_problem(directory: Path, names: set[str]) -> str | None:
    """Return a problem if weights are quantized and the configuration does not say so."""
    parts = [name for name in names if name.rpartition(".")[2] in _QUANTIZATION_PARTS]
    if not parts:
        return None
    return (
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
