"""The shared part of the engines on vLLM and TensorRT-LLM's LLM API: arguments, sampling, tokens, errors.

A library's arguments come from the template variables, by library.yaml, the table beside this file. Those
of a YAML file, which ``vllm_config`` or ``llm_api_config`` names, are handed over as they are and win.
"""

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.base import LEAST_LOG_PROB, GenerationRequest, Step
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.errors import EngineError, EngineUnavailable
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.text.tokenizer import remote_code_refusal

logger = logging.getLogger(__name__)

Library = Literal["llmapi", "vllm"]
Arguments = dict[str, Any]

TABLE: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_bytes())
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
_TOO_LONG = re.compile(r"prompt length.*(exceed|larger than)", re.IGNORECASE | re.DOTALL)


def read_arguments(path: Path, variable: str) -> Arguments:
    """Return the arguments in the YAML file that ``variable`` names, or raise ValueError or OSError."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{variable} {path}: not valid YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{variable} {path}: expected a mapping, got {content!r}")
    return content or {}


def table_arguments(parameters: Mapping[str, str], library: Library) -> Arguments:
    """Return the arguments of the tensorrt_llm model's parameters; warn of those without one."""
    arguments: Arguments = {}
    for name, row in TABLE.items():
        text, argument = parameters.get(name), row.get(library)
        if text is None or text == row.get("same_as_unset") or name == CONFIG[library]:
            continue
        if argument is None:
            logger.warning("tensorrt_llm: %s has no effect with the engine %s", name, library)
        elif row.get("needs", name) in parameters:
            section, _, last = argument.rpartition(".")
            into = arguments.setdefault(section, {}) if section else arguments
            try:
                into[last] = _PARSE[row.get("type", "text")](text)
            except ValueError as error:
                raise ValueError(f"tensorrt_llm: {name}: {error}") from None
    if "guided_decoding_backend" in parameters:  # it compiles grammars for a vocabulary
        arguments["tokenizer"] = parameters.get("tokenizer_dir") or parameters.get("model")
    else:
        arguments["skip_tokenizer_init"] = True
    return arguments


def with_file(
    arguments: Arguments,
    parameters: Mapping[str, str],
    library: Library,
    convert: Callable[[Arguments, Arguments, str], Arguments] | None = None,
) -> Arguments:
    """Return the arguments with those of the library's file, which win; ``kv_cache_config`` is merged.

    Args:
        convert: merges the two, and makes objects of sections that the library does not take as dicts.
    """
    variable = CONFIG[library]
    if path := parameters.get(variable):
        extra = read_arguments(Path(path), variable)
        if _KV in arguments and isinstance(extra.get(_KV), dict):
            extra[_KV] = arguments[_KV] = _merged(variable, arguments[_KV], extra[_KV], f"{_KV}.")
        merged = _merged(variable, arguments, extra)
        try:
            arguments = convert(arguments, extra, path) if convert else merged
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{variable} {path}: {type(error).__name__}: {error}") from error
    if "model" not in arguments:
        raise ValueError(f"tensorrt_llm: model: the engine {library} needs it")
    return arguments


def _merged(variable: str, ours: Arguments, theirs: Arguments, section: str = "") -> Arguments:
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            text = "%s: %s%s is %r, and not %r as the template variables have it"
            logger.warning(text, variable, section, name, theirs[name], ours[name])
    return {**ours, **theirs}


def model_config(arguments: Arguments) -> dict[str, Any]:
    """Return the content of a model's config.json; raise OSError if it cannot be read."""
    from transformers import PretrainedConfig

    model, revision = arguments["model"], arguments.get("revision")
    return dict(PretrainedConfig.get_config_dict(model, revision=revision)[0])


def sampling_arguments(request: GenerationRequest) -> Arguments:
    """Return the arguments that both libraries' ``SamplingParams`` have for a request.

    Stop words are left out: ``Serving`` looks for them, and they stay in the output.
    """
    sampling = request.sampling
    arguments: Arguments = {"max_tokens": request.max_tokens, **sampling.penalties}
    if not sampling.greedy:
        # TensorRT-LLM takes a top_p of 0 as greedy, even with a top_k; here it is none.
        top_p = sampling.top_p or 1.0
        arguments |= {"temperature": sampling.temperature, "top_p": top_p}
        arguments |= {"top_k": sampling.top_k} if sampling.top_k else {}
    if sampling.min_tokens > 0:
        # The context may have cut the maximum since the two were compared.
        arguments["min_tokens"] = min(sampling.min_tokens, request.max_tokens)
    return arguments


