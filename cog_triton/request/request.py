"""A request as every face makes it: a prompt, limits and sampling parameters, each bound stated once."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from enum import Enum
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from cog_triton import wire
from cog_triton.errors import (
    ConflictingMaxTokens,
    ConflictingMinTokens,
    InvalidParameter,
    PromptRequired,
    PromptTooLong,
    is_unicode,
    shown,
)
from cog_triton.request import limits

DEFAULT_MAX_TOKENS = 512
MAX_SEED = 2**64 - 1
ANY_SEED = -1
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
NO_TOKEN = -1
"""As an end_id: no token ends the output."""

# NumPy below 2 would let a greater integer wrap around.
Int32 = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]
Float32 = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Word = Annotated[str, Field(max_length=limits.STOP_CHARACTERS)]
AtMostWords = Field(max_length=limits.WORDS)

_NOT_UNICODE = "{} must be valid Unicode; half of a surrogate pair is not"
_TOO_LONG = "{} must be of at most {} characters, not {}"
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


@dataclasses.dataclass(frozen=True)
class Guide:
    """The form of an output; ``text`` of CHOICE is a JSON list of texts, and of JSON empty."""

    kind: GuideKind
    text: str = ""


def check_guide(guide: Guide) -> None:
    """Refuse a guide that is wrong whatever the engine is, with a ValueError."""
    if not guide.text and guide.kind is not GuideKind.JSON:
        raise ValueError(f"a guide of kind {guide.kind.value} must have a text")
    if guide.kind is GuideKind.JSON_SCHEMA and not isinstance(_parsed(guide.text), dict):
        raise ValueError("a JSON schema must be an object")
    engine_guide(guide)


def engine_guide(guide: Guide) -> Guide:
    """Return a guide as engines take it: a choice as a regular expression, and classes as ASCII.

    Raises:
        ValueError: the choice or the expression is not valid.
    """
    if guide.kind is GuideKind.REGEX:
        return Guide(guide.kind, ascii_classes(guide.text))
    if guide.kind is not GuideKind.CHOICE:
        return guide
    texts = _parsed(guide.text)
    valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not valid or not texts or not all(text and is_unicode(text) for text in texts):
        raise ValueError("choice must be a JSON list of texts in Unicode, none of them empty")
    return Guide(GuideKind.REGEX, "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the guide is no JSON: {error}") from None


def ascii_classes(expression: str) -> str:
    """Spell out \\d, \\w and \\s as Python's re has them with ASCII; engines differ in what they match.

    Raises:
        ValueError: a backslash before a letter or digit that engines take differently.
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


