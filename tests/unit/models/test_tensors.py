import inspect
from typing import Any

import numpy as np
import pytest

from cog_triton.engines.base import GenerationRequest, SamplingParams
from cog_triton.engines.serving import Output
from cog_triton.errors import InvalidParameter
from cog_triton.models import engine, names
from cog_triton.models import tensors as module
from cog_triton.models.names import UNSUPPORTED as UNSUPPORTED_INPUTS
from cog_triton.models.stub import Array
from cog_triton.models.tensors import (
    frames_tensor,
    generation_requests,
    response_tensors,
    words_from_list,
)
from cog_triton.protocol.frames import Frame, decode_frames
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.protocol.names import CONTINUED
from cog_triton.protocol.parameters import ids_text
from cog_triton.request.request import Guide, GuideKind
from tests.unit.models.support import CONTRACT, DTYPES, WORD_LISTS

INPUTS = {tensor["name"]: tensor for tensor in CONTRACT["tensorrt_llm"]["inputs"]}


def tensor(name: str, *rows: Any) -> Array:
    """An input with a batch of values, as Triton hands it to the model."""
    array = np.array(rows, DTYPES[INPUTS[name]["dtype"]])
    return array.reshape(len(rows)) if INPUTS[name].get("reshape") == [] else array


def inputs(**values: Any) -> dict[str, Array]:
    """One prompt and what is given beside it."""
    given = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 10, **values}
    return {name: tensor(name, value) for name, value in given.items()}


def request(**values: Any) -> GenerationRequest:
    (found,) = generation_requests(inputs(**values))
    return found


def output(**values: Any) -> Output:
    defaults: dict[str, Any] = {
        "ids": [11, 12],
        "log_probs": [TokenLogProb(11, -0.5), TokenLogProb(12, -0.25)],
        "cum_log_prob": -1.75,
        "context_ids": [8, 9, 10],
        "generated": 5,
        "input_tokens": 3,
    }
    return Output(**{**defaults, **values})


def lists(tensors: dict[str, Array]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in tensors.items()}


# Requests


# Of two prompts: the first has what is taken where nothing is given.
BATCH: dict[str, list[Any]] = {
    "input_ids": [[5, 6, 7], [8, 0, 0]],
    "request_output_len": [10, 20],
    "end_id": [-1, 2],
    "stop_words_list": [[[0, 0, 0], [-1, -1, -1]], [[5, 6, 7], [2, 3, -1]]],
    "bad_words_list": [[[0], [-1]], [[8], [1]]],
    "runtime_top_k": [0, 40],
    "runtime_top_p": [0.0, 0.75],
    "return_log_probs": [False, True],
}
# Those whose names are the names of sampling parameters.
SAMPLING: dict[str, list[Any]] = {
    "temperature": [1.0, 0.5],
    "seed": [0, 2**64 - 1],
    "repetition_penalty": [1.0, 1.5],
    "presence_penalty": [0.0, -0.5],
    "frequency_penalty": [0.0, 0.25],
    "min_tokens": [0, 3],
}


def test_all_values_of_a_batch() -> None:
    given = BATCH | SAMPLING
    lengths = {"input_lengths": np.array([[3], [1]])}  # a scalar may have kept its dimension
    tensors = {name: tensor(name, *values) for name, values in given.items()}
    first, second = generation_requests({**tensors, **lengths})
    assert request() == GenerationRequest("", [5, 6, 7], 10, sampling=SamplingParams())
    assert first == GenerationRequest("", [5, 6, 7], 10, sampling=SamplingParams(seed=0))
    assert first.sampling.greedy
    assert first.sampling.plain
    all_values: Any = {name: value for name, (_, value) in SAMPLING.items()}
    sampling = SamplingParams(top_k=40, top_p=0.75, bad_words=((8,),), **all_values)
    others: Any = {"end_id": 2, "stop_words": ((5, 6), (7,)), "return_log_probs": True}
    assert second == GenerationRequest("", [8], 20, sampling=sampling, **others)
    assert all(type(value) is int for value in (second.sampling.seed, *second.input_ids))


@pytest.mark.parametrize(
    ("old_name", "new_name", "value"),
    [("random_seed", "seed", 2**63 + 5), ("min_length", "min_tokens", 4)],
)
def test_old_names_of_inputs(old_name: str, new_name: str, value: int) -> None:
    old = {old_name: np.array([value], DTYPES[INPUTS[new_name]["dtype"]])}
    (found,) = generation_requests(inputs() | old)
    assert found == request(**{new_name: value})
    with pytest.raises(InvalidParameter, match=f"{old_name} is the old name of {new_name}"):
        generation_requests(inputs(**{new_name: value}) | old)


