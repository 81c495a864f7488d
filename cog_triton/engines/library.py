"""What the engines on vLLM and on TensorRT-LLM's LLM API share: arguments, sampling, tokens, adapters.

A library's arguments come from the template variables, by library.yaml, the table beside this file. Those
of a YAML file, which ``vllm_config`` or ``llm_api_config`` names, are handed over as they are and win.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import BaseModel, TypeAdapter

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.base import (
    LEAST_LOG_PROB,
    EngineError,
    EventLoopEngine,
    GenerationRequest,
    Step,
    Steps,
    TokenLogProb,
)
from cog_triton.text.tokenizer import remote_code_refusal

logger = logging.getLogger(__name__)

Library = Literal["llmapi", "vllm"]
Convert = Callable[[dict[str, Any], dict[str, Any], str], dict[str, Any]]

CONFIG: dict[Library, str] = {"llmapi": "llm_api_config", "vllm": "vllm_config"}
_KV = "kv_cache_config"
_PARSE: dict[str, Callable[[str], Any]] = {
    "text": str,
    "upper": str.upper,
    "integer": int,
    "integers": lambda text: [int(item) for item in text.split(",")],
    "float": float,
    "boolean": lambda text: text == "true",
    "given": bool,
}


class Variable(BaseModel, frozen=True, extra="forbid"):
    """A row of library.yaml."""

    type: Literal["text", "upper", "integer", "integers", "float", "boolean", "given"] = "text"
    llmapi: str | None = None
    vllm: str | None = None
    same_as_unset: str | None = None


TABLE = TypeAdapter(dict[str, Variable]).validate_python(
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


def table_arguments(parameters: Mapping[str, str], library: Library) -> dict[str, Any]:
    """Return the arguments that the tensorrt_llm model's parameters stand for; warn of those without one.

    Raises:
        ValueError: a value is not valid.
    """
    arguments: dict[str, Any] = {}
    for name, row in TABLE.items():
        text, argument = parameters.get(name), getattr(row, library)
        if text is None or text == row.same_as_unset:
            continue
        if name == "lora_cache_max_adapter_size" and "lora_prefetch_dir" not in parameters:
            continue
        if argument is None:
            logger.warning("tensorrt_llm: %s has no effect with the engine %s", name, library)
            continue
        section, _, last = argument.rpartition(".")
        into = arguments.setdefault(section, {}) if section else arguments
        try:
            into[last] = _PARSE[row.type](text)
        except ValueError as error:
            raise ValueError(f"tensorrt_llm: {name}: {error}") from None
    for config in CONFIG.values():
        if config != CONFIG[library] and config in parameters:
            logger.warning("tensorrt_llm: %s has no effect with the engine %s", config, library)
    if parameters.get("guided_decoding_backend"):  # it compiles grammars for a vocabulary
        arguments["tokenizer"] = parameters.get("tokenizer_dir") or parameters.get("model")
    else:
        arguments["skip_tokenizer_init"] = True
    return arguments


def read_arguments(path: Path, variable: str) -> dict[str, Any]:
    """Return the arguments in a YAML file, which the template variable ``variable`` names.

    Raises:
        ValueError: it is not YAML, or not a mapping.
        OSError: it cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{variable} {path}: not valid YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{variable} {path}: expected a mapping, got {content!r}")
    return content or {}


