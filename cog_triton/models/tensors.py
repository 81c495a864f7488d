"""Between tensors and plain values: the tensorrt_llm model's inputs and outputs, in one place.

Arrays of the tensorrt_llm model have the batch as their first dimension; a scalar of the contract,
reshaped to nothing there, has shape [batch].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.engines.base import (
    EngineError,
    GenerationRequest,
    SamplingParams,
)
from cog_triton.engines.serving import Output, Times, words_from_list
from cog_triton.request.guide import Guide, GuideKind, engine_guide
from cog_triton.request.limits import GUIDE_CHARACTERS, TOP_LOG_PROBS, WORD_IDS
from cog_triton.wire import (
    ALLOWED_IDS,
    LOG_PROBS,
    MIN_P,
    PROMPT_LOG_PROBS,
    ids_parameter,
    packed_log_probs,
    packed_prompt_log_probs,
)
from cog_triton.wire import TOP_LOG_PROBS as TOP_LOG_PROBS_NAME

Array = npt.NDArray[Any]

# What only TensorRT-LLM does, or an engine that says so. Silently ignoring one would give a wrong answer.
# Inputs that are not here change no answer, or only together with one that is: decoder_input_ids, which
# preprocessing always sends, is for models with an encoder.
_UNSUPPORTED = (
    "context_phase_params",
    "cross_attention_mask",
    "draft_acceptance_threshold",
    "draft_input_ids",
    "draft_logits",
    "embedding_bias",
    "encoder_input_features",
    "guided_decoding_guide",
    "guided_decoding_guide_type",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "lookahead_window_size",
    "lora_task_id",
    "lora_weights",
    "mrope_position_deltas",
    "mrope_rotary_cos_sin",
    "prompt_embedding_table",
    "skip_cross_attn_blocks",
)
_UNSUPPORTED_WHEN_TRUE = ("return_context_logits", "return_generation_logits")
_FLOAT_OUTPUTS = ("cum_log_probs", "output_log_probs")  # that the embedded engines make
_NOT_COUNTED = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
_ONLY_ONE = ("beam_width", "num_return_sequences")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


# What an engine may honour besides → the inputs that say it. Parameters of a request are features as well.
_FEATURES = {
    "embedding_bias": ("embedding_bias",),
    "guided_decoding": ("guided_decoding_guide", "guided_decoding_guide_type"),
    "lora_task_id": ("lora_task_id",),
}
_PARAMETERS = (MIN_P, TOP_LOG_PROBS_NAME, PROMPT_LOG_PROBS, ALLOWED_IDS)


def generation_requests(
    inputs: Mapping[str, Array],
    continued: int = 0,
    features: Collection[str] = (),
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> list[GenerationRequest]:
    """One request per sequence of the batch.

    Args:
        continued: so many of the input ids, the last of each sequence, are output already.
        features: what the engine honours besides, see ``Engine.features``.
        parameters: of the request, which are no tensors; of those that the engine may honour besides.

    Raises:
        EngineError: an input is missing, out of range, or not supported by the embedded engines.
    """
    inputs_honoured = {name for feature in features for name in _FEATURES.get(feature, ())}
    given = [name for name in _PARAMETERS if parameters.get(name) and name not in features]
    _refuse_unsupported(inputs, inputs_honoured, given)
    if "input_ids" not in inputs:
        raise EngineError("input_ids is missing")
    return [
        _generation_request(inputs, i, continued, parameters)
        for i in range(inputs["input_ids"].shape[0])
    ]


def top_log_probs(parameters: Mapping[str, Any]) -> int:
    """Return the number of most likely tokens that a request wants at each place.

    Raises:
        EngineError: it is no such number.
    """
    count = parameters.get(TOP_LOG_PROBS_NAME, 0)
    if type(count) is not int or not 0 <= count <= TOP_LOG_PROBS:
        raise EngineError(
            f"{TOP_LOG_PROBS_NAME} must be between 0 and {TOP_LOG_PROBS}, not {str(count)[:50]}"
        )
    return count


def _min_p(parameters: Mapping[str, Any]) -> float:
    text = str(parameters.get(MIN_P) or 0)[:50]
    try:
        return _probability(MIN_P, float(text))
    except ValueError:
        raise EngineError(f"{MIN_P} must be between 0 and 1, not {text!r}") from None


def response_tensors(
    index: int,
    output: Output,
    inputs: Mapping[str, Array],
    *,
    ids_only: bool = False,
    counted: bool = False,
    top: int = 0,
) -> dict[str, Array]:
    """The tensors of one response; shapes are [1, beams = 1, …] as in TensorRT-LLM.

    Args:
        index: the sequence's place in the request's batch.
        inputs: the request's, which say what else it wants.
        ids_only: make only output_ids, with num_input_tokens in the first response if it is wanted and
            num_output_tokens in the last, and output_log_probs if they are wanted. Each tensor costs tens
            of microseconds on its way through Triton.
        counted: begin output_ids with the count of all ids so far.
        top: how many of the most likely tokens output_log_probs tells at each place.
    """
    ids = [output.generated, *output.ids] if counted else output.ids
    output_ids = np.array(ids, np.int32).reshape(1, 1, -1)
    if ids_only:
        tensors: dict[str, Array] = {"output_ids": output_ids}
        first = output.generated <= len(output.ids)
        if first and _flag(inputs, "return_num_input_tokens"):
            tensors["num_input_tokens"] = _num_input_tokens(index, inputs)
        if output.final:
            tensors["num_output_tokens"] = np.array([[output.generated]], np.int32)
        if _flag(inputs, "return_log_probs"):
            tensors[LOG_PROBS] = _log_probs(output, top)
        return tensors
    tensors = {
        "output_ids": output_ids,
        "sequence_length": np.array([[len(output.ids)]], np.int32),
        "cum_log_probs": np.array([[output.cum_log_prob]], np.float32),
        LOG_PROBS: _log_probs(output, top),
        "batch_index": np.array([[index]], np.int32),
        "sequence_index": np.array([[0]], np.int32),
        "context_ids": np.array(output.context_ids, np.int32).reshape(1, -1),
        "is_final": np.array([[output.final]], np.bool_),
    }
    if _flag(inputs, "return_num_input_tokens"):
        tensors["num_input_tokens"] = _num_input_tokens(index, inputs)
    if _flag(inputs, "return_num_output_tokens"):
        tensors["num_output_tokens"] = np.array([[output.generated]], np.int32)
    if _flag(inputs, "return_perf_metrics"):
        tensors |= _perf_metrics(output.times)
    return tensors


def _log_probs(output: Output, top: int) -> Array:
    """The log probabilities of the generated ids, behind any of the prompt's, shape [1, 1, values]."""
    if not output.log_probs:
        # As TensorRT-LLM has it, zeros stand for what was not asked for.
        return np.zeros((1, 1, len(output.ids)), np.float32)
    values = packed_log_probs(output.log_probs, top)
    if output.prompt_log_probs:
        places = [((token.id, token.log_prob), *token.top) for token in output.prompt_log_probs]
        values = np.append(packed_prompt_log_probs(places, top), values)
    return values.reshape(1, 1, -1)


