"""Either form of the build configuration → the fields of ``EngineConfig``, each with where it is from.

Arguments that TensorRT-LLM has renamed or dropped since a guide was written are read as what they are
now, with a note, or refused with what to use instead; ``arguments`` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tools.engine_builder import arguments
from tools.engine_builder.forms import Problem, Step, StepForm, unknown

_STEPS = {
    "convert_to_ft": "convert_args",
    "convert": "convert_args",
    "quantize": "quantize_args",
    "build": "build_args",
}
_AS_IN_SHORT_FORM = ("hf_token", "checksum", "tokenizer", "timeout", "trust_remote_code")
_KV_CACHE_TYPES: dict[Hashable, str] = {
    **dict.fromkeys((None, True, "enable"), "paged"),
    **dict.fromkeys((False, "disable"), "continuous"),
}


class Draft:
    """The fields of an ``EngineConfig`` in the making.

    Attributes:
        fields: not checked yet.
        problems: in the order in which they were found.
        notes: what was read as something else.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._origins: dict[tuple[str, ...], str] = {}

    def refuse(self, path: str, problem: str) -> None:
        self.problems.append((path, problem))

    def note(self, path: str, text: str) -> None:
        self.notes.append(f"{path}: {text}")

    def put(self, name: str, value: Any, path: str) -> None:
        """Sets a field; two places that say different things are a problem."""
        self._put(self.fields, name, value, (name,), path)

    def put_item(self, field: str, name: str, value: Any, path: str) -> None:
        """Sets one item of a field that is a mapping."""
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float | None) for item in items):
            self.refuse(path, "expected a value, a list of values, or nothing for a bare flag")
            return
        self._put(self.fields.setdefault(field, {}), name, value, (field, name), path)

    def origin(self, key: tuple[str, ...]) -> str:
        """The path in the file of a field, or of an item of one."""
        known = (self._origins.get(key[:length]) for length in range(len(key), 0, -1))
        return next(filter(None, known), ".".join(key))

    def _put(
        self, target: dict[str, Any], name: str, value: Any, key: tuple[str, ...], path: str
    ) -> None:
        if name in target and target[name] != value:
            self.refuse(path, f"contradicts {self._origins[key]}")
            return
        target[name] = value
        self._origins.setdefault(key, path)


def migrate(form: BaseModel, keys: Collection[str]) -> Draft:
    """The draft that a form becomes.

    Args:
        keys: of the file, in its order; the form may lack those that something was wrong with.
    """
    draft = Draft()
    given = {key: getattr(form, key) for key in keys if key in form.model_fields_set}
    if isinstance(form, StepForm):
        _take_step_form(draft, form, given)
        _check_steps(draft, form, set(keys))
    else:
        _take_short_form(draft, given)
    return draft


