from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cog_triton.errors import (
    ConflictingMaxTokens,
    ConflictingMinTokens,
    InvalidParameter,
    PromptRequired,
    PromptTooLong,
)
from cog_triton.request.request import (
    ANY_SEED,
    DEFAULT_MAX_TOKENS,
    MAX_INT32,
    MAX_SEED,
    NO_TOKEN,
    Guide,
    GuideKind,
    Request,
    request_parameters,
    resolve_seed,
    resolve_tokens,
    triton_inputs,
)
from cog_triton.wire import adapter_task_id, ids_text

INPUTS = {
    tensor["name"]: tensor
    for tensor in json.loads(
        (Path(__file__).parents[2] / "contracts" / "inflight_batcher_llm.json").read_text()
    )["models"]["ensemble"]["inputs"]
}
DTYPES = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
NAN, INF = float("nan"), float("inf")


def request(**values: Any) -> Request:
    return Request(**{"prompt": "Hello", "seed": 1, **values})


def sent(**values: Any) -> dict[str, Any]:
    """What the ensemble gets, without the batch's dimensions."""
    return {name: array.item() for name, array in triton_inputs(request(**values)).items()}


# Validation


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", 2**31, f"at most {MAX_INT32}"),
        ("min_tokens", 513, "at most max_tokens (512)"),
        ("temperature", -0.01, "at least 0"),
        ("temperature", NAN, "a finite number"),
        ("temperature", INF, "a finite number"),
        ("temperature", 1e39, "at most 3.40282e+38"),
        ("top_p", -0.01, "at least 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_p", NAN, "a finite number"),
        ("top_k", -2, "at least -1"),
        ("top_k", 2**31, f"at most {MAX_INT32}"),
        ("length_penalty", NAN, "a finite number"),
        ("repetition_penalty", 0.0, "greater than 0"),
        ("repetition_penalty", -1.0, "greater than 0"),
        ("repetition_penalty", INF, "a finite number"),
        ("presence_penalty", NAN, "a finite number"),
        ("frequency_penalty", -INF, "a finite number"),
        ("seed", -1, "at least 0"),
        ("seed", 2**64, f"at most {MAX_SEED}"),
        ("end_id", 2**31, f"at most {MAX_INT32}"),
        ("pad_id", -(2**40), f"at least {-MAX_INT32}"),
        ("min_p", -0.1, "at least 0"),
        ("min_p", NAN, "a finite number"),
        ("log_probs", -1, "at least 0"),
        ("log_probs", 21, "at most 20"),
    ],
)
def test_what_is_out_of_range(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        request(**{name: value})
    assert raised.value.message == f"{name} must be {wanted}, not {value}"
    assert str(raised.value).startswith("E1103 ")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": MAX_INT32},
        {"min_tokens": -1},
        {"min_tokens": 512},
        {"temperature": 0.0},
        {"temperature": 1e30},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": MAX_INT32},
        {"length_penalty": -2.0},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"end_id": 0, "pad_id": -1},
        {"min_p": 1.0},
        {"log_probs": 20},
        {"logit_bias": ((0, 1e30), (5, -100))},
        {"prompt": "", "prompt_ids": (0, MAX_INT32)},
    ],
)
def test_what_is_in_range_can_be_sent(values: dict[str, Any]) -> None:
    triton_inputs(request(**values))


def test_a_prompt_is_required() -> None:
    with pytest.raises(PromptRequired, match="E1001 PromptRequired: a prompt is required"):
        request(prompt="")


def test_a_prompt_that_cannot_be_sent() -> None:
    with pytest.raises(InvalidParameter, match="prompt must be valid Unicode"):
        request(prompt="half an emoji: \ud83d")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"prompt_ids": (5, -1)}, "prompt_ids must be at least 0, not -1"),
        ({"prompt_ids": (2**31,)}, "prompt_ids must be at most"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias must be at least 0, not -1"),
        ({"logit_bias": ((1, NAN),)}, "logit_bias must be a finite number, not nan"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias must be at most 1024, not 1025"),
        ({"adapter": "a" * 257}, "adapter must be of at most 256 characters"),
        ({"adapter": "a\udfff"}, "adapter must be valid Unicode"),
        ({"guide": Guide(GuideKind.REGEX, "a\udfff")}, "guide must be valid Unicode"),
        ({"guide": Guide(GuideKind.REGEX, "a" * 2**18)}, "guide must be of at most 131072"),
        ({"guide": Guide(GuideKind.REGEX)}, "must have a text"),
        ({"guide": Guide(GuideKind.JSON_SCHEMA, "{")}, "is no JSON"),
    ],
)
def test_what_cannot_be_sent(values: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidParameter, match=why):
        request(**values)


