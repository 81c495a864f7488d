"""The build configuration: a YAML file in one of two forms, every problem of it reported at once.

The short form says what is wanted::

    model: meta-llama/Llama-2-7b-hf
    dtype: float16
    tp_size: 4
    plugins:
      gemm_plugin: float16

Its keys are the fields of ``EngineConfig``. The step form is that of Replicate's cog-trt-llm: what
is run, step by step. ``convert_to_ft`` (or ``convert``), ``quantize`` and ``build`` each have a
``script`` of TensorRT-LLM's examples or the ``executable`` trtllm-build, and its ``args``; one
without a value is a bare flag::

    model_id: meta-llama/Llama-2-7b-hf
    example_name: llama
    convert_to_ft:
      script: convert_checkpoint.py
      args:
        dtype: float16
        tp_size: 4
    build:
      executable: trtllm-build
      args:
        gemm_plugin: float16

Both become one ``EngineConfig``. The paths by which one step hands its result to the next are the
builder's, whatever the file says; other relative paths in arguments are relative to the working
directory of the build. Arguments that TensorRT-LLM has renamed or dropped since a guide was
written are read as what they are now, with a note, or refused with what to use instead.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cog_triton.errors import ConfigurationError
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.forms import read_form
from tools.engine_builder.migration import migrate
from tools.engine_builder.redaction import Redactor, secrets_in


def load_config(path: Path) -> tuple[EngineConfig, list[str]]:
    """Reads a file in either form; returns it with notes on what was read as something else.

    Raises:
        ConfigurationError: with a line for every problem.
    """
    try:
        document = yaml.load(path.read_bytes(), Loader=_UniqueKeys)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        # Not the error's own text: that quotes the line, which may hold a token.
        raise ConfigurationError(f"{path} is no YAML: {_where(error)}") from None
    return parse_config(document, str(path))


def parse_config(
    document: object, source: str = "the configuration"
) -> tuple[EngineConfig, list[str]]:
    """The configuration in a YAML document, in either form, and notes.

    Args:
        source: what to call the document in messages.

    Raises:
        ConfigurationError: with a line for every problem, each with the path of its key.
    """
    if not isinstance(document, dict):
        raise ConfigurationError(f"{source}: expected keys and values, such as model: …")
    document = {str(key): value for key, value in document.items()}
    form, problems = read_form(document)
    draft = migrate(form, document)
    order = list(document)
    problems = sorted(problems + draft.problems, key=lambda problem: _position(problem[0], order))
    problems += [(draft.origin(key), text) for key, text in _contradictions(draft.fields)]
    try:
        config = EngineConfig.model_validate(draft.fields)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = tuple(map(str, detail["loc"]))
            problems.append((draft.origin(key), _explain(detail)))
    if problems:
        hide = Redactor(secrets_in(document))
        lines = "\n".join(f"  {path}: {problem}" for path, problem in problems)
        raise ConfigurationError(hide(f"{source} cannot be used:\n{lines}"))
    return config, draft.notes


def _position(path: str, keys: list[str]) -> int:
    """Where in the file a problem is; at its end if it is of a key that is not there."""
    key = path.partition(".")[0]
    return keys.index(key) if key in keys else len(keys)


def _contradictions(fields: Mapping[str, Any]) -> Iterable[tuple[tuple[str, ...], str]]:
    """What is wrong between two keys. The values may be of any type yet."""
    prompt, total = fields.get("max_input_len"), fields.get("max_seq_len")
    if isinstance(prompt, int) and isinstance(total, int) and prompt > total:
        yield (
            ("max_input_len",),
            f"{prompt} is more than max_seq_len {total}, which has room for prompt and output",
        )
    quantized = fields.get("quantization", "none") != "none"
    if not quantized:
        for name in ("kv_cache_dtype", "calib_size", "calib_dataset", "awq_block_size"):
            if fields.get(name) is not None:
                yield (name,), "has no effect without quantization"
        for name in fields.get("quantize_args", {}):
            yield ("quantize_args", name), "has no effect without quantization"
    elif fields.get("convert_args"):
        for name in fields["convert_args"]:
            yield ("convert_args", name), "has no effect: quantize.py replaces the conversion"
    if fields.get("checkpoint") is not None:
        for name in (
            "quantization",
            "convert_args",
            "convert_script",
            "dtype",
            "tp_size",
            "pp_size",
        ):
            if fields.get(name) not in (None, {}, "none", 1):
                yield (name,), "has no effect with checkpoint, which is ready to be built"


def _explain(detail: Any) -> str:
    """One of pydantic's errors in our words; the value of a secret is never in it."""
    message = re.sub(r"^(Value error, |Input should be )", "", detail["msg"])
    message = message.replace("'", "")
    if detail["type"] == "missing":
        return "required"
    if detail["type"] == "value_error" or detail["msg"].startswith("Input should be"):
        message = message if message.startswith("expected ") else f"expected {message}"
    if "hf_token" in detail["loc"]:
        return message
    return f"{message}, got {detail['input']!r}"


def _where(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
    return f"{place}: {problem}" if problem else place


class _UniqueKeys(yaml.SafeLoader):
    """YAML, but a key that stands twice is an error: one of the two would have no effect."""

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
