"""Between tensors and plain values: the tensorrt_llm model's inputs and outputs, in one place.

Arrays have the batch as their first dimension; a scalar of the contract has shape [batch].
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from cog_triton.engines.base import GenerationRequest, SamplingParams
from cog_triton.engines.serving import Output
from cog_triton.errors import InvalidParameter, shown
from cog_triton.models.names import OLD_INPUTS, SAMPLING_INPUTS, UNKNOWN_METRICS, UNSUPPORTED
from cog_triton.models.stub import Array, Inputs, flag, indices, words
from cog_triton.protocol.frames import Frame, encode_frames
from cog_triton.protocol.log_probs import packed_log_probs
from cog_triton.protocol.names import (
    ALLOWED_IDS,
    CONTINUED,
    FRAMES,
    LOG_PROBS,
    MIN_P,
    NO_PARAMETERS,
    PROMPT_LOG_PROBS,
    TOP_LOG_PROBS,
    Parameters,
)
from cog_triton.protocol.parameters import ids_parameter
from cog_triton.request import limits
from cog_triton.request.guide import Guide, GuideKind, engine_guide
from cog_triton.request.request import NO_TOKEN, check_sampling

STOP_WORDS_TEXT = "stop_words_text"
# Parameters of a request that need the engine's feature of that name.
_FEATURES = (MIN_P, TOP_LOG_PROBS, PROMPT_LOG_PROBS, ALLOWED_IDS)
_EMPTY = np.empty(0)


def generation_requests(
    inputs: Inputs,
    parameters: Parameters = NO_PARAMETERS,
    features: Collection[str] = (),
    end_ids: Collection[int] = (),
) -> list[GenerationRequest]:
    """Return one request per sequence of the batch.

    ``features`` are the inputs and parameters that the engine honours; see ``Engine.features``. A stop word
    that is one of the model's ``end_ids`` is an end token: preprocessing sends those that ``end_id`` has no
    room for as stop words, which every backend understands.
    InvalidParameter names an input that is missing, out of range, or not supported.
    """
    inputs = _with_new_names(inputs)
    refused = _unsupported(inputs, parameters, features)
    if refused:
        raise InvalidParameter(f"the embedded engine does not support {', '.join(refused)}")
    if "input_ids" not in inputs:
        raise InvalidParameter("input_ids is missing")
    count = len(inputs["input_ids"])
    return [_generation_request(inputs, row, parameters, end_ids) for row in range(count)]


def _unsupported(inputs: Inputs, parameters: Parameters, features: Collection[str]) -> list[str]:
    """Return what a request asks for and the engine cannot do."""
    refused = []
    for name, feature in UNSUPPORTED.items():
        if name not in inputs or feature in features:
            continue
        # A zero asks for nothing, a tensor of several zeros for something.
        if flag(inputs, name) or inputs[name][:1].size > 1:
            refused.append(name)
    for name in ("beam_width", "num_return_sequences"):
        if name not in inputs:
            continue
        least = inputs[name].min()
        if least < 1:
            raise InvalidParameter(f"{name} must be at least 1, not {least}")
        if (inputs[name] > 1).any():
            refused.append(f"{name} > 1")
    if (inputs.get("runtime_top_p_decay", _EMPTY) != 1).any():
        refused.append("runtime_top_p_decay")
    refused += [name for name in _FEATURES if parameters.get(name) and name not in features]
    return refused


def _with_new_names(inputs: Inputs) -> Inputs:
    """Return the inputs with the old names replaced; InvalidParameter for both names of one input."""
    renamed = dict(inputs)
    for old_name, new_name in OLD_INPUTS.items():
        if old_name not in renamed:
            continue
        if new_name in renamed:
            raise InvalidParameter(
                f"{old_name} is the old name of {new_name}: a request must have only one of the two"
            )
        renamed[new_name] = renamed.pop(old_name)
    return renamed


def _generation_request(
    inputs: Inputs, row: int, parameters: Parameters, end_ids: Collection[int]
) -> GenerationRequest:
    """Return the request of one row of the batch."""

    def scalar(name: str, default: Any) -> Any:
        return inputs[name].reshape(-1)[row].item() if name in inputs else default

    ids = inputs["input_ids"][row]
    length = scalar("input_lengths", len(ids))
    if not 0 <= length <= len(ids):
        raise InvalidParameter(f"input_lengths must be between 0 and {len(ids)}, not {length}")
    top_k = scalar("runtime_top_k", 0)
    if top_k < 0:
        raise InvalidParameter(f"top_k must be at least 0, not {top_k}")
    sampling: dict[str, Any] = {"seed": None, "min_p": parameters.get(MIN_P) or 0.0}
    for tensor, name in SAMPLING_INPUTS.items():
        if tensor in inputs:
            sampling[name] = scalar(tensor, 0)
    others = {"max_tokens": scalar("request_output_len", 1), "guide": _guide(inputs, row)}
    checked = check_sampling(sampling | others)
    end_id = scalar("end_id", NO_TOKEN)
    stop_words = _words(inputs, "stop_words_list", row)
    other_end_ids: tuple[int, ...] = ()
    if end_id >= 0:
        other_end_ids = _end_ids_among(stop_words, end_id, end_ids)
        stop_words = tuple(word for word in stop_words if len(word) > 1 or word[0] not in end_ids)
    log_probs = bool(scalar("return_log_probs", False))
    top_log_probs = _top_log_probs(parameters)
    continued = len(ids_parameter(parameters, CONTINUED))
    return GenerationRequest(
        key="",
        input_ids=ids[:length].tolist(),
        max_tokens=checked["max_tokens"],
        end_id=end_id if end_id >= 0 else None,
        other_end_ids=other_end_ids,
        stop_words=stop_words,
        sampling=SamplingParams(
            **{name: checked[name] for name in sampling},
            top_k=top_k,
            bad_words=_words(inputs, "bad_words_list", row),
        ),
        return_log_probs=log_probs,
        top_log_probs=top_log_probs if log_probs else 0,
        # A client that continues an answer has had them.
        prompt_log_probs=log_probs and not continued and bool(parameters.get(PROMPT_LOG_PROBS)),
        continued=min(continued, length),
        logit_bias=_logit_bias(inputs.get("embedding_bias", _EMPTY), row),
        allowed_ids=tuple(ids_parameter(parameters, ALLOWED_IDS)),
        guide=None if checked["guide"] is None else engine_guide(checked["guide"]),
        lora_task_id=scalar("lora_task_id", 0),
    )


def _end_ids_among(
    stop_words: Sequence[Sequence[int]], end_id: int, end_ids: Collection[int]
) -> tuple[int, ...]:
    """Return the end tokens but ``end_id`` that a request has as stop words, each once."""
    single = dict.fromkeys(word[0] for word in stop_words if len(word) == 1)
    return tuple(token for token in single if token in end_ids and token != end_id)


def _top_log_probs(parameters: Parameters) -> int:
    top = parameters.get(TOP_LOG_PROBS, 0)
    if type(top) is not int or not 0 <= top <= limits.TOP_LOG_PROBS:
        raise InvalidParameter(
            f"{TOP_LOG_PROBS} must be between 0 and {limits.TOP_LOG_PROBS}, not {shown(top)}"
        )
    return top


def _words(inputs: Inputs, name: str, row: int) -> tuple[tuple[int, ...], ...]:
    if name not in inputs:
        return ()
    count = inputs[name].shape[-1]
    if count > limits.WORD_IDS:
        raise InvalidParameter(f"{name} must be at most {limits.WORD_IDS} ids, not {count}")
    return words_from_list(inputs[name][row])


def stop_words_in_text(inputs: Inputs) -> list[list[str]]:
    """Return the stop words of each sequence of the batch that are to be found in its text."""
    array = inputs.get(STOP_WORDS_TEXT)
    if array is None:
        return [[] for _ in range(len(inputs["input_ids"]))]
    return words(array)


def words_from_list(word_list: Array) -> tuple[tuple[int, ...], ...]:
    """Return the words of a TensorRT-LLM word list, [2, N]: ids, and the words' ends padded with -1."""
    ids, ends = word_list.tolist()
    places = pairwise([0, *(end for end in ends if end > 0)])
    # An end that does not rise makes no word: an empty one would end everything at once.
    return tuple(tuple(ids[start:end]) for start, end in places if start < end)


