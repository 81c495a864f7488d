"""Between tensors and plain values: the tensorrt_llm model's inputs and outputs, in one place.

Arrays have the batch as their first dimension; a scalar of the contract has shape [batch].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton.engines.base import GenerationRequest, SamplingParams
from cog_triton.engines.serving import Output, words_from_list
from cog_triton.models.stub import Array, flag, indices
from cog_triton.request.limits import GUIDE_CHARACTERS, WORD_IDS
from cog_triton.request.limits import TOP_LOG_PROBS as MOST_LOG_PROBS
from cog_triton.request.request import MAX_FLOAT32, Guide, GuideKind, Request, engine_guide
from cog_triton.wire import (
    ALLOWED_IDS,
    CONTINUED,
    LOG_PROBS,
    MIN_P,
    NO_PARAMETERS,
    PROMPT_LOG_PROBS,
    TOP_LOG_PROBS,
    ids_parameter,
    packed_log_probs,
    packed_prompt_log_probs,
)

NAMES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
_PARAMETERS = (MIN_P, TOP_LOG_PROBS, PROMPT_LOG_PROBS, ALLOWED_IDS)  # each a feature of that name
# Of Request's fields, as {"ge": 0, "le": 1}.
_BOUNDS = {
    name: {kind: bound for each in field.metadata for kind, bound in asdict(each).items()}
    for name, field in Request.__pydantic_fields__.items()  # type: ignore[attr-defined]
    if name in ("temperature", "top_p", MIN_P, "repetition_penalty")
}
_EMPTY = np.empty(0)


def generation_requests(
    inputs: Mapping[str, Array],
    parameters: Mapping[str, Any] = NO_PARAMETERS,
    features: Collection[str] = (),
) -> list[GenerationRequest]:
    """Return one request per sequence of the batch.

    Args:
        parameters: of the request, which are not tensors; see ``cog_triton.wire``.
        features: inputs and parameters that the engine honours, see ``Engine.features``.

    Raises:
        ValueError: an input is missing, out of range, or not supported by the embedded engines.
    """
    _refuse_unsupported(inputs, parameters, features)
    if "input_ids" not in inputs:
        raise ValueError("input_ids is missing")
    return [_generation_request(inputs, i, parameters) for i in range(len(inputs["input_ids"]))]


def _refuse_unsupported(
    inputs: Mapping[str, Array], parameters: Mapping[str, Any], features: Collection[str]
) -> None:
    refused = [
        name
        for name, feature in NAMES["unsupported"].items()
        if feature not in features and any(value != b"" for value in inputs.get(name, _EMPTY).flat)
    ]
    logits = "return_context_logits", "return_generation_logits"
    refused += [name for name in logits if flag(inputs, name)]
    for name in ("beam_width", "num_return_sequences"):
        if name in inputs:
            if (least := inputs[name].min()) < 1:
                raise ValueError(f"{name} must be at least 1, not {least}")
            refused += [f"{name} > 1"] if (inputs[name] > 1).any() else []
    if (inputs.get("runtime_top_p_decay", _EMPTY) != 1).any():
        refused.append("runtime_top_p_decay")
    refused += [name for name in _PARAMETERS if parameters.get(name) and name not in features]
    if refused:
        raise ValueError(f"the embedded engine does not support {', '.join(refused)}")


def _generation_request(
    inputs: Mapping[str, Array], i: int, parameters: Mapping[str, Any]
) -> GenerationRequest:
    def scalar(name: str, default: Any) -> Any:
        if name not in inputs:
            return default
        value = inputs[name].reshape(-1)[i].item()
        if not math.isfinite(value):  # it would spoil the arithmetic of sampling
            raise ValueError(
                f"{name} must be between {-MAX_FLOAT32:g} and {MAX_FLOAT32:g}, not {value}"
            )
        return value

    max_tokens, min_tokens = scalar("request_output_len", 1), scalar("min_tokens", 0)
    if min_tokens > max(max_tokens, 0):
        raise ValueError(f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}")
    row = inputs["input_ids"][i]
    length = scalar("input_lengths", len(row))
    if not 0 <= length <= len(row):
        raise ValueError(f"input_lengths must be between 0 and {len(row)}, not {length}")
    if (top_k := scalar("runtime_top_k", 0)) < 0:
        raise ValueError(f"top_k must be at least 0, not {top_k}")
    end_id, log_probs = scalar("end_id", -1), bool(scalar("return_log_probs", False))
    top_log_probs = parameters.get(TOP_LOG_PROBS, 0)
    if type(top_log_probs) is not int or not 0 <= top_log_probs <= MOST_LOG_PROBS:
        raise ValueError(
            f"{TOP_LOG_PROBS} must be between 0 and {MOST_LOG_PROBS}, not {str(top_log_probs)[:50]}"
        )
    continued = len(ids_parameter(parameters, CONTINUED))
    return GenerationRequest(
        key="",
        input_ids=row[:length].tolist(),
        max_tokens=max_tokens,
        end_id=end_id if end_id >= 0 else None,
        stop_words=_words(inputs, "stop_words_list", i),
        sampling=SamplingParams(
            temperature=_bounded("temperature", scalar("temperature", 1.0)),
            top_k=top_k,
            top_p=_bounded("top_p", scalar("runtime_top_p", 0.0)),
            min_p=_bounded(MIN_P, parameters.get(MIN_P) or 0),
            seed=scalar("seed", 0),
            repetition_penalty=_bounded("repetition_penalty", scalar("repetition_penalty", 1.0)),
            presence_penalty=scalar("presence_penalty", 0.0),
            frequency_penalty=scalar("frequency_penalty", 0.0),
            min_tokens=min_tokens,
            bad_words=_words(inputs, "bad_words_list", i),
        ),
        return_log_probs=log_probs,
        top_log_probs=top_log_probs if log_probs else 0,
        # A client that continues an answer has had them.
        prompt_log_probs=log_probs and bool(parameters.get(PROMPT_LOG_PROBS)) and not continued,
        continued=min(continued, length),
        logit_bias=_logit_bias(inputs.get("embedding_bias", _EMPTY), i),
        allowed_ids=tuple(ids_parameter(parameters, ALLOWED_IDS)),
        guide=_guide(inputs, i),
        lora_task_id=scalar("lora_task_id", 0),
    )


def _bounded(name: str, value: Any) -> float:
    """Refuse a value, a number or its text, that is out of the bounds of Request's field."""
    low, above, high = (_BOUNDS[name].get(kind, -math.inf) for kind in ("ge", "gt", "le"))
    try:
        number = float(value)
    except (TypeError, ValueError):
        number, value = math.nan, repr(str(value)[:50])
    if low <= number <= high and number > above:
        return number
    must = f"greater than {above}" if math.isfinite(above) else f"at least {low}"
    if high < MAX_FLOAT32:
        must = f"between {low} and {high}"
    raise ValueError(f"{name} must be {must}, not {value}")


