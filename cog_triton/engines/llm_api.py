"""TensorRT-LLM by its Python LLM API, 1.1 and later; from 1.3 on it has no other.

TensorRT-LLM schedules, batches and samples; this module hands it token ids and takes token ids. The LLM's
arguments come from the same template variables as the C++ backend's configuration. Those of
``llm_api_config``, a YAML file, are handed over as they stand there and win.

All of this has run only on a fake that keeps to the interface promised for 1.x. Unchecked on the real one:

- start and end: the time of loading, worker processes started from Triton's Python stub, also by MPI, and
  that ``shutdown`` ends them; the sections of the YAML file, a scheduling policy as text;
- adapters: ``LoRARequest`` and ``lora_config`` in 1.1 to 1.3, that an adapter changes only the requests
  that name it, and that one which cannot be loaded fails its requests and not the LLM;
- log probabilities: that they are of the unchanged distribution, and have the chosen token's;
- the end token: some samplers leave it out, so it is added then;
- the texts of its errors, by which clients tell a long prompt from other failures;
- that a dead worker process shows. If no output's iterator raises, requests wait until their clients lose
  patience, and the next request finds the LLM shut down;
- speed, of which the loop's thread may be the limit; a ``stream_interval`` above 1 eases that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from cog_triton.adapters.directory import LoraRequests
from cog_triton.engines.arguments import (
    context_length,
    llm_arguments,
    merged,
    read_arguments,
    without_effect,
)
from cog_triton.engines.base import (
    EngineError,
    GenerationRequest,
    Step,
    TokenLogProb,
)
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.text.tokenizer import remote_code_refusal

logger = logging.getLogger(__name__)

OLDEST = Version("1.1.0.dev0")
TORCH_SAMPLER_ONLY = Version("1.3.0rc26")
REMEDY = "set sampler_type: TRTLLMSampler in the file that llm_api_config names"
NO_END_ID = -1
ANY_ID = 0  # pads what is never read; without it the LLM would pad with NO_END_ID
_TOO_LONG = re.compile(r"prompt length.*(exceed|larger than)", re.IGNORECASE | re.DOTALL)


class TensorrtLlmEngine(EventLoopEngine):
    """See the module's docstring."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        """Load the model that the tensorrt_llm model's parameters name.

        Raises:
            ValueError: a parameter is missing or not valid, the LLM does not know an argument, its release
                is too old, or the model needs its own code and that is not trusted.
            OSError: there is no such file or model.
            Exception: whatever else the LLM raises while it loads.
        """
        import tensorrt_llm

        version = str(getattr(tensorrt_llm, "__version__", "unknown"))
        if _parsed(version) < OLDEST:
            raise ValueError(f"the engine llmapi needs TensorRT-LLM 1.1 or later, not {version}")
        arguments = loading_arguments(parameters)
        self._forgetful = version if is_forgetful(version, arguments) else None
        if self._forgetful:
            logger.warning(
                "the default sampler of TensorRT-LLM %s ignores seeds: the same seed may give another "
                "text. Penalties and bad words are refused. To have them, %s",
                *(version, REMEDY),
            )
        try:
            self._llm = tensorrt_llm.LLM(**arguments)
        except Exception as error:
            text = remote_code_refusal(error, "model", str(arguments["model"]))
            if arguments.get("trust_remote_code") or not text:
                raise
            raise ValueError(text) from error
        try:
            self.context_length = context_length(arguments, self._llm)
        except BaseException:
            self._llm.shutdown()
            raise
        self._sampling_params = tensorrt_llm.SamplingParams
        adapters = parameters.get("lora_prefetch_dir")
        self.features = frozenset({"lora_task_id"} if adapters else ())
        self._adapters = LoraRequests(Path(adapters) if adapters else None)
        super().__init__("llm-api-engine")

    def close(self) -> None:
        super().close()
        self._llm.shutdown()

    def steps(self, request: GenerationRequest) -> Steps:
        sampling = request.sampling
        asked = [*sampling.penalties, *(["bad_words"] if any(sampling.bad_words) else [])]
        if self._forgetful and asked:
            raise EngineError(
                f"the default sampler of TensorRT-LLM {self._forgetful} does not support "
                f"{', '.join(asked)}, and would ignore it; {REMEDY}"
            )
        try:
            params = self._sampling_params(**sampling_arguments(request))
            return self._generate(request, params, self._adapter(request.lora_task_id))
        except (ValueError, TypeError) as error:
            raise EngineError(str(error)) from error

    def _adapter(self, task_id: int) -> Any:
        if not task_id:
            return None
        from tensorrt_llm.executor.request import LoRARequest

        return self._adapters.of(task_id, LoRARequest)

    async def _generate(self, request: GenerationRequest, params: Any, adapter: Any) -> Steps:
        output, last_id = None, None
        try:
            asked = {"inputs": request.input_ids, "sampling_params": params}
            output = self._llm.generate_async(**asked, lora_request=adapter, streaming=True)
            async for update in output:
                step = next_step(update.outputs[0], request, last_id, finished=update.finished)
                last_id = step.ids[-1] if step.ids else last_id
                yield step
        except Exception as error:
            if is_fatal(error):
                raise
            yield Step([], finished=True, error=error_text(error, len(request.input_ids)))
        finally:
            if output is not None and not output.finished:
                output.abort()


def loading_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.LLM``, with those of ``llm_api_config`` and as its classes.

    Raises:
        ValueError: a parameter or a section of the file is not valid, or the model is missing.
        OSError: the file cannot be read.
    """
    from tensorrt_llm.llmapi import KvCacheConfig, llm_args

    for name in without_effect(parameters, "llmapi"):
        logger.warning("tensorrt_llm: %s has no effect with the engine llmapi", name)
    arguments = llm_arguments(parameters)
    if path := parameters.get("llm_api_config"):
        convert = getattr(llm_args, "update_llm_args_with_extra_dict", None)
        extra = read_arguments(Path(path), "llm_api_config")
        arguments = merged(arguments, extra, path, convert)
    if "model" not in arguments:
        raise ValueError("tensorrt_llm: model: the engine llmapi needs it")
    # LoraConfig from the module that uses it; its own has changed.
    kinds = {"kv_cache_config": KvCacheConfig, "lora_config": getattr(llm_args, "LoraConfig", None)}
    for name, kind in kinds.items():
        if kind is not None and isinstance(section := arguments.get(name), dict):
            arguments[name] = kind(**section)
    return arguments


