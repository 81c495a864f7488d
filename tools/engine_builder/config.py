"""The build configuration: a YAML file whose keys are the fields of ``EngineConfig``::

model: meta-llama/Llama-2-7b-hf
dtype: float16
tp_size: 4
plugins:
  gemm_plugin: float16
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from cog_triton.errors import ConfigurationError

_TABLES = yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8"))
PLUGINS: dict[str, list[str] | None] = _TABLES["plugins"]
PARALLEL: list[str] = _TABLES["parallel"]
LIMITS = (
    *("max_batch_size", "max_input_len", "max_seq_len"),
    *("max_num_tokens", "max_beam_width", "workers"),
)
_QUANTIZED_ONLY = ("kv_cache_dtype", "calib_size", "calib_dataset", "awq_block_size")
_NOT_WITH_CHECKPOINT = (
    *("quantization", "convert_args", "convert_script"),
    *("dtype", "tp_size", "pp_size"),
)


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would take true for 1
        raise ValueError("expected a number")
    return value


Count = Annotated[int, BeforeValidator(_not_boolean), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_not_boolean), Field(gt=0)]
Scalar = str | int | float | bool | None
Arguments = Mapping[str, Scalar | list[Scalar]]
"""Names without dashes, and a value each: one, a list of them, or None for a bare flag."""


class EngineConfig(BaseModel):
    """A build: source, precision, parallelism and limits. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    """Hugging Face id, local directory, or URL of a tar with one."""
    checksum: str | None = None
    """Of the model, as weights are checked."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """Source of the tokenizer; the model when unset."""
    hf_token: SecretStr | None = Field(default=None, exclude=True)
    """Hugging Face token for the download. Better given as HF_TOKEN; never stored."""
    trust_remote_code: bool = False
    """Run the Python code that the model brings: conversion does."""
    checkpoint: Path | None = None
    """An existing TensorRT-LLM checkpoint; nothing is converted or quantized then."""
    family: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Directory of TensorRT-LLM's examples with the conversion script; by model_type when unset."""
    convert_script: Path | None = None
    """Conversion script; a relative path is under the examples."""
    quantize_script: Path = Path("quantization/quantize.py")
    """Quantization script; a relative path is under the examples."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] | None = None
    """Data type of weights that are not quantized; the script's default."""
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
    ] = "none"
    """quantize.py's --qformat; none converts instead. The next four need it."""
    kv_cache_dtype: Literal["fp8", "int8"] | None = None
    calib_size: Count | None = None
    """Samples to calibrate with."""
    calib_dataset: str | None = None
    """Hugging Face id or directory of the samples."""
    awq_block_size: Count | None = None
    tp_size: Count = 1
    """GPUs that each layer is split over."""
    pp_size: Count = 1
    """GPUs that the layers are distributed over."""
    max_batch_size: Count | None = None
    max_input_len: Count | None = None
    """Tokens of a prompt."""
    max_seq_len: Count | None = None
    """Tokens of prompt and output."""
    max_num_tokens: Count | None = None
    """Tokens in one batch."""
    max_beam_width: Count | None = None
    workers: Count | None = None
    """Ranks that are built in parallel."""
    kv_cache_type: Literal["paged", "continuous", "disabled"] | None = None
    plugins: Mapping[str, str | int] = {}
    """Plugin configuration of trtllm-build, such as gemm_plugin: auto."""
    convert_args: Arguments = {}
    """More arguments of the conversion script; the next two of quantize.py and trtllm-build."""
    quantize_args: Arguments = {}
    build_args: Arguments = {}
    timeout: Seconds | None = None
    """Seconds that a step may take."""

    @property
    def quantized(self) -> bool:
        return self.quantization != "none"

    @property
    def world_size(self) -> int:
        """Ranks of the engine, one file and one GPU each."""
        return self.tp_size * self.pp_size

    def plain(self) -> dict[str, Any]:
        """Return what was set, without the token, as keys and values that build the same."""
        return self.model_dump(mode="json", exclude_defaults=True)


def load_config(path: Path) -> EngineConfig:
    """Read a file.

    Raises:
        ConfigurationError: with a line for every problem.
    """
    try:
        document = yaml.load(path.read_bytes(), Loader=_UniqueKeys)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        # Not the error's own text: that quotes the line, which may hold a token.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigurationError(f"{path} is not YAML: {place}: {problem}") from None
    return parse_config(document, str(path))


