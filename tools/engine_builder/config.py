"""The build configuration: a YAML file with the fields of ``EngineConfig``, as in examples/engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from cog_triton.errors import ConfigurationError

_TABLES = yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8"))
PLUGINS: dict[str, list[str] | None] = _TABLES["plugins"]
LIMITS: list[str] = _TABLES["limits"]
QUANTIZED_ONLY = ("kv_cache_dtype", "calib_size", "calib_dataset", "awq_block_size")
CONVERSION_ONLY = ("quantization", "convert_args", "convert_script", "dtype", "tp_size", "pp_size")

Count = Annotated[int, Field(strict=True, ge=1)]
# As on a command line, with any number of dashes.
Name = Annotated[str, BeforeValidator(lambda name: str(name).lstrip("-"))]
Arguments = Mapping[Name, Any]
"""Names without dashes, and a value each: one, a list of them, or None for a bare flag."""


def _check(problems: Callable[[Arguments], Iterable[str]]) -> AfterValidator:
    """Return the validator that refuses arguments in which a function finds problems."""

    def check(arguments: Arguments) -> Arguments:
        if found := list(problems(arguments)):
            raise ValueError("\n".join(found))
        return arguments

    return AfterValidator(check)


def _plugin_problems(plugins: Arguments) -> Iterator[str]:
    for name, value in plugins.items():
        choices = PLUGINS.get(name)
        if name not in PLUGINS:
            yield f"{name}: unknown plugin{_did_you_mean(name, PLUGINS)}"
        elif choices and value not in choices:
            yield f"{name}: expected {' or '.join(choices)}, got {value!r}"
        elif not choices and (type(value) is not int or value < 1):
            yield f"{name}: expected a whole number above 0, got {value!r}"


def _build_argument_problems(names: Iterable[str]) -> Iterator[str]:
    """Find a misspelled argument now, and not after an hour of converting; pass unknown ones."""
    known = [*_TABLES["others"], *LIMITS, *PLUGINS]
    for name in names:
        if name in PLUGINS:
            yield f"{name}: use plugins: {name}"
        elif name in LIMITS:
            yield f"{name}: use the key {name}"
        elif name in _TABLES["gone"]:
            yield f"{name}: {_TABLES['gone'][name]}"
        elif name not in known and (close := _did_you_mean(name, known, 0.8)):
            yield f"{name}: unknown argument of trtllm-build{close}"


def _did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    close = get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {close[0]}?" if close else ""


class EngineConfig(BaseModel):
    """A build: source, precision, parallelism and limits. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)  # Hugging Face id, local directory, or URL of a tar with one
    checksum: str | None = None  # of the model, as weights are checked
    # Source of the tokenizer; the model when unset.
    tokenizer: str | None = Field(default=None, min_length=1)
    trust_remote_code: bool = False  # run the Python code that the model brings: conversion does
    # An existing TensorRT-LLM checkpoint; nothing is converted or quantized then.
    checkpoint: Path | None = None
    # Directory of TensorRT-LLM's examples with the conversion script; by model_type when unset.
    family: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    convert_script: Path | None = None  # conversion script; a relative path is under the examples
    # Quantization script; a relative path is under the examples.
    quantize_script: Path = Path("quantization/quantize.py")
    # Data type of weights that are not quantized; the script's default.
    dtype: Literal["auto", "float16", "bfloat16", "float32"] | None = None
    # quantize.py's --qformat; none converts instead. The next four need it.
    quantization: Literal[
        "none", "fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo", "nvfp4"
    ] = "none"
    kv_cache_dtype: Literal["fp8", "int8"] | None = None
    calib_size: Count | None = None  # samples to calibrate with
    calib_dataset: str | None = None  # Hugging Face id or directory of the samples
    awq_block_size: Count | None = None
    tp_size: Count = 1  # GPUs that each layer is split over
    pp_size: Count = 1  # GPUs that the layers are distributed over
    max_batch_size: Count | None = None
    max_input_len: Count | None = None  # tokens of a prompt
    max_seq_len: Count | None = None  # tokens of prompt and output
    max_num_tokens: Count | None = None  # tokens in one batch
    max_beam_width: Count | None = None
    workers: Count | None = None  # ranks that are built in parallel
    kv_cache_type: Literal["paged", "continuous", "disabled"] | None = None
    # Plugin configuration of trtllm-build, such as gemm_plugin: auto.
    plugins: Annotated[Arguments, _check(_plugin_problems)] = {}
    # More arguments of the conversion script; the next two of quantize.py and trtllm-build.
    convert_args: Arguments = {}
    quantize_args: Arguments = {}
    build_args: Annotated[Arguments, _check(_build_argument_problems)] = {}

    @model_validator(mode="after")
    def _check_contradictions(self) -> EngineConfig:
        unused = dict.fromkeys(
            (*QUANTIZED_ONLY, "quantize_args"), "has no effect without quantization"
        )
        if self.quantized:
            unused = {"convert_args": "has no effect: quantize.py replaces the conversion"}
        if self.checkpoint:
            text = "has no effect with checkpoint, which is ready to be built"
            unused |= dict.fromkeys(CONVERSION_ONLY, text)
        given = self.model_dump(exclude_defaults=True)
        problems = [f"{key}: {text}" for key, text in unused.items() if key in given]
        if self.max_input_len and self.max_seq_len and self.max_input_len > self.max_seq_len:
            text = "is more than max_seq_len, which has room for prompt and output"
            problems.append(f"max_input_len: {self.max_input_len} {text}")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def quantized(self) -> bool:
        return self.quantization != "none"


def load_config(path: Path) -> EngineConfig:
    """Read a file, or raise ConfigurationError with a line for every problem."""
    try:
        document = yaml.safe_load(path.read_bytes())
        return EngineConfig.model_validate(document)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        problems: list[str] = []
        for detail in error.errors(include_url=False):
            key = ".".join(map(str, detail["loc"]))
            text = detail["msg"].removeprefix("Value error, ")
            if detail["type"] == "extra_forbidden":
                text = "unknown key" + _did_you_mean(key, EngineConfig.model_fields)
            problems += [f"{key}: {line}".removeprefix(": ") for line in text.splitlines()]
    text = "\n  ".join(problems)
    raise ConfigurationError(f"{path} cannot be used:\n  {text}")
