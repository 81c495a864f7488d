"""A request as the predictor's users make it: a prompt, limits and sampling parameters, validated."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
from cog_triton.request.guide import Guide, check_guide, engine_guide
from cog_triton.request.limits import (
    ALLOWED_IDS,
    GUIDE_CHARACTERS,
    MOST_CHARACTERS,
    NAME_CHARACTERS,
    STOP_CHARACTERS,
    TOP_LOG_PROBS,
    WORDS,
    check_stop_sequences,
    check_texts,
)

DEFAULT_MAX_TOKENS = 512
MAX_SEED = 2**64 - 1
ANY_SEED = -1
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)

_INTEGERS = ("max_tokens", "top_k", "end_id", "pad_id")
_FLOATS = (
    "temperature",
    "length_penalty",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NO_TOKEN = -1
"""As an end_id: no token ends the output."""


@dataclass(frozen=True)
class Request:
    """One text to complete.

    Attributes:
        prompt: the text that the model sees, with the prompt template already filled in; not read where
            there are prompt_ids.
        prompt_ids: the prompt as token ids.
        add_special_tokens: whether the tokenizer adds those that begin a text, which a rendered chat
            template has; None leaves it to the configuration of preprocessing.
        max_tokens: the most output tokens; the end of the model's context may come first.
        min_tokens: the end token is not chosen before; 0 or less is none.
        temperature: 0 is greedy.
        top_p: nucleus sampling; 1 is no limit.
        top_k: 0 or -1 is no limit.
        length_penalty: has an effect in beam search only.
        seed: 64 bits; see ``resolve_seed``.
        stop_sequences: texts that end the output and are no part of it.
        bad_words: texts whose token ids are never made one after the other.
        end_id, pad_id: token ids that override the tokenizer's.
        min_p: tokens less likely than so many times the most likely one are not chosen; 0 is no limit.
        logit_bias: token ids, and what is added to their logits.
        ignore_eos: no token ends the output, whatever end_id is.
        log_probs: None for none; k for those of the chosen tokens, and of the k most likely at each place.
        prompt_log_probs: whether log_probs are told of the prompt's tokens as well.
        guide: what the output has to be; None for anything.
        stop_token_ids: tokens that end the output, of whose text they are no part.
        shown_tokens: special tokens, by their texts, that the output's text is to have; it has no others.
        adapter: name of the LoRA adapter that changes the model; empty for none.
        include_stop: whether the stop sequence or token that ends the output is part of its text.
        skip_special_tokens: whether special tokens are left out of the output's text.
        allowed_token_ids: the only tokens of which the output may be; empty for all.
        priority: of requests that wait for their turn, lower ones come first.
    """

    prompt: str
    seed: int
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_sequences: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    end_id: int | None = None
    pad_id: int | None = None
    prompt_ids: tuple[int, ...] = ()
    add_special_tokens: bool | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    log_probs: int | None = None
    guide: Guide | None = None
    adapter: str = ""
    stop_token_ids: tuple[int, ...] = ()
    shown_tokens: tuple[str, ...] = ()
    prompt_log_probs: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        """Refuses values that no engine could honour.

        Raises:
            PromptRequired, InvalidParameter: naming the parameter and its range.
        """
        if not self.prompt and not self.prompt_ids:
            raise PromptRequired("a prompt is required")
        check_stop_sequences(self.stop_sequences)
        check_texts("bad_words", self.bad_words, WORDS, STOP_CHARACTERS)
        check_texts("adapter", (self.adapter,), 1, NAME_CHARACTERS)
        guide = self.guide.text if self.guide else ""
        check_texts("guide", (guide,), 1, GUIDE_CHARACTERS)
        texts = {"prompt": (self.prompt,), "adapter": (self.adapter,), "guide": (guide,)}
        words = {"bad_words": self.bad_words, "stop_sequences": self.stop_sequences}
        for name, values in {**texts, **words}.items():
            if not all(map(is_unicode, values)):
                raise InvalidParameter(
                    f"{name} must be valid Unicode; half of a surrogate pair is not"
                )
        self._check_numbers()
        self._check_token_ids()
        if self.guide is not None:
            _check_guide(self.guide)

    def _check_numbers(self) -> None:
        for name in _INTEGERS:
            _check(name, getattr(self, name) or 0, _fits_int32, "a 32-bit integer")
        for name in _FLOATS:
            _check(name, getattr(self, name), _fits_float32, "a finite 32-bit float")
        _check("max_tokens", self.max_tokens, lambda v: v >= 1, "at least 1")
        _check("temperature", self.temperature, lambda v: v >= 0, "at least 0")
        _check("top_p", self.top_p, lambda v: 0 <= v <= 1, "between 0 and 1")
        _check("min_p", self.min_p, lambda v: 0 <= v <= 1, "between 0 and 1")
        _check("top_k", self.top_k, lambda v: v >= -1, "at least -1")
        _check("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "greater than 0")
        _check("seed", self.seed, lambda v: 0 <= v <= MAX_SEED, f"between 0 and {MAX_SEED}")
        limit = f"at most max_tokens ({shown(self.max_tokens)})"
        _check("min_tokens", self.min_tokens, lambda v: v <= self.max_tokens, limit)
        top = f"between 0 and {TOP_LOG_PROBS}"
        _check("log_probs", self.log_probs or 0, lambda v: 0 <= v <= TOP_LOG_PROBS, top)

    def _check_token_ids(self) -> None:
        if len(self.prompt_ids) > MOST_CHARACTERS:
            raise PromptTooLong(
                f"the prompt has {len(self.prompt_ids)} tokens; {MOST_CHARACTERS} are the most"
            )
        if self.prompt_ids and not 0 <= min(self.prompt_ids) <= max(self.prompt_ids) <= MAX_INT32:
            raise InvalidParameter(f"prompt_ids must be between 0 and {MAX_INT32}")
        if len(self.stop_token_ids) > WORDS:
            raise InvalidParameter(
                f"stop_token_ids must be at most {WORDS}, not {len(self.stop_token_ids)}"
            )
        if len(self.allowed_token_ids) > ALLOWED_IDS:
            raise InvalidParameter(
                f"allowed_token_ids must be at most {ALLOWED_IDS}, not {len(self.allowed_token_ids)}"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _check(name, token, lambda v: 0 <= v <= MAX_INT32, "of token ids")
        if len(self.logit_bias) > WORDS:
            raise InvalidParameter(
                f"logit_bias must be at most {WORDS}, not {len(self.logit_bias)}"
            )
        for token, bias in self.logit_bias:
            _check("logit_bias", token, lambda v: 0 <= v <= MAX_INT32, "of token ids")
            _check("logit_bias", bias, _fits_float32, "of finite 32-bit floats")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def resolve_seed(seed: int | None) -> int:
    """The seed, or a drawn one in place of None and ANY_SEED.

    A drawn seed has 31 bits, so that any JSON client reads it back whole.
    """
    return secrets.randbelow(2**31) if seed in (None, ANY_SEED) else seed


def resolve_max_tokens(max_tokens: int, max_new_tokens: int | None) -> int:
    """max_tokens, which may also be given by its old name, max_new_tokens.

    Raises:
        ConflictingMaxTokens: both were given and differ. A new name at its default counts as not given.
    """
    if max_new_tokens is None or max_new_tokens == max_tokens:
        return max_tokens
    if max_tokens != DEFAULT_MAX_TOKENS:
        raise ConflictingMaxTokens(
            f"max_tokens={shown(max_tokens)} and max_new_tokens={shown(max_new_tokens)} contradict; "
            "max_new_tokens is the old name of max_tokens, give one of them"
        )
    return max_new_tokens


def resolve_min_tokens(min_tokens: int | None, min_new_tokens: int | None) -> int:
    """min_tokens, which may also be given by its old name, min_new_tokens; 0 if both are -1 or None.

    Raises:
        ConflictingMinTokens: both were given and differ.
    """
    given = {value for value in (min_tokens, min_new_tokens) if value not in (None, -1)}
    if len(given) > 1:
        raise ConflictingMinTokens(
            f"min_tokens={shown(min_tokens)} and min_new_tokens={shown(min_new_tokens)} contradict; "
            "min_new_tokens is the old name of min_tokens, give one of them"
        )
    return given.pop() or 0 if given else 0


def triton_inputs(request: Request) -> dict[str, npt.NDArray[Any]]:
    """The ensemble's inputs for a streamed request, shapes [batch = 1, 1].

    A parameter that changes nothing is left out: each tensor costs time.
    """
    # TensorRT-LLM refuses a temperature of 0 in some versions; top_k 1 is greedy in all.
    temperature, top_k = (
        (1.0, 1) if request.greedy else (request.temperature, max(request.top_k, 0))
    )
    end_id = NO_TOKEN if request.ignore_eos else request.end_id
    values: dict[str, npt.NDArray[Any] | None] = {
        "text_input": _text("" if request.prompt_ids else request.prompt),
        "max_tokens": _int32(request.max_tokens),
        "stream": np.array([[True]]),
        "return_num_input_tokens": np.array([[True]]),
        "seed": np.array([[request.seed]], np.uint64),
        "temperature": _float32(temperature),
        "top_p": _float32(request.top_p),
        "top_k": _int32(top_k) if top_k else None,
        "min_tokens": _int32(request.min_tokens) if request.min_tokens > 0 else None,
        "length_penalty": _unless(1.0, request.length_penalty),
        "repetition_penalty": _unless(1.0, request.repetition_penalty),
        "presence_penalty": _unless(0.0, request.presence_penalty),
        "frequency_penalty": _unless(0.0, request.frequency_penalty),
        "bad_words": np.array([[word.encode() for word in request.bad_words]], np.object_)
        if request.bad_words
        else None,
        "end_id": None if end_id is None else _int32(end_id),
        "pad_id": None if request.pad_id is None else _int32(request.pad_id),
        "return_log_probs": None if request.log_probs is None else np.array([[True]]),
        "lora_task_id": np.array([[wire.adapter_task_id(request.adapter)]], np.uint64)
        if request.adapter
        else None,
        **_guide_inputs(request.guide),
    }
    return {name: value for name, value in values.items() if value is not None}


def request_parameters(request: Request) -> dict[str, str | int | bool]:
    """What the ensemble has no input for, and is sent as parameters of the request; see ``wire``."""
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


def effective_end_id(request: Request, tokenizers: int | None) -> int:
    """The token that ends the output, NO_TOKEN for none.

    Args:
        tokenizers: the tokenizer's end of sequence.
    """
    if request.ignore_eos:
        return NO_TOKEN
    end_id = tokenizers if request.end_id is None else request.end_id
    return NO_TOKEN if end_id is None else end_id


def _check(name: str, value: Any, valid: Callable[[Any], bool], wanted: str) -> None:
    if not valid(value):
        raise InvalidParameter(f"{name} must be {wanted}, not {shown(value)}")


def _check_guide(guide: Guide) -> None:
    try:
        check_guide(guide)
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def _guide_inputs(guide: Guide | None) -> dict[str, npt.NDArray[Any]]:
    if guide is None:
        return {}
    told = engine_guide(guide)
    texts = {"guided_decoding_guide_type": told.kind.value, "guided_decoding_guide": told.text}
    return {name: _text(text) for name, text in texts.items() if text}


def _fits_int32(value: int) -> bool:
    # NumPy below 2 would let a greater one wrap around.
    return -MAX_INT32 <= value <= MAX_INT32


def _fits_float32(value: float) -> bool:
    return abs(value) <= MAX_FLOAT32


def _text(text: str) -> npt.NDArray[Any]:
    return np.array([[text.encode()]], np.object_)


def _int32(value: int) -> npt.NDArray[Any]:
    return np.array([[value]], np.int32)


def _float32(value: float) -> npt.NDArray[Any]:
    return np.array([[value]], np.float32)


def _unless(neutral: float, value: float) -> npt.NDArray[Any] | None:
    return None if value == neutral else _float32(value)