def is_forgetful(version: str, options: Mapping[str, Any]) -> bool:
    """Return True if the sampler of an LLM with these arguments ignores seeds, penalties and bad words.

    The PyTorch backend has two. TRTLLMSampler, in C++, honours all that a request can ask for here.
    TorchSampler, the default, silently ignores these up to 1.2. It learned them between July and August
    2026 (pull requests 16052, 16485 and 17172), while the release candidates of 1.3 came out; from
    1.3.0rc26 on it is the only one. All that was read in its repository, and never tried.

    An ignored penalty or bad word changes the answer unnoticed, so such a request is refused. A seed comes
    with every request, mostly one that nobody asked for: it is warned of once.
    """
    sampler = options.get("sampler_type", "auto")
    # The engines that 1.x can still run by the LLM API sample in C++, too.
    in_cpp = str(getattr(sampler, "value", sampler)) == "TRTLLMSampler"
    in_cpp = in_cpp or options.get("backend") == "tensorrt"
    return not in_cpp and _parsed(version) < TORCH_SAMPLER_ONLY


def _parsed(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return OLDEST  # the one of which least is expected


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.SamplingParams`` that a request stands for.

    What changes nothing is left out, but for what means something else when it is missing. Stop words are
    not given to the LLM: they stay in the output here, and ``Serving`` looks for them.

    Raises:
        EngineError: a bad word has several tokens.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {"max_tokens": request.max_tokens, "end_id": request.end_id}
    if request.end_id is None:
        # Without a tokenizer the LLM refuses requests that give no end id.
        arguments |= {"end_id": NO_END_ID, "pad_id": ANY_ID, "ignore_eos": True}
    if sampling.greedy:
        # The one that means greedy in all releases. A temperature or top_p of 0 does not.
        arguments["top_k"] = 1
    else:
        # The LLM takes a top_p of 0 as greedy, even with a top_k; SamplingParams takes it as none.
        top_p = sampling.top_p or 1.0
        arguments |= {"temperature": sampling.temperature, "top_p": top_p, "seed": sampling.seed}
        arguments |= {"top_k": sampling.top_k} if sampling.top_k else {}
    arguments |= sampling.penalties
    if sampling.min_tokens > 0:
        arguments["min_tokens"] = sampling.min_tokens
    for word in sampling.bad_words:
        if len(word) > 1:
            raise EngineError(
                "TensorRT-LLM's LLM API does not support bad words of several tokens, such as token "
                f"ids {list(word)}"
            )
    if bad := [word[0] for word in sampling.bad_words if word]:
        arguments["bad_token_ids"] = bad
    if request.return_log_probs:
        arguments["logprobs"] = 1  # 0 means none in older releases
    return arguments


def next_step(
    completion: Any, request: GenerationRequest, last_id: int | None, *, finished: bool
) -> Step:
    """Return the new tokens of one of the LLM's ``CompletionOutput``.

    Args:
        last_id: the last id of the update before.
        finished: that of the ``RequestOutput``.

    Raises:
        EngineError: log probabilities are missing, or the LLM gave the request up.
    """
    ids = list(completion.token_ids_diff)
    log_probs = chosen_log_probs(ids, completion.logprobs_diff) if request.return_log_probs else []
    reason = completion.finish_reason if finished else None
    if reason in ("timeout", "cancelled"):
        raise EngineError(f"TensorRT-LLM ended the request: {reason}")
    # No stop words are given to the LLM, so "stop" is the end token.
    if reason == "stop" and request.end_id not in (None, ids[-1] if ids else last_id):
        ids.append(request.end_id)
    return Step(ids, log_probs, finished)


def chosen_log_probs(ids: Sequence[int], entries: Sequence[Any] | None) -> list[TokenLogProb]:
    """Return the log probability of each id; as releases differ, each entry is a number, or a mapping
    from ids to objects with a ``logprob``.

    Raises:
        EngineError: one is missing.
    """
    log_probs = []
    for token, entry in zip(ids, entries or (), strict=False):
        chosen = entry.get(token) if isinstance(entry, Mapping) else entry
        value = getattr(chosen, "logprob", chosen)
        if value is not None:
            log_probs.append(TokenLogProb(token, float(value)))
    if len(log_probs) < len(ids):
        raise EngineError("TensorRT-LLM left out the log probability of a token")
    return log_probs


def is_fatal(error: Exception) -> bool:
    """Tell an error that ends the LLM from one of a request.

    A request's own errors are ``RequestError``, or those of Python for arguments; what ends the executor,
    or is raised because it has ended, is a RuntimeError or comes from a socket or pipe.
    """
    # By name, for its place in the package is not promised.
    if any(base.__name__ == "RequestError" for base in type(error).__mro__):
        return False
    return isinstance(error, (RuntimeError, OSError))


def error_text(error: Exception, prompt_length: int) -> str:
    """Return the text for the client; of a prompt that is too long it begins as the C++ backend's."""
    text = str(error) or repr(error)
    if _TOO_LONG.search(text) and "exceeds maximum input length" not in text:
        return f"Prompt length ({prompt_length}) exceeds maximum input length: {text}"
    return text
