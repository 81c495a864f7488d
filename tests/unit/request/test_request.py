import json
import math
import re
from typing import Any, Literal

import pytest
from pydantic_core import InitErrorDetails, ValidationError

from cog_triton.errors import ConflictingMaxTokens, InvalidParameter, PromptRequired, PromptTooLong
from cog_triton.protocol.parameters import adapter_task_id, ids_text, parse_logit_bias
from cog_triton.request.guide import choose_guide, engine_guide
from cog_triton.request.limits import MOST_CHARACTERS, UNKNOWN_CHARACTERS, parse_json
from cog_triton.request.request import (
    ANY_SEED,
    DEFAULT_MAX_TOKENS,
    NO_TOKEN,
    Guide,
    GuideKind,
    Request,
    _explained,
    check_sampling,
    request_parameters,
    resolve_seed,
    resolve_tokens,
    triton_inputs,
)
from cog_triton.text.tokenizer import Tokenizer, text_limits
from tests.unit.models.support import CONTRACT, DTYPES

INPUTS = {tensor["name"]: tensor for tensor in CONTRACT["ensemble"]["inputs"]}
REGEX, SCHEMA = GuideKind.REGEX, GuideKind.JSON_SCHEMA


def request(**values: Any) -> Request:
    return Request(**{"prompt": "Hello", "seed": 1, **values})


def sent(**values: Any) -> dict[str, Any]:
    """What the ensemble gets, without the batch's dimensions."""
    return {name: array.item() for name, array in triton_inputs(request(**values)).items()}


# Validation


A_NUMBER = "between -3.40282e+38 and 3.40282e+38"


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        pytest.param("max_tokens", 0, "at least 1", id="no tokens"),
        pytest.param("min_tokens", 513, "at most max_tokens (512)", id="minimum above the maximum"),
        pytest.param("temperature", -0.01, "at least 0", id="negative temperature"),
        pytest.param("temperature", math.nan, A_NUMBER, id="temperature that is no number"),
        pytest.param("temperature", 1e39, "at most 3.40282e+38", id="temperature beyond an fp32"),
        pytest.param("top_p", 1.01, "between 0 and 1", id="top_p above 1"),
        pytest.param("top_k", -2, "at least -1", id="top_k below -1"),
        pytest.param("repetition_penalty", 0.0, "greater than 0", id="repetition_penalty of 0"),
        pytest.param("repetition_penalty", math.inf, A_NUMBER, id="infinite repetition_penalty"),
        pytest.param("frequency_penalty", -math.inf, A_NUMBER, id="infinite frequency_penalty"),
        pytest.param("seed", 2**64, "at most 18446744073709551615", id="seed of 65 bits"),
        pytest.param("end_id", 2_147_483_648, "at most 2147483647", id="end_id of 32 bits"),
        pytest.param("pad_id", -1_099_511_627_776, "at least -2147483647", id="pad_id of 41 bits"),
        pytest.param("min_p", -0.1, "between 0 and 1", id="negative min_p"),
        pytest.param("log_probs", 21, "at most 20", id="too many log probabilities"),
    ],
)
def test_what_is_out_of_range(name: str, value: float, must: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        request(**{name: value})
    reason = f"{name} must be {must}, not {value}"
    assert str(raised.value) == f"E1103 InvalidParameter: {reason}"
    with pytest.raises(InvalidParameter) as raised:
        check_sampling({"max_tokens": DEFAULT_MAX_TOKENS, name: value})
    assert raised.value.message == reason


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(
            {"max_tokens": 1, "temperature": 0.0, "top_p": 0.0, "top_k": -1, "seed": 0},
            id="the least",
        ),
        pytest.param(
            {"max_tokens": 2**31 - 1, "top_k": 2**31 - 1, "seed": 2**64 - 1, "log_probs": 20},
            id="the greatest",
        ),
        pytest.param(
            {"min_tokens": -1, "temperature": 1e30, "top_p": 1.0, "min_p": 1.0},
            id="no minimum, and shares of 1",
        ),
        pytest.param(
            {"min_tokens": 512, "repetition_penalty": 0.01, "end_id": 0, "pad_id": -1},
            id="minimum of all",
        ),
        pytest.param(
            {"length_penalty": -2.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
            id="penalties",
        ),
        pytest.param({"logit_bias": ((0, 1e30), (5, -100))}, id="biases"),
        pytest.param({"prompt": "", "prompt_ids": (0, 2**31 - 1)}, id="ids in place of a prompt"),
        pytest.param(
            {"stop_sequences": ("a" * 256,) * 64, "bad_words": ("a",) * 1024}, id="the most words"
        ),
    ],
)
def test_what_is_in_range_can_be_sent(values: dict[str, Any]) -> None:
    checked = request(**values)
    triton_inputs(checked)
    assert check_sampling(values) == {name: getattr(checked, name) for name in values}