@pytest.mark.parametrize(
    ("end_id", "ends", "stop_words"),
    [
        pytest.param(2, (2, 6), ((6, 7), (8,)), id="an end token of the model"),
        pytest.param(-1, (), ((6,), (6, 7), (8,), (6,)), id="no end token"),
    ],
)
def test_a_stop_word_that_is_an_end_token_of_the_model_is_one(
    end_id: int, ends: tuple[int, ...], stop_words: tuple[tuple[int, ...], ...]
) -> None:
    words = np.array([[[6, 6, 7, 8, 6], [1, 3, 4, 5, -1]]], np.int32)
    tensors = {
        "input_ids": np.array([[5]], np.int32),
        "request_output_len": np.array([10], np.int32),
        "end_id": np.array([end_id], np.int32),
        "stop_words_list": words,
    }
    (request,) = generation_requests(tensors, end_ids={2, 6})
    assert (request.end_ids, request.stop_words) == (ends, stop_words)
    (plain,) = generation_requests(tensors)
    assert plain.stop_words == ((6,), (6, 7), (8,), (6,))


@pytest.mark.parametrize(
    ("word_list", "words"),
    [
        *WORD_LISTS,
        # As others may write them.
        pytest.param([[5, 6, 7, 0, 0], [3, -1, -1, -1, -1]], [[5, 6, 7]], id="padding of zeros"),
        pytest.param([[0], [-1]], [], id="padding only"),
        pytest.param([[5, 6], [2, 2]], [[5, 6]], id="empty word at the end"),
        pytest.param([[5, 6], [2, 1]], [[5, 6]], id="lengths that go backwards"),
    ],
)
def test_word_lists(word_list: list[list[int]], words: list[list[int]]) -> None:
    """An empty word would end everything at once."""
    assert words_from_list(np.array(word_list, int)) == tuple(map(tuple, words))


UNSUPPORTED = {*UNSUPPORTED_INPUTS, "runtime_top_p_decay"}
# These change no answer, or none without one that is refused.
HARMLESS = {
    "beam_search_diversity_rate",
    "decoder_input_ids",
    "decoder_input_lengths",
    "early_stopping",
    "encoder_output_lengths",
    "len_penalty",
    "lora_config",
    "pad_id",
    "prompt_table_extra_ids",
    "prompt_vocab_size",
    "runtime_top_p_min",
    "runtime_top_p_reset_ids",
    *(name for name in INPUTS if name.startswith("retention_")),
}


def some(name: str, number: float) -> Array:
    """A value of an input, of its type and shape."""
    kind, dims = INPUTS[name]["dtype"], INPUTS[name].get("reshape", INPUTS[name]["dims"])
    value: Any = b"x" * bool(number) if kind == "STRING" else number
    return np.full((1, *(abs(dim) for dim in dims)), value, DTYPES[kind])


def test_every_input_of_the_contract_is_used_refused_or_known_to_be_harmless() -> None:
    code = inspect.getsource(engine) + inspect.getsource(module) + inspect.getsource(names)
    used = {name for name in INPUTS if f'"{name}"' in code or name in SAMPLING}
    assert INPUTS.keys() == UNSUPPORTED | HARMLESS | used
    given = inputs() | {name: some(name, 1) for name in HARMLESS}
    given |= {name: some(name, name == "runtime_top_p_decay") for name in UNSUPPORTED}
    given |= {name: some(name, 1) for name in ("beam_width", "num_return_sequences")}
    empty = {name: some(name, 1)[:, :0] for name in ("embedding_bias", "lookahead_window_size")}
    assert generation_requests({**given, **empty}) == [request()]


def test_what_is_not_supported_is_refused_by_name_all_at_once() -> None:
    for name in UNSUPPORTED:
        with pytest.raises(InvalidParameter, match=f"the embedded engine does not support {name}$"):
            generation_requests({**inputs(), name: some(name, 2)})
    with pytest.raises(InvalidParameter, match="does not support draft_input_ids"):
        generation_requests({**inputs(), "draft_input_ids": np.zeros((1, 3), np.int32)})
    numbers = {"beam_width", "num_return_sequences"}
    with pytest.raises(InvalidParameter, match="beam_width > 1") as raised:
        generation_requests(inputs() | {name: some(name, 2) for name in UNSUPPORTED | numbers})
    assert all(name in str(raised.value) for name in UNSUPPORTED | numbers)