def parse_config(document: object, source: str = "the configuration") -> EngineConfig:
    """Validate a YAML document.

    Args:
        source: names the document in errors.

    Raises:
        ConfigurationError: with a line for every problem, each with the path of its key.
    """
    if not isinstance(document, dict):
        raise ConfigurationError(f"{source}: expected keys and values, such as model: …")
    fields = {str(key): value for key, value in document.items() if value is not None}
    problems: list[Problem] = []
    for name in ("plugins", "convert_args", "quantize_args", "build_args"):
        if isinstance(fields.get(name), dict):
            # As on a command line, with any number of dashes.
            fields[name] = {str(key).lstrip("-"): v for key, v in fields[name].items()}
    if isinstance(fields.get("plugins"), dict):
        fields["plugins"] = {k: _plugin_value(k, v) for k, v in fields["plugins"].items()}
        problems += _plugin_problems(fields["plugins"])
    if isinstance(fields.get("build_args"), dict):
        problems += _build_argument_problems(fields["build_args"])
    problems += _contradictions(fields)
    try:
        config = EngineConfig.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        seen = {path for path, _ in problems}
        for detail in details:
            # Of a union each member complains, at a path of its own.
            path = ".".join(map(str, detail["loc"][:2]))
            if path not in seen:
                seen.add(path)
                problems.append((path, _explain(detail)))
    if problems:
        lines = "\n".join(f"  {path}: {problem}" for path, problem in problems)
        raise ConfigurationError(f"{source} cannot be used:\n{lines}")
    return config


Problem = tuple[str, str]
"""The path of a key, and the problem."""


def _plugin_value(name: str, value: Any) -> Any:
    """Spell a plugin's value as trtllm-build does: true, false and a bare flag are words there."""
    choices = PLUGINS.get(name)
    if choices and (value is None or value is True):
        return choices[0]
    return "disable" if choices and value is False else value


def _plugin_problems(plugins: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in plugins.items():
        path = f"plugins.{name}"
        if name not in PLUGINS:
            yield path, _unknown(name, PLUGINS)
        elif (choices := PLUGINS[name]) is None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield path, f"expected a whole number above 0, got {value!r}"
        elif value not in choices:
            yield path, f"expected {' or '.join(choices)}, got {value!r}"


def _build_argument_problems(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Find misspelled arguments now, and not after an hour of converting; pass unknown ones."""
    known = [*_TABLES["others"], *PARALLEL]
    for name in arguments:
        path = f"build_args.{name}"
        if name in PLUGINS:
            yield path, f"use plugins: {name}"
        elif name in LIMITS:
            yield path, f"use the key {name}"
        elif name in _TABLES["gone"]:
            yield path, _TABLES["gone"][name]
        elif name not in known:
            close = get_close_matches(name, [*known, *LIMITS, *PLUGINS], 1, 0.8)
            if close:
                yield path, f"unknown argument of trtllm-build; did you mean {close[0]}?"


def _contradictions(fields: Mapping[str, Any]) -> Iterator[Problem]:
    prompt, total = fields.get("max_input_len"), fields.get("max_seq_len")
    if isinstance(prompt, int) and isinstance(total, int) and prompt > total:
        text = f"{prompt} is more than max_seq_len {total}, which has room for prompt and output"
        yield "max_input_len", text
    if fields.get("quantization", "none") == "none":
        for name in (*_QUANTIZED_ONLY, "quantize_args"):
            if fields.get(name):
                yield name, "has no effect without quantization"
    elif fields.get("convert_args"):
        yield "convert_args", "has no effect: quantize.py replaces the conversion"
    if "checkpoint" in fields:
        for name in _NOT_WITH_CHECKPOINT:
            if fields.get(name) not in (None, {}, "none", 1):
                yield name, "has no effect with checkpoint, which is ready to be built"


def _explain(detail: Any) -> str:
    """Say one of pydantic's errors without the value, which may be a secret."""
    if detail["type"] == "missing":
        return "required"
    if detail["type"] == "extra_forbidden":
        name = str(detail["loc"][-1])
        if name in ("model_id", "model_tar_url", "example_name", "convert_to_ft", "build"):
            return "unknown key: the steps of cog-trt-llm's files are not read; see CHANGELOG.md"
        return _unknown(name, EngineConfig.model_fields)
    text = str(detail["msg"]).removeprefix("Value error, ").replace("'", "")
    return text.replace("Input should be", "expected")


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, list(known), 1)
    return "unknown key" + (f"; did you mean {close[0]}?" if close else "")


class _UniqueKeys(yaml.SafeLoader):
    """YAML, in which a key that stands twice is an error: one of the two would have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)