@pytest.mark.parametrize(
    ("values", "error", "why"),
    [
        ({"prompt": ""}, PromptRequired, "^E1001 PromptRequired: a prompt is required"),
        ({"prompt": "half: \ud83d"}, InvalidParameter, "prompt must be valid Unicode"),
        ({"prompt_ids": (5, -1)}, InvalidParameter, "prompt_ids must be at least 0, not -1"),
        ({"logit_bias": ((-1, 1.0),)}, InvalidParameter, "logit_bias must be at least 0, not -1"),
        ({"logit_bias": ((1, float("nan")),)}, InvalidParameter, "logit_bias must be between"),
        ({"logit_bias": ((1, 1.0),) * 4097}, InvalidParameter, "must be at most 4096, not 4097"),
        ({"adapter": "a" * 257}, InvalidParameter, "adapter must be at most 256 characters"),
        ({"adapter": "a\udfff"}, InvalidParameter, "adapter must be valid Unicode"),
        ({"stop_sequences": ("a",) * 65}, InvalidParameter, "must be at most 64, not 65"),
        ({"bad_words": ("a",) * 1025}, InvalidParameter, "bad_words must be at most 1024"),
        ({"bad_words": ("a\udfff",)}, InvalidParameter, "bad_words must be valid Unicode"),
        ({"guide": Guide(REGEX, "a\udfff")}, InvalidParameter, "guide must be valid Unicode"),
        ({"guide": Guide(REGEX, "a" * 2**18)}, InvalidParameter, "guide must be at most 131072"),
        # A value is not echoed whole.
        ({"max_tokens": 2**20_000}, InvalidParameter, "not a number of 20001 bits"),
        ({"temperature": -(10.0**300)}, InvalidParameter, "^.{,200}$"),
    ],
)
def test_what_cannot_be_sent(values: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        request(**values)


@pytest.mark.rare  # pydantic looks at millions of numbers
def test_a_prompt_of_more_ids_than_any_context_has_cannot_be_sent() -> None:
    with pytest.raises(PromptTooLong, match="16777217 tokens; the limit is 16777216"):
        request(prompt_ids=(1,) * (2**24 + 1))


def test_too_many_ids_are_too_long_a_prompt() -> None:
    context = {"field_type": "Tuple", "max_length": 2**24, "actual_length": 2**24 + 1}
    problem = InitErrorDetails(type="too_long", loc=("prompt_ids",), input=(), ctx=context)
    error = ValidationError.from_exception_data("Request", [problem])
    assert str(_explained("prompt_ids", error)) == (
        "E1002 PromptTooLong: the prompt has 16777217 tokens; the limit is 16777216"
    )


# Inputs that become fields


@pytest.mark.parametrize(
    ("which", "new", "old", "tokens"),
    [
        pytest.param("max", 512, None, 512, id="new maximum"),
        pytest.param("max", 512, 100, 100, id="old maximum, and the default"),
        pytest.param("max", 100, 100, 100, id="two equal maxima"),
        pytest.param("min", None, None, -1, id="no minimum"),
        pytest.param("min", 0, None, 0, id="new minimum"),
        pytest.param("min", 5, -1, 5, id="new minimum, and none by its old name"),
        pytest.param("min", -1, 5, 5, id="old minimum, and none by its new name"),
    ],
)
def test_old_and_new_names(
    which: Literal["max", "min"], new: int | None, old: int | None, tokens: int
) -> None:
    assert resolve_tokens(which, new, old) == tokens


def test_names_that_contradict() -> None:
    for old, shown in ((DEFAULT_MAX_TOKENS, "512"), (2**20_000, "a number of 20001 bits")):
        with pytest.raises(ConflictingMaxTokens, match=f": max_tokens=100 .*_tokens={shown} "):
            resolve_tokens("max", 100, old)


@pytest.mark.parametrize("none", [None, ANY_SEED])
def test_seeds_that_are_drawn_are_valid_and_differ(none: int | None) -> None:
    assert resolve_seed(none, draws=False) is None
    seeds = {resolve_seed(none) for _ in range(20)}
    assert len(seeds) > 10
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)


def test_a_seed_that_is_given_is_kept_and_none_is_sent_without_one() -> None:
    assert (resolve_seed(0), resolve_seed(7, draws=False)) == (0, 7)
    assert "seed" not in sent(seed=None)