def test_features_of_an_engine_are_honoured() -> None:
    given = inputs(
        embedding_bias=[0.0, 0.5, 0.0, -2.0],
        guided_decoding_guide_type=[b"regex"],
        guided_decoding_guide=[r"[ä]\d".encode()],
        lora_task_id=7,
        return_log_probs=True,
    )
    parameters: dict[str, Any] = {
        "min_p": "0.25",
        "top_logprobs": 3,
        "allowed_token_ids": ids_text([5, 7]),
        "prompt_logprobs": True,
        "another": [],
    }
    features = {"embedding_bias", "guided_decoding", "lora_task_id", *parameters}
    (made,) = generation_requests(given, parameters, features)
    assert made.logit_bias == {1: 0.5, 3: -2.0}
    assert made.guide == Guide(GuideKind.REGEX, "[ä][0-9]")
    assert (made.lora_task_id, made.sampling.min_p, made.allowed_ids) == (7, 0.25, (5, 7))
    assert (made.return_log_probs, made.top_log_probs, made.prompt_log_probs) == (True, 3, True)
    for feature in features - {"another"}:
        with pytest.raises(InvalidParameter, match=f"does not support .*{feature}"):
            generation_requests(given, parameters, features - {feature})
    (without,) = generation_requests(inputs(), parameters, features)
    assert (without.top_log_probs, without.prompt_log_probs) == (0, False)
    # Who continues an answer has had the prompt's.
    (continued,) = generation_requests(given, {**parameters, CONTINUED: ids_text([7])}, features)
    assert (continued.continued, continued.prompt_log_probs) == (1, False)


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        pytest.param(
            {"guided_decoding_guide": "a"},
            "guided_decoding_guide_type must be one of",
            id="no kind",
        ),
        pytest.param(
            {"guided_decoding_guide_type": "verse"},
            "must be one of .*, not 'verse'",
            id="unknown kind",
        ),
        pytest.param(
            {"guided_decoding_guide_type": "regex"},
            "a guide of kind regex must not be empty",
            id="no guide",
        ),
        pytest.param(
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": b"\xff"},
            "guide must be valid Unicode",
            id="guide that is no UTF-8",
        ),
    ],
)
def test_guides_that_are_wrong(guide: dict[str, str | bytes], reason: str) -> None:
    given = inputs(**{name: [value] for name, value in guide.items()})
    with pytest.raises(InvalidParameter, match=reason):
        generation_requests(given, features={"guided_decoding"})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        pytest.param(
            "min_p", "nan", "min_p must be between 0 and 1, not nan", id="min_p that is no number"
        ),
        pytest.param(
            "min_p", "much", "min_p must be between 0 and 1, not much", id="min_p that is a text"
        ),
        pytest.param(
            "top_logprobs",
            21,
            "top_logprobs must be between 0 and 20, not 21",
            id="too many top_logprobs",
        ),
        pytest.param(
            "top_logprobs",
            True,
            "top_logprobs must be between 0 and 20, not True",
            id="top_logprobs that are true",
        ),
        pytest.param(
            "top_logprobs",
            "3",
            "top_logprobs must be between 0 and 20, not 3",
            id="top_logprobs that are a text",
        ),
        pytest.param(
            "allowed_token_ids",
            "x",
            "allowed_token_ids must be 32-bit integers in base64",
            id="allowed_token_ids that are no base64",
        ),
    ],
)
def test_parameters_that_are_wrong(name: str, value: str | int, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        generation_requests(inputs(return_log_probs=True), {name: value}, {name})


def test_a_bias_that_is_no_number() -> None:
    with pytest.raises(InvalidParameter, match="embedding_bias must be finite"):
        generation_requests(inputs(embedding_bias=[float("nan")]), features={"embedding_bias"})


def test_a_request_without_a_prompt() -> None:
    with pytest.raises(InvalidParameter, match="input_ids is missing"):
        generation_requests({"input_lengths": np.array([1], np.int32)})


# Responses

COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


def test_what_a_response_says() -> None:
    whole = {
        "output_ids": [[[11, 12]]],
        "sequence_length": [[2]],
        "cum_log_probs": [[-1.75]],
        "output_log_probs": [[[-0.5, -0.25]]],
        "batch_index": [[0]],
        "sequence_index": [[0]],
        "context_ids": [[8, 9, 10]],
        "is_final": [[True]],
    }
    assert lists(response_tensors(0, output(finished=True), inputs=inputs())) == whole
    counts = {"num_input_tokens": [[3]], "num_output_tokens": [[5]]}
    more = inputs(**COUNTS)
    assert lists(response_tensors(0, output(finished=True), inputs=more)) == whole | counts
    # Zeros stand for log probabilities that nobody asked for.
    tensors = response_tensors(0, output(log_probs=[]), inputs=inputs())
    assert tensors["output_log_probs"].tolist() == [[[0.0, 0.0]]]


def test_the_end_token_is_left_out_for_clients_that_decode() -> None:
    ended = output(sequence=1, finished=True, has_end_token=True)
    found = lists(response_tensors(0, ended, inputs=inputs(**COUNTS, return_log_probs=True)))
    assert found["output_ids"] == [[[11]]]
    assert found["sequence_length"] == [[1]]
    assert found["num_output_tokens"] == [[4]]
    assert len(found["output_log_probs"][0][0]) == 1
    (frame,) = decode_frames(frames_tensor([ended])["frames"][0].tolist())
    assert frame.ids == [11, 12]  # this package's client hides it


def test_frames_are_one_tensor() -> None:
    made = output(sequence=5, generated=5)
    last = output(sequence=7, generated=7, input_tokens=9, finished=True, log_probs=[])
    tensors = frames_tensor([made, last])
    assert [(name, value.shape[0]) for name, value in tensors.items()] == [("frames", 1)]
    first, second = decode_frames(tensors["frames"][0].tolist())
    assert first == Frame(5, 3, [11, 12], 3, False, made.log_probs, [])
    assert second == Frame(7, 5, [11, 12], 9, final=True)