def _logit_bias(bias: Array, row: int) -> dict[int, float]:
    """Return the biases that are not 0; ``bias`` is empty, or has one for each id of the vocabulary."""
    if not bias.size:
        return {}
    values = bias[row].reshape(-1)
    if not np.isfinite(values).all():
        raise InvalidParameter("embedding_bias must be finite")
    ids = np.flatnonzero(values)
    return dict(zip(ids.tolist(), values[ids].tolist(), strict=True))


def _guide(inputs: Inputs, row: int) -> Guide | None:
    kind = _text(inputs, "guided_decoding_guide_type", row)
    text = _text(inputs, "guided_decoding_guide", row)
    if not kind and not text:
        return None
    known = [each.value for each in GuideKind]
    if kind not in known:
        raise InvalidParameter(f"guided_decoding_guide_type must be one of {known}, not {kind!r}")
    return Guide(GuideKind(kind), text)


def _text(inputs: Inputs, name: str, row: int) -> str:
    """Return a text input; one that is not Unicode is kept, for ``check_sampling`` to refuse it."""
    values = inputs.get(name, _EMPTY)
    if not values.size:
        return ""
    value = values.reshape(len(values), -1)[row, 0]
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def frames_tensor(outputs: Iterable[Output]) -> dict[str, Array]:
    """Return the only tensor of a response to this package's client."""
    frames = (
        Frame(
            sequence=output.sequence,
            start=output.generated - len(output.ids),
            ids=output.ids,
            input_tokens=output.input_tokens,
            final=output.finished,
            log_probs=output.log_probs,
            prompt_log_probs=output.prompt_log_probs,
        )
        for output in outputs
    )
    return {FRAMES: encode_frames(frames).reshape(1, -1)}


