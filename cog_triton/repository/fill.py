"""Fill templates of config.pbtxt, with ``${name}`` where a value goes, into a Triton model repository.

Every problem of every model is found before anything is written, and all are reported at once. If a
variable is unset, its parameter is left out; outside of parameters, the line that uses it is.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.protocol.names import CONTEXT_MODEL
from cog_triton.protocol.triton_messages import ModelConfig
from cog_triton.repository.checks import problems_of, unmet_needs
from cog_triton.repository.derived_models import add_derived
from cog_triton.repository.render import (
    CONFIG,
    DECODING_CONTEXT,
    Overrides,
    Values,
    is_empty,
    render_all,
    suggestion,
)
from cog_triton.repository.variables import TABLES

logger = logging.getLogger(__name__)

CONTEXT_MODEL_CODE = "from cog_triton.models.context import TritonPythonModel\n"
_NOT_COPIED = ("__pycache__", ".gitkeep")


def fill_repository(source: Path, destination: Path, overrides: Overrides) -> None:
    """Fill every model's template under ``source`` and write a repository to ``destination``.

    An optional model is filled only if it is among ``overrides``, with or without values.

    Raises:
        TemplateError: with a line for every problem of every model. Nothing was written.
        ConfigurationError: ``destination`` is not empty, or is inside ``source``.
    """
    _check_destination(source, destination)
    templates = _read_templates(source, overrides)
    problems = []
    for model in sorted(overrides.keys() - templates.keys()):
        if model in TABLES.optional_models:
            logger.warning("%s has no effect: the repository has no such model", model)
        else:
            problems.append(
                f"{model}: no such model in the repository{suggestion(model, templates)}"
            )
    configs = render_all(templates, overrides, problems)
    for model, config in configs.items():
        if config is not None:
            problems += problems_of(model, configs, source / model)
    _raise_if(problems)
    add_derived(configs, context=is_empty(overrides.get("ensemble", {}).get(DECODING_CONTEXT)))
    for model, config in configs.items():
        _write_model(source / model, destination / model, config)
    if CONTEXT_MODEL in configs:
        (destination / CONTEXT_MODEL / "1" / "model.py").write_text(CONTEXT_MODEL_CODE)


def _check_destination(source: Path, destination: Path) -> None:
    target = destination.resolve()
    if source.resolve() in (target, *target.parents):
        raise ConfigurationError(
            f"{destination} must not be inside the templates' directory {source}"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigurationError(f"{destination} must not exist or must be an empty directory")


def _read_templates(source: Path, overrides: Overrides) -> dict[str, str]:
    """Return the templates of a directory by model, without optional models that nobody asks for."""
    templates = {
        path.parent.name: read_template(path) for path in sorted(source.glob(f"*/{CONFIG}"))
    }
    if not templates:
        raise TemplateError(f"{source} contains no <model>/{CONFIG}")
    for model in TABLES.optional_models - overrides.keys():
        templates.pop(model, None)
    return templates


def _write_model(source: Path, destination: Path, config: Any) -> None:
    """Write a model's configuration, and copy its versions."""
    # Triton wants a version directory even if there is nothing to put in it.
    (destination / "1").mkdir(parents=True)
    (destination / CONFIG).write_text(text_format.MessageToString(config))
    for version in source.glob("[0-9]*"):
        if version.is_dir() and version.name.isdigit():
            shutil.copytree(
                version,
                destination / version.name,
                ignore=shutil.ignore_patterns(*_NOT_COPIED),
                dirs_exist_ok=True,
            )


def fill_model(model: str, template: str, values: Values) -> str:
    """Fill the template of one model; TemplateError has a line for every problem."""
    problems: list[str] = []
    config = render_all({model: template}, {model: values}, problems)[model]
    _raise_if(problems)
    for problem in unmet_needs(model, config):
        logger.warning(problem)
    return str(text_format.MessageToString(config, as_utf8=True))


def read_template(path: Path) -> str:
    """Read a template; raise TemplateError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: not UTF-8: {error}") from None


def read_config(file: Path) -> Any:
    """Return the ModelConfig in a filled config.pbtxt; raise ConfigurationError if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        # A newer Triton may have more fields than this client of it.
        return text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigurationError(f"{file}: {error}") from None


def check_streaming(repository: Path) -> None:
    """Raise ConfigurationError for a repository in which the predictor cannot stream."""
    if not read_config(repository / "tensorrt_llm" / CONFIG).model_transaction_policy.decoupled:
        raise ConfigurationError(
            "tensorrt_llm: decoupled_mode is false, but the predictor streams, which needs true"
        )


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise TemplateError("\n  ".join(["config templates cannot be filled:", *problems]))