@dataclass(frozen=True)
class Request:
    """One text to complete.

    Raises:
        PromptRequired, PromptTooLong, InvalidParameter: a value that no engine could honour, by its name.
    """

    # With the prompt template filled in; not read if there are prompt_ids.
    prompt: Annotated[str, Field(min_length=0)]  # a bound, so that it is checked to be Unicode
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] = DEFAULT_MAX_TOKENS
    min_tokens: int = 0  # 0 or less is none
    temperature: Annotated[float, Field(ge=0, le=MAX_FLOAT32)] = 0.7  # 0 is greedy
    top_p: Probability = 0.95
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] = 0  # 0 or -1 is no limit
    length_penalty: Float32 = 1.0  # has an effect only in beam search
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_FLOAT32)] = 1.0
    presence_penalty: Float32 = 0.0
    frequency_penalty: Float32 = 0.0
    stop_sequences: Annotated[tuple[Word, ...], Field(max_length=limits.STOP_SEQUENCES)] = ()
    bad_words: Annotated[tuple[Word, ...], AtMostWords] = ()
    # Override the tokenizer's.
    end_id: Int32 | None = None
    pad_id: Int32 | None = None
    prompt_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.MOST_CHARACTERS)] = ()
    # Of tokens that begin a text, which a rendered chat has. None: as preprocessing is configured.
    add_special_tokens: bool | None = None
    min_p: Probability = 0.0
    logit_bias: Annotated[tuple[tuple[TokenId, Float32], ...], AtMostWords] = ()
    ignore_eos: bool = False  # no token ends the output, whatever end_id is
    # None for none; k for those of the chosen tokens, and of the k most likely at each place.
    log_probs: Annotated[int, Field(ge=0, le=limits.TOP_LOG_PROBS)] | None = None
    guide: Guide | None = None
    adapter: Annotated[str, Field(max_length=limits.NAME_CHARACTERS)] = ""  # a LoRA adapter's name
    stop_token_ids: Annotated[tuple[TokenId, ...], AtMostWords] = ()
    shown_tokens: tuple[str, ...] = ()  # special tokens that are not left out of the output's text
    prompt_log_probs: bool = False
    include_stop: bool = False  # whether what ended the output is part of its text
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=limits.ALLOWED_IDS)] = ()
    priority: int = 0  # of requests that wait in the queue, lower ones come first

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, validate: Any) -> Any:
        try:
            return validate(values)
        except ValidationError as error:
            raise _explained(error) from None

    def __post_init__(self) -> None:
        if not self.prompt and not self.prompt_ids:
            raise PromptRequired("a prompt is required")
        if self.min_tokens > self.max_tokens:
            bound = f"at most max_tokens ({self.max_tokens})"
            raise InvalidParameter(f"min_tokens must be {bound}, not {shown(self.min_tokens)}")
        if self.guide is not None:
            if (count := len(self.guide.text)) > limits.GUIDE_CHARACTERS:
                raise InvalidParameter(_TOO_LONG.format("guide", limits.GUIDE_CHARACTERS, count))
            if not is_unicode(self.guide.text):
                raise InvalidParameter(_NOT_UNICODE.format("guide"))
            try:
                check_guide(self.guide)
            except ValueError as error:
                raise InvalidParameter(str(error)) from None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def effective_end_id(self, tokenizers: int | None) -> int:
        """Return the token that ends the output, by the request or its tokenizer; NO_TOKEN for none."""
        end_id = tokenizers if self.end_id is None else self.end_id
        return NO_TOKEN if end_id is None or self.ignore_eos else end_id


def _explained(error: ValidationError) -> InvalidParameter | PromptTooLong:
    """Say in the words of this API which value of a request is out of its bounds."""
    problem = error.errors(include_url=False)[0]
    (name, *_), value, bounds = problem["loc"], problem["input"], problem.get("ctx", {})
    if problem["type"] == "too_long":
        count, most = bounds["actual_length"], bounds["max_length"]
        if name == "prompt_ids":
            return PromptTooLong(f"the prompt has {count} tokens; {most} are the most")
        return InvalidParameter(f"{name} must be at most {most}, not {count}")
    if problem["type"] == "string_too_long":
        return InvalidParameter(_TOO_LONG.format(name, bounds["max_length"], len(value)))
    if problem["type"] == "string_unicode":
        return InvalidParameter(_NOT_UNICODE.format(name))
    if isinstance(value, float) and not math.isfinite(value):
        return InvalidParameter(f"{name} must be a finite number, not {value}")
    for kind, words in _BOUNDS.items():
        if kind in bounds:
            bound = f"{bounds[kind]:g}" if isinstance(value, float) else bounds[kind]
            return InvalidParameter(f"{name} must be {words} {bound}, not {shown(value)}")
    return InvalidParameter(f"{name}: {problem['msg']}")


def resolve_seed(seed: int | None) -> int:
    """Draw a seed in place of None and ANY_SEED, of 31 bits, so that any JSON client reads it whole."""
    return secrets.randbelow(2**31) if seed in (None, ANY_SEED) else seed


def resolve_tokens(which: str, value: int | None, old: int | None) -> int:
    """Choose between max_tokens or min_tokens and its old name; a default counts as not given."""
    unset, conflict = {
        "max": (DEFAULT_MAX_TOKENS, ConflictingMaxTokens),
        "min": (-1, ConflictingMinTokens),
    }[which]
    given = {each for each in (None if value == unset else value, old) if each not in (None, -1)}
    if len(given) > 1:
        raise conflict(
            f"{which}_tokens={shown(value)} and {which}_new_tokens={shown(old)} contradict; "
            f"{which}_new_tokens is the old name of {which}_tokens, give one of them"
        )
    return given.pop() or 0 if given else unset