def _words(inputs: Mapping[str, Array], name: str, i: int) -> tuple[tuple[int, ...], ...]:
    if name not in inputs:
        return ()
    if (count := inputs[name].shape[-1]) > WORD_IDS:
        raise ValueError(f"{name} must be at most {WORD_IDS} ids, not {count}")
    return words_from_list(inputs[name][i])


def _logit_bias(bias: Array, i: int) -> dict[int, float]:
    # An array as long as the vocabulary.
    if not bias.size:
        return {}
    row = bias[i].reshape(-1)
    if not np.isfinite(row).all():
        raise ValueError("embedding_bias must be finite")
    ids = np.flatnonzero(row)
    return dict(zip(ids.tolist(), row[ids].tolist(), strict=True))


def _guide(inputs: Mapping[str, Array], i: int) -> Guide | None:
    texts = []
    for name in ("guided_decoding_guide_type", "guided_decoding_guide"):
        values = inputs.get(name, _EMPTY)
        value = values.reshape(len(values), -1)[i, 0] if values.size else ""
        try:
            texts.append(value.decode() if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError:
            raise ValueError(f"{name} must be valid Unicode") from None
    kind, text = texts
    if not kind and not text:
        return None
    known = [each.value for each in GuideKind]
    if kind not in known:
        raise ValueError(f"guided_decoding_guide_type must be among {known}, not {kind!r}")
    if not text and kind != GuideKind.JSON.value:
        raise ValueError(f"guided_decoding_guide is missing, of type {kind}")
    if len(text) > GUIDE_CHARACTERS:
        raise ValueError(
            f"guided_decoding_guide must be at most {GUIDE_CHARACTERS} characters, not {len(text)}"
        )
    try:
        return engine_guide(Guide(GuideKind(kind), text))
    except ValueError as error:
        raise ValueError(f"guided_decoding_guide: {error}") from None


def response_tensors(
    index: int,
    output: Output,
    inputs: Mapping[str, Array],
    *,
    ids_only: bool = False,
    counted: bool = False,
    top: int = 0,
) -> dict[str, Array]:
    """Return the tensors of one response; shapes are [1, beams = 1, …] as in TensorRT-LLM.

    Args:
        index: the sequence's place in the request's batch.
        inputs: the request's, which say what else it wants.
        ids_only: make only output_ids, the counts once, and output_log_probs if they are wanted. Each
            tensor costs tens of microseconds on its way through Triton.
        counted: begin output_ids with the count of all ids so far.
        top: number of the most likely tokens at each place in output_log_probs.
    """
    count = len(output.ids)
    ids = [output.generated, *output.ids] if counted else output.ids
    tensors = {"output_ids": np.array(ids, np.int32).reshape(1, 1, -1)}
    if ids_only:
        with_input_tokens, with_output_tokens = output.generated <= count, output.final
        with_log_probs = flag(inputs, "return_log_probs")
    else:
        with_input_tokens = with_log_probs = True
        with_output_tokens = flag(inputs, "return_num_output_tokens")
        tensors |= {
            "sequence_length": np.array([[count]], np.int32),
            "cum_log_probs": np.array([[output.cum_log_prob]], np.float32),
            **indices(index, 0),
            "context_ids": np.array(output.context_ids, np.int32).reshape(1, -1),
            "is_final": np.array([[output.final]], np.bool_),
        }
        if flag(inputs, "return_perf_metrics"):
            tensors |= _perf_metrics(output)
    if with_input_tokens and flag(inputs, "return_num_input_tokens"):
        length = inputs["input_lengths"].reshape(-1)[index]
        tensors["num_input_tokens"] = np.array([[length]], np.int32)
    if with_output_tokens:
        tensors["num_output_tokens"] = np.array([[output.generated]], np.int32)
    if with_log_probs:
        tensors[LOG_PROBS] = _log_probs(output, top)
    return tensors


def _log_probs(output: Output, top: int) -> Array:
    """Return those of the generated ids, behind any of the prompt's, shape [1, 1, values]."""
    if not output.log_probs:
        # As TensorRT-LLM has it, zeros stand for what was not asked for.
        return np.zeros((1, 1, len(output.ids)), np.float32)
    values = packed_log_probs(output.log_probs, top)
    if output.prompt_log_probs:
        places = [((token.id, token.log_prob), *token.top) for token in output.prompt_log_probs]
        values = np.append(packed_prompt_log_probs(places, top), values)
    return values.reshape(1, 1, -1)


def _perf_metrics(output: Output) -> dict[str, Array]:
    # Clients read all that TensorRT-LLM's backend sends: zeros stand for what only the engine's internals
    # know, and nothing is drafted. Times are of the monotonic clock, and 0 for a token that is to come.
    times = {
        "arrival_time_ns": output.times.arrival,
        "first_scheduled_time_ns": 0,
        "first_token_time_ns": output.times.first_token,
        "last_token_time_ns": output.times.last_token,
    }
    return {
        **{name: np.array([[value]], np.int64) for name, value in times.items()},
        **{name: np.array([[0]], np.int32) for name in NAMES["not_counted"]},
        "acceptance_rate": np.array([[0]], np.float32),
    }


def placeholders(config: Mapping[str, Any]) -> dict[str, Array]:
    """Return a zero for each floating-point output that no embedded engine makes.

    TensorRT-LLM's backend sends the logits so when they were not asked for, and perf_analyzer reads
    memory of its own where one is missing.
    """
    kinds = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
    return {
        output["name"]: np.zeros((1, *(1 for _ in output["dims"])), kinds[output["data_type"]])
        for output in config["output"]
        if output["data_type"] in kinds and output["name"] not in ("cum_log_probs", LOG_PROBS)
    }
