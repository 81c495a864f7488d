from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cog_triton.engines.base import (
    GenerationRequest,
    SamplingParams,
)
from cog_triton.engines.serving import Output
from cog_triton.models.tensors import generation_requests, placeholders, response_tensors
from cog_triton.request.limits import GUIDE_CHARACTERS, WORD_IDS
from cog_triton.request.request import Guide, GuideKind
from cog_triton.wire import (
    CONTINUED,
    TokenLogProb,
    ids_text,
    unpacked_log_probs,
    unpacked_prompt_log_probs,
)

Array = npt.NDArray[Any]

CONTRACT = json.loads(
    (Path(__file__).parents[2] / "contracts" / "inflight_batcher_llm.json").read_text()
)["models"]["tensorrt_llm"]
INPUTS = {tensor["name"]: tensor for tensor in CONTRACT["inputs"]}
OUTPUTS = {tensor["name"]: tensor for tensor in CONTRACT["outputs"]}
OURS: dict[str, Any] = {"context_ids": (np.int32, [-1]), "is_final": (np.bool_, [1])}
DTYPES: dict[str, Any] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}


def tensor(name: str, *rows: Any) -> Array:
    """An input with a batch of values, as Triton hands it to the model."""
    dtype = DTYPES[INPUTS[name]["dtype"]]
    if INPUTS[name].get("reshape") == []:
        return np.array(rows, dtype).reshape(len(rows))
    return np.array(rows, dtype).reshape(len(rows), *np.shape(rows[0]))


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
        "final": False,
    }
    return Output(**{**defaults, **values})


# Requests


def test_defaults_are_those_of_tensorrt_llm() -> None:
    found = request()
    assert found == GenerationRequest(
        key="",
        input_ids=[5, 6, 7],
        max_tokens=10,
        end_id=None,
        stop_words=(),
        sampling=SamplingParams(
            temperature=1.0,
            top_k=0,
            top_p=0.0,
            seed=0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            min_tokens=0,
            bad_words=(),
        ),
        return_log_probs=False,
    )
    assert found.sampling.greedy
    assert found.sampling.plain
    assert all(type(token) is int for token in found.input_ids)


def test_all_values() -> None:
    found = request(
        end_id=2,
        stop_words_list=[[5, 6, 7], [2, 3, -1]],
        bad_words_list=[[8], [1]],
        temperature=0.5,
        runtime_top_k=40,
        runtime_top_p=0.75,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        min_tokens=3,
        return_log_probs=True,
    )
    assert found == GenerationRequest(
        key="",
        input_ids=[5, 6, 7],
        max_tokens=10,
        end_id=2,
        stop_words=((5, 6), (7,)),  # the contract's example
        sampling=SamplingParams(
            temperature=0.5,
            top_k=40,
            top_p=0.75,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            min_tokens=3,
            bad_words=((8,),),
        ),
        return_log_probs=True,
    )
    assert type(found.sampling.seed) is int


def test_a_batch_of_prompts() -> None:
    found = generation_requests(
        {
            "input_ids": tensor("input_ids", [5, 6, 7], [8, 0, 0]),
            "input_lengths": tensor("input_lengths", 3, 1),
            "request_output_len": tensor("request_output_len", 10, 20),
            "end_id": tensor("end_id", 2, -1),
            "seed": tensor("seed", 0, 9),
            "temperature": tensor("temperature", 0.0, 2.0),
            "stop_words_list": tensor(
                "stop_words_list", [[5, 6, 7], [2, 3, -1]], [[9, 0, 0], [1, -1, -1]]
            ),
        }
    )
    assert [one.input_ids for one in found] == [[5, 6, 7], [8]]
    assert [one.max_tokens for one in found] == [10, 20]
    assert [one.end_id for one in found] == [2, None]
    assert [one.sampling.seed for one in found] == [0, 9]
    assert [one.sampling.temperature for one in found] == [0, 2]
    assert [one.stop_words for one in found] == [((5, 6), (7,)), ((9,),)]


def test_scalars_may_have_kept_their_dimension() -> None:
    given = {name: np.atleast_2d(value) for name, value in inputs(seed=7, end_id=2).items()}
    (found,) = generation_requests(given)
    assert (found.input_ids, found.sampling.seed, found.end_id) == ([5, 6, 7], 7, 2)