def with_file(
    arguments: dict[str, Any],
    parameters: Mapping[str, str],
    library: Library,
    convert: Convert | None = None,
) -> dict[str, Any]:
    """Return the arguments with those of the library's file, which win; ``kv_cache_config`` is merged.

    Args:
        convert: merges the two, and makes objects of sections that the library does not take as dicts.

    Raises:
        ValueError: the file's contents are not valid, or the model is missing.
        OSError: the file cannot be read.
    """
    variable = CONFIG[library]
    if path := parameters.get(variable):
        extra = read_arguments(Path(path), variable)
        ours, theirs = arguments.get(_KV), extra.get(_KV)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            _log_overridden(variable, ours, theirs, f"{_KV}.")
            extra[_KV] = arguments[_KV] = {**ours, **theirs}
        _log_overridden(variable, arguments, extra)
        try:
            arguments = {**arguments, **extra} if not convert else convert(arguments, extra, path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{variable} {path}: {type(error).__name__}: {error}") from error
    if "model" not in arguments:
        raise ValueError(f"tensorrt_llm: model: the engine {library} needs it")
    return arguments


def _log_overridden(
    variable: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> None:
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            logger.warning(
                "%s: %s%s is %r, and not %r as the template variables have it",
                *(variable, prefix, name, theirs[name], ours[name]),
            )


def model_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a model's config.json; raise OSError if it cannot be read."""
    from transformers import PretrainedConfig

    model, revision = arguments["model"], arguments.get("revision")
    config: dict[str, Any] = PretrainedConfig.get_config_dict(model, revision=revision)[0]
    return config


@contextmanager
def explained(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Raise ValueError where a library refuses a model's own code, which is not trusted."""
    try:
        yield
    except Exception as error:
        text = remote_code_refusal(error, "model", str(arguments["model"]))
        if arguments.get("trust_remote_code") or not text:
            raise
        raise ValueError(text) from error


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments that both libraries' ``SamplingParams`` have for a request.

    Arguments that change nothing are left out, and stop words, which ``Serving`` looks for: they stay in
    the output here.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {"max_tokens": request.max_tokens, **sampling.penalties}
    if not sampling.greedy:
        # TensorRT-LLM takes a top_p of 0 as greedy, even with a top_k; here it is none.
        top_p, seed = sampling.top_p or 1.0, sampling.seed
        arguments |= {"temperature": sampling.temperature, "top_p": top_p, "seed": seed}
        arguments |= {"top_k": sampling.top_k} if sampling.top_k else {}
    if sampling.min_tokens > 0:
        # The context may have cut the maximum since the two were compared.
        arguments["min_tokens"] = min(sampling.min_tokens, request.max_tokens)
    return arguments


def log_probs(
    ids: Iterable[int], entries: Iterable[Any] | None, top: int = 0
) -> list[TokenLogProb]:
    """Return the log probability of each id, with the ``top`` most likely ids'.

    Args:
        entries: a mapping from ids to objects with a ``logprob`` each; of some of TensorRT-LLM's releases
            the number.

    Raises:
        EngineError: one is missing.
    """
    found, ids = [], list(ids)
    for token, entry in zip(ids, entries or (), strict=False):
        likely = entry if isinstance(entry, Mapping) else {token: entry}
        raw = {i: float(getattr(value, "logprob", value)) for i, value in likely.items()}
        # Rounding may leave a certain token a hair above 0.
        values = {i: max(LEAST_LOG_PROB, min(0.0, value)) for i, value in raw.items()}
        best = sorted(raw, key=lambda i: -raw[i])[:top]  # the chosen token is not always among them
        if token in values:
            found.append(TokenLogProb(token, values[token], tuple((i, values[i]) for i in best)))
    if len(found) < len(ids):
        raise EngineError("the engine left out the log probability of a token")
    return found


class LibraryEngine(EventLoopEngine):
    """An engine whose library schedules, batches and samples.

    A subclass closes its library after ``close`` here.
    """

    lora_request: ClassVar[str]  # the library's class LoRARequest(name, number, path)
    title: ClassVar[str]

    def __init__(self, parameters: Mapping[str, str]) -> None:
        directory = parameters.get("lora_prefetch_dir")
        self._adapters = LoraRequests(Path(directory) if directory else None)
        super().__init__(f"{self.title} engine")

    @abstractmethod
    def sampling_params(self, request: GenerationRequest) -> Any:
        """Return the library's ``SamplingParams``; an error of ``is_refusal`` refuses the request."""

    @abstractmethod
    def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        """Generate a request's steps, on the loop; see ``steps``."""

    @abstractmethod
    def is_refusal(self, error: Exception) -> bool:
        """Return True for an error that is the request's fault."""

    @abstractmethod
    def is_fatal(self, error: Exception) -> bool:
        """Return True for an error that ends the library."""

    def steps(self, request: GenerationRequest) -> Steps:
        try:
            sampling = self.sampling_params(request)
        except Exception as error:
            if not self.is_refusal(error):
                raise
            raise EngineError(str(error)) from error
        return self.generate(request, sampling, self._adapter(request.lora_task_id))

    def failure(self, request: GenerationRequest, error: Exception) -> Step | None:
        if self.is_fatal(error):
            return None
        text = self.error_text(error, len(request.input_ids))
        return Step(finished=True, error=text, refused=self.is_refusal(error))

    def error_text(self, error: Exception, prompt_length: int) -> str:  # noqa: ARG002
        """Return the text for the client."""
        return str(error) or repr(error)

    def _adapter(self, task_id: int) -> Any:
        if not task_id:
            return None
        return self._adapters.of(task_id, resolve_name(self.lora_request))

    def step(
        self,
        request: GenerationRequest,
        ids: list[int],
        entries: Iterable[Any] | None,
        end: str | None,
    ) -> Step:
        """Return a library's new tokens as a step.

        Args:
            entries: see ``log_probs``.
            end: the library's reason for the end of the request, None before.

        Raises:
            EngineError: log probabilities are missing, or the library gave the request up.
        """
        if end not in (None, "stop", "length"):
            raise EngineError(f"{self.title} ended the request: {end}")
        given = log_probs(ids, entries, request.top_log_probs) if request.return_log_probs else []
        return Step(ids, given, finished=end is not None)