def test_a_prompt_of_far_too_many_ids() -> None:
    with pytest.raises(PromptTooLong, match="tokens; 16777216 are the most"):
        request(prompt_ids=(1,) * (2**24 + 1))


# Old and new names


@pytest.mark.parametrize(
    ("max_tokens", "max_new_tokens", "meant"),
    [
        (DEFAULT_MAX_TOKENS, None, DEFAULT_MAX_TOKENS),
        (100, None, 100),
        (DEFAULT_MAX_TOKENS, 100, 100),
        (DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS),
        (100, 100, 100),
    ],
)
def test_max_tokens(max_tokens: int, max_new_tokens: int | None, meant: int) -> None:
    assert resolve_tokens("max", max_tokens, max_new_tokens) == meant


@pytest.mark.parametrize(("max_tokens", "max_new_tokens"), [(100, 101), (100, DEFAULT_MAX_TOKENS)])
def test_max_tokens_that_contradict(max_tokens: int, max_new_tokens: int) -> None:
    with pytest.raises(ConflictingMaxTokens) as raised:
        resolve_tokens("max", max_tokens, max_new_tokens)
    assert str(raised.value).startswith(
        f"E1102 ConflictingMaxTokens: max_tokens={max_tokens} and max_new_tokens={max_new_tokens} "
    )


@pytest.mark.parametrize(
    ("min_tokens", "min_new_tokens", "meant"),
    [
        (None, None, 0),
        (-1, None, 0),
        (None, -1, 0),
        (-1, -1, 0),
        (0, None, 0),
        (5, None, 5),
        (None, 5, 5),
        (-1, 5, 5),
        (5, -1, 5),
        (5, 5, 5),
        (0, 0, 0),
    ],
)
def test_min_tokens(min_tokens: int | None, min_new_tokens: int | None, meant: int) -> None:
    assert max(resolve_tokens("min", min_tokens, min_new_tokens), 0) == meant


@pytest.mark.parametrize(("min_tokens", "min_new_tokens"), [(5, 6), (0, 5)])
def test_min_tokens_that_contradict(min_tokens: int, min_new_tokens: int) -> None:
    with pytest.raises(ConflictingMinTokens) as raised:
        resolve_tokens("min", min_tokens, min_new_tokens)
    assert str(raised.value).startswith(
        f"E1101 ConflictingMinTokens: min_tokens={min_tokens} and min_new_tokens={min_new_tokens} "
    )


# What is sent

ALL: dict[str, Any] = {
    "max_tokens": 99,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 40,
    "length_penalty": 2.0,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "end_id": 0,
    "pad_id": 0,
}


def test_names_types_and_shapes_are_those_of_the_contract() -> None:
    found = triton_inputs(request(**ALL))
    assert ALL.keys() <= found.keys()
    for name, array in found.items():
        assert array.dtype == DTYPES[INPUTS[name]["dtype"]], name
        assert array.shape == (1, *INPUTS[name]["dims"]), name
    required = {name for name, tensor in INPUTS.items() if not tensor.get("optional")}
    assert required <= triton_inputs(request()).keys()


def test_all_values() -> None:
    assert sent(prompt="Grüß 日本 🚀", seed=7, **ALL) == {
        "text_input": "Grüß 日本 🚀".encode(),
        "seed": 7,
        "stream": True,
        "return_num_input_tokens": True,
        **ALL,
    }


def test_bad_words_are_one_row_of_texts() -> None:
    words = triton_inputs(request(bad_words=("a", "ä b")))["bad_words"]
    assert words.dtype == np.object_
    assert words.tolist() == [[b"a", "ä b".encode()]]
    assert "bad_words" not in triton_inputs(request())


def test_what_changes_nothing_is_left_out() -> None:
    assert sent(seed=5) == {
        "text_input": b"Hello",
        "max_tokens": DEFAULT_MAX_TOKENS,
        "stream": True,
        "return_num_input_tokens": True,
        "seed": 5,
        "temperature": pytest.approx(0.7),
        "top_p": pytest.approx(0.95),
    }
    for values in ({"top_k": -1}, {"top_k": 0}, {"min_tokens": 0}, {"min_tokens": -1}):
        assert sent(seed=5, **values) == sent(seed=5)


