"""A request as every API makes it: a prompt, limits and sampling parameters, each bound stated once."""

import json
import math
import secrets
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from cog_triton import errors
from cog_triton.errors import InvalidParameter, is_unicode, shown
from cog_triton.protocol.names import (
    ADD_SPECIAL_TOKENS,
    ALLOWED_IDS,
    CONTINUED,
    LOGIT_BIAS,
    MIN_P,
    PROMPT_IDS,
    PROMPT_LOG_PROBS,
    TOP_LOG_PROBS,
)
from cog_triton.protocol.parameters import adapter_task_id, ids_text
from cog_triton.request import limits
from cog_triton.request.guide import Guide as Guide
from cog_triton.request.guide import GuideKind as GuideKind
from cog_triton.request.guide import engine_guide

DEFAULT_MAX_TOKENS = 512
MAX_SEED = 2**64 - 1
ANY_SEED = -1
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# As an end_id: no token ends the output.
NO_TOKEN = -1

# NumPy below 2 would let a greater integer wrap around.
Int32 = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]
Float32 = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Word = Annotated[str, Field(max_length=limits.STOP_CHARACTERS)]
AtMostWords = Field(max_length=limits.WORDS)
AtMostBiases = Field(max_length=limits.LOGIT_BIASES)
# A negative number means none, as 0 does.
OrNone = AfterValidator(lambda number: max(number, 0))

# Inputs of the ensemble that are fields of a request → the value that changes nothing. It is not sent: each
# tensor costs time.
_INPUTS: dict[str, float | None] = {
    "max_tokens": None,
    "seed": None,
    "temperature": None,
    "top_p": None,
    "end_id": None,
    "pad_id": None,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": 0.0,
    "min_tokens": 0.0,
}
_DTYPES = {int: np.int32, float: np.float32, bool: np.bool_, str: np.object_}
_BOUNDS = {"ge": "at least", "le": "at most", "gt": "greater than"}


def _valid(guide: Guide) -> Guide:
    length = len(guide.text)
    if length > limits.GUIDE_CHARACTERS:
        raise ValueError(
            f"guide must be at most {limits.GUIDE_CHARACTERS} characters, not {length}"
        )
    if not is_unicode(guide.text):
        raise ValueError("guide must be valid Unicode, without lone surrogates")
    engine_guide(guide)
    return guide


@dataclass(frozen=True)
class Request:
    """One text to complete; UserErrors name values that no engine could honour."""

    # With the prompt template filled in; not read if there are prompt_ids.
    # It has a bound, so that it is checked to be Unicode.
    prompt: Annotated[str, Field(min_length=0)]
    # None: the engine draws at random.
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[int, OrNone] = 0
    # 0 takes the likeliest token.
    temperature: Annotated[float, Field(ge=0, le=MAX_FLOAT32)] = 0.7
    top_p: Probability = 0.95
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32), OrNone] = 0
    # Has an effect only in beam search.
    length_penalty: Float32 = 1.0
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_FLOAT32)] = 1.0
    presence_penalty: Float32 = 0.0
    frequency_penalty: Float32 = 0.0
    stop_sequences: Annotated[tuple[Word, ...], Field(max_length=limits.STOP_SEQUENCES)] = ()
    bad_words: Annotated[tuple[Word, ...], AtMostWords] = ()
    # The only end token, in place of the model's; below 0, there is none.
    end_id: Int32 | None = None
    # Overrides the tokenizer's.
    pad_id: Int32 | None = None
    prompt_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.MOST_CHARACTERS)] = ()
    # Of tokens that begin a text, which a rendered chat has. None: as preprocessing is configured.
    add_special_tokens: bool | None = None
    min_p: Probability = 0.0
    logit_bias: Annotated[tuple[tuple[TokenId, Float32], ...], AtMostBiases] = ()
    # No token ends the output, whatever end_id is.
    ignore_eos: bool = False
    # None for none; k for those of the chosen tokens, and of the k most likely at each place.
    log_probs: Annotated[int, Field(ge=0, le=limits.TOP_LOG_PROBS)] | None = None
    guide: Annotated[Guide, AfterValidator(_valid)] | None = None
    # The name of a LoRA adapter.
    adapter: Annotated[str, Field(max_length=limits.NAME_CHARACTERS)] = ""
    stop_token_ids: Annotated[tuple[TokenId, ...], AtMostWords] = ()
    # Special tokens that are not left out of the output's text.
    shown_tokens: tuple[str, ...] = ()
    prompt_log_probs: bool = False
    # Whether what ended the output is part of its text.
    include_stop: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.ALLOWED_IDS)] = ()
    # Of the requests that wait in the queue, those with a lower number come first.
    priority: int = 0
    # Output that another deployment or start has delivered, to continue from; max_tokens has it too.
    continued_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.MOST_CHARACTERS)] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, validate: Any) -> Any:
        try:
            return validate(values)
        except ValidationError as error:
            name = str(error.errors(include_url=False)[0]["loc"][0])
            raise _explained(name, error) from None

    def __post_init__(self) -> None:
        if not self.prompt and not self.prompt_ids:
            raise errors.PromptRequired("a prompt is required")
        _check_lengths(self.min_tokens, self.max_tokens)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def sent_end_id(self) -> int | None:
        """The token that is to end the output; NO_TOKEN for none, and None for those of the model."""
        return NO_TOKEN if self.ignore_eos else self.end_id