def parse_logit_bias(text: str | None) -> tuple[tuple[int, float], ...]:
    """Parse a JSON object of token ids and what is added to their logits."""
    try:
        return tuple(wire.parse_biases(text or "{}").items())
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def choose_guide(**inputs: str | None) -> Guide | None:
    """Return the guide that is given by its kind: json_schema, regex, grammar or choice."""
    given = {name: text for name, text in inputs.items() if text is not None}
    if len(given) > 1:
        raise InvalidParameter(f"{' and '.join(given)} exclude each other: give one of them")
    return next((Guide(GuideKind[name.upper()], text) for name, text in given.items()), None)


def triton_inputs(request: Request) -> dict[str, npt.NDArray[Any]]:
    """Make the ensemble's inputs for a streamed request, shapes [batch = 1, 1].

    A parameter that changes nothing is left out: each tensor costs time.
    """

    def unless(name: str, neutral: float) -> float | None:
        value: float = getattr(request, name)
        return None if value == neutral else value

    # TensorRT-LLM refuses a temperature of 0 in some versions; top_k 1 is greedy in all.
    greedy = request.greedy
    values: dict[str, tuple[Any, Any]] = {
        "text_input": ("" if request.prompt_ids else request.prompt, np.object_),
        "max_tokens": (request.max_tokens, np.int32),
        "stream": (True, np.bool_),
        "return_num_input_tokens": (True, np.bool_),
        "seed": (request.seed, np.uint64),
        "temperature": (1.0 if greedy else request.temperature, np.float32),
        "top_p": (request.top_p, np.float32),
        "top_k": (1 if greedy else max(request.top_k, 0) or None, np.int32),
        "min_tokens": (max(request.min_tokens, 0) or None, np.int32),
        "length_penalty": (unless("length_penalty", 1.0), np.float32),
        "repetition_penalty": (unless("repetition_penalty", 1.0), np.float32),
        "presence_penalty": (unless("presence_penalty", 0.0), np.float32),
        "frequency_penalty": (unless("frequency_penalty", 0.0), np.float32),
        "end_id": (NO_TOKEN if request.ignore_eos else request.end_id, np.int32),
        "pad_id": (request.pad_id, np.int32),
        "return_log_probs": (None if request.log_probs is None else True, np.bool_),
    }
    if request.adapter:
        values["lora_task_id"] = wire.adapter_task_id(request.adapter), np.uint64
    if request.guide is not None:
        guide = engine_guide(request.guide)
        values["guided_decoding_guide_type"] = (guide.kind.value, np.object_)
        values["guided_decoding_guide"] = (guide.text or None, np.object_)
    arrays = {
        name: np.array([[value.encode() if isinstance(value, str) else value]], kind)
        for name, (value, kind) in values.items()
        if value is not None
    }
    if request.bad_words:
        arrays["bad_words"] = np.array([[word.encode() for word in request.bad_words]], np.object_)
    return arrays


def request_parameters(request: Request) -> dict[str, str | int | bool]:
    """Make the parameters of a request, of which the ensemble has no input; see ``wire``."""
    values = {
        wire.PROMPT_IDS: wire.ids_text(request.prompt_ids) or None,
        wire.ADD_SPECIAL_TOKENS: request.add_special_tokens,
        wire.LOGIT_BIAS: json.dumps(dict(request.logit_bias)) if request.logit_bias else None,
        wire.MIN_P: repr(float(request.min_p)) if request.min_p else None,
        wire.TOP_LOG_PROBS: request.log_probs or None,
        wire.PROMPT_LOG_PROBS: request.prompt_log_probs or None,
        wire.ALLOWED_IDS: wire.ids_text(request.allowed_token_ids) or None,
    }
    return {name: value for name, value in values.items() if value is not None}
