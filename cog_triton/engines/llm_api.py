"""TensorRT-LLM by its Python LLM API, 1.1 and later; from 1.3 on it has no other.

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
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from cog_triton.engines import library
from cog_triton.engines.base import EngineError, GenerationRequest, Steps

logger = logging.getLogger(__name__)

OLDEST = Version("1.1.0.dev0")
TORCH_SAMPLER_ONLY = Version("1.3.0rc26")
REMEDY = "set sampler_type: TRTLLMSampler in the file that llm_api_config names"
NO_END_ID = -1
ANY_ID = 0  # pads what is never read; without it the LLM would pad with NO_END_ID
_TOO_LONG = re.compile(r"prompt length.*(exceed|larger than)", re.IGNORECASE | re.DOTALL)


class TensorrtLlmEngine(library.LibraryEngine):
    """See the module's docstring."""

    title = "TensorRT-LLM"
    lora_request = "tensorrt_llm.executor.request:LoRARequest"

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
        with library.explained(arguments):
            self._llm = tensorrt_llm.LLM(**arguments)
        try:
            self.context_length = context_length(arguments, self._llm)
        except BaseException:
            self._llm.shutdown()
            raise
        self._sampling_params = tensorrt_llm.SamplingParams
        if "lora_prefetch_dir" in parameters:
            self.features = frozenset({"lora_task_id"})
        super().__init__(parameters)

    def close(self) -> None:
        super().close()
        self._llm.shutdown()

    def sampling_params(self, request: GenerationRequest) -> Any:
        sampling = request.sampling
        asked = [*sampling.penalties, *(["bad_words"] if any(sampling.bad_words) else [])]
        if self._forgetful and asked:
            raise EngineError(
                f"the default sampler of TensorRT-LLM {self._forgetful} does not support "
                f"{', '.join(asked)}, and would ignore it; {REMEDY}"
            )
        return self._sampling_params(**sampling_arguments(request))

    async def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        asked = {"inputs": request.input_ids, "sampling_params": sampling}
        output = self._llm.generate_async(**asked, lora_request=adapter, streaming=True)
        last_id = None
        try:
            async for update in output:
                new = update.outputs[0]
                end = (new.finish_reason or "stop") if update.finished else None
                step = self.step(request, list(new.token_ids_diff), new.logprobs_diff, end)
                last_id = step.ids[-1] if step.ids else last_id
                if end == "stop" and request.end_id not in (None, last_id):
                    # No stop words are given to the LLM, so it has left out the end token.
                    step.ids.append(request.end_id)
                yield step
        finally:
            if not output.finished:
                output.abort()

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, (ValueError, TypeError))

    def is_fatal(self, error: Exception) -> bool:
        """Tell an error that ends the LLM from one of a request.

        A request's own errors are ``RequestError``, or those of Python for arguments; what ends the
        executor, or is raised because it has ended, is a RuntimeError or comes from a socket or pipe.
        """
        # By name, for its place in the package is not promised.
        if any(base.__name__ == "RequestError" for base in type(error).__mro__):
            return False
        return isinstance(error, (RuntimeError, OSError))

    def error_text(self, error: Exception, prompt_length: int) -> str:
        """Return the text for the client; of a prompt that is too long it begins as the C++ backend's."""
        text = super().error_text(error, prompt_length)
        if _TOO_LONG.search(text) and "exceeds maximum input length" not in text:
            return f"Prompt length ({prompt_length}) exceeds maximum input length: {text}"
        return text


def llm_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.LLM`` that the parameters stand for, without the file's."""
    arguments = library.table_arguments(parameters, "llmapi")
    if "lora_prefetch_dir" in parameters:
        arguments.setdefault("lora_config", {})
    if backend := parameters.get("guided_decoding_backend"):
        arguments["guided_decoding_backend"] = backend
    return arguments


def loading_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.LLM``, with those of ``llm_api_config`` and as its classes.

    Raises:
        ValueError: a parameter or a section of the file is not valid, or the model is missing.
        OSError: the file cannot be read.
    """
    from tensorrt_llm.llmapi import KvCacheConfig, llm_args

    convert = getattr(llm_args, "update_llm_args_with_extra_dict", None)
    arguments = library.with_file(llm_arguments(parameters), parameters, "llmapi", convert)
    # LoraConfig from the module that uses it; its own has changed.
    kinds = {"kv_cache_config": KvCacheConfig, "lora_config": getattr(llm_args, "LoraConfig", None)}
    for name, kind in kinds.items():
        if kind is not None and isinstance(section := arguments.get(name), dict):
            arguments[name] = kind(**section)
    return arguments


def context_length(arguments: Mapping[str, Any], llm: Any) -> int:
    """Return the most tokens that prompt and output of an ``LLM`` may have together.

    Raises:
        ValueError: the arguments, the LLM's and the model's configuration do not have it.
        OSError: the model's configuration cannot be read.
    """
    known = arguments.get("max_seq_len") or getattr(getattr(llm, "args", None), "max_seq_len", None)
    if known is None:
        config = library.model_config(arguments)
        known = config.get("text_config", config).get("max_position_embeddings")
    if known is None:
        raise ValueError(f"the configuration of {arguments['model']} does not say; set max_seq_len")
    return int(known)


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
    """Return the arguments of ``tensorrt_llm.SamplingParams`` for a request.

    Raises:
        EngineError: a bad word has several tokens.
    """
    arguments = {**library.sampling_arguments(request), "end_id": request.end_id}
    if request.end_id is None:
        # Without a tokenizer the LLM refuses requests that give no end id.
        arguments |= {"end_id": NO_END_ID, "pad_id": ANY_ID, "ignore_eos": True}
    if request.sampling.greedy:
        # The one that means greedy in all releases. A temperature or top_p of 0 does not.
        arguments["top_k"] = 1
    bad_words = [word for word in request.sampling.bad_words if word]
    for word in bad_words:
        if len(word) > 1:
            raise EngineError(
                "TensorRT-LLM's LLM API does not support bad words of several tokens, such as token "
                f"ids {list(word)}"
            )
    if bad_words:
        arguments["bad_token_ids"] = [word[0] for word in bad_words]
    if request.return_log_probs:
        arguments["logprobs"] = 1  # 0 means none in older releases
    return arguments
