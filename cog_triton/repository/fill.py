"""Templates and values in, a filled Triton model repository out.

A template is a model's config.pbtxt with ``${name}`` where a value goes. Filling is strict: every
problem of every model is found before anything is written, and all are reported at once. An unset
optional variable takes its line with it, or the whole ``parameters { … }`` block that it stands in.
"""

from __future__ import annotations

import difflib
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.repository.derived import CONTEXT_MODEL_CODE, ids_ensemble, with_context
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

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}", re.ASCII)
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | \$\{[^}\n]*\}
    | (?P<parameters>\bparameters\s*:?\s*\{)
    | (?P<open>\{)
    | (?P<close>\})""",
    re.VERBOSE,
)
_REST_OF_LINE = re.compile(r"[ \t]*,?[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {
    **{code: f"\\{code:03o}" for code in (*range(32), 127)},
    **{ord(char): f"\\{char}" for char in "\"'\\"},
    ord("\n"): "\\n",
}

Span = tuple[int, int]
Overrides = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class _Use:
    """One place where a template uses a variable, and what goes when that is unset."""

    name: str
    span: Span
    quoted: bool
    scope: Span


def render(
    template: str, variables: Mapping[str, Variable], values: Mapping[str, object], *, source: str
) -> str:
    """Fills one template.

    Args:
        variables: every variable that the template may use.
        values: given values by name; defaults stand in for the others.
        source: what to call the template in messages.

    Raises:
        TemplateError: with one line for every value that is missing, unknown or not valid, and for
            every variable of the template that ``variables`` lacks.
    """
    filled, problems = _fill(template, variables, values, source)
    _raise_if(problems)
    return filled


def fill_model(model: str, template: str, values: Mapping[str, object]) -> str:
    """Fills the template of one model: old names become new ones, and the result must be valid.

    Raises:
        TemplateError: as ``render``, and for a result that Triton would not accept.
    """
    if model == "tensorrt_llm":
        values = _with_backend(template, values)
    values = _with_context(template, values, values if model == "tensorrt_llm" else None)
    filled, config, problems = _fill_and_parse(model, template, values)
    _raise_if(problems)
    for problem in _unmet_needs(model, config):
        logger.warning(problem)
    _warn_of_refusals(model, config)
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
        filled[model], configs[model], found = _fill_and_parse(model, template, values)
        problems += found
    for model, config in configs.items():
        if config is not None:
            problems += _unmet_needs(model, config) + _ensemble_problems(model, configs)
            problems += _missing_code(model, config, source / model)
    _raise_if(problems)
    for model, config in configs.items():
        _warn_of_refusals(model, config)
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


def load_overrides(path: Path) -> dict[str, dict[str, object]]:
    """Reads values by model and variable from a YAML file, for ``fill_repository``.

    They stand under ``server: {<model>: {args: {<variable>: <value>}}}``, or, as cog-triton had it,
    under ``instantiate: {server: …}``. Other keys beside ``server`` are somebody else's.

    Raises:
        ConfigurationError: naming the file and the key or line at fault.
        OSError: when the file cannot be read.
    """
    document = _mapping(_load_yaml(path), path, "the file")
    where, server = "server", document.get("server")
    instantiate = document.get("instantiate")
    if isinstance(instantiate, dict) and "server" in instantiate:
        if server is not None:
            raise ConfigurationError(f"{path}: give server or instantiate.server, not both")
        where, server = "instantiate.server", instantiate["server"]
    for model in document.keys() & VARIABLES.keys():
        logger.warning("%s: %s is ignored; it belongs under server", path, model)
    return {
        str(model): _args(entry, path, f"{where}.{model}")
        for model, entry in _mapping(server, path, where).items()
    }


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
        f"{path}: no model is called {' or '.join(candidates)}; known are {_join(VARIABLES)}"
    )


# One template


def _fill_and_parse(
    model: str, template: str, values: Mapping[str, object]
) -> tuple[str, Any, list[str]]:
    """The filled template, its ModelConfig or None, and the problems."""
    values, problems = _current_names(model, values)
    values = _without_effectless(model, template, values)
    filled, found = _fill(template, known(model), values, model)
    problems += found
    if problems:
        return "", None, problems
    config, problems = _parse(model, filled)
    return filled, config, problems


def _fill(
    template: str, variables: Mapping[str, Variable], values: Mapping[str, object], source: str
) -> tuple[str, list[str]]:
    uses = _uses(template)
    problems = _malformed(template, source)
    problems += [
        f"{source}: {name}: the template uses it, but there is no such variable"
        + _suggest(name, variables)
        for name in sorted({use.name for use in uses} - variables.keys())
    ]
    problems += [
        f"{source}: {name}: unknown variable" + _suggest(name, variables)
        for name in values
        if name not in variables
    ]
    texts: dict[str, str | None] = {}
    for name in dict.fromkeys(use.name for use in uses if use.name in variables):
        try:
            texts[name] = variables[name].render(values.get(name))
        except ValueError as error:
            problems.append(f"{source}: {name}: {error}")
    return ("", problems) if problems else (_substitute(template, uses, texts), [])


def _substitute(template: str, uses: list[_Use], texts: Mapping[str, str | None]) -> str:
    edits = []
    for use in uses:
        text = texts[use.name]
        if text is None:
            edits.append((use.scope, ""))
        else:
            edits.append((use.span, text.translate(_ESCAPES) if use.quoted else text))
    pieces, position = [], 0
    # By start, wider first: what lies inside of a dropped scope goes with it.
    for (start, end), text in sorted(edits, key=lambda edit: (edit[0][0], -edit[0][1])):
        if start >= position:
            pieces += [template[position:start], text]
            position = end
    return "".join(pieces) + template[position:]


def _uses(template: str) -> list[_Use]:
    strings, blocks = _strings_and_blocks(template)
    return [
        _Use(
            name=match.group(1),
            span=match.span(),
            quoted=any(start < match.start() < end for start, end in strings),
            scope=_scope(template, match.span(), blocks),
        )
        for match in _VARIABLE.finditer(template)
    ]


def _strings_and_blocks(template: str) -> tuple[list[Span], list[Span]]:
    """Where string literals are, and where ``parameters { … }`` blocks are, inner ones first."""
    strings, blocks = [], []
    opened: list[re.Match[str]] = []
    for token in _TOKEN.finditer(template):
        if token.lastgroup == "string":
            strings.append(token.span())
        elif token.lastgroup in ("open", "parameters"):
            opened.append(token)
        elif token.lastgroup == "close" and opened:
            opening = opened.pop()
            if opening.lastgroup == "parameters":
                blocks.append((opening.start(), token.end()))
    return strings, blocks


def _scope(template: str, use: Span, blocks: list[Span]) -> Span:
    """What to drop when the variable used at ``use`` is unset."""
    for start, end in blocks:
        if start < use[0] < end:
            return _whole_lines(template, start, end)
    start = template.rfind("\n", 0, use[0]) + 1
    end = template.find("\n", use[1])
    return _whole_lines(template, start, len(template) if end < 0 else end)


def _whole_lines(template: str, start: int, end: int) -> Span:
    """The span and the rest of its lines, if that is nothing but space, a comma or a comment."""
    line = template.rfind("\n", 0, start) + 1
    after = _REST_OF_LINE.match(template, end)
    if after and not template[line:start].strip():
        return line, after.end()
    return start, end


def _malformed(template: str, source: str) -> list[str]:
    return [
        f"{source}: line {template.count(chr(10), 0, match.start()) + 1}: "
        'a "${" that does not begin a variable'
        for match in re.finditer(r"\$\{", template)
        if not _VARIABLE.match(template, match.start())
    ]


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


def _unmet_needs(model: str, config: Any) -> list[str]:
    """What the backend or the embedded engine that ``config`` chooses cannot load without."""
    given = {key for key, parameter in config.parameters.items() if parameter.string_value}
    if config.backend == "tensorrtllm":
        met = given & {"gpt_model_path", "encoder_model_path"}
        return [] if met else [f"{model}: engine_dir: triton_backend tensorrtllm needs it"]
    if "engine" not in given:
        return []
    if "gpt_model_path" in given:
        logger.warning("%s: engine_dir has no effect with triton_backend python", model)
    engine = config.parameters["engine"].string_value
    needs = {"transformers": "model", "llmapi": "model", "simulated": "tokenizer_dir"}
    need = needs.get(engine)
    return [] if need in {None, *given} else [f"{model}: {need}: the {engine} engine needs it"]


def _warn_of_refusals(model: str, config: Any) -> None:
    """Warns of requests that TensorRT-LLM's C++ backend will refuse because of the configuration.

    No error: shorter requests and those that do not stream are served, and guides have this.
    """
    values = {key: parameter.string_value for key, parameter in config.parameters.items()}
    if (
        config.backend == "tensorrtllm"
        and config.model_transaction_policy.decoupled
        and values.get("batch_scheduler_policy") == "max_utilization"
        and values.get("enable_chunked_context") != "true"
    ):
        logger.warning(
            "%s: with batch_scheduler_policy max_utilization and without enable_chunked_context, "
            "TensorRT-LLM refuses a streamed request whose prompt and max_tokens less 1 exceed the "
            "engine's max_input_len: set enable_chunked_context to true, take guaranteed_no_evict, or "
            "build the engine with max_input_len as great as max_seq_len",
            model,
        )


def _missing_code(model: str, config: Any, directory: Path) -> list[str]:
    # Triton does not fail on this: it waits for the model's process, which has gone, for good.
    if config.backend != "python" or any(directory.glob("*/model.py")):
        return []
    return [f"{model}: no version of it has a model.py"]


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
    effectless = (values.keys() & known(model).keys()) - _names(template)
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
    if given.isdisjoint(engine) or given & set(others) or others[0] not in _names(template):
        return values
    return {**values, "triton_backend": "tensorrtllm"}


def _with_context(
    template: str, values: Mapping[str, object], llm: Mapping[str, object] | None
) -> Mapping[str, object]:
    """The values with decoding_context on, unless they say, where tensorrt_llm runs in Python.

    ``llm`` holds tensorrt_llm's values, None when they are not known.
    """
    name = _CONTEXT
    if llm is None or name not in _names(template) or not _is_empty(values.get(name)):
        return values
    backend = llm.get("triton_backend") or VARIABLES["tensorrt_llm"]["triton_backend"].default
    return {**values, name: backend == "python"}


def _names(template: str) -> set[str]:
    return set(_VARIABLE.findall(template))


def _is_empty(value: object) -> bool:
    return value is None or value == ""


def _same(variable: Variable, one: object, other: object) -> bool:
    try:
        return variable.render(one) == variable.render(other)
    except ValueError:
        return one == other


def _suggest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {_join(names)}" if names else ""


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


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
            problems.append(
                f"{model}: no such model in the repository" + _suggest(model, templates)
            )
    return sorted(problems)


def _ensemble_problems(model: str, configs: Mapping[str, Any]) -> list[str]:
    return [
        problem
        for step in configs[model].ensemble_scheduling.step
        for problem in _step_problems(model, step, configs)
    ]


def _step_problems(model: str, step: Any, configs: Mapping[str, Any]) -> list[str]:
    """What Triton would refuse of one step of the ensemble ``model``."""
    name, config = step.model_name, configs[model]
    if name not in configs:
        return [f"{model}: step {name}: no such model in the repository"]
    inner = configs[name]
    if inner is None:  # its own problems come first
        return []
    problems = []
    if inner.max_batch_size < config.max_batch_size:
        problems.append(
            f"{name}: triton_max_batch_size: {inner.max_batch_size} is less than the "
            f"{config.max_batch_size} of {model}, which has it as a step; give both the same"
        )
    for kind, mapped, tensors in (
        ("input", step.input_map, inner.input),
        ("output", step.output_map, inner.output),
    ):
        for tensor in sorted(mapped.keys() - {t.name for t in tensors}) if tensors else ():
            problems.append(f"{model}: step {name} has no {kind} {tensor}")
    return problems


def _write_model(source: Path, destination: Path, config: str) -> None:
    destination.mkdir(parents=True)
    for version in source.iterdir():
        if version.is_dir() and version.name.isdigit():
            ignore = shutil.ignore_patterns("__pycache__", ".gitkeep")
            shutil.copytree(version, destination / version.name, ignore=ignore)
    # Triton wants a version directory even where there is nothing to put in it.
    (destination / "1").mkdir(exist_ok=True)
    (destination / CONFIG).write_text(config, encoding="utf-8")


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise TemplateError(
            "config templates cannot be filled:\n" + "\n".join(f"  {p}" for p in problems)
        )


# The YAML file


def _load_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or error
        raise ConfigurationError(f"{where}: not valid YAML: {reason}") from None


def _mapping(value: object, path: Path, where: str) -> dict[Any, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: {where}: expected a mapping, got {value!r}")
    return value


def _args(entry: object, path: Path, where: str) -> dict[str, object]:
    entry = _mapping(entry, path, where)
    for key in entry:
        if key != "args":
            raise ConfigurationError(f"{path}: {where}.{key}: only args is known here")
    args = _mapping(entry.get("args"), path, f"{where}.args")
    return {str(name): value for name, value in args.items()}