def test_logit_bias_is_a_json_object() -> None:
    assert parse_logit_bias(None) == ()
    assert parse_logit_bias('{"5": 1, "7": -0.5}') == ((5, 1.0), (7, -0.5))
    for broken in ("{", '{"\\ud800": 1}', "\ud800"):
        with pytest.raises(InvalidParameter, match="logit_bias must be"):
            parse_logit_bias(broken)
    many = json.dumps({str(token): 1 for token in range(200_000)})
    with pytest.raises(InvalidParameter, match="logit_bias must have at most 131072 strings"):
        parse_logit_bias(many)
    for text in ("5", '{"a": 1}', '{"1": "x"}', '{"1": [2]}', 5):
        with pytest.raises(InvalidParameter, match="logit_bias must be a JSON object"):
            parse_logit_bias(text)


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("{", list, "messages must be JSON"),
        ("{}", list, "messages must be a JSON list of objects"),
        ("[]", dict, "messages must be a JSON object"),
        ("[" * 100_000, list, "messages must have at most 65536 objects and lists"),
        ('{"a":' * 200, dict, "messages must have at most 128 levels"),
        ('["a"' + ', "a"' * 140_000 + "]", list, "messages must have at most 131072 strings"),
    ],
    ids=lambda value: "" if len(str(value)) > 99 else None,
)
def test_inputs_that_are_not_the_json_they_should_be(text: str, kind: type, why: str) -> None:
    assert parse_json("messages", '[{"role": "user"}]', list) == [{"role": "user"}]
    with pytest.raises(InvalidParameter, match=why):
        parse_json("messages", text, kind)


def test_guides_exclude_each_other() -> None:
    assert choose_guide() is None
    assert choose_guide(grammar="root ::= a", regex=None) == Guide(GuideKind.GRAMMAR, "root ::= a")
    with pytest.raises(InvalidParameter, match="json_schema and regex cannot be combined"):
        choose_guide(json_schema="{}", regex="a+")


# Limits of a prompt


@pytest.mark.parametrize(
    ("context_length", "characters", "why"),
    [
        (2048, None, ", as the model's maximum context length is 2048 tokens"),
        (None, UNKNOWN_CHARACTERS, ", since .*; set MAX_SEQUENCE_LENGTH"),
        (2**31, MOST_CHARACTERS, ""),
    ],
)
def test_a_prompt_has_as_many_characters_as_the_context_can_stand_for(
    tokenizer: Tokenizer, context_length: int | None, characters: int | None, why: str
) -> None:
    characters = characters or 2048 * (max(map(len, tokenizer.get_vocab())) + 1)
    limits = text_limits(tokenizer, context_length)
    limits.check("the prompt", characters)
    with pytest.raises(PromptTooLong, match=f"; the limit is {characters} ?{why}"):
        limits.check("the prompt", characters + 1)


# What is sent


def test_all_values_have_the_types_and_shapes_of_the_contract() -> None:
    values: dict[str, Any] = {
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
        "seed": 2**64 - 1,
    }
    assert sent(**values, prompt="Grüß 日本 🚀") == {
        **values,
        "text_input": "Grüß 日本 🚀".encode(),
        "stream": True,
        "return_num_input_tokens": True,
    }
    choice = Guide(GuideKind.CHOICE, '["a.", "b"]')
    found = triton_inputs(request(**values, guide=choice, adapter="fr", log_probs=2))
    for name, array in found.items():
        assert array.dtype == DTYPES[INPUTS[name]["dtype"]], name
        assert array.shape == (1, *INPUTS[name]["dims"]), name
    words = triton_inputs(request(bad_words=("a", "ä b")))["bad_words"]
    assert words.tolist() == [[b"a", "ä b".encode()]]
    required = {name for name, tensor in INPUTS.items() if not tensor.get("optional")}
    assert required <= triton_inputs(request()).keys()


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


@pytest.mark.parametrize(
    ("values", "also"),
    [
        ({"guide": Guide(GuideKind.JSON)}, {"guided_decoding_guide_type": b"json"}),
        (
            {"guide": Guide(REGEX, r"\d")},
            {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"[0-9]"},
        ),
        ({"adapter": "fr"}, {"lora_task_id": adapter_task_id("fr")}),
        ({"log_probs": 0}, {"return_log_probs": True}),
        ({"prompt_ids": (1,)}, {"text_input": b""}),
    ],
)
def test_what_is_sent_beside(values: dict[str, Any], also: dict[str, Any]) -> None:
    assert sent(**values) == sent() | also