def _perf_metrics(times: Times) -> dict[str, Array]:
    """The metrics that TensorRT-LLM's backend sends with every response, as far as known, [1, 1].

    Times are of the monotonic clock; as there, the last token's is 0 before it came. Clients read all of
    the metrics: zeros stand for what only the engine's internals know (when it first scheduled the
    request, which blocks of its KV cache it took), and nothing is drafted.
    """
    known = {
        "arrival_time_ns": times.arrival,
        "first_scheduled_time_ns": 0,
        "first_token_time_ns": times.first_token,
        "last_token_time_ns": times.last_token,
    }
    return {
        **{name: np.array([[value]], np.int64) for name, value in known.items()},
        **{name: np.array([[0]], np.int32) for name in _NOT_COUNTED},
        "acceptance_rate": np.array([[0]], np.float32),
    }


def placeholders(config: Mapping[str, Any]) -> dict[str, Array]:
    """A zero for each floating-point output that no embedded engine makes.

    TensorRT-LLM's backend sends the logits so when they were not asked for, and perf_analyzer reads
    memory of its own where one is missing.

    Args:
        config: the tensorrt_llm model's, as Triton hands it to the Python backend.
    """
    kinds = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
    return {
        output["name"]: np.zeros((1, *(1 for _ in output["dims"])), kinds[output["data_type"]])
        for output in config["output"]
        if output["data_type"] in kinds and output["name"] not in _FLOAT_OUTPUTS
    }


def _num_input_tokens(index: int, inputs: Mapping[str, Array]) -> Array:
    return inputs["input_lengths"].reshape(-1)[index : index + 1].reshape(1, 1).astype(np.int32)


def _refuse_unsupported(
    inputs: Mapping[str, Array], honoured: Collection[str], parameters: Sequence[str]
) -> None:
    refused = [n for n in _UNSUPPORTED if n not in honoured and not _is_empty(inputs.get(n))]
    refused += [name for name in _UNSUPPORTED_WHEN_TRUE if _flag(inputs, name)]
    for name in _ONLY_ONE:
        if name in inputs:
            _at_least(name, int(inputs[name].min()), 1)
    refused += [f"{name} > 1" for name in _ONLY_ONE if name in inputs and (inputs[name] > 1).any()]
    if "runtime_top_p_decay" in inputs and (inputs["runtime_top_p_decay"] != 1).any():
        refused.append("runtime_top_p_decay")
    refused += parameters
    if refused:
        raise EngineError(f"the embedded engine does not support {', '.join(refused)}")


def _is_empty(values: Array | None) -> bool:
    """Return True for an input that is absent, has no elements, or only empty texts."""
    return values is None or all(value == b"" for value in values.flat)


