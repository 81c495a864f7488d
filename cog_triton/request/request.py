"""A request as every face makes it: a prompt, limits and sampling parameters, each bound stated once."""

import json
import math
import re
import secrets
from enum import Enum
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, ValidationError, model_validator
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

DEFAULT_MAX_TOKENS = 512
MAX_SEED = 2**64 - 1
ANY_SEED = -1
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
NO_TOKEN = -1  # as an end_id: no token ends the output

# NumPy below 2 would let a greater integer wrap around.
Int32 = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]
Float32 = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Word = Annotated[str, Field(max_length=limits.STOP_CHARACTERS)]
AtMostWords = Field(max_length=limits.WORDS)
AtMostBiases = Field(max_length=limits.LOGIT_BIASES)
OrNone = AfterValidator(lambda number: max(number, 0))  # less than 0 is none, as 0 is

# Inputs that are fields of a request, with the value that changes nothing: each tensor costs time.
_INPUTS: dict[str, float | None] = {
    **dict.fromkeys(("max_tokens", "seed", "temperature", "top_p", "end_id", "pad_id")),
    **dict.fromkeys(("length_penalty", "repetition_penalty"), 1.0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_k", "min_tokens"), 0.0),
}
_DTYPES = {int: np.int32, float: np.float32, bool: np.bool_, str: np.object_}
_NOT_UNICODE = "{} must be valid Unicode, without lone surrogates"
_TOO_LONG = "{} must be at most {} characters, not {}"
_BOUNDS = {"ge": "at least", "le": "at most", "gt": "greater than"}
# Special in regular expressions of any kind; re.escape knows only Python's.
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/]")
_TOKENS = re.compile(r"\\.|\[\^?|.", re.DOTALL)
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
# With these letters a backslash means the same to every engine, or is refused by name.
_ESCAPES = frozenset("nrtfvxupPbB0")