def test_a_greedy_request_has_nothing_to_sample_by() -> None:
    sampled = {name: sent()[name] for name in ("seed", "temperature", "top_p")}
    assert sent(temperature=0.0, top_k=40) | sampled == sent() | {"top_k": 1}
    assert not sent(temperature=0.0).keys() & sampled


def test_what_the_ensemble_has_no_input_for_is_sent_as_parameters() -> None:
    assert request_parameters(request(log_probs=0)) == {}
    values: dict[str, Any] = {"prompt_ids": (1, 2), "logit_bias": ((5, 1.5),), "log_probs": 3}
    assert request_parameters(request(**values, add_special_tokens=False, min_p=0.1)) == {
        "prompt_ids": ids_text([1, 2]),
        "add_special_tokens": False,
        "min_p": "0.1",
        "logit_bias": '{"5": 1.5}',
        "top_logprobs": 3,
    }


@pytest.mark.parametrize(
    ("values", "sent_id"),
    [({}, None), ({"end_id": 0}, 0), ({"ignore_eos": True, "end_id": 7}, NO_TOKEN)],
    ids=["the model's", "its own", "none"],
)
def test_what_ends_an_output(values: dict[str, Any], sent_id: int | None) -> None:
    assert request(**values).sent_end_id == sent_id
    assert sent(**values).get("end_id") == sent_id


# Guides


def test_engines_get_a_choice_as_a_regular_expression() -> None:
    texts = ["yes", "a.b*c", "x|y (z)", "[1]{2}^$", "back\\slash/", "ż\n-", 'quote "it"']
    found = engine_guide(Guide(GuideKind.CHOICE, json.dumps(texts)))
    assert found.kind is REGEX
    assert all(re.fullmatch(found.text, text) for text in texts)
    assert not any(re.fullmatch(found.text, text) for text in ("ye", "aXbc", "x", "y (z)", "1"))


@pytest.mark.parametrize(
    ("expression", "as_sent"),
    [
        pytest.param(r"\d{3}-\w", "[0-9]{3}-[A-Za-z0-9_]", id="alone"),
        pytest.param(r"[\d-]+\s", r"[0-9-]+[ \t\n\r\f\v]", id="in classes"),
        pytest.param(r"\D\W\S", r"[^0-9][^A-Za-z0-9_][^ \t\n\r\f\v]", id="negated"),
        pytest.param(
            r"[]\d][^]\w]\d", "[]0-9][^]A-Za-z0-9_][0-9]", id="beside a bracket in a class"
        ),
        pytest.param(
            r"\\d\[\d\]\p{Lu}[\W]\u00e9",
            r"\\d\[[0-9]\]\p{Lu}[\W]\u00e9",
            id="escaped or of Unicode, which stay",
        ),
    ],
)
def test_classes_of_an_expression_are_ascii_for_every_engine(expression: str, as_sent: str) -> None:
    """As Python's re has them with ASCII."""
    for text in (expression, as_sent):
        assert engine_guide(Guide(REGEX, text)) == Guide(REGEX, as_sent)
    for kind in set(GuideKind) - {GuideKind.CHOICE, REGEX, SCHEMA}:
        assert engine_guide(Guide(kind, expression)) == Guide(kind, expression)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        pytest.param(REGEX, "", "of kind regex must not be empty", id="empty expression"),
        pytest.param(
            REGEX, r"a\Z", r"\\Z is not supported in a regular expression", id="end of a text"
        ),
        pytest.param(REGEX, r"(a)\1", r"\\1 is not supported", id="reference to a group"),
        pytest.param(SCHEMA, "{", "the guide is not JSON: ", id="no JSON"),
        pytest.param(SCHEMA, "[]", "a JSON schema must be an object", id="list for a schema"),
        pytest.param(
            GuideKind.CHOICE, "[]", "choice must be a JSON list of texts", id="no choices"
        ),
        pytest.param(GuideKind.CHOICE, '["a", ""]', "none of them empty", id="empty choice"),
        pytest.param(
            GuideKind.CHOICE,
            r'["a", "\ud800"]',
            "texts in Unicode",
            id="choice of half a character",
        ),
        pytest.param(
            GuideKind.CHOICE,
            '{"a": 1}',
            "choice must be a JSON list of texts",
            id="object for choices",
        ),
        pytest.param(SCHEMA, "[" * 100_000, "the guide is not JSON: ", id="deep nesting"),
    ],
)
def test_what_is_no_guide(kind: GuideKind, text: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        request(guide=Guide(kind, text))
