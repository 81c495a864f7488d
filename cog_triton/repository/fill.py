"""Templates and values in, a filled Triton model repository out.

A template is a model's config.pbtxt with ``${name}`` where a value goes. Filling is strict: every
problem of every model is found before anything is written, and all are reported at once. An unset
optional variable takes its line with it, or the whole ``parameters { … }`` block that it stands in.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.repository.checks import (
    ensemble_problems,
    missing_code,
    unmet_needs,
    warn_of_refusals,
)
from cog_triton.repository.derived import CONTEXT_MODEL_CODE, ids_ensemble, with_context
from cog_triton.repository.template import filled_text, join, names_in, raise_if, suggest
from cog_triton.repository.variables import (
    IGNORED,
    OPTIONAL_MODELS,
    RENAMED,
    RENAMED_VALUES,
    VARIABLES,
    Variable,
    known,
)

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
_CONTEXT = "decoding_context"

Overrides = Mapping[str, Mapping[str, object]]


def fill_model(model: str, template: str, values: Mapping[str, object]) -> str:
    """Fills the template of one model: old names become new ones, and the result must be valid.

    Raises:
        TemplateError: as ``render``, and for a result that Triton would not accept.
    """
    if model == "tensorrt_llm":
        values = _with_backend(template, values)
    values = _with_context(template, values, values if model == "tensorrt_llm" else None)
    filled, config, problems = _fill_and_parse(model, template, values)
    raise_if(problems)
    for problem in unmet_needs(model, config):
        logger.warning(problem)
    warn_of_refusals(model, config)
    return filled


def fill_repository(source: Path, destination: Path, overrides: Overrides) -> None:
    """Fills every model's template under ``source`` and writes a repository to ``destination``.

    Args:
        source: holds ``<model>/config.pbtxt`` and ``<model>/<version>/``; it is only read.
        destination: is made, or is an empty directory.
        overrides: values by model and variable; defaults stand in for the others. An optional model
            (``OPTIONAL_MODELS``) is filled only if it is among them; no values will do.

    Raises:
        TemplateError: with a line for every problem of every model. Nothing was written.
        ConfigurationError: when ``destination`` is not empty, or inside ``source``.
    """
    _check_destination(source, destination)
    templates = _read_templates(source)
    problems = _absent_models(overrides, templates)
    for model in OPTIONAL_MODELS - overrides.keys():
        templates.pop(model, None)
    llm = _with_backend(templates.get("tensorrt_llm", ""), overrides.get("tensorrt_llm", {}))
    overrides = {**overrides, "tensorrt_llm": llm} if "tensorrt_llm" in overrides else overrides
    filled: dict[str, str] = {}
    configs: dict[str, Any] = {}
    for model, template in templates.items():
        values = _with_context(template, overrides.get(model, {}), llm)
        filled[model], configs[model], wrong = _fill_and_parse(model, template, values)
        problems += wrong
    for model, config in configs.items():
        if config is not None:
            problems += unmet_needs(model, config) + ensemble_problems(model, configs)
            problems += missing_code(model, config, source / model)
    raise_if(problems)
    for model, config in configs.items():
        warn_of_refusals(model, config)
    for model, text in filled.items():
        _write_model(source / model, destination / model, text)
    _derive(source, destination, configs, context=overrides.get("ensemble", {}).get(_CONTEXT))


def _derive(
    source: Path, destination: Path, configs: Mapping[str, Any], *, context: object
) -> None:
    """Adds the models that no template stands for.

    Args:
        context: the ensemble's value of decoding_context, if one was given.
    """
    ensemble = configs.get("ensemble")
    if ensemble is not None and (ids := ids_ensemble(ensemble)) is not None:
        _write_model(source / "ensemble", destination / ids.name, text_format.MessageToString(ids))
    if _is_empty(context) and (derived := with_context(configs)) is not None:
        ensemble, relay = derived
        (destination / "ensemble" / CONFIG).write_text(
            text_format.MessageToString(ensemble), encoding="utf-8"
        )
        version = destination / relay.name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(CONTEXT_MODEL_CODE, encoding="utf-8")
        (version.parent / CONFIG).write_text(text_format.MessageToString(relay), encoding="utf-8")


def model_of(template: str, path: Path) -> str:
    """The model that a template belongs to: its ``name``, else the directory that it is in.

    Raises:
        TemplateError: when neither is a model with a table of variables.
    """
    name = re.search(r'^name\s*:\s*"([^"]*)"', template, re.MULTILINE)
    candidates = [name.group(1)] if name else []
    candidates.append(path.resolve().parent.name)
    for candidate in candidates:
        if candidate in VARIABLES:
            return candidate
    raise TemplateError(
        f"{path}: no model is called {' or '.join(candidates)}; known are {join(VARIABLES)}"
    )


# One template


def _fill_and_parse(
    model: str, template: str, values: Mapping[str, object]
) -> tuple[str, Any, list[str]]:
    """The filled template, its ModelConfig or None, and the problems."""
    values, problems = _current_names(model, values)
    values = _without_effectless(model, template, values)
    filled, wrong = filled_text(template, known(model), values, model)
    problems += wrong
    if problems:
        return "", None, problems
    config, problems = _parse(model, filled)
    return filled, config, problems


def _parse(model: str, filled: str) -> tuple[Any, list[str]]:
    try:
        config = text_format.Parse(filled, ModelConfig())
    except text_format.ParseError as error:
        return None, [f"{model}: {_describe(error, filled)}"]
    if config.name not in ("", model):
        return config, [f"{model}: the template's name is {config.name}"]
    return config, []


def _describe(error: Any, filled: str) -> str:
    line = error.GetLine()
    reason = re.sub(r"^\d+:\d+ : ", "", str(error)).strip()
    if line is None:
        return f"not a valid {CONFIG}: {reason}"
    text = (filled + "\n").split("\n")[line - 1].strip()
    where = "" if text in reason else f" in {text!r}"
    return f"line {line} of the filled {CONFIG}: {reason}{where}"


# Names


def _current_names(model: str, values: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The values under today's names, with a warning for every old one."""
    current, problems = dict(values), []
    for old, new in RENAMED.get(model, {}).items():
        if old not in current:
            continue
        value = current.pop(old)
        logger.warning("%s: %s is called %s now", model, old, new)
        if _is_empty(current.get(new)):
            current[new] = value
        elif not _is_empty(value) and not _same(known(model)[new], value, current[new]):
            problems.append(f"{model}: {new}: also given, with another value, as {old}")
    for name, renamed in RENAMED_VALUES.get(model, {}).items():
        value = current.get(name)
        if isinstance(value, str) and value in renamed:
            logger.warning("%s: %s %s is called %s now", model, name, value, renamed[value])
            current[name] = renamed[value]
    return current, problems


