"""TensorRT-LLM by its Python LLM API, 1.1 and later; from 1.3 on it has no other.

This has run only on a fake of the interface promised for 1.x; docs/operations.md lists what is unchecked.
"""

import logging
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from cog_triton.engines import library
from cog_triton.engines.base import EngineError, GenerationRequest, Step
from cog_triton.engines.event_loop import Steps
from cog_triton.engines.library_arguments import Arguments, table_arguments, with_file
from cog_triton.protocol.log_probs import TokenLogProb

logger = logging.getLogger(__name__)

OLDEST_RELEASE = Version("1.1.0.dev0")
# From this release on, TorchSampler is the only sampler.
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

        self._version = tensorrt_llm.__version__
        if Version(self._version) < OLDEST_RELEASE:
            raise ValueError(
                f"ENGINE=llmapi requires TensorRT-LLM 1.1 or later, but {self._version} is installed"
            )
        super().__init__(parameters, loading_arguments(parameters))

    def load(self, arguments: Arguments) -> None:
        from tensorrt_llm import LLM

        self._forgetful = is_forgetful(self._version, arguments)
        if self._forgetful:
            logger.warning(
                "the default sampler of TensorRT-LLM %s ignores seeds, so output is not reproducible, and "
                "penalties and bad words, so requests with them are refused; to use them, %s",
                self._version,
                REMEDY,
            )
        self._llm = LLM(**arguments)
        self.context_length = context_length(arguments, self._llm)
        self.features = frozenset({"lora_task_id"} if arguments.get("enable_lora") else ())

    def sampling_params(self, request: GenerationRequest) -> Any:
        from tensorrt_llm import SamplingParams

        if self._forgetful:
            self._check_forgetful(request)
        return SamplingParams(**sampling_arguments(request))

    def _check_forgetful(self, request: GenerationRequest) -> None:
        """Refuse what the sampler ignores, but for seeds: most requests have one without asking for it."""
        ignored = list(request.sampling.penalties)
        if any(request.sampling.bad_words):
            ignored.append("bad_words")
        if ignored:
            raise EngineError(
                f"the default sampler of TensorRT-LLM {self._version} does not support "
                f"{', '.join(ignored)}; {REMEDY}"
            )

    async def generate(self, request: GenerationRequest, sampling: Any, adapter: Any) -> Steps:
        """Yield the steps of a request; drop it in the library when this is closed early."""
        output = self._llm.generate_async(
            request.input_ids, sampling, lora_request=adapter, streaming=True
        )
        last_id = None
        try:
            async for update in output:
                end = None
                if update.finished:
                    end = update.outputs[0].finish_reason or "stop"
                step = self._read(request, update.outputs[0], end)
                if step.ids:
                    last_id = step.ids[-1]
                if end == "stop" and request.end_ids and last_id not in request.end_ids:
                    _append_end_token(step, request)
                yield step
        finally:
            if not output.finished:
                output.abort()

    def _read(self, request: GenerationRequest, new: Any, end: str | None) -> Step:
        """Return the new tokens of an output as a step."""
        ids = list(new.token_ids_diff)
        entries = list(new.logprobs_diff or ())
        has_end_token = end == "stop" and bool(ids) and ids[-1] in request.end_ids
        if has_end_token and len(entries) == len(ids) - 1:
            entries.append(UNKNOWN_LOG_PROB)
        return self.step(request, ids, entries, end)


def _append_end_token(step: Step, request: GenerationRequest) -> None:
    """Append ``end_id``, which the LLM API leaves out; it gets no stop words that could have ended it."""
    end_id = request.end_ids[0]
    step.ids.append(end_id)
    if request.return_log_probs:
        step.log_probs.append(TokenLogProb(end_id, UNKNOWN_LOG_PROB))


def loading_arguments(parameters: Mapping[str, str]) -> Arguments:
    """Return the arguments of ``tensorrt_llm.LLM``, its sections as its classes.

    TensorRT-LLM merges the file that ``llm_api_config`` names itself.
    """
    from tensorrt_llm.llmapi import KvCacheConfig, llm_args

    convert = getattr(llm_args, "update_llm_args_with_extra_dict", None)
    arguments = table_arguments(parameters, "llmapi")
    if "lora_prefetch_dir" in parameters:
        arguments.setdefault("lora_config", {})
    arguments = with_file(arguments, parameters, "llmapi", convert)
    sections = {
        "kv_cache_config": KvCacheConfig,
        # From the module that uses it: the class has moved between releases.
        "lora_config": getattr(llm_args, "LoraConfig", None),
    }
    for name, section_class in sections.items():
        section = arguments.get(name)
        if section_class is not None and isinstance(section, dict):
            arguments[name] = section_class(**section)
    return arguments


def context_length(arguments: Arguments, llm: Any) -> int:
    """Return the limit of prompt and output of an ``LLM`` together, in tokens."""
    known = arguments.get("max_seq_len") or getattr(getattr(llm, "args", None), "max_seq_len", None)
    if known is None:
        config = library.model_config(arguments)
        known = config.get("text_config", config).get("max_position_embeddings")
    if known is None:
        raise ValueError(
            f"the configuration of {arguments['model']} does not state its context length; set max_seq_len"
        )
    return int(known)


def is_forgetful(version: str, options: Arguments) -> bool:
    """Return True if the sampler of an LLM with these arguments ignores seeds, penalties and bad words.

    TRTLLMSampler, in C++, honours them. TorchSampler, the default, silently ignores them up to 1.2, and
    learned them in the release candidates of 1.3 (pull requests 16052, 16485 and 17172). All that was read
    in its repository, and never tried.
    """
    sampler = options.get("sampler_type")
    if getattr(sampler, "value", sampler) == "TRTLLMSampler":
        return False
    # Engines, which 1.x can still run by the LLM API, sample in C++.
    if options.get("backend") == "tensorrt":
        return False
    return Version(version) < TORCH_SAMPLER_ONLY


def sampling_arguments(request: GenerationRequest) -> Arguments:
    """Return the arguments of ``tensorrt_llm.SamplingParams`` for a request."""
    sampling = request.sampling
    arguments = {**library.sampling_arguments(request), "end_id": request.end_id}
    if sampling.greedy:
        # Means greedy in all releases; a temperature or top_p of 0 does not.
        arguments["top_k"] = 1
    else:
        arguments["seed"] = sampling.seed or 0
    if request.other_end_ids:
        arguments["stop_token_ids"] = list(request.other_end_ids)
        # An end token is part of the output.
        arguments["include_stop_str_in_output"] = True
    if request.end_id is None:
        # Without a tokenizer, the LLM refuses requests without an end id, and pads with the end id unless
        # there is a pad id. Nothing reads that.
        arguments["end_id"] = -1
        arguments["pad_id"] = 0
        arguments["ignore_eos"] = True
    bad_tokens = _bad_tokens(sampling.bad_words)
    if bad_tokens:
        arguments["bad_token_ids"] = bad_tokens
    if request.return_log_probs:
        # In older releases, 0 means none.
        arguments["logprobs"] = 1
    return arguments


def _bad_tokens(bad_words: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the tokens of bad words of one token each, or raise EngineError."""
    for word in bad_words:
        if len(word) > 1:
            raise EngineError(
                "TensorRT-LLM's LLM API does not support bad words of several tokens, such as token ids "
                f"{list(word)}"
            )
    return [word[0] for word in bad_words if word]