def response_tensors(
    index: int, output: Output, *, inputs: Inputs, top: int = 0
) -> dict[str, Array]:
    """Return TensorRT-LLM's tensors of one response; shapes are [1, beams = 1, …].

    As with its C++ backend, the end token is left out, so that no client decodes it.

    Args:
        index: the sequence's place in the request's batch.
        inputs: the request's, which say what else it wants.
        top: number of the most likely tokens at each place in output_log_probs.
    """
    if output.has_end_token:
        output = replace(
            output,
            ids=output.ids[:-1],
            log_probs=output.log_probs[:-1],
            generated=output.generated - 1,
            has_end_token=False,
        )
    count = len(output.ids)
    log_probs = packed_log_probs(output.log_probs, top, output.prompt_log_probs)
    # If they were not asked for, TensorRT-LLM sends zeros.
    if not output.log_probs:
        log_probs = np.zeros(count, np.float32)
    tensors = {
        "output_ids": np.array(output.ids, np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[count]], np.int32),
        "cum_log_probs": np.array([[output.cum_log_prob]], np.float32),
        LOG_PROBS: log_probs.reshape(1, 1, -1),
        **indices(index, 0),
        "context_ids": np.array(output.context_ids, np.int32).reshape(1, -1),
        "is_final": np.array([[output.finished]], np.bool_),
    }
    if output.characters_behind:
        tensors["cut_characters"] = np.array([[output.characters_behind]], np.int32)
    if flag(inputs, "return_perf_metrics"):
        tensors |= _perf_metrics(output)
    if flag(inputs, "return_num_input_tokens"):
        tensors["num_input_tokens"] = np.array([[output.input_tokens]], np.int32)
    if flag(inputs, "return_num_output_tokens"):
        tensors["num_output_tokens"] = np.array([[output.generated]], np.int32)
    return tensors


def _perf_metrics(output: Output) -> dict[str, Array]:
    # Clients read all that TensorRT-LLM's backend sends: zeros stand for what only the engine's internals
    # know, and nothing is drafted. Times are of the monotonic clock, and 0 for a token that is to come.
    names = ("arrival_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [*zip(names, output.times, strict=True), ("first_scheduled_time_ns", 0)]
    return {
        **{name: np.array([[value]], np.int64) for name, value in times},
        **{name: np.array([[0]], np.int32) for name in UNKNOWN_METRICS},
    }


def placeholders(config: Mapping[str, Any]) -> dict[str, Array]:
    """Return a zero for each floating-point output that no engine here makes: perf_analyzer reads it."""
    kinds = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
    return {
        output["name"]: np.zeros((1, *(1 for _ in output["dims"])), kinds[output["data_type"]])
        for output in config["output"]
        if output["data_type"] in kinds and output["name"] not in ("cum_log_probs", LOG_PROBS)
    }