def test_what_structured_output_adapters_and_log_probabilities_send() -> None:
    more = triton_inputs(
        request(guide=Guide(GuideKind.CHOICE, '["a.", "b"]'), adapter="fr", log_probs=2)
    )
    for name in (
        "guided_decoding_guide_type",
        "guided_decoding_guide",
        "lora_task_id",
        "return_log_probs",
    ):
        assert more[name].dtype == DTYPES[INPUTS[name]["dtype"]], name
        assert more[name].shape == (1, *INPUTS[name]["dims"]), name
    assert more["guided_decoding_guide_type"].item() == b"regex"
    assert more["guided_decoding_guide"].item() == rb"a\.|b"
    assert more["lora_task_id"].item() == adapter_task_id("fr")
    assert more["return_log_probs"].item() is True
    any_json = triton_inputs(request(guide=Guide(GuideKind.JSON)))
    assert any_json["guided_decoding_guide_type"].item() == b"json"
    assert "guided_decoding_guide" not in any_json


def test_what_the_ensemble_has_no_input_for_is_sent_as_parameters() -> None:
    assert request_parameters(request()) == {}
    assert request_parameters(
        request(
            prompt_ids=(1, 2),
            add_special_tokens=False,
            min_p=0.1,
            logit_bias=((5, 1.5),),
            log_probs=3,
        )
    ) == {
        "prompt_ids": ids_text([1, 2]),
        "add_special_tokens": False,
        "min_p": "0.1",
        "logit_bias": '{"5": 1.5}',
        "top_logprobs": 3,
    }
    assert request_parameters(request(log_probs=0)) == {}


def test_a_prompt_of_ids_goes_without_its_text() -> None:
    assert triton_inputs(request(prompt_ids=(1,)))["text_input"].item() == b""


@pytest.mark.parametrize(
    ("values", "tokenizers", "end_id", "told"),
    [
        ({}, 2, 2, None),
        ({}, None, NO_TOKEN, None),
        ({"end_id": 7}, 2, 7, 7),
        ({"end_id": 0}, 2, 0, 0),
        ({"ignore_eos": True}, 2, NO_TOKEN, -1),
        ({"ignore_eos": True, "end_id": 7}, 2, NO_TOKEN, -1),
    ],
)
def test_what_ends_an_output(
    values: dict[str, Any], tokenizers: int | None, end_id: int, told: int | None
) -> None:
    assert request(**values).effective_end_id(tokenizers) == end_id
    assert sent(**values).get("end_id") == told


@pytest.mark.parametrize("top_k", [-1, 0, 40])
def test_temperature_0_is_sent_as_top_k_1(top_k: int) -> None:
    found = sent(temperature=0.0, top_k=top_k)
    assert (found["temperature"], found["top_k"]) == (1.0, 1)
    assert request(temperature=0.0).greedy
    assert not request(temperature=0.1).greedy


@pytest.mark.parametrize("seed", [0, 2**63, MAX_SEED])
def test_seeds(seed: int) -> None:
    array = triton_inputs(request(seed=seed))["seed"]
    assert array.dtype == np.uint64
    assert array.tolist() == [[seed]]


@pytest.mark.parametrize("none", [None, ANY_SEED])
def test_seeds_that_are_drawn_are_valid_and_differ(none: int | None) -> None:
    seeds = [resolve_seed(none) for _ in range(20)]
    assert len(set(seeds)) > 10
    assert all(0 <= seed < 2**31 for seed in seeds)


# Sizes


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"stop_sequences": ("a",) * 65}, "stop_sequences must be at most 64, not 65"),
        ({"stop_sequences": ("a" * 257,)}, "at most 256 characters, not 257"),
        ({"bad_words": ("a",) * 1025}, "bad_words must be at most 1024, not 1025"),
        ({"bad_words": ("a\udfff",)}, "bad_words must be valid Unicode"),
    ],
)
def test_lists_of_texts_are_bounded(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameter, match=text):
        request(**values)
    request(stop_sequences=("a" * 256,) * 64, bad_words=("a",) * 1024)


def test_a_value_is_not_echoed_whole() -> None:
    with pytest.raises(InvalidParameter, match="not a number of 20001 bits"):
        request(max_tokens=2**20_000)
    with pytest.raises(InvalidParameter) as caught:
        request(temperature=-(10.0**300))
    assert len(str(caught.value)) < 200
    with pytest.raises(ConflictingMaxTokens, match="a number of 20001 bits"):
        resolve_tokens("max", 5, 2**20_000)