class GuideKind(str, Enum):
    """The language of a guide; the values but CHOICE are those of ``guided_decoding_guide_type``."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "ebnf_grammar"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"


@dataclass(frozen=True)
class Guide:
    """The form of an output; ``text`` of CHOICE is a JSON list of texts, and of JSON empty."""

    kind: GuideKind
    text: str = ""


def engine_guide(guide: Guide) -> Guide:
    """Return a guide as engines take it, or raise ValueError: a choice as a regex, and classes as ASCII."""
    kind, text, value = guide.kind, guide.text, None
    if not text and kind is not GuideKind.JSON:
        raise ValueError(f"a guide of kind {kind.value} must not be empty")
    if kind in (GuideKind.JSON_SCHEMA, GuideKind.CHOICE):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the guide is not JSON: {error}") from None
    if kind is GuideKind.JSON_SCHEMA and not isinstance(value, dict):
        raise ValueError("a JSON schema must be an object")
    if kind is GuideKind.CHOICE:
        texts = value if isinstance(value, list) else []
        if not texts or not all(isinstance(t, str) and t and is_unicode(t) for t in texts):
            raise ValueError("choice must be a JSON list of texts in Unicode, none of them empty")
        return Guide(GuideKind.REGEX, "|".join(_SPECIAL.sub(r"\\\g<0>", t) for t in texts))
    return Guide(kind, ascii_classes(text)) if kind is GuideKind.REGEX else guide


def ascii_classes(expression: str) -> str:
    """Spell out \\d, \\w and \\s as Python's re has them with ASCII; engines differ in what they match.

    ValueError names a backslash before a letter or digit that engines take differently.
    """
    parts, in_class, first = [], False, False
    for token in _TOKENS.findall(expression):
        letter = token[1:] if token[0] == "\\" else ""
        if letter in _ASCII:
            token = _ASCII[letter] if in_class else f"[{_ASCII[letter]}]"
        elif letter.lower() in _ASCII:  # in a class, engines' own: there is no other way to say it
            token = token if in_class else f"[^{_ASCII[letter.lower()]}]"
        elif letter.isascii() and letter.isalnum() and letter not in _ESCAPES:
            raise ValueError(f"{token} is not supported in a regular expression")
        if token[0] == "[" and not letter and not in_class:
            in_class = first = True
        else:
            in_class, first = in_class and (token != "]" or first), False
        parts.append(token)
    return "".join(parts)


def _valid(guide: Guide) -> Guide:
    if (count := len(guide.text)) > limits.GUIDE_CHARACTERS:
        raise ValueError(_TOO_LONG.format("guide", limits.GUIDE_CHARACTERS, count))
    if not is_unicode(guide.text):
        raise ValueError(_NOT_UNICODE.format("guide"))
    engine_guide(guide)
    return guide


@dataclass(frozen=True)
class Request:
    """One text to complete; UserErrors name values that no engine could honour."""

    # With the prompt template filled in; not read if there are prompt_ids.
    prompt: Annotated[str, Field(min_length=0)]  # a bound, so that it is checked to be Unicode
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None  # None: the engine's own randomness
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[int, OrNone] = 0
    temperature: Annotated[float, Field(ge=0, le=MAX_FLOAT32)] = 0.7  # 0 is greedy
    top_p: Probability = 0.95
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32), OrNone] = 0
    length_penalty: Float32 = 1.0  # has an effect only in beam search
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_FLOAT32)] = 1.0
    presence_penalty: Float32 = 0.0
    frequency_penalty: Float32 = 0.0
    stop_sequences: Annotated[tuple[Word, ...], Field(max_length=limits.STOP_SEQUENCES)] = ()
    bad_words: Annotated[tuple[Word, ...], AtMostWords] = ()
    end_id: Int32 | None = (
        None  # the only end token, in place of the model's; below 0, there is none
    )
    pad_id: Int32 | None = None  # overrides the tokenizer's
    prompt_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.MOST_CHARACTERS)] = ()
    # Of tokens that begin a text, which a rendered chat has. None: as preprocessing is configured.
    add_special_tokens: bool | None = None
    min_p: Probability = 0.0
    logit_bias: Annotated[tuple[tuple[TokenId, Float32], ...], AtMostBiases] = ()
    ignore_eos: bool = False  # no token ends the output, whatever end_id is
    # None for none; k for those of the chosen tokens, and of the k most likely at each place.
    log_probs: Annotated[int, Field(ge=0, le=limits.TOP_LOG_PROBS)] | None = None
    guide: Annotated[Guide, AfterValidator(_valid)] | None = None
    adapter: Annotated[str, Field(max_length=limits.NAME_CHARACTERS)] = ""  # a LoRA adapter's name
    stop_token_ids: Annotated[tuple[TokenId, ...], AtMostWords] = ()
    shown_tokens: tuple[str, ...] = ()  # special tokens that are not left out of the output's text
    prompt_log_probs: bool = False
    include_stop: bool = False  # whether what ended the output is part of its text
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.ALLOWED_IDS)] = ()
    priority: int = 0  # of requests that wait in the queue, lower ones come first
    # Output that another deployment or start has delivered, to continue from; max_tokens has it too.
    continued_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.MOST_CHARACTERS)] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, validate: Any) -> Any:
        try:
            return validate(values)
        except ValidationError as error:
            raise _explained(error) from None

    def __post_init__(self) -> None:
        if not self.prompt and not self.prompt_ids:
            raise errors.PromptRequired("a prompt is required")
        if self.min_tokens > self.max_tokens:
            bound = f"at most max_tokens ({self.max_tokens})"
            raise InvalidParameter(f"min_tokens must be {bound}, not {shown(self.min_tokens)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def sent_end_id(self) -> int | None:
        """The token that is to end the output; NO_TOKEN for none, and None for those of the model."""
        return NO_TOKEN if self.ignore_eos else self.end_id


def _explained(error: ValidationError) -> InvalidParameter | errors.PromptTooLong:
    problem = error.errors(include_url=False)[0]
    (name, *_), value, bounds = problem["loc"], problem["input"], problem.get("ctx", {})
    if problem["type"] == "too_long":
        count, most = bounds["actual_length"], bounds["max_length"]
        if name == "prompt_ids":
            return errors.PromptTooLong(f"the prompt has {count} tokens; the limit is {most}")
        return InvalidParameter(f"{name} must be at most {most}, not {count}")
    if problem["type"] == "string_too_long":
        return InvalidParameter(_TOO_LONG.format(name, bounds["max_length"], len(value)))
    if problem["type"] == "string_unicode":
        return InvalidParameter(_NOT_UNICODE.format(name))
    if isinstance(value, float) and not math.isfinite(value):
        must = f"between {-MAX_FLOAT32:g} and {MAX_FLOAT32:g}"
    elif name in ("top_p", "min_p"):
        must = "between 0 and 1"
    elif kind := next((kind for kind in _BOUNDS if kind in bounds), ""):
        bound = f"{bounds[kind]:g}" if isinstance(value, float) else bounds[kind]
        must = f"{_BOUNDS[kind]} {bound}"
    else:
        return InvalidParameter(str(bounds.get("error", f"{name}: {problem['msg']}")))
    return InvalidParameter(f"{name} must be {must}, not {shown(value)}")


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
    given = {n for n in (None if value == default else value, old) if n is not None and n != -1}
    if len(given) > 1:
        text = f"{which}_new_tokens is the old name of {which}_tokens: set only one of them"
        given_both = f"{which}_tokens={shown(value)} and {which}_new_tokens={shown(old)} differ"
        raise conflict(f"{given_both}; {text}")
    return given.pop() if given else default


def choose_guide(**inputs: str | None) -> Guide | None:
    """Return the guide that is given by its kind: json_schema, regex, grammar or choice."""
    given = {name: text for name, text in inputs.items() if text is not None}
    if len(given) > 1:
        raise InvalidParameter(f"{' and '.join(given)} cannot be combined: set only one of them")
    return next((Guide(GuideKind[name.upper()], text) for name, text in given.items()), None)


def triton_inputs(request: Request) -> dict[str, npt.NDArray[Any]]:
    """Make the ensemble's inputs for a streamed request, shapes [batch = 1, 1]; of bad_words [1, words]."""
    fields = {name: getattr(request, name) for name in _INPUTS}
    for name in ("max_tokens", "min_tokens"):
        fields[name] = max(0, fields[name] - len(request.continued_ids))
    # TensorRT-LLM refuses a temperature of 0 in some versions; top_k 1 is greedy in all.
    if request.greedy:
        fields |= {"top_k": 1, **dict.fromkeys(("seed", "temperature", "top_p"))}
    values = {name: value for name, value in fields.items() if value not in (None, _INPUTS[name])}
    values["text_input"] = "" if request.prompt_ids else request.prompt
    values["stream"] = values["return_num_input_tokens"] = True
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