def check_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of some fields as a Request has them, or raise the UserError that it raises."""
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = _field_type(name).validate_python(value)
        except ValidationError as error:
            raise _explained(name, error) from None
    if "min_tokens" in checked and "max_tokens" in checked:
        _check_lengths(checked["min_tokens"], checked["max_tokens"])
    return checked


def _check_lengths(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidParameter(
            f"min_tokens must be at most max_tokens ({max_tokens}), not {shown(min_tokens)}"
        )


@cache
def _field_type(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(Request, include_extras=True)[name])


def _explained(name: str, error: ValidationError) -> InvalidParameter | errors.PromptTooLong:
    """Return the error of a field as one that names the field, its bound and the value."""
    problem = error.errors(include_url=False)[0]
    value = problem["input"]
    bounds = problem.get("ctx", {})
    if problem["type"] == "too_long":
        count = bounds["actual_length"]
        limit = bounds["max_length"]
        if name == "prompt_ids":
            return errors.PromptTooLong(f"the prompt has {count} tokens; the limit is {limit}")
        return InvalidParameter(f"{name} must be at most {limit}, not {count}")
    if problem["type"] == "string_too_long":
        limit = bounds["max_length"]
        return InvalidParameter(f"{name} must be at most {limit} characters, not {len(value)}")
    if problem["type"] == "string_unicode":
        return InvalidParameter(f"{name} must be valid Unicode, without lone surrogates")
    if isinstance(value, float) and not math.isfinite(value):
        return InvalidParameter(
            f"{name} must be between {-MAX_FLOAT32:g} and {MAX_FLOAT32:g}, not {shown(value)}"
        )
    if name in ("top_p", "min_p"):
        return InvalidParameter(f"{name} must be between 0 and 1, not {shown(value)}")
    for kind, words in _BOUNDS.items():
        if kind in bounds:
            bound = f"{bounds[kind]:g}" if isinstance(value, float) else bounds[kind]
            return InvalidParameter(f"{name} must be {words} {bound}, not {shown(value)}")
    return InvalidParameter(str(bounds.get("error", f"{name}: {problem['msg']}")))


def resolve_seed(seed: int | None, *, draws: bool = True) -> int | None:
    """Return a seed, or for None and ANY_SEED a drawn one; None if ``draws`` is false.

    It has 31 bits, so that any JSON client reads it whole.
    """
    if seed is not None and seed != ANY_SEED:
        return seed
    return secrets.randbelow(2**31) if draws else None


def resolve_tokens(which: str, value: int | None, old: int | None) -> int:
    """Choose between max_tokens or min_tokens and its old name; a default counts as not given."""
    default = DEFAULT_MAX_TOKENS if which == "max" else -1
    conflict = errors.ConflictingMaxTokens if which == "max" else errors.ConflictingMinTokens
    values = {number for number in (None if value == default else value, old) if number is not None}
    values.discard(-1)
    if len(values) > 1:
        raise conflict(
            f"{which}_tokens={shown(value)} and {which}_new_tokens={shown(old)} differ; "
            f"{which}_new_tokens is the old name of {which}_tokens: set only one of them"
        )
    return values.pop() if values else default


def triton_inputs(request: Request) -> dict[str, npt.NDArray[Any]]:
    """Make the ensemble's inputs for a streamed request, shapes [batch = 1, 1]; of bad_words [1, words]."""
    values = _changing_fields(request)
    values["text_input"] = "" if request.prompt_ids else request.prompt
    values["stream"] = True
    values["return_num_input_tokens"] = True
    if request.sent_end_id is not None:
        values["end_id"] = request.sent_end_id
    if request.log_probs is not None:
        values["return_log_probs"] = True
    if request.adapter:
        values["lora_task_id"] = adapter_task_id(request.adapter)
    if request.guide is not None:
        guide = engine_guide(request.guide)
        values["guided_decoding_guide_type"] = guide.kind.value
        if guide.text:
            values["guided_decoding_guide"] = guide.text
    arrays = {}
    for name, value in values.items():
        dtype = np.uint64 if name in ("seed", "lora_task_id") else _DTYPES[type(value)]
        arrays[name] = np.array([[value.encode() if isinstance(value, str) else value]], dtype)
    if request.bad_words:
        arrays["bad_words"] = np.array([[word.encode() for word in request.bad_words]], np.object_)
    return arrays


def _changing_fields(request: Request) -> dict[str, Any]:
    """Return the fields that are inputs of the ensemble and change something."""
    fields = {name: getattr(request, name) for name in _INPUTS}
    for name in ("max_tokens", "min_tokens"):
        fields[name] = max(0, fields[name] - len(request.continued_ids))
    if request.greedy:
        # TensorRT-LLM refuses a temperature of 0 in some versions; top_k 1 is greedy in all.
        fields |= {"top_k": 1, "seed": None, "temperature": None, "top_p": None}
    return {
        name: value
        for name, value in fields.items()
        if value is not None and value != _INPUTS[name]
    }


def request_parameters(request: Request) -> dict[str, str | int | bool]:
    """Make the parameters of a request, of which the ensemble has no input; see ``protocol``."""
    values = {
        PROMPT_IDS: ids_text(request.prompt_ids) or None,
        ADD_SPECIAL_TOKENS: request.add_special_tokens,
        LOGIT_BIAS: json.dumps(dict(request.logit_bias)) if request.logit_bias else None,
        MIN_P: repr(float(request.min_p)) if request.min_p else None,
        TOP_LOG_PROBS: request.log_probs or None,
        PROMPT_LOG_PROBS: request.prompt_log_probs or None,
        ALLOWED_IDS: ids_text(request.allowed_token_ids) or None,
        CONTINUED: ids_text(request.continued_ids) or None,
    }
    return {name: value for name, value in values.items() if value is not None}
