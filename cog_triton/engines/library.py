"""The shared part of the engines on vLLM and TensorRT-LLM's LLM API: sampling, tokens, errors.

Their arguments are in ``library_arguments``.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.base import LEAST_LOG_PROB, GenerationRequest, Step
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.engines.library_arguments import Arguments
from cog_triton.errors import EngineError, EngineUnavailable
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.text.tokenizer import remote_code_refusal

_TOO_LONG = re.compile(r"prompt length.*(exceed|larger than)", re.IGNORECASE | re.DOTALL)


def model_config(arguments: Arguments) -> dict[str, Any]:
    """Return the content of a model's config.json; raise OSError if it cannot be read."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(
        arguments["model"], revision=arguments.get("revision")
    )
    return dict(config)


def sampling_arguments(request: GenerationRequest) -> Arguments:
    """Return the arguments that both libraries' ``SamplingParams`` have for a request.

    Stop words are left out: ``Serving`` looks for them, and they stay in the output.
    """
    sampling = request.sampling
    arguments: Arguments = {"max_tokens": request.max_tokens, **sampling.penalties}
    if not sampling.greedy:
        arguments["temperature"] = sampling.temperature
        # TensorRT-LLM takes a top_p of 0 as greedy, even with a top_k; here it is none.
        arguments["top_p"] = sampling.top_p or 1.0
        if sampling.top_k:
            arguments["top_k"] = sampling.top_k
    if sampling.min_tokens > 0:
        # The context may have cut the maximum since the two were compared.
        arguments["min_tokens"] = min(sampling.min_tokens, request.max_tokens)
    return arguments


def log_probs(ids: list[int], entries: Iterable[Any] | None, top: int = 0) -> list[TokenLogProb]:
    """Return each id's log probability, with those of the ``top`` most likely ids.

    Args:
        entries: one for each id: a number, or a mapping of ids to numbers or to objects with a ``logprob``.

    Raises:
        EngineUnavailable: an entry is missing.
    """
    found = []
    for token, entry in zip(ids, entries or (), strict=False):
        by_token = entry if isinstance(entry, Mapping) else {token: entry}
        values = {
            candidate: _in_range(float(getattr(value, "logprob", value)))
            for candidate, value in by_token.items()
        }
        most_likely = sorted(values.items(), key=lambda item: -item[1])[:top]
        if token in values:
            found.append(TokenLogProb(token, values[token], tuple(most_likely)))
    if len(found) < len(ids):
        raise EngineUnavailable("the engine left out the log probability of a token")
    return found


def _in_range(log_prob: float) -> float:
    # Rounding may leave a certain token slightly above 0.
    return max(LEAST_LOG_PROB, min(0.0, log_prob))


class LibraryEngine(EventLoopEngine):
    """An engine whose library schedules, batches and samples, and raises errors known by name.

    Class attributes:
        title: the library's name in messages.
        lora_request: the library's class LoRARequest(name, number, path).
        refusals: names of the errors that are the request's fault.
        deaths: names of the errors that end the library, but for the ``failures`` of one request.
    """

    title: ClassVar[str]
    lora_request: ClassVar[str]
    refusals: ClassVar[frozenset[str]]
    deaths: ClassVar[frozenset[str]]
    failures: ClassVar[frozenset[str]] = frozenset()

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
        """Create ``_llm``, and set ``context_length`` and ``features``."""

    @abstractmethod
    def sampling_params(self, request: GenerationRequest) -> Any:
        """Return the library's ``SamplingParams``."""

    @abstractmethod
    def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        """Generate a request's steps, on the loop; see ``steps``."""

    def close(self) -> None:
        super().close()
        llm = self._llm
        # Dropped, because vLLM's would shut down once more while Python ends.
        self._llm = None
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
            # The beginning is the C++ backend's, which clients know.
            text = f"Prompt length ({len(request.input_ids)}) exceeds maximum input length: {text}"
        is_refusal = bool(_class_names(error) & self.refusals)
        return EngineError(text) if is_refusal else EngineUnavailable(text)

    def step(self, request: GenerationRequest, ids: list[int], entries: Any, end: object) -> Step:
        """Return new tokens as a step.

        Args:
            entries: the library's log probabilities of the ids; see ``log_probs``.
            end: the library's reason for the end of the request; None before its end.

        Raises:
            EngineUnavailable: the reason is that of a failure.
        """
        if end not in (None, "stop", "length"):
            raise EngineUnavailable(f"{self.title} ended the request: {end}")
        found = log_probs(ids, entries, request.top_log_probs) if request.return_log_probs else []
        return Step(ids, found, finished=end is not None)


def _class_names(error: Exception) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}