def log_probs(ids: list[int], entries: Iterable[Any] | None, top: int = 0) -> list[TokenLogProb]:
    """Return each id's log probability, with the ``top`` likeliest ids'. Entries may be plain numbers."""
    found = []
    for token, entry in zip(ids, entries or (), strict=False):
        likely = entry if isinstance(entry, Mapping) else {token: entry}
        raw = {i: float(getattr(value, "logprob", value)) for i, value in likely.items()}
        # Rounding may leave a certain token a hair above 0.
        values = {i: max(LEAST_LOG_PROB, min(0.0, value)) for i, value in raw.items()}
        best = sorted(values.items(), key=lambda item: -item[1])[:top]
        if token in values:
            found.append(TokenLogProb(token, values[token], tuple(best)))
    if len(found) < len(ids):
        raise EngineUnavailable("the engine left out the log probability of a token")
    return found


class LibraryEngine(EventLoopEngine):
    """An engine whose library schedules, batches and samples, and raises errors known by name."""

    title: ClassVar[str]
    lora_request: ClassVar[str]  # the library's class LoRARequest(name, number, path)
    refusals: ClassVar[frozenset[str]]  # errors that are the request's fault
    deaths: ClassVar[frozenset[str]]  # errors that end the library
    failures: ClassVar[frozenset[str]] = frozenset()  # those among them that end only one request

    def __init__(self, parameters: Mapping[str, str], arguments: Arguments) -> None:
        directory = parameters.get("lora_prefetch_dir")
        self._adapters = LoraRequests(Path(directory) if directory else None)
        self._llm: Any = None
        super().__init__(f"{self.title} engine")
        try:
            self.load(arguments)
        except BaseException as error:
            self.close()
            refusal = remote_code_refusal(error, "model", str(arguments["model"]))
            if refusal and not arguments.get("trust_remote_code"):
                raise ValueError(refusal) from error
            raise

    @abstractmethod
    def load(self, arguments: Arguments) -> None:
        """Make ``_llm``, and set ``context_length`` and ``features``."""

    @abstractmethod
    def sampling_params(self, request: GenerationRequest) -> Any:
        """Return the library's ``SamplingParams``."""

    @abstractmethod
    def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        """Generate a request's steps, on the loop; see ``steps``."""

    def close(self) -> None:
        super().close()
        # Dropped, else vLLM's shuts down once more, when Python is half gone.
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    def steps(self, request: GenerationRequest) -> Steps:
        try:
            sampling = self.sampling_params(request)
        except Exception as error:
            raise self.request_error(error, request) from None
        adapter = None
        if request.lora_task_id:
            adapter = self._adapters.of(request.lora_task_id, resolve_name(self.lora_request))
        return self.generate(request, sampling, adapter)

    def ends_engine(self, error: Exception) -> bool:
        names = _class_names(error)
        is_death = bool(names & self.deaths) and not names & self.failures
        return is_death and not isinstance(error, EngineError)

    def request_error(self, error: Exception, request: GenerationRequest) -> EngineError:
        if isinstance(error, EngineError):
            return error
        text = str(error) or repr(error)
        if _TOO_LONG.search(text) and "exceeds maximum input length" not in text:
            # As the C++ backend's begins, which clients know.
            text = f"Prompt length ({len(request.input_ids)}) exceeds maximum input length: {text}"
        is_refusal = bool(_class_names(error) & self.refusals)
        return EngineError(text) if is_refusal else EngineUnavailable(text)

    def step(self, request: GenerationRequest, ids: list[int], entries: Any, end: object) -> Step:
        """Return new tokens as a step. ``end`` is the library's reason for the end of the request."""
        if end not in (None, "stop", "length"):
            raise EngineUnavailable(f"{self.title} ended the request: {end}")
        given = log_probs(ids, entries, request.top_log_probs) if request.return_log_probs else []
        return Step(ids, given, finished=end is not None)


def _class_names(error: Exception) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}