def _generation_request(
    inputs: Mapping[str, Array], i: int, continued: int, parameters: Mapping[str, Any]
) -> GenerationRequest:
    def scalar(name: str, default: Any) -> Any:
        values = inputs.get(name)
        return default if values is None else _finite(name, values.reshape(-1)[i].item())

    def words(name: str) -> tuple[tuple[int, ...], ...]:
        return _words(name, inputs[name][i]) if name in inputs else ()

    max_tokens, min_tokens = scalar("request_output_len", 1), scalar("min_tokens", 0)
    if min_tokens > max(max_tokens, 0):
        raise EngineError(f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}")
    width = inputs["input_ids"].shape[1]
    length = scalar("input_lengths", width)
    if not 0 <= length <= width:
        raise EngineError(f"input_lengths must be between 0 and {width}, not {length}")
    end_id, log_probs = scalar("end_id", -1), bool(scalar("return_log_probs", False))
    return GenerationRequest(
        key="",
        input_ids=inputs["input_ids"][i, :length].tolist(),
        max_tokens=max_tokens,
        end_id=end_id if end_id >= 0 else None,
        stop_words=words("stop_words_list"),
        sampling=SamplingParams(
            temperature=_at_least("temperature", scalar("temperature", 1.0), 0),
            top_k=_at_least("top_k", scalar("runtime_top_k", 0), 0),
            top_p=_probability("top_p", scalar("runtime_top_p", 0.0)),
            min_p=_min_p(parameters),
            seed=scalar("seed", 0),
            repetition_penalty=_positive("repetition_penalty", scalar("repetition_penalty", 1.0)),
            presence_penalty=scalar("presence_penalty", 0.0),
            frequency_penalty=scalar("frequency_penalty", 0.0),
            min_tokens=min_tokens,
            bad_words=words("bad_words_list"),
        ),
        return_log_probs=log_probs,
        top_log_probs=top_log_probs(parameters) if log_probs else 0,
        # Whoever goes on with an answer has had them.
        prompt_log_probs=log_probs and bool(parameters.get(PROMPT_LOG_PROBS)) and not continued,
        continued=min(continued, length),
        logit_bias=_logit_bias(inputs, i),
        allowed_ids=_allowed_ids(parameters),
        guide=_guide(inputs, i),
        lora_task_id=scalar("lora_task_id", 0),
    )


def _allowed_ids(parameters: Mapping[str, Any]) -> tuple[int, ...]:
    try:
        return tuple(ids_parameter(parameters, ALLOWED_IDS))
    except ValueError as error:
        raise EngineError(str(error)) from None


def _logit_bias(inputs: Mapping[str, Array], i: int) -> dict[int, float]:
    """Return the non-zero entries of an array as long as the vocabulary."""
    bias = inputs.get("embedding_bias")
    if bias is None or not bias.size:
        return {}
    row = bias[i].reshape(-1)
    if not np.isfinite(row).all():
        raise EngineError("embedding_bias must be finite")
    ids = np.flatnonzero(row)
    return dict(zip(ids.tolist(), row[ids].tolist(), strict=True))


def _guide(inputs: Mapping[str, Array], i: int) -> Guide | None:
    kind, text = (_guide_text(inputs, name, i) for name in _FEATURES["guided_decoding"][::-1])
    if not kind and not text:
        return None
    known = [guide.value for guide in GuideKind]
    if kind not in known:
        raise EngineError(f"guided_decoding_guide_type must be among {known}, not {kind!r}")
    if not text and kind != GuideKind.JSON.value:
        raise EngineError(f"guided_decoding_guide is missing, of type {kind}")
    if len(text) > GUIDE_CHARACTERS:
        raise EngineError(
            f"guided_decoding_guide must be at most {GUIDE_CHARACTERS} characters, not {len(text)}"
        )
    try:
        return engine_guide(Guide(GuideKind(kind), text))
    except ValueError as error:
        raise EngineError(f"guided_decoding_guide: {error}") from None


def _guide_text(inputs: Mapping[str, Array], name: str, i: int) -> str:
    values = inputs.get(name)
    if values is None or not values.size:
        return ""
    value = values.reshape(values.shape[0], -1)[i, 0]
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise EngineError(f"{name} must be valid Unicode") from None


def _words(name: str, word_list: Array) -> tuple[tuple[int, ...], ...]:
    if word_list.shape[-1] > WORD_IDS:
        raise EngineError(f"{name} must be at most {WORD_IDS} ids, not {word_list.shape[-1]}")
    return words_from_list(word_list)


def _flag(inputs: Mapping[str, Array], name: str) -> bool:
    return name in inputs and bool(inputs[name].any())


def _finite(name: str, value: Any) -> Any:
    """The value, unless it is infinite or no number, which would spoil the arithmetic of sampling."""
    if not math.isfinite(value):
        raise EngineError(
            f"{name} must be between {-_MAX_FLOAT32:g} and {_MAX_FLOAT32:g}, not {value}"
        )
    return value


def _at_least(name: str, value: Any, minimum: int) -> Any:
    if value < minimum:
        raise EngineError(f"{name} must be at least {minimum}, not {value}")
    return value


def _positive(name: str, value: float) -> float:
    if value <= 0:
        raise EngineError(f"{name} must be greater than 0, not {value}")
    return value


def _probability(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise EngineError(f"{name} must be between 0 and 1, not {value}")
    return value