@pytest.mark.parametrize("words", [[[], []], [[0], [-1]]])
def test_word_lists_without_a_word(words: list[list[int]]) -> None:
    found = request(stop_words_list=words, bad_words_list=words)
    assert found.stop_words == found.sampling.bad_words == ()
    assert found.sampling.plain


UNSUPPORTED: dict[str, Any] = {
    "context_phase_params": [1],
    "cross_attention_mask": [[True]],
    "draft_acceptance_threshold": 0.5,
    "draft_input_ids": [1],
    "draft_logits": [[0.5]],
    "embedding_bias": [0.5],
    "encoder_input_features": [[0.5]],
    "guided_decoding_guide": ["{}"],
    "guided_decoding_guide_type": ["json"],
    "lookahead_ngram_size": [1],
    "lookahead_verification_set_size": [1],
    "lookahead_window_size": [1],
    "lora_task_id": 1,
    "lora_weights": [[0.5]],
    "mrope_position_deltas": [1],
    "mrope_rotary_cos_sin": [0.5],
    "prompt_embedding_table": [[0.5]],
    "return_context_logits": True,
    "return_generation_logits": True,
    "runtime_top_p_decay": 0.9,
    "skip_cross_attn_blocks": [True],
}
NEUTRAL: dict[str, Any] = {
    "beam_width": 1,
    "embedding_bias": [],
    "guided_decoding_guide": [],
    "guided_decoding_guide_type": [b""],
    "lookahead_window_size": [],
    "num_return_sequences": 1,
    "return_context_logits": False,
    "return_generation_logits": False,
    "runtime_top_p_decay": 1.0,
}
# They change no answer, or none without one of those above.
IGNORED: dict[str, Any] = {
    "beam_search_diversity_rate": 0.5,
    "decoder_input_ids": [1],
    "decoder_input_lengths": 1,
    "early_stopping": 1,
    "encoder_output_lengths": 1,
    "len_penalty": 2.0,
    "lora_config": [[1, 2, 3]],
    "pad_id": 0,
    "prompt_table_extra_ids": [1],
    "prompt_vocab_size": 1,
    "retention_decode_duration_ms": [1],
    "retention_decode_priority": [1],
    "retention_token_range_durations_ms": [1],
    "retention_token_range_ends": [1],
    "retention_token_range_priorities": [1],
    "retention_token_range_starts": [1],
    "runtime_top_p_min": 0.1,
    "runtime_top_p_reset_ids": 1,
}
USED = {
    "bad_words_list",
    "beam_width",
    "end_id",
    "exclude_input_in_output",
    "frequency_penalty",
    "input_ids",
    "input_lengths",
    "min_tokens",
    "num_return_sequences",
    "presence_penalty",
    "repetition_penalty",
    "request_output_len",
    "return_log_probs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_perf_metrics",
    "runtime_top_k",
    "runtime_top_p",
    "seed",
    "stop",
    "stop_words_list",
    "streaming",
    "temperature",
}


def test_every_input_of_the_contract_is_used_refused_or_known_to_be_harmless() -> None:
    assert UNSUPPORTED.keys() | IGNORED.keys() | USED == INPUTS.keys()
    assert not UNSUPPORTED.keys() & IGNORED.keys()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^the embedded engine does not support {name}$"):
        request(**{name: UNSUPPORTED[name]})


@pytest.mark.parametrize("name", ["beam_width", "num_return_sequences"])
def test_more_than_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"does not support {name} > 1"):
        request(**{name: 2})


def test_all_that_is_not_supported_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="beam_width > 1") as raised:
        request(**UNSUPPORTED, beam_width=4)
    assert all(name in str(raised.value) for name in (*UNSUPPORTED, "beam_width > 1"))


