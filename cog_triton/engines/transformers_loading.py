"""Loads a checkpoint with transformers, and refuses one that does not fill the model it describes."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cog_triton.engines.model_config import first_names
from cog_triton.engines.transformers_progress import loading_progress
from cog_triton.text.tokenizer import remote_code_lock, remote_code_refusal

# Layers for which continuous batching has a cache.
_BATCHED_LAYERS = frozenset(("full_attention", "sliding_attention"))
# Where the name of a layer's kind is not a word.
_LAYER_WORDS = {"conv": "convolution"}
# Families whose class does not say what its attention can do. (Tested: tests/tiny_models.py.)
_BATCHED_FAMILIES = frozenset(("biogpt",))
_UNBATCHED_FAMILIES = frozenset(("doge", "nemotron"))
# Families without SDPA that the eager attention of continuous batching is right for: others may have
# sinks or caps that it does not know of.
_EAGER_FAMILIES = frozenset(("gemma2", "gpt_oss", "vaultgemma"))


def load_model(parameters: Mapping[str, str]) -> Any:
    """Load a causal language model from a local directory or by its Hugging Face id."""
    name = parameters["model"]
    device = parameters.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    trusted = parameters.get("trust_remote_code") == "true"
    config: Any = None
    try:
        config = _load_config(name, trusted)
        loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with loading_progress():
            model, report = loader.from_pretrained(
                name,
                config=config,
                dtype=parameters.get("dtype", "auto"),
                attn_implementation=attention(config),
                trust_remote_code=trusted,
                # Its error for mismatched sizes names no weight; see ``check_report``.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except ValueError as error:
        text = remote_code_refusal(error, "model", name)
        if trusted or not text:
            raise
        raise ValueError(text) from error
    except KeyError as error:
        kind = error.args[0] if error.args else None
        if config is None or kind not in _rope_types(config):
            raise
        raise ValueError(
            f"{name}: the installed transformers does not support the rotary embedding type {kind!r} in "
            "config.json; try ENGINE=vllm or a newer transformers"
        ) from error
    check_report(name, model, report)
    return model.to(device).eval()


def _rope_types(config: Any) -> set[Any]:
    """Return the types of a configuration's rotary embeddings: of all layers, or by their types."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    sections = [rope, *(section for section in rope.values() if isinstance(section, Mapping))]
    return {section["rope_type"] for section in sections if "rope_type" in section}


def _load_config(name: str, trusted: bool) -> Any:
    if not trusted:
        return AutoConfig.from_pretrained(name)
    # Processes of the tokenizer load the same code at the same time.
    with remote_code_lock():
        return AutoConfig.from_pretrained(name, trust_remote_code=True)


def model_class(config: Any) -> Any:
    """Return the class that transformers has for a configuration; None for code that a model brings."""
    loader: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return loader._model_mapping.get(type(config), None)


def batching_problem(config: Any, architecture: Any) -> str | None:
    """Return why continuous batching cannot run the models of a class; None if it can.

    Args:
        architecture: the class of models, such as LlamaForCausalLM.
    """
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "has an encoder"
    if architecture._is_stateful:
        return "keeps a recurrent state (like Mamba and linear attention)"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _BATCHED_LAYERS)
    if others:
        words = [_LAYER_WORDS.get(layer, layer.replace("_", " ")) for layer in others]
        return f"has {', '.join(words)} layers"
    if getattr(text, "kv_lora_rank", None):
        return "compresses keys and values (multi-head latent attention)"
    family = text.model_type
    if family in _UNBATCHED_FAMILIES:
        return "has a custom attention"
    if not architecture._supports_attention_backend and family not in _BATCHED_FAMILIES:
        return "has a custom attention"
    if not architecture._supports_sdpa and family not in _EAGER_FAMILIES:
        return "has an attention that SDPA does not support"
    rope = getattr(text, "rope_parameters", None) or {}
    if family == "phimoe" and rope.get("rope_type") == "longrope":
        return "scales its attention by the length of a whole batch (LongRoPE)"
    return None


def attention(config: Any) -> str:
    """Return the implementation of attention: SDPA, unless the class lacks it (soft caps, sinks)."""
    kind = model_class(config)
    return "eager" if kind is not None and not kind._supports_sdpa else "sdpa"


def check_report(name: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers' report of loading shows that weights are not the model's.

    It makes up weights that the checkpoint lacks, and leaves out those that the model has no place for.
    Tied weights and buffers that are not saved are not in its report.
    """
    for weight, shape, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"the weights of {name} do not match its config.json: {weight} has the shape "
            f"{tuple(shape)} instead of {tuple(expected)}"
        )
    missing = sorted(report["missing_keys"])
    unexpected = sorted(report["unexpected_keys"])
    if missing:
        unknown = ""
        if unexpected:
            unknown = f" and contains {len(unexpected)} unknown weights ({first_names(unexpected)})"
        raise ValueError(
            f"{name} lacks {len(missing)} of the model's weights ({first_names(missing)}){unknown}; check "
            "that the checkpoint is complete and matches the architecture in its config.json"
        )
    ignored = [key for key in unexpected if _belongs_to_a_weight(model, key)]
    if ignored:
        raise ValueError(
            f"{name} contains {len(ignored)} weights that would be ignored ({first_names(ignored)}), such "
            "as quantization scales or biases that config.json does not declare; use the config.json that "
            "belongs to the checkpoint"
        )
    if report.get("error_msgs"):
        raise ValueError(f"{name} could not be loaded: {report['error_msgs'][0]}")


def _belongs_to_a_weight(model: Any, key: str) -> bool:
    """Return whether an unexpected tensor is in a layer of the model, beside the layer's weight.

    Without this scale or bias, the layer computes something else. Weights of whole layers or towers that
    the model does not have are left out on purpose.
    """
    parent = key.rpartition(".")[0]
    try:
        module = model.get_submodule(parent)
    except AttributeError:
        return False
    return parent != "" and isinstance(getattr(module, "weight", None), torch.Tensor)
