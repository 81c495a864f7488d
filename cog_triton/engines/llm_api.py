"""TensorRT-LLM by its Python LLM API, 1.1 and later; from 1.3 on it has no other.

This has run only on a fake of the interface promised for 1.x; docs/operations.md has what is unchecked.
"""

import logging
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from cog_triton.engines import library
from cog_triton.engines.base import EngineError, GenerationRequest
from cog_triton.engines.event_loop import Steps
from cog_triton.protocol.log_probs import TokenLogProb

logger = logging.getLogger(__name__)

TORCH_SAMPLER_ONLY = Version("1.3.0rc26")
# Stands for the log probability of an end token, which the LLM API may not give.
UNKNOWN_LOG_PROB = 0.0
REMEDY = "set sampler_type: TRTLLMSampler in the file that llm_api_config names"


class TensorrtLlmEngine(library.LibraryEngine):
    title = "TensorRT-LLM"
    lora_request = "tensorrt_llm.executor.request:LoRARequest"
    refusals = frozenset({"ValueError", "TypeError"})
    failures = frozenset({"RequestError"})
    deaths = frozenset({"RuntimeError", "OSError"})

    def __init__(self, parameters: Mapping[str, str]) -> None:
        import tensorrt_llm

        self._version = version = tensorrt_llm.__version__
        if Version(version) < Version("1.1.0.dev0"):
            raise ValueError(
                f"ENGINE=llmapi requires TensorRT-LLM 1.1 or later, but {version} is installed"
            )
        super().__init__(parameters, loading_arguments(parameters))

    def load(self, arguments: library.Arguments) -> None:
        from tensorrt_llm import LLM

        self._forgetful = is_forgetful(self._version, arguments)
        if self._forgetful:
            logger.warning(
                "the default sampler of TensorRT-LLM %s ignores seeds, so output is not reproducible, and "
                "penalties and bad words, so requests with them are refused; to use them, %s",
                *(self._version, REMEDY),
            )
        self._llm = LLM(**arguments)
        self.context_length = context_length(arguments, self._llm)
        self.features = frozenset({"lora_task_id"} if arguments.get("enable_lora") else ())

    def sampling_params(self, request: GenerationRequest) -> Any:
        from tensorrt_llm import SamplingParams

        sampling = request.sampling
        asked = [*sampling.penalties, *(["bad_words"] if any(sampling.bad_words) else [])]
        # An ignored one changes the answer unnoticed. A seed comes with every request, mostly unasked for.
        if self._forgetful and asked:
            raise EngineError(
                f"the default sampler of TensorRT-LLM {self._version} does not support "
                f"{', '.join(asked)}; {REMEDY}"
            )
        return SamplingParams(**sampling_arguments(request))

    async def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        prompt = request.input_ids
        output = self._llm.generate_async(prompt, sampling, lora_request=adapter, streaming=True)
        last_id = None
        try:
            async for update in output:
                new = update.outputs[0]
                end = (new.finish_reason or "stop") if update.finished else None
                ids, entries = list(new.token_ids_diff), list(new.logprobs_diff or ())
                has_end_token = end == "stop" and ids and ids[-1] in request.end_ids
                if has_end_token and len(entries) == len(ids) - 1:
                    entries.append(UNKNOWN_LOG_PROB)
                step = self.step(request, ids, entries, end)
                last_id = step.ids[-1] if step.ids else last_id
                if end == "stop" and request.end_ids and last_id not in request.end_ids:
                    # It leaves out ``end_id``, and no stop words but end tokens are given to it.
                    end_id = request.end_ids[0]
                    step.ids.append(end_id)
                    if request.return_log_probs:
                        # It left out that token's log probability as well.
                        step.log_probs.append(TokenLogProb(end_id, UNKNOWN_LOG_PROB))
                yield step
        finally:
            if not output.finished:
                output.abort()


def loading_arguments(parameters: Mapping[str, str]) -> library.Arguments:
    """Return the arguments of ``tensorrt_llm.LLM``, with those of ``llm_api_config`` and as its classes."""
    from tensorrt_llm.llmapi import KvCacheConfig, llm_args

    convert = getattr(llm_args, "update_llm_args_with_extra_dict", None)
    arguments = library.table_arguments(parameters, "llmapi")
    if "lora_prefetch_dir" in parameters:
        arguments.setdefault("lora_config", {})
    arguments = library.with_file(arguments, parameters, "llmapi", convert)
    # LoraConfig from the module that uses it; its own has changed.
    kinds = {"kv_cache_config": KvCacheConfig, "lora_config": getattr(llm_args, "LoraConfig", None)}
    for name, kind in kinds.items():
        if kind is not None and isinstance(section := arguments.get(name), dict):
            arguments[name] = kind(**section)
    return arguments


def context_length(arguments: library.Arguments, llm: Any) -> int:
    """Return the most tokens that prompt and output of an ``LLM`` may have together."""
    known = arguments.get("max_seq_len") or getattr(getattr(llm, "args", None), "max_seq_len", None)
    if known is None:
        config = library.model_config(arguments)
        known = config.get("text_config", config).get("max_position_embeddings")
    if known is None:
        raise ValueError(
            f"the configuration of {arguments['model']} does not state its context length; set max_seq_len"
        )
    return int(known)


def is_forgetful(version: str, options: library.Arguments) -> bool:
    """Return True if the sampler of an LLM with these arguments ignores seeds, penalties and bad words.

    TRTLLMSampler, in C++, honours them. TorchSampler, the default, silently ignores them up to 1.2, and
    learned them in the release candidates of 1.3 (pull requests 16052, 16485 and 17172); from 1.3.0rc26
    on it is the only one. All that was read in its repository, and never tried.
    """
    sampler = options.get("sampler_type")
    # Engines, which 1.x can still run by the LLM API, sample in C++, too.
    in_cpp = getattr(sampler, "value", sampler) == "TRTLLMSampler"
    in_cpp = in_cpp or options.get("backend") == "tensorrt"
    return not in_cpp and Version(version) < TORCH_SAMPLER_ONLY


def sampling_arguments(request: GenerationRequest) -> library.Arguments:
    """Return the arguments of ``tensorrt_llm.SamplingParams`` for a request."""
    arguments = {**library.sampling_arguments(request), "end_id": request.end_id}
    if not request.sampling.greedy:
        arguments["seed"] = request.sampling.seed or 0
    if request.other_end_ids:
        arguments["stop_token_ids"] = list(request.other_end_ids)
        arguments["include_stop_str_in_output"] = True  # an end token is part of the output
    if request.end_id is None:
        # Without a tokenizer the LLM refuses requests that give no end id. The pad id is never read; else
        # the LLM would pad with the end id.
        arguments |= {"end_id": -1, "pad_id": 0, "ignore_eos": True}
    if request.sampling.greedy:
        arguments["top_k"] = 1  # means greedy in all releases; a temperature or top_p of 0 does not
    bad_words = [word for word in request.sampling.bad_words if word]
    if several := [list(word) for word in bad_words if len(word) > 1]:
        raise EngineError(
            "TensorRT-LLM's LLM API does not support bad words of several tokens, such as token ids "
            f"{several[0]}"
        )
    if bad_words:
        arguments["bad_token_ids"] = [word[0] for word in bad_words]
    if request.return_log_probs:
        arguments["logprobs"] = 1  # 0 means none in older releases
    return arguments
