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

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cog_triton.errors import ConfigurationError
from tools.engine_builder import arguments
from tools.engine_builder.config import EngineConfig
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
    draft = _Draft()
    if _STEP_FORM.intersection(document):
        _take_step_form(draft, document)
    else:
        _take_short_form(draft, document)
    config = draft.finish()
    if config is None or draft.problems:
        hide = Redactor(secrets_in(document))
        lines = "\n".join(f"  {path}: {problem}" for path, problem in draft.problems)
        raise ConfigurationError(hide(f"{source} cannot be used:\n{lines}"))
    return config, draft.notes


class _Draft:
    """The short form in the making, and where in the file each part of it is from."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.origins: dict[tuple[str, ...], str] = {}
        self.problems: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def refuse(self, path: str, problem: str) -> None:
        self.problems.append((path, problem))

    def note(self, path: str, text: str) -> None:
        self.notes.append(f"{path}: {text}")

    def put(self, name: str, value: Any, path: str) -> None:
        """Sets a field; two places that say different things are a problem."""
        self._put(self.fields, name, value, (name,), path)

    def put_item(self, field: str, name: str, value: Any, path: str) -> None:
        """Sets one item of a field that is a mapping."""
        if not all(
            item is None or isinstance(item, str | int | float)
            for item in (value if isinstance(value, list) else [value])
        ):
            self.refuse(path, "expected a value, a list of values, or nothing for a bare flag")
            return
        self._put(self.fields.setdefault(field, {}), name, value, (field, name), path)

    def _put(
        self, target: dict[str, Any], name: str, value: Any, key: tuple[str, ...], path: str
    ) -> None:
        if name in target and target[name] != value:
            self.refuse(path, f"contradicts {self.origins[key]}")
            return
        target[name] = value
        self.origins.setdefault(key, path)

    def finish(self) -> EngineConfig | None:
        """The configuration, or None with the problems noted."""
        for path, problem in _contradictions(self.fields):
            self.refuse(self._origin(path), problem)
        try:
            return EngineConfig.model_validate(self.fields)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                key = tuple(str(part) for part in detail["loc"])
                self.refuse(self._origin(key), _explain(detail))
            return None

    def _origin(self, key: tuple[str, ...]) -> str:
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return ".".join(key)


_SHORT_FORM = (*EngineConfig.model_fields, "max_output_len")


def _take_short_form(draft: _Draft, document: Mapping[Any, Any]) -> None:
    for key, value in document.items():
        name = str(key)
        if name not in _SHORT_FORM:
            draft.refuse(name, _unknown(name, _SHORT_FORM))
        elif name in ("plugins", *arguments.PATHS):
            _take_mapping(draft, name, value)
        elif value is not None and name != "max_output_len":
            draft.put(name, value, name)
    if document.get("max_output_len") is not None:
        _take_output_length(draft, document["max_output_len"], "max_output_len")


def _take_mapping(draft: _Draft, name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        draft.refuse(name, f"expected names and values, got {value!r}")
    elif name == "plugins":
        _take_build_arguments(draft, value, name, plugins_only=True)
    else:
        _TAKE[name](draft, value, name)


_STEPS = {
    "convert_to_ft": "convert_args",
    "convert": "convert_args",
    "quantize": "quantize_args",
    "build": "build_args",
}
_STEP_FORM = {"model_id", "model_tar_url", *_STEPS}
_AS_IN_SHORT_FORM = ("hf_token", "checksum", "tokenizer", "timeout", "trust_remote_code")
_STEP_FORM_KEYS = (
    *sorted(_STEP_FORM),
    "example_name",
    "weight_format",
    "merge",
    *_AS_IN_SHORT_FORM,
)
_STEP_KEYS = ("executable", "script", "output_dir", "args")


def _take_step_form(draft: _Draft, document: Mapping[Any, Any]) -> None:
    for key, value in document.items():
        name = str(key)
        if name not in _STEP_FORM_KEYS:
            draft.refuse(name, _unknown(name, _STEP_FORM_KEYS))
        elif name in _STEPS:
            _take_step(draft, name, value)
        elif name in _AS_IN_SHORT_FORM and value is not None:
            draft.put(name, value, name)
        elif name in ("weight_format", "merge"):
            draft.note(name, "not used")
    if document.get("example_name") is not None:
        draft.put("family", document["example_name"], "example_name")
    _take_step_form_model(draft, document)
    if {"convert", "convert_to_ft"} <= document.keys():
        draft.refuse("convert", "is the same as convert_to_ft, give one of them")
    if "quantize" in document and "quantization" not in draft.fields:
        draft.refuse("quantize.args.qformat", "required")
    _take_checkpoint(draft, document)


def _take_step_form_model(draft: _Draft, document: Mapping[Any, Any]) -> None:
    # The tar holds what the id names.
    for name in ("model_tar_url", "model_id"):
        if document.get(name) is not None:
            draft.put("model", document[name], name)
            return
    draft.refuse("model_id", "required")


def _take_step(draft: _Draft, step: str, content: Any) -> None:
    if not isinstance(content, dict):
        draft.refuse(step, "expected script or executable, and args")
        return
    for key in content:
        if key not in _STEP_KEYS:
            draft.refuse(f"{step}.{key}", _unknown(str(key), _STEP_KEYS))
    _take_program(draft, step, content)
    args = content.get("args")
    if args is not None and not isinstance(args, dict):
        draft.refuse(f"{step}.args", f"expected names and values, got {args!r}")
    elif args:
        _TAKE[_STEPS[step]](draft, args, f"{step}.args")


def _take_program(draft: _Draft, step: str, content: Mapping[Any, Any]) -> None:
    """What a step runs: only the converting and the quantizing script can be another."""
    executable, script = content.get("executable"), content.get("script")
    if executable not in (None, "python", "python3", "trtllm-build"):
        draft.refuse(f"{step}.executable", f"expected python or trtllm-build, got {executable!r}")
    elif executable == "trtllm-build" and step != "build":
        draft.refuse(f"{step}.executable", "trtllm-build is for the step build")
    if script is None:
        return
    path, name = f"{step}.script", Path(str(script)).name
    if not isinstance(script, str):
        draft.refuse(path, f"expected a path, got {script!r}")
    elif name in arguments.OLD_SCRIPTS:
        draft.note(
            path, f"{name} ended with TensorRT-LLM 0.7, {arguments.OLD_SCRIPTS[name]} is run"
        )
    elif step == "build":
        draft.refuse(path, f"engines are built by trtllm-build, not by {script}")
    elif step == "quantize":
        if name != "quantize.py":
            draft.put("quantize_script", script, path)
    elif name != "convert_checkpoint.py":
        draft.put("convert_script", script, path)


def _take_checkpoint(draft: _Draft, document: Mapping[Any, Any]) -> None:
    """A build step alone, with a checkpoint, is all that there is to do."""
    if not {"convert", "convert_to_ft", "quantize"}.isdisjoint(document):
        return
    build = document.get("build")
    args = build.get("args") if isinstance(build, dict) else None
    given = args.get("checkpoint_dir") if isinstance(args, dict) else None
    if given is not None:
        draft.put("checkpoint", given, "build.args.checkpoint_dir")


def _take_convert_arguments(draft: _Draft, args: Mapping[Any, Any], prefix: str) -> None:
    for key, value in args.items():
        given = _name(key)
        name, path = arguments.CONVERT_RENAMED.get(given, given), f"{prefix}.{given}"
        if name in arguments.PATHS["convert_args"]:
            draft.note(path, "not used, the builder chooses it")
            continue
        if name != given:
            draft.note(path, f"read as {name}")
        if name in ("dtype", "tp_size", "pp_size"):
            draft.put(name, arguments.DTYPES.get(value, value) if value else value, path)
        else:
            draft.put_item("convert_args", name, value, path)


_QUANTIZE_FIELDS = {
    "qformat": "quantization",
    **{
        name: name
        for name in (
            "dtype",
            "kv_cache_dtype",
            "calib_size",
            "calib_dataset",
            "awq_block_size",
            "tp_size",
            "pp_size",
        )
    },
}


def _take_quantize_arguments(draft: _Draft, args: Mapping[Any, Any], prefix: str) -> None:
    for key, value in args.items():
        name = _name(key)
        path = f"{prefix}.{name}"
        if name in arguments.PATHS["quantize_args"]:
            draft.note(path, "not used, the builder chooses it")
        elif name in _QUANTIZE_FIELDS:
            draft.put(_QUANTIZE_FIELDS[name], value, path)
        else:
            draft.put_item("quantize_args", name, value, path)


def _take_build_arguments(
    draft: _Draft, args: Mapping[Any, Any], prefix: str, *, plugins_only: bool = False
) -> None:
    names = {_name(key): value for key, value in args.items()}
    # Last, because it is counted from max_input_len.
    output_length = names.pop("max_output_len", None)
    for given, value in names.items():
        _take_build_argument(draft, given, value, f"{prefix}.{given}", plugins_only)
    if output_length is not None:
        _take_output_length(draft, output_length, f"{prefix}.max_output_len")


def _take_build_argument(
    draft: _Draft, given: str, value: Any, path: str, plugins_only: bool
) -> None:
    name = arguments.RENAMED.get(given, given)
    if name != given:
        draft.note(path, f"read as {name}")
    if name in arguments.PLUGINS:
        _take_plugin(draft, name, value, path)
    elif name == "paged_kv_cache":
        _take_paged_kv_cache(draft, value, path)
    elif name in arguments.DROPPED:
        draft.note(path, f"dropped: {arguments.DROPPED[name]}")
    elif name in arguments.REFUSED:
        draft.refuse(path, arguments.REFUSED[name])
    elif plugins_only:
        draft.refuse(path, _unknown(name, arguments.PLUGINS))
    elif name in arguments.PATHS["build_args"]:
        if name != "checkpoint_dir":
            draft.note(path, "not used, the builder chooses it")
    elif name in (*arguments.LIMITS, "dtype", "kv_cache_type"):
        draft.put(name, arguments.DTYPES.get(value, value) if name == "dtype" else value, path)
    elif name == "world_size":
        draft.note(path, "read as tp_size")
        draft.put("tp_size", value, path)
    elif name in arguments.TO_CONVERT:
        draft.note(path, "read as an argument of convert_checkpoint.py")
        draft.put_item("convert_args", name, value, path)
    else:
        _take_other_build_argument(draft, name, value, path)


def _take_other_build_argument(draft: _Draft, name: str, value: Any, path: str) -> None:
    known = (*arguments.OTHERS, *arguments.PARALLEL)
    if name not in known:
        everything = (*known, *arguments.LIMITS, *arguments.PLUGINS, *arguments.RENAMED)
        close = difflib.get_close_matches(name, everything, 1, 0.8)
        if close:  # found now, not after an hour of converting
            draft.refuse(path, f"unknown argument of trtllm-build; did you mean {close[0]}?")
            return
        draft.note(path, "no known argument of trtllm-build, passed as it is")
    draft.put_item("build_args", name, value, path)


def _take_plugin(draft: _Draft, name: str, value: Any, path: str) -> None:
    value = arguments.plugin_value(name, value)
    problem = arguments.plugin_problem(name, value)
    if problem:
        draft.refuse(path, problem)
    else:
        draft.put_item("plugins", name, value, path)


def _take_paged_kv_cache(draft: _Draft, value: Any, path: str) -> None:
    kind = {None: "paged", True: "paged", "enable": "paged", False: "continuous"}
    kind |= {"disable": "continuous"}
    if not isinstance(value, Hashable) or value not in kind:
        draft.refuse(path, f"expected enable or disable, got {value!r}; see kv_cache_type")
        return
    draft.note(path, f"read as kv_cache_type: {kind[value]}")
    draft.put("kv_cache_type", kind[value], path)


def _take_output_length(draft: _Draft, value: Any, path: str) -> None:
    """Since TensorRT-LLM 0.11 the limit is on prompt and output together."""
    prompt = draft.fields.get("max_input_len")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (value, prompt)):
        draft.refuse(
            path,
            "TensorRT-LLM 0.12 removed it: give max_seq_len, the tokens of prompt and output "
            "together (with a max_input_len, it would have been counted from both)",
        )
        return
    total = prompt + value
    if draft.fields.get("max_seq_len", total) == total:
        draft.note(path, f"read as max_seq_len: {total}, with the {prompt} of max_input_len")
    draft.put("max_seq_len", total, path)


_TAKE = {
    "convert_args": _take_convert_arguments,
    "quantize_args": _take_quantize_arguments,
    "build_args": _take_build_arguments,
}


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


def _name(key: Any) -> str:
    """An argument's name, however many dashes are before it."""
    return str(key).lstrip("-")


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return "unknown key" + (f"; did you mean {close[0]}?" if close else "")


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