def _take_short_form(draft: Draft, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is None or name == "max_output_len":
            continue
        if name in _TAKE:
            _TAKE[name](draft, value, name)
        else:
            draft.put(name, value, name)
    if given.get("max_output_len") is not None:
        _take_output_length(draft, given["max_output_len"], "max_output_len")


def _take_step_form(draft: Draft, form: StepForm, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Step):
            _take_script(draft, name, value)
            _TAKE[_STEPS[name]](draft, value.args or {}, f"{name}.args")
        elif name in _AS_IN_SHORT_FORM and value is not None:
            draft.put(name, value, name)
        elif name in ("weight_format", "merge"):
            draft.note(name, "not used")
    if form.example_name is not None:
        draft.put("family", form.example_name, "example_name")
    # The tar holds what the id names.
    model = "model_id" if form.model_tar_url is None else "model_tar_url"
    if getattr(form, model) is None:
        draft.refuse(model, "required")
    else:
        draft.put("model", getattr(form, model), model)


def _check_steps(draft: Draft, form: StepForm, keys: set[str]) -> None:
    """What is there beside what."""
    if {"convert", "convert_to_ft"} <= keys:
        draft.refuse("convert", "is the same as convert_to_ft, give one of them")
    if "quantize" in keys and "quantization" not in draft.fields:
        draft.refuse("quantize.args.qformat", "required")
    checkpoint = (form.build.args or {}).get("checkpoint_dir")
    # A build step alone, with a checkpoint, is all that there is to do.
    if checkpoint is not None and keys.isdisjoint(("convert", "convert_to_ft", "quantize")):
        draft.put("checkpoint", checkpoint, "build.args.checkpoint_dir")


def _take_script(draft: Draft, name: str, step: Step) -> None:
    """What a step runs: only the converting and the quantizing script can be another."""
    if step.script is None:
        return
    path, script = f"{name}.script", Path(step.script).name
    if script in arguments.OLD_SCRIPTS:
        now = arguments.OLD_SCRIPTS[script]
        draft.note(path, f"{script} ended with TensorRT-LLM 0.7, {now} is run")
    elif name == "quantize":
        if script != "quantize.py":
            draft.put("quantize_script", step.script, path)
    elif script != "convert_checkpoint.py":
        draft.put("convert_script", step.script, path)


def _take_convert_arguments(draft: Draft, args: Mapping[Any, Any], prefix: str) -> None:
    for given, value in _named(args):
        name, path = arguments.CONVERT_RENAMED.get(given, given), f"{prefix}.{given}"
        if name in arguments.PATHS["convert_args"]:
            draft.note(path, "not used, the builder chooses it")
            continue
        if name != given:
            draft.note(path, f"read as {name}")
        if name in ("dtype", "tp_size", "pp_size"):
            draft.put(name, arguments.dtype(value) if name == "dtype" else value, path)
        else:
            draft.put_item("convert_args", name, value, path)


def _take_quantize_arguments(draft: Draft, args: Mapping[Any, Any], prefix: str) -> None:
    for name, value in _named(args):
        path = f"{prefix}.{name}"
        if name in arguments.PATHS["quantize_args"]:
            draft.note(path, "not used, the builder chooses it")
        elif name in arguments.QUANTIZE_FIELDS:
            draft.put(arguments.QUANTIZE_FIELDS[name], value, path)
        else:
            draft.put_item("quantize_args", name, value, path)


def _take_build_arguments(
    draft: Draft, args: Mapping[Any, Any], prefix: str, *, plugins_only: bool = False
) -> None:
    names = dict(_named(args))
    # Last, because it is counted from max_input_len.
    output_length = names.pop("max_output_len", None)
    for given, value in names.items():
        _take_build_argument(draft, given, value, f"{prefix}.{given}", plugins_only)
    if output_length is not None:
        _take_output_length(draft, output_length, f"{prefix}.max_output_len")


def _take_build_argument(
    draft: Draft, given: str, value: Any, path: str, plugins_only: bool
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
        draft.refuse(path, unknown(name, arguments.PLUGINS))
    elif name in arguments.PATHS["build_args"]:
        if name != "checkpoint_dir":
            draft.note(path, "not used, the builder chooses it")
    elif name in (*arguments.LIMITS, "dtype", "kv_cache_type"):
        draft.put(name, arguments.dtype(value) if name == "dtype" else value, path)
    elif name == "world_size":
        draft.note(path, "read as tp_size")
        draft.put("tp_size", value, path)
    elif name in arguments.TO_CONVERT:
        draft.note(path, "read as an argument of convert_checkpoint.py")
        draft.put_item("convert_args", name, value, path)
    else:
        _take_other_build_argument(draft, name, value, path)


def _take_other_build_argument(draft: Draft, name: str, value: Any, path: str) -> None:
    known = (*arguments.OTHERS, *arguments.PARALLEL)
    if name not in known:
        everything = (*known, *arguments.LIMITS, *arguments.PLUGINS, *arguments.RENAMED)
        close = get_close_matches(name, everything, 1, 0.8)
        if close:  # found now, not after an hour of converting
            draft.refuse(path, f"unknown argument of trtllm-build; did you mean {close[0]}?")
            return
        draft.note(path, "no known argument of trtllm-build, passed as it is")
    draft.put_item("build_args", name, value, path)


def _take_plugin(draft: Draft, name: str, value: Any, path: str) -> None:
    value = arguments.plugin_value(name, value)
    problem = arguments.plugin_problem(name, value)
    if problem:
        draft.refuse(path, problem)
    else:
        draft.put_item("plugins", name, value, path)


def _take_paged_kv_cache(draft: Draft, value: Any, path: str) -> None:
    kind = _KV_CACHE_TYPES.get(value) if isinstance(value, Hashable) else None
    if kind is None:
        draft.refuse(path, f"expected enable or disable, got {value!r}; see kv_cache_type")
        return
    draft.note(path, f"read as kv_cache_type: {kind}")
    draft.put("kv_cache_type", kind, path)


def _take_output_length(draft: Draft, value: Any, path: str) -> None:
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


_TAKE: dict[str, Callable[[Draft, Mapping[Any, Any], str], None]] = {
    "convert_args": _take_convert_arguments,
    "quantize_args": _take_quantize_arguments,
    "build_args": _take_build_arguments,
    "plugins": partial(_take_build_arguments, plugins_only=True),
}


def _named(args: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Arguments by name, however many dashes are before it."""
    return [(str(key).lstrip("-"), value) for key, value in args.items()]