def test_features_of_an_engine_are_honoured() -> None:
    given = inputs(
        embedding_bias=[0.0, 0.5, 0.0, -2.0],
        guided_decoding_guide_type=[b"regex"],
        guided_decoding_guide=["[ä]+".encode()],
        lora_task_id=7,
    )
    features = {"embedding_bias", "guided_decoding", "lora_task_id"}
    (made,) = generation_requests(given, features=features)
    assert made.logit_bias == {1: 0.5, 3: -2.0}
    assert made.guide == Guide(GuideKind.REGEX, "[ä]+")
    assert made.lora_task_id == 7
    for feature, name in (("embedding_bias",) * 2, ("guided_decoding", "guided_decoding_guide")):
        with pytest.raises(ValueError, match=f"does not support .*{name}"):
            generation_requests(given, features=features - {feature})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guided_decoding_guide": [b"a"]}, "guided_decoding_guide_type must be among"),
        ({"guided_decoding_guide_type": [b"verse"]}, "must be among .*, not 'verse'"),
        ({"guided_decoding_guide_type": [b"regex"]}, "guided_decoding_guide is missing, of type"),
        (
            {"guided_decoding_guide_type": [b"regex"], "guided_decoding_guide": [b"\xff"]},
            "guided_decoding_guide must be valid Unicode",
        ),
        ({"embedding_bias": [0.5, float("nan")]}, "embedding_bias must be finite"),
    ],
)
def test_features_that_are_used_wrongly(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generation_requests(inputs(**values), features={"embedding_bias", "guided_decoding"})


def test_what_changes_nothing_is_accepted() -> None:
    assert request(**NEUTRAL, **IGNORED) == request()


NUMBER = r"must be between -3\.40282e\+38 and 3\.40282e\+38"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beam_width", 0, "beam_width must be at least 1, not 0"),
        ("num_return_sequences", 0, "num_return_sequences must be at least 1, not 0"),
        ("input_lengths", -1, "input_lengths must be between 0 and 3, not -1"),
        ("input_lengths", 4, "input_lengths must be between 0 and 3, not 4"),
        ("min_tokens", 11, r"min_tokens must be at most max_tokens \(10\), not 11"),
        ("temperature", -0.5, "temperature must be at least 0, not -0.5"),
        ("temperature", float("nan"), f"temperature {NUMBER}, not nan"),
        ("temperature", float("inf"), f"temperature {NUMBER}, not inf"),
        ("runtime_top_k", -1, "top_k must be at least 0, not -1"),
        ("runtime_top_p", 1.5, "top_p must be between 0 and 1, not 1.5"),
        ("runtime_top_p", -0.5, "top_p must be between 0 and 1, not -0.5"),
        ("runtime_top_p", float("nan"), f"runtime_top_p {NUMBER}, not nan"),
        ("repetition_penalty", 0.0, "repetition_penalty must be greater than 0, not 0.0"),
        ("repetition_penalty", float("inf"), f"repetition_penalty {NUMBER}, not inf"),
        ("presence_penalty", float("nan"), f"presence_penalty {NUMBER}, not nan"),
        ("frequency_penalty", -float("inf"), f"frequency_penalty {NUMBER}, not -inf"),
    ],
)
def test_what_is_out_of_range(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request(**{name: value})


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_a_word_list_is_bounded(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at most {WORD_IDS} ids"):
        request(**{name: np.ones((2, WORD_IDS + 1), np.int32)})


def test_a_request_without_a_prompt() -> None:
    with pytest.raises(ValueError, match="input_ids is missing"):
        generation_requests({"input_lengths": np.array([1], np.int32)})


# Responses


@pytest.mark.parametrize("ids", [[], [11], [11, 12, 13]])
def test_responses_have_the_shapes_and_types_of_the_contract(ids: list[int]) -> None:
    given = inputs(return_num_input_tokens=True, return_num_output_tokens=True)

    tensors = response_tensors(
        0, output(ids=ids, log_probs=[TokenLogProb(i, -1.0) for i in ids]), given
    )

    for name, array in tensors.items():
        if name in OURS:
            dtype, dims = OURS[name]
        else:
            dtype, dims = DTYPES[OUTPUTS[name]["dtype"]], OUTPUTS[name]["dims"]
        assert array.dtype == dtype, name
        assert array.ndim == 1 + len(dims), name  # the batch comes first
        assert all(dim in (-1, size) for dim, size in zip(dims, array.shape[1:], strict=True)), name
        assert array.shape[0] == 1, name
    assert tensors["output_ids"].shape == (1, 1, len(ids))
    assert tensors["output_log_probs"].shape == (1, 1, len(ids))


def test_what_a_response_says() -> None:
    given = inputs(return_num_input_tokens=True, return_num_output_tokens=True)

    tensors = response_tensors(0, output(final=True), given)

    assert {name: array.tolist() for name, array in tensors.items()} == {
        "output_ids": [[[11, 12]]],
        "sequence_length": [[2]],
        "cum_log_probs": [[-1.75]],
        "output_log_probs": [[[-0.5, -0.25]]],
        "batch_index": [[0]],
        "sequence_index": [[0]],
        "context_ids": [[8, 9, 10]],
        "is_final": [[True]],
        "num_input_tokens": [[3]],
        "num_output_tokens": [[5]],
    }


def test_ids_only_is_one_tensor_and_once_the_prompts_length() -> None:
    given = inputs(return_num_input_tokens=True, return_num_output_tokens=True)

    first = response_tensors(0, output(generated=2), given, ids_only=True)
    later = response_tensors(0, output(generated=5), given, ids_only=True)
    last = response_tensors(0, output(generated=7, final=True), given, ids_only=True)

    assert {name: array.tolist() for name, array in first.items()} == {
        "output_ids": [[[11, 12]]],
        "num_input_tokens": [[3]],
    }
    assert {name: array.tolist() for name, array in later.items()} == {"output_ids": [[[11, 12]]]}
    assert last["num_output_tokens"].tolist() == [[7]]


def test_ids_stand_behind_their_count_if_a_client_asks() -> None:
    later = response_tensors(0, output(generated=5), inputs(), ids_only=True, counted=True)
    expected = [5, 11, 12]
    assert {name: array.tolist() for name, array in later.items()} == {"output_ids": [[expected]]}
    last = response_tensors(
        0, output(ids=[], generated=7, final=True), inputs(), ids_only=True, counted=True
    )
    assert {name: array.tolist() for name, array in last.items()} == {
        "output_ids": [[[7]]],
        "num_output_tokens": [[7]],
    }


def test_log_probabilities_that_nobody_asked_for_are_zeros() -> None:
    tensors = response_tensors(0, output(log_probs=[]), inputs())
    assert tensors["output_log_probs"].tolist() == [[[0.0, 0.0]]]


def test_log_probabilities_with_the_most_likely_tokens() -> None:
    told = [
        TokenLogProb(11, -0.5, ((11, -0.5), (4, -1.0))),
        TokenLogProb(12, -0.25, ((7, -0.125), (12, -0.25))),
    ]
    made = output(ids=[1, 2, 11, 12], log_probs=told)  # behind the prompt
    given = inputs(return_log_probs=True)

    whole = response_tensors(0, made, given, top=2)
    checked = response_tensors(0, output(log_probs=told), given, ids_only=True, top=2)

    assert whole["output_log_probs"].shape == (1, 1, 10)
    assert unpacked_log_probs([11, 12], whole["output_log_probs"].ravel(), 2) == told
    assert checked.keys() == {"output_ids", "output_log_probs"}
    assert (checked["output_log_probs"] == whole["output_log_probs"]).all()
    none = response_tensors(0, output(), inputs(), ids_only=True, top=2)
    assert none.keys() == {"output_ids"}


def test_the_prompts_log_probabilities_stand_before_those_of_the_first_ids() -> None:
    told = [TokenLogProb(1, 0.0), TokenLogProb(2, -0.75, ((3, -0.5),))]
    made = output(prompt_log_probs=told)
    given = inputs(return_log_probs=True)
    values = response_tensors(0, made, given, ids_only=True, top=1)["output_log_probs"].ravel()
    assert unpacked_prompt_log_probs(values, 2, 1) == told
    assert [token.log_prob for token in unpacked_log_probs([11, 12], values, 1)] == [-0.5, -0.25]


def test_who_goes_on_with_an_answer_is_not_told_of_the_prompt_again() -> None:
    parameters, features = {"prompt_logprobs": True}, {"prompt_logprobs"}
    given = inputs(return_log_probs=True)
    (made,) = generation_requests(given, parameters, features)
    assert made.prompt_log_probs
    (continued,) = generation_requests(given, {**parameters, CONTINUED: ids_text([7])}, features)
    assert not continued.prompt_log_probs
    (without,) = generation_requests(inputs(), parameters, features)
    assert not without.prompt_log_probs
    with pytest.raises(ValueError, match="does not support prompt_logprobs"):
        generation_requests(given, parameters=parameters)


def test_parameters_of_a_request() -> None:
    parameters = {"min_p": "0.25", "top_logprobs": 3, "another": []}
    features = {"min_p", "top_logprobs"}
    given = inputs(return_log_probs=True)
    (made,) = generation_requests(given, parameters, features)
    assert made.sampling.min_p == 0.25
    assert (made.return_log_probs, made.top_log_probs) == (True, 3)
    (without,) = generation_requests(inputs(), parameters, features)
    assert without.top_log_probs == 0
    with pytest.raises(ValueError, match="does not support min_p, top_logprobs"):
        generation_requests(given, parameters=parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"min_p": "1.5"}, "min_p must be between 0 and 1, not 1.5"),
        ({"min_p": "nan"}, "min_p must be between 0 and 1, not nan"),
        ({"min_p": "much"}, "min_p must be between 0 and 1, not 'much'"),
        ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20, not 21"),
        ({"top_logprobs": True}, "top_logprobs must be between 0 and 20, not True"),
        ({"top_logprobs": "3"}, "top_logprobs must be between 0 and 20, not 3"),
    ],
)
def test_parameters_that_are_wrong(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generation_requests(inputs(return_log_probs=True), parameters, {"min_p", "top_logprobs"})


def test_a_guide_is_bounded() -> None:
    kind, text = [b"regex"], [b"a" * (GUIDE_CHARACTERS + 1)]
    given = inputs(guided_decoding_guide_type=kind, guided_decoding_guide=text)
    with pytest.raises(ValueError, match=f"must be at most {GUIDE_CHARACTERS} characters"):
        generation_requests(given, features={"guided_decoding"})


def test_placeholders_of_what_the_engines_do_not_make() -> None:
    outputs = [
        {"name": "cum_log_probs", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "context_logits", "data_type": "TYPE_FP16", "dims": [-1, -1]},
        {"name": "acceptance_rate", "data_type": "TYPE_FP32", "dims": [1]},
        {"name": "total_draft_tokens", "data_type": "TYPE_INT32", "dims": [1]},
        {"name": "generation_logits", "data_type": "TYPE_BF16", "dims": [-1, -1, -1]},
    ]
    made = placeholders({"output": outputs})
    assert {name: (zero.tolist(), zero.dtype.name) for name, zero in made.items()} == {
        "context_logits": ([[[0.0]]], "float16"),
        "acceptance_rate": ([[0.0]], "float32"),
    }


def test_counts_come_when_asked_for() -> None:
    tensors = response_tensors(0, output(), inputs(return_num_input_tokens=False))
    assert not {"num_input_tokens", "num_output_tokens"} & tensors.keys()


def test_each_prompt_of_a_batch_has_its_index_and_length() -> None:
    given = {
        "input_lengths": tensor("input_lengths", 3, 1),
        "return_num_input_tokens": tensor("return_num_input_tokens", True, True),
    }
    for index, length in enumerate((3, 1)):
        tensors = response_tensors(index, output(), given)
        assert tensors["batch_index"].tolist() == [[index]]
        assert tensors["num_input_tokens"].tolist() == [[length]]


def test_only_allowed_token_ids_are_taken_where_the_engine_does() -> None:
    parameters = {"allowed_token_ids": ids_text([5, 7])}
    (request,) = generation_requests(inputs(), parameters, {"allowed_token_ids"})
    assert request.allowed_ids == (5, 7)
    with pytest.raises(ValueError, match="does not support allowed_token_ids"):
        generation_requests(inputs(), parameters)
    with pytest.raises(ValueError, match="allowed_token_ids must be 32-bit integers in base64"):
        generation_requests(inputs(), {"allowed_token_ids": "x"}, {"allowed_token_ids"})
