"""Fill templates of config.pbtxt, with ``${name}`` where a value goes, into a Triton model repository.

Every problem of every model is found before anything is written, and all are reported at once. Where a
variable is unset, its parameter is left out; outside of parameters, the line that uses it is.

Two models that no template stands for are made of the filled ones. ``ensemble_ids`` is the ensemble without
its last step, for clients that turn token ids into text: Triton walks through every output of an ensemble
for every response, whichever a client names. ``tensorrt_llm_context`` stands before TensorRT-LLM's C++
backend; see ``cog_triton.models.context``.
"""

import difflib
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from google.protobuf import text_encoding, text_format  # type: ignore[attr-defined, unused-ignore]
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.protocol.names import (
    CONTEXT_MODEL,
    DIMS,
    FRAMES,
    IDS_ENSEMBLE,
    LOG_PROBS,
    OUTPUTS,
)
from cog_triton.repository.variables import TABLES, known

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
_VARIABLE = re.compile(r"\$\{([^}\n]*)\}?")
_UNSET = "\0unset"  # in a parameter's value: to be left out
_CONTEXT = "decoding_context"
_NEEDS = {"transformers": "model", "llmapi": "model", "vllm": "model", "simulated": "tokenizer_dir"}
# TensorRT-LLM's C++ backend answers with an error if one of these is left out.
_NEEDED = {"output_ids", "sequence_length"}
# As tensorrt_llm, the ensemble and postprocessing call the tensors.
_CONTEXT_TENSORS = [
    ("context_ids", "_CONTEXT_IDS", "CONTEXT_IDS"),
    ("is_final", "_IS_FINAL", "IS_FINAL"),
]
CONTEXT_MODEL_CODE = "from cog_triton.models.context import TritonPythonModel\n"

Values = Mapping[str, object]
Overrides = Mapping[str, Values]


