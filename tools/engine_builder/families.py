"""Which convert_checkpoint.py reads which model, and how it names what all of them need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError

SCRIPT = "convert_checkpoint.py"


@dataclass(frozen=True)
class Family:
    """One directory of TensorRT-LLM's examples with a convert_checkpoint.py.

    Attributes:
        name: of the directory.
        collection: where TensorRT-LLM 0.18 and later keep it, under ``examples/models``.
        model_dir: the argument for the model's directory; the next three are alike.
        pp_size: None for a script that cannot split a model by its layers.
        extra: arguments that are always given.
    """

    name: str
    collection: str = "core"
    model_dir: str = "--model_dir"
    output_dir: str = "--output_dir"
    tp_size: str = "--tp_size"
    pp_size: str | None = "--pp_size"
    extra: tuple[str, ...] = ()


_FAMILIES = (
    Family("commandr"),
    Family(
        "gemma",
        model_dir="--model-dir",
        output_dir="--output-model-dir",
        tp_size="--world-size",
        pp_size=None,
        extra=("--ckpt-type", "hf"),
    ),
    Family("glm-4-9b"),
    Family("gpt"),
    Family("internlm2"),
    Family("llama"),
    # The scripts of these two have the argument, and refuse all but 1.
    Family("mamba", pp_size=None),
    Family("phi", pp_size=None),
    Family("qwen"),
    Family("baichuan", "contrib"),
    Family("bloom", "contrib"),
    Family("dbrx", "contrib"),
    Family("deepseek_v1", "contrib"),
    Family("deepseek_v2", "contrib"),
    Family("falcon", "contrib"),
    Family("gptj", "contrib"),
    Family("gptneox", "contrib"),
    Family("mpt", "contrib"),
    Family("opt", "contrib"),
)
FAMILIES = {family.name: family for family in _FAMILIES}

MODEL_TYPES = {
    "aquila": "llama",
    "baichuan": "baichuan",
    "bloom": "bloom",
    "chatglm": "glm-4-9b",
    "cohere": "commandr",
    "dbrx": "dbrx",
    "deepseek": "deepseek_v1",
    "deepseek_v2": "deepseek_v2",
    "exaone": "llama",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gpt2": "gpt",
    "gpt_bigcode": "gpt",
    "gpt_neox": "gptneox",
    "gptj": "gptj",
    "granite": "llama",
    "granitemoe": "llama",
    "internlm": "llama",
    "internlm2": "internlm2",
    "llama": "llama",
    "mamba": "mamba",
    "mistral": "llama",
    "mixtral": "llama",
    "mpt": "mpt",
    "nemotron": "gpt",
    "opt": "opt",
    "persimmon": "gpt",
    "phi": "phi",
    "phi3": "phi",
    "phi3small": "phi",
    "phimoe": "phi",
    "qwen": "qwen",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "starcoder2": "gpt",
}
"""``model_type`` in a model's config.json, and the family whose script reads such models."""


def family_of(model_type: str) -> Family:
    """The family of a ``model_type``.

    Raises:
        ConfigurationError: naming the known ones, and what to do about an unknown one.
    """
    try:
        return FAMILIES[MODEL_TYPES[model_type]]
    except KeyError:
        raise ConfigurationError(
            f"no conversion script is known for model_type {model_type!r}. Known are "
            f"{', '.join(sorted(MODEL_TYPES))}. Name a directory of TensorRT-LLM's examples with "
            "family, or a script with convert_script, in the build configuration"
        ) from None


def named(name: str) -> Family:
    """The family of that name; a name that is none of ours takes the common arguments."""
    return FAMILIES.get(name, Family(name))


def script_candidates(examples: Path, family: Family) -> list[Path]:
    """Where a family's script may be, the layout of the newest TensorRT-LLM first."""
    other = "core" if family.collection == "contrib" else "contrib"
    directories = [
        examples / "models" / family.collection / family.name,
        examples / "models" / other / family.name,
        examples / family.name,
    ]
    if family.name == "glm-4-9b":
        directories.append(examples / "chatglm")
    return [directory / SCRIPT for directory in directories]