def _without_effectless(
    model: str, template: str, values: Mapping[str, object]
) -> dict[str, object]:
    """The values without those that the template has no use for, with a warning for each."""
    effectless = (values.keys() & known(model).keys()) - names_in(template)
    for name in sorted(effectless):
        ignored = IGNORED.get(model, {}).get(name)
        why = ignored.description if ignored else "the template does not use it"
        logger.warning("%s: %s has no effect: %s", model, name, why)
    return {name: value for name, value in values.items() if name not in effectless}


def _with_backend(template: str, values: Mapping[str, object]) -> Mapping[str, object]:
    """The values of tensorrt_llm with the C++ backend, if they have its engine and nothing of another's.

    NVIDIA's guides from before there was a choice name the engine alone.
    """
    engine = ("engine_dir", "encoder_engine_dir", "gpt_model_path", "encoder_model_path")
    others = ("triton_backend", "engine", "model")
    given = {name for name, value in values.items() if not _is_empty(value)}
    if given.isdisjoint(engine) or given & set(others) or others[0] not in names_in(template):
        return values
    return {**values, "triton_backend": "tensorrtllm"}


def _with_context(
    template: str, values: Mapping[str, object], llm: Mapping[str, object] | None
) -> Mapping[str, object]:
    """The values with decoding_context on, unless they say, where tensorrt_llm runs in Python.

    ``llm`` holds tensorrt_llm's values, None when they are not known.
    """
    name = _CONTEXT
    if llm is None or name not in names_in(template) or not _is_empty(values.get(name)):
        return values
    backend = llm.get("triton_backend") or VARIABLES["tensorrt_llm"]["triton_backend"].default
    return {**values, name: backend == "python"}


def _is_empty(value: object) -> bool:
    return value is None or value == ""


def _same(variable: Variable, one: object, other: object) -> bool:
    try:
        return variable.render(one) == variable.render(other)
    except ValueError:
        return one == other


# The repository as a whole


def read_template(path: Path) -> str:
    """Reads a template.

    Raises:
        TemplateError: when it is not UTF-8 text.
        OSError: when it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: not UTF-8: {error}") from None


def _read_templates(source: Path) -> dict[str, str]:
    templates = {p.parent.name: read_template(p) for p in sorted(source.glob(f"*/{CONFIG}"))}
    if not templates:
        raise TemplateError(f"{source}: no <model>/{CONFIG} in it")
    return templates


def _check_destination(source: Path, destination: Path) -> None:
    if source.resolve() in (destination.resolve(), *destination.resolve().parents):
        raise ConfigurationError(f"{destination}: inside of the templates' directory {source}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigurationError(f"{destination}: must be new or an empty directory")


def _absent_models(overrides: Overrides, templates: Mapping[str, str]) -> list[str]:
    problems = []
    for model in overrides.keys() - templates.keys():
        if model in OPTIONAL_MODELS:
            logger.warning("%s: has no effect: the repository has no such model", model)
        else:
            problems.append(f"{model}: no such model in the repository" + suggest(model, templates))
    return sorted(problems)


def _write_model(source: Path, destination: Path, config: str) -> None:
    destination.mkdir(parents=True)
    for version in source.iterdir():
        if version.is_dir() and version.name.isdigit():
            ignore = shutil.ignore_patterns("__pycache__", ".gitkeep")
            shutil.copytree(version, destination / version.name, ignore=ignore)
    # Triton wants a version directory even where there is nothing to put in it.
    (destination / "1").mkdir(exist_ok=True)
    (destination / CONFIG).write_text(config, encoding="utf-8")