def fill_repository(source: Path, destination: Path, overrides: Overrides) -> None:
    """Fill every model's template under ``source`` and write a repository to ``destination``.

    An optional model is filled only if it is among ``overrides``, with or without values.

    Raises:
        TemplateError: with a line for every problem of every model. Nothing was written.
        ConfigurationError: ``destination`` is not empty, or is inside ``source``.
    """
    if source.resolve() in (destination.resolve(), *destination.resolve().parents):
        raise ConfigurationError(
            f"{destination} must not be inside the templates' directory {source}"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigurationError(f"{destination} must not exist or must be an empty directory")
    templates = {p.parent.name: read_template(p) for p in sorted(source.glob(f"*/{CONFIG}"))}
    if not templates:
        raise TemplateError(f"{source} contains no <model>/{CONFIG}")
    for model in TABLES.optional_models - overrides.keys():
        templates.pop(model, None)
    problems = []
    for model in sorted(overrides.keys() - templates.keys()):
        if model in TABLES.optional_models:
            logger.warning("%s has no effect: the repository has no such model", model)
        else:
            problems.append(f"{model}: no such model in the repository{_suggest(model, templates)}")
    configs = _render_all(templates, overrides, problems)
    for model, config in configs.items():
        if config is not None:
            problems += _problems_of(model, configs, source / model)
    _raise_if(problems)
    add_derived(configs, context=_is_empty(overrides.get("ensemble", {}).get(_CONTEXT)))
    for model, config in configs.items():
        # Triton wants a version directory even where there is nothing to put in it.
        (destination / model / "1").mkdir(parents=True)
        (destination / model / CONFIG).write_text(text_format.MessageToString(config))
        for version in (source / model).glob("[0-9]*"):
            if version.is_dir() and version.name.isdigit():
                ignore = shutil.ignore_patterns("__pycache__", ".gitkeep")
                target = destination / model / version.name
                shutil.copytree(version, target, ignore=ignore, dirs_exist_ok=True)
    if CONTEXT_MODEL in configs:
        (destination / CONTEXT_MODEL / "1" / "model.py").write_text(CONTEXT_MODEL_CODE)


def fill_model(model: str, template: str, values: Values) -> str:
    """Fill the template of one model; TemplateError has a line for every problem."""
    problems: list[str] = []
    config = _render_all({model: template}, {model: values}, problems)[model]
    _raise_if(problems)
    for problem in unmet_needs(model, config):
        logger.warning(problem)
    return str(text_format.MessageToString(config, as_utf8=True))


def read_template(path: Path) -> str:
    """Read a template; raise TemplateError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: not UTF-8: {error}") from None


def read_config(file: Path) -> Any:
    """Return the ModelConfig in a filled config.pbtxt; raise ConfigurationError where it cannot."""
    try:
        text = file.read_text(encoding="utf-8")
        # A newer Triton may have more fields than this client of it.
        return text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigurationError(f"{file}: {error}") from None


def check_streaming(repository: Path) -> None:
    """Raise ConfigurationError for a repository in which the predictor cannot stream."""
    if not read_config(repository / "tensorrt_llm" / CONFIG).model_transaction_policy.decoupled:
        text = "decoupled_mode is false, but the predictor streams, which needs true"
        raise ConfigurationError(f"tensorrt_llm: {text}")


def unmet_needs(model: str, config: Any) -> list[str]:
    """Return what the chosen backend or embedded engine lacks to load; warn of what will not work."""
    values = {key: p.string_value for key, p in config.parameters.items() if p.string_value}
    if config.backend == "tensorrtllm":
        # Not an error: shorter requests and those that do not stream are served.
        if (
            config.model_transaction_policy.decoupled
            and values.get("batch_scheduler_policy") == "max_utilization"
            and values.get("enable_chunked_context") != "true"
        ):
            logger.warning(
                "%s: with batch_scheduler_policy max_utilization and without enable_chunked_context, "
                "TensorRT-LLM refuses streamed requests whose prompt tokens plus max_tokens - 1 exceed the "
                "engine's max_input_len; set enable_chunked_context to true, use guaranteed_no_evict, or "
                "build the engine with max_input_len equal to max_seq_len",
                model,
            )
        met = values.keys() & {"gpt_model_path", "encoder_model_path"}
        return [] if met else [f"{model}: engine_dir: triton_backend tensorrtllm needs it"]
    engine = values.get("engine", "")
    if engine and "gpt_model_path" in values:
        logger.warning("%s: engine_dir has no effect with triton_backend python", model)
    need = _NEEDS.get(engine)
    return [] if need in {None, *values} else [f"{model}: {need}: the {engine} engine needs it"]


def _render_all(
    templates: Mapping[str, str], overrides: Overrides, problems: list[str]
) -> dict[str, Any]:
    """Return the ModelConfig of each model, None for one with problems, which are added to ``problems``."""
    values = {model: dict(overrides.get(model, {})) for model in templates}
    if llm := templates.get("tensorrt_llm"):
        backend = _choose_backend(llm, values["tensorrt_llm"])
        for model, template in templates.items():
            # Only the engines in Python return the context.
            if f"${{{_CONTEXT}}}" in template and _is_empty(values[model].get(_CONTEXT)):
                values[model][_CONTEXT] = backend == "python"
    return {name: _render(name, text, values[name], problems) for name, text in templates.items()}


def _choose_backend(template: str, values: dict[str, object]) -> object:
    # NVIDIA's guides from before there was a choice name only the engine.
    given = {name for name, value in values.items() if not _is_empty(value)}
    engines = {"engine_dir", "encoder_engine_dir", "gpt_model_path", "encoder_model_path"}
    chosen = given & {"triton_backend", "engine", "model"}
    if given & engines and not chosen and "${triton_backend}" in template:
        values["triton_backend"] = "tensorrtllm"
    return values.get("triton_backend") or "python"


def _render(model: str, template: str, given: Values, problems: list[str]) -> Any | None:
    variables, found = known(model), len(problems)
    values = _current_names(model, given, problems)
    # Of an old template too: each name that it uses, and that of the variable today.
    renamed = TABLES.renamed.get(model, {})
    used = {name: renamed.get(name, name) for name in _VARIABLE.findall(template)}
    for name in values:
        if name not in variables:
            problems.append(f"{model}: {name}: unknown variable" + _suggest(name, variables))
        elif name not in used.values():
            ignored = TABLES.ignored.get(model, {}).get(name)
            why = ignored.description if ignored else "the template does not use it"
            logger.warning("%s: %s has no effect: %s", model, name, why)
    texts: dict[str, str | None] = {}
    for name, current in used.items():
        try:
            texts[name] = variables[current].render(values.get(current))
        except KeyError:
            unknown = "the template uses an unknown variable"
            problems.append(f"{model}: ${{{name}}}: {unknown}" + _suggest(name, variables))
        except ValueError as error:
            problems.append(f"{model}: {name}: {error}")
    if len(problems) > found:
        return None
    filled = "\n".join(_fill_line(line, texts) for line in template.split("\n"))
    try:
        config = text_format.Parse(filled, ModelConfig())
    except text_format.ParseError as error:
        problems.append(f"{model}: {CONFIG}:{error}")
        return None
    for key in [key for key, value in config.parameters.items() if _UNSET in value.string_value]:
        del config.parameters[key]
    if config.name not in ("", model):
        problems.append(f"{model}: the template's name is {config.name}")
    return config


def _fill_line(line: str, texts: Mapping[str, str | None]) -> str:
    def escaped(match: re.Match[str]) -> str:
        text = texts[match[1]]
        return str(text_encoding.CEscape(_UNSET if text is None else text, True))

    if "string_value" not in line and any(texts[name] is None for name in _VARIABLE.findall(line)):
        return ""
    return _VARIABLE.sub(escaped, line)


def _current_names(model: str, values: Values, problems: list[str]) -> dict[str, object]:
    current = dict(values)
    for old, new in TABLES.renamed.get(model, {}).items():
        if _is_empty(value := current.pop(old, None)):
            continue
        if _is_empty(current.get(new)):
            current[new] = value
        elif not known(model)[new].same(value, current[new]):
            problems.append(f"{model}: {new} and its old name {old} have different values")
    for name, renamed in TABLES.renamed_values.get(model, {}).items():
        if name in current:
            current[name] = renamed.get(str(current[name]), current[name])
    return current


def _problems_of(model: str, configs: Mapping[str, Any], directory: Path) -> list[str]:
    config = configs[model]
    problems = unmet_needs(model, config)
    for step in config.ensemble_scheduling.step:
        if step.model_name not in configs:
            problems.append(f"{model}: step {step.model_name}: no such model in the repository")
            continue
        if (inner := configs[step.model_name]) is None:
            continue
        if inner.max_batch_size < config.max_batch_size:
            problems.append(
                f"{step.model_name}: triton_max_batch_size: {inner.max_batch_size} is less than the "
                f"{config.max_batch_size} of {model}, which calls it; set both to the same value"
            )
        for kind in ("input", "output"):
            there = {tensor.name for tensor in getattr(inner, kind)}
            for tensor in sorted(getattr(step, f"{kind}_map").keys() - there) if there else ():
                problems.append(f"{model}: step {step.model_name} has no {kind} {tensor}")
    # Triton does not fail on this: it waits permanently for the model's process, which has ended.
    if config.backend == "python" and not any(directory.glob("*/model.py")):
        problems.append(f"{model}: none of its versions contains a model.py")
    return problems


def _is_empty(value: object) -> bool:
    return value is None or value == ""


def _suggest(name: str, names: Collection[str]) -> str:
    if close := difflib.get_close_matches(name, names, n=1):
        return f"; did you mean {close[0]}?"
    return f"; the known ones are {', '.join(sorted(names))}" if names else ""


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise TemplateError("\n  ".join(["config templates cannot be filled:", *problems]))


def add_derived(configs: dict[str, Any], *, context: bool) -> None:
    """Add ``ensemble_ids`` and, for ``context``, ``tensorrt_llm_context``, where the models allow them."""
    if (ensemble := configs.get("ensemble")) is None:
        return
    ids = ids_ensemble(ensemble, configs)
    if ids is not None:
        configs[IDS_ENSEMBLE] = ids
    if not context or not _reads_context(configs):
        return
    relay = configs[CONTEXT_MODEL] = _relay(configs["tensorrt_llm"])
    preprocessing = configs.get("preprocessing")
    if preprocessing is not None:
        # By which it knows the end tokens that preprocessing sends as stop words.
        for name in ("end_ids", "tokenizer_dir"):
            if name in preprocessing.parameters:
                relay.parameters[name].CopyFrom(preprocessing.parameters[name])
    for step in ensemble.ensemble_scheduling.step:
        if step.model_name == "tensorrt_llm":
            step.model_name = CONTEXT_MODEL
            step.output_map.update({key: tensor for key, tensor, _ in _CONTEXT_TENSORS})
        elif step.model_name == "postprocessing":
            step.input_map.update({name: tensor for _, tensor, name in _CONTEXT_TENSORS})


def ids_ensemble(ensemble: Any, configs: Mapping[str, Any]) -> Any | None:
    """Return an ensemble that makes ``OUTPUTS``, ``LOG_PROBS`` and ``FRAMES``; None if no step makes ids.

    ``FRAMES`` is among them where the model that makes the ids has it.
    """
    result = deepcopy(ensemble)
    steps = result.ensemble_scheduling.step
    maker = next((n for n, step in enumerate(steps) if step.output_map.keys() >= _NEEDED), None)
    if maker is None:
        return None
    del steps[maker + 1 :]
    if "context_ids" in steps[maker].output_map:  # an embedded engine reads none of these
        for unread in ("decoder_input_ids", "decoder_input_lengths", "pad_id"):
            steps[maker].input_map.pop(unread, None)
    needed = {tensor for step in steps for tensor in step.input_map.values()}
    ids = {n: n for n in (*OUTPUTS, LOG_PROBS) if n in steps[maker].output_map}
    engine = configs.get(steps[maker].model_name)
    if engine is not None and any(output.name == FRAMES for output in engine.output):
        ids[FRAMES] = FRAMES
    for step in steps:
        made = {key: tensor for key, tensor in step.output_map.items() if tensor in needed}
        step.output_map.clear()
        step.output_map.update(ids if step == steps[maker] else made)
    result.name = IDS_ENSEMBLE
    result.ClearField("input")
    result.input.extend(tensor for tensor in ensemble.input if tensor.name in needed)
    result.ClearField("output")
    for name in ids:
        data_type = "TYPE_FP32" if name == LOG_PROBS else "TYPE_INT32"
        result.output.add(name=name, data_type=data_type, dims=DIMS[name])
    return result


def _reads_context(configs: dict[str, Any]) -> bool:
    # A backend in Python returns the context itself; without decoupling a response holds a whole text.
    llm, post = configs.get("tensorrt_llm"), configs.get("postprocessing")
    if llm is None or post is None or llm.backend != "tensorrtllm":
        return False
    inputs = {tensor.name for tensor in post.input}
    return llm.model_transaction_policy.decoupled and all(
        name in inputs for *_, name in _CONTEXT_TENSORS
    )


def _relay(llm: Any) -> Any:
    result = deepcopy(llm)
    result.name, result.backend = CONTEXT_MODEL, "python"
    for part in ("parameters", "dynamic_batching", "instance_group"):
        result.ClearField(part)
    result.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    result.output.add(name="context_ids", data_type="TYPE_INT32", dims=[-1])
    result.output.add(name="is_final", data_type="TYPE_BOOL", dims=[1])
    return result
