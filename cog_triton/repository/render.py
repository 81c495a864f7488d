"""One template of a config.pbtxt and its values, to Triton's ModelConfig."""

import difflib
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf import text_encoding, text_format  # type: ignore[attr-defined, unused-ignore]

from cog_triton.protocol.names import ENGINE
from cog_triton.protocol.triton_messages import ModelConfig
from cog_triton.repository.variables import TABLES, Variable, known

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
# The variable of the ensemble and of BLS that says whether the engine returns the context.
DECODING_CONTEXT = "decoding_context"
_VARIABLE = re.compile(r"\$\{([^}\n]*)\}?")
# In the value of a parameter that is to be left out.
_UNSET = "\0unset"
# Variables that name an engine of TensorRT-LLM, and variables that choose a backend.
_ENGINE_DIRECTORIES = frozenset(
    ("engine_dir", "encoder_engine_dir", "gpt_model_path", "encoder_model_path")
)
_BACKEND_CHOICES = frozenset(("triton_backend", "engine", "model"))

Values = Mapping[str, object]
Overrides = Mapping[str, Values]


def render_all(
    templates: Mapping[str, str], overrides: Overrides, problems: list[str]
) -> dict[str, Any]:
    """Return the ModelConfig of each model by name; None for a model with problems.

    Args:
        templates: by model.
        problems: gets a line for each problem.
    """
    values = {model: dict(overrides.get(model, {})) for model in templates}
    engine_template = templates.get(ENGINE)
    if engine_template:
        backend = _choose_backend(engine_template, values[ENGINE])
        for model, template in templates.items():
            # Only the engines in Python return the context.
            is_unset = is_empty(values[model].get(DECODING_CONTEXT))
            if is_unset and f"${{{DECODING_CONTEXT}}}" in template:
                values[model][DECODING_CONTEXT] = backend == "python"
    return {
        model: _render(model, template, values[model], problems)
        for model, template in templates.items()
    }


def _choose_backend(template: str, values: dict[str, object]) -> object:
    """Return the backend of tensorrt_llm, and set it if the values name only its engine.

    NVIDIA's guides did so before there was a choice.
    """
    named = {name for name, value in values.items() if not is_empty(value)}
    names_engine = bool(named & _ENGINE_DIRECTORIES)
    if names_engine and not named & _BACKEND_CHOICES and "${triton_backend}" in template:
        values["triton_backend"] = "tensorrtllm"
    return values.get("triton_backend") or "python"


def _render(model: str, template: str, values: Values, problems: list[str]) -> Any | None:
    """Return the ModelConfig of one model, or None after adding its problems."""
    problems_before = len(problems)
    variables = known(model)
    values = _with_current_names(model, values, problems)
    # The names that the template uses, which may be old, and those of the same variables today.
    renamed = TABLES.renamed.get(model, {})
    used = {name: renamed.get(name, name) for name in _VARIABLE.findall(template)}
    for name in values:
        if name not in variables:
            problems.append(f"{model}: {name}: unknown variable{suggestion(name, variables)}")
        elif name not in used.values():
            _warn_of_no_effect(model, name)
    texts = _texts(model, used, values, variables, problems)
    if len(problems) > problems_before:
        return None
    filled = "\n".join(_fill_line(line, texts) for line in template.split("\n"))
    try:
        config = text_format.Parse(filled, ModelConfig())
    except text_format.ParseError as error:
        problems.append(f"{model}: {CONFIG}:{error}")
        return None
    for name in list(config.parameters):
        if _UNSET in config.parameters[name].string_value:
            del config.parameters[name]
    if config.name not in ("", model):
        problems.append(f"{model}: the template's name is {config.name}")
    return config


def _texts(
    model: str,
    used: Mapping[str, str],
    values: Values,
    variables: Mapping[str, Variable],
    problems: list[str],
) -> dict[str, str | None]:
    """Return the text of each variable in a template; None for one that is unset."""
    texts: dict[str, str | None] = {}
    for name, current_name in used.items():
        if current_name not in variables:
            problems.append(
                f"{model}: ${{{name}}}: the template uses an unknown variable"
                f"{suggestion(name, variables)}"
            )
            continue
        try:
            texts[name] = variables[current_name].render(values.get(current_name))
        except ValueError as error:
            problems.append(f"{model}: {name}: {error}")
    return texts


def _warn_of_no_effect(model: str, name: str) -> None:
    ignored = TABLES.ignored.get(model, {}).get(name)
    reason = "the template does not use it" if ignored is None else ignored.description
    logger.warning("%s: %s has no effect: %s", model, name, reason)


def _fill_line(line: str, texts: Mapping[str, str | None]) -> str:
    """Return a line of a template with texts in place of its variables.

    A line with an unset variable is left out, unless it is a parameter, which is removed later.
    """

    def escaped(match: re.Match[str]) -> str:
        text = texts[match[1]]
        return str(text_encoding.CEscape(_UNSET if text is None else text, True))

    has_unset = any(texts[name] is None for name in _VARIABLE.findall(line))
    if has_unset and "string_value" not in line:
        return ""
    return _VARIABLE.sub(escaped, line)


def _with_current_names(model: str, values: Values, problems: list[str]) -> dict[str, object]:
    """Return the values under the names that variables have today, and with today's names of choices."""
    current = dict(values)
    for old, new in TABLES.renamed.get(model, {}).items():
        value = current.pop(old, None)
        if is_empty(value):
            continue
        if is_empty(current.get(new)):
            current[new] = value
        elif not known(model)[new].same(value, current[new]):
            problems.append(f"{model}: {new} and its old name {old} have different values")
    for name, renamed in TABLES.renamed_values.get(model, {}).items():
        if name in current:
            current[name] = renamed.get(str(current[name]), current[name])
    return current


def is_empty(value: object) -> bool:
    return value is None or value == ""


def suggestion(name: str, names: Collection[str]) -> str:
    """Return the end of an error's text: the name that may be meant, or all known ones."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; the known ones are {', '.join(sorted(names))}" if names else ""
