"""What is built: the one model that both forms of the YAML file become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would take true for 1
        raise ValueError("expected a number")
    return value


Count = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_no_boolean), Field(gt=0)]
Arguments = Mapping[str, Any]
"""Names without dashes, and a value each: one, a list of them, or None for a bare flag."""


class EngineConfig(BaseModel):
    """What is built, from what, and how. Frozen. The field names are the short form's keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        min_length=1,
        description="Hugging Face id, local directory, or URL of a tar with one.",
    )
    checksum: str | None = Field(
        default=None, description="Checksum of the model, as weights are checked."
    )
    tokenizer: str | None = Field(
        default=None, min_length=1, description="Where the tokenizer is from; the model when unset."
    )
    hf_token: SecretStr | None = Field(
        default=None,
        exclude=True,
        description="Hugging Face token for the download. Better given as HF_TOKEN; never stored.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="The Python code that the model brings may be run: conversion runs it.",
    )
    checkpoint: Path | None = Field(
        default=None,
        description="An existing TensorRT-LLM checkpoint; nothing is converted or quantized then.",
    )
    family: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="Directory of TensorRT-LLM's examples with the conversion script; from the "
        "model's model_type when unset.",
    )
    convert_script: Path | None = Field(
        default=None, description="Conversion script; a relative path is under the examples."
    )
    quantize_script: Path = Field(
        default=Path("quantization/quantize.py"),
        description="Quantization script; a relative path is under the examples.",
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] | None = Field(
        default=None,
        description="Data type of weights that are not quantized; the script's default.",
    )
    quantization: Literal[
        "none",
        "fp8",
        "fp8_pc_pt",
        "int8_sq",
        "int4_awq",
        "w4a8_awq",
        "int8_wo",
        "int4_wo",
        "nvfp4",
    ] = Field(default="none", description="quantize.py's --qformat; none converts instead.")
    kv_cache_dtype: Literal["fp8", "int8"] | None = Field(
        default=None, description="Quantized KV cache; needs quantization."
    )
    calib_size: Count | None = Field(
        default=None, description="Samples to calibrate with; needs quantization."
    )
    calib_dataset: str | None = Field(
        default=None,
        description="Hugging Face id or directory of the samples; needs quantization.",
    )
    awq_block_size: Count | None = Field(
        default=None, description="Block size of AWQ; needs quantization."
    )
    tp_size: Count = Field(default=1, description="GPUs that each layer is split over.")
    pp_size: Count = Field(default=1, description="GPUs that the layers are distributed over.")
    max_batch_size: Count | None = Field(default=None, description="Requests in one batch.")
    max_input_len: Count | None = Field(default=None, description="Tokens of a prompt.")
    max_seq_len: Count | None = Field(default=None, description="Tokens of prompt and output.")
    max_num_tokens: Count | None = Field(default=None, description="Tokens in one batch.")
    max_beam_width: Count | None = Field(default=None, description="Beams of a beam search.")
    workers: Count | None = Field(default=None, description="Ranks that are built in parallel.")
    kv_cache_type: Literal["paged", "continuous", "disabled"] | None = None
    plugins: Mapping[str, str | int] = Field(
        default={}, description="Plugin configuration of trtllm-build, such as gemm_plugin: auto."
    )
    convert_args: Arguments = Field(
        default={}, description="More arguments of the conversion script."
    )
    quantize_args: Arguments = Field(default={}, description="More arguments of quantize.py.")
    build_args: Arguments = Field(default={}, description="More arguments of trtllm-build.")
    timeout: Seconds | None = Field(default=None, description="Seconds that a step may take.")

    @property
    def quantized(self) -> bool:
        """Whether quantize.py makes the checkpoint."""
        return self.quantization != "none"

    @property
    def world_size(self) -> int:
        """Ranks of the engine, one file and one GPU each."""
        return self.tp_size * self.pp_size

    def plain(self) -> dict[str, Any]:
        """What was set, as plain data without the token: a short form that builds the same."""
        return self.model_dump(mode="json", exclude_defaults=True)
