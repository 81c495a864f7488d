"""The fields of a body to a ``Request``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import (
    IGNORED,
    REFUSED,
    Body,
    ChatBody,
    CompletionBody,
    ResponseFormat,
    Sampling,
)
from cog_triton.faces.openai.served import Served
from cog_triton.request.request import MAX_SEED, Guide, GuideKind, Request, resolve_seed

UNKNOWN_CONTEXT = 2**20
"""Tokens, where only the engine knows how many its context has; it cuts to them."""
LONGEST_BIAS = 1024
_KINDS = {
    "json": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "grammar": GuideKind.GRAMMAR,
    "choice": GuideKind.CHOICE,
}
# Fields that a Request has under the same name; one that is not given is left to its default.
_SAME = (
    *("top_k", "min_p", "repetition_penalty", "length_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "ignore_eos", "skip_special_tokens", "priority"),
)


def sampling(body: Sampling) -> dict[str, Any]:
    """Return the arguments of a ``Request`` that do not depend on the prompt."""
    if body.stream_options and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not allowed when stream is true", "prompt_logprobs")
    values = {name: getattr(body, name) for name in _SAME}
    return {
        **{name: value for name, value in values.items() if value is not None},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "seed": resolve_seed(body.seed),
        "stop_sequences": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "bad_words": tuple(body.bad_words or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "include_stop": bool(body.include_stop_str_in_output),
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "logit_bias": logit_bias(body.logit_bias or {}),
        "guide": guide(body),
    }


def log_probs(body: ChatBody | CompletionBody, *, echo: bool = False) -> dict[str, Any]:
    """Return the arguments of a ``Request`` for log probabilities; ``echo``: of the prompt as well."""
    asked = [n for n in (body.wanted_log_probs, body.prompt_logprobs) if n is not None]
    of_prompt = body.prompt_logprobs is not None or (echo and bool(asked))
    return {"log_probs": max(asked, default=None), "prompt_log_probs": of_prompt}


def longest_output(served: Served) -> int:
    """Return max_tokens of a chat that gives none: the context's rest, to which the engine cuts it."""
    return served.backend.context_length or UNKNOWN_CONTEXT


def repeated(request: Request, count: int) -> list[Request]:
    """Return the requests for so many answers, which differ in their seeds."""
    return [replace(request, seed=(request.seed + n) % (MAX_SEED + 1)) for n in range(count)]


def check_fields(
    body: Body,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    ignored: Collection[str] = IGNORED,
) -> dict[str, str]:
    """Refuse known fields that no engine honours; return the headers that name unknown ones.

    Args:
        refused: with the values that ask for nothing.
        ignored: are not named.
    """
    unknown = []
    for name in sorted(body.__pydantic_extra__ or {}):
        value = getattr(body, name)
        if name not in refused:
            unknown += [name] if name not in ignored else []
        elif value is not None and value not in refused[name]:
            raise invalid(f"{name} is not supported", name, "unsupported_parameter")
    if not unknown:
        return {}
    # A header takes neither line feeds nor quotes, and no long list.
    names = ", ".join("".join(filter(str.isidentifier, name))[:40] or "?" for name in unknown[:10])
    return {
        "Warning": f'199 cog-triton "ignored fields: {names.encode("ascii", "replace").decode()}"'
    }


def logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    name = "logit_bias"
    if len(given) > LONGEST_BIAS:
        raise invalid(f"{name} must have at most {LONGEST_BIAS} tokens", name)
    for token, bias in given.items():
        if not token.isdecimal():
            raise invalid(f"{name} must have token ids for keys, not {shown(token)}", name)
        if not -100 <= bias <= 100:
            raise invalid(f"{name} must be between -100 and 100, not {bias}", name)
    return tuple((int(token), bias) for token, bias in given.items())


def guides(body: Sampling) -> dict[str, Guide]:
    """Return the guides of fields beyond OpenAI's, by their names."""
    found = {
        f"guided_{name}": _guide(name, value)
        for name in _KINDS
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if body.structured_outputs is None:
        return found
    given = body.structured_outputs.model_dump(by_alias=True)
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if not asked:
        raise invalid("structured_outputs must say what the output has to be", "structured_outputs")
    return found | {f"structured_outputs.{name}": _guide(name, given[name]) for name in asked}


def _guide(name: str, value: Any) -> Guide:
    if name == "json_object":
        return Guide(GuideKind.JSON)
    if name not in _KINDS:
        code = "unsupported_parameter"
        raise invalid(f"structured_outputs.{name} is not supported", "structured_outputs", code)
    return Guide(_KINDS[name], value if isinstance(value, str) else json.dumps(value))


def guide(body: Sampling) -> Guide | None:
    """Return the guide that a body asks for; it may ask for one only."""
    found = guides(body)
    if body.response_format and (formatted := _of_format(body.response_format)):
        found["response_format"] = formatted
    if len(found) > 1:
        raise invalid(f"{' and '.join(found)} contradict; give one of them", next(iter(found)))
    return next(iter(found.values()), None)


def _of_format(format: ResponseFormat) -> Guide | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Guide(GuideKind.JSON)
    schema = format.json_schema.schema_ if format.json_schema else None
    place, name, value = {
        "json_schema": ("json_schema.schema", "json", schema),
        "json": ("schema", "json", format.schema_),
        "regex": ("regex", "regex", format.regex),
        "ebnf": ("ebnf", "grammar", format.ebnf),
    }[format.type]
    if value is None:
        raise invalid(f"response_format must have {place}", "response_format")
    return _guide(name, value)
