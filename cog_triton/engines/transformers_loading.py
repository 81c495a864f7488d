"""Loads a checkpoint with transformers, and refuses one that does not fill the model it describes."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cog_triton.engines.model_config import first_names
from cog_triton.text.tokenizer import remote_code_lock, remote_code_refusal


def load_model(parameters: Mapping[str, str]) -> Any:
    """Load a causal language model from a local directory or by its Hugging Face id."""
    name, device = parameters["model"], parameters.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    trusted = parameters.get("trust_remote_code") == "true"
    try:
        config = _load_config(name, trusted)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=parameters.get("dtype", "auto"),
            attn_implementation=attention(config),
            trust_remote_code=trusted,
            ignore_mismatched_sizes=True,  # its own error names none
            output_loading_info=True,
        )
    except ValueError as error:
        text = remote_code_refusal(error, "model", name)
        if trusted or not text:
            raise
        raise ValueError(text) from error
    check_report(name, model, report)
    return model.to(device).eval()


def _load_config(name: str, trusted: bool) -> Any:
    if not trusted:
        return AutoConfig.from_pretrained(name)
    # Processes of the tokenizer load the same code at the same time.
    with remote_code_lock():
        return AutoConfig.from_pretrained(name, trust_remote_code=True)


def model_class(config: Any) -> Any:
    """Return the class that transformers has for a configuration; None for code that a model brings."""
    return AutoModelForCausalLM._model_mapping.get(type(config), None)


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
            f"the weights of {name} are not those of its config.json: {weight} has the shape "
            f"{tuple(shape)}, and should have {tuple(expected)}"
        )
    missing = sorted(report["missing_keys"])
    unexpected = sorted(report["unexpected_keys"])
    if missing:
        text = f"{name} lacks {len(missing)} of the model's weights: {first_names(missing)}"
        if unexpected:
            text += (
                f"; it has {len(unexpected)} that are not the model's: {first_names(unexpected)}"
            )
        raise ValueError(
            f"{text}. Random numbers would take their place; check that the checkpoint is complete, and "
            "that it is one of the architecture in its config.json"
        )
    ignored = [key for key in unexpected if _belongs_to_a_weight(model, key)]
    if ignored:
        raise ValueError(
            f"{name} has {len(ignored)} weights that would be ignored: {first_names(ignored)}. By "
            "config.json, the modules that they belong to have no such parameter (of a quantization, or a "
            "bias that it turns off); take the config.json that belongs to the checkpoint"
        )
    if report.get("error_msgs"):
        raise ValueError(f"{name} could not be loaded: {report['error_msgs'][0]}")


def _belongs_to_a_weight(model: Any, key: str) -> bool:
    # Without its scale or bias, a layer computes something else. Weights of whole layers or towers that
    # this model does not use are left out on purpose.
    parent = key.rpartition(".")[0]
    try:
        module = model.get_submodule(parent)
    except AttributeError:
        return False
    return parent != "" and isinstance(getattr(module, "weight", None), torch.Tensor)
