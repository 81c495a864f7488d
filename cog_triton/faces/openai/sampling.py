"""The fields of a body to a ``Request``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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
from cog_triton.request.request import Guide, GuideKind, Request, resolve_seed

UNKNOWN_CONTEXT = 2**20
"""Tokens, where only the engine knows how many its context has; it cuts to them."""
LONGEST_BIAS = 1024
_KINDS = {
    "json": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "grammar": GuideKind.GRAMMAR,
    "choice": GuideKind.CHOICE,
}
# Fields that go to a Request as they are; one that is not given is left to its default.
_SAME = Sampling.model_fields.keys() & Request.__dataclass_fields__.keys()
_SAME -= {"max_tokens", "add_special_tokens", "seed", "logit_bias"}


def sampling(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Return the arguments of a ``Request`` that do not depend on the prompt."""
    if body.stream_options and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not allowed when stream is true", "prompt_logprobs")
    values = {name: getattr(body, name) for name in _SAME}
    asked = [n for n in (body.wanted_log_probs, body.prompt_logprobs) if n is not None]
    echoes = isinstance(body, CompletionBody) and bool(body.echo and asked)
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        **{name: value for name, value in values.items() if value is not None},
        "seed": resolve_seed(body.seed),
        "stop_sequences": [body.stop] if isinstance(body.stop, str) else body.stop or (),
        "include_stop": bool(body.include_stop_str_in_output),
        "logit_bias": logit_bias(body.logit_bias or {}),
        "log_probs": max(asked, default=None),
        "prompt_log_probs": body.prompt_logprobs is not None or echoes,
        "guide": guide(body),
    }


def longest_output(served: Served) -> int:
    """Return max_tokens of a chat that gives none: the context's rest, to which the engine cuts it."""
    return served.backend.context_length or UNKNOWN_CONTEXT


def check_fields(
    body: Body,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    ignored: Collection[str] = IGNORED,
) -> dict[str, str]:
    """Refuse known fields that no engine honours; return the headers that name unknown ones."""
    given = body.__pydantic_extra__ or {}
    for name in sorted(refused.keys() & given.keys()):
        if given[name] is not None and given[name] not in refused[name]:
            raise invalid(f"{name} is not supported", name, "unsupported_parameter")
    if not (unknown := sorted(given.keys() - refused.keys() - set(ignored))):
        return {}
    # A header takes neither line feeds nor quotes, and no long list.
    names = ", ".join("".join(filter(str.isidentifier, name))[:40] or "?" for name in unknown[:10])
    names = names.encode("ascii", "replace").decode()
    return {"Warning": f'199 cog-triton "ignored fields: {names}"'}


def logit_bias(given: dict[str, float]) -> list[tuple[int, float]]:
    name = "logit_bias"
    if len(given) > LONGEST_BIAS:
        raise invalid(f"{name} must have at most {LONGEST_BIAS} tokens", name)
    for token, bias in given.items():
        if not token.isdecimal():
            raise invalid(f"{name} must have token ids for keys, not {shown(token)}", name)
        if not -100 <= bias <= 100:
            raise invalid(f"{name} must be between -100 and 100, not {bias}", name)
    return [(int(token), bias) for token, bias in given.items()]


def guide(body: Sampling) -> Guide | None:
    """Return the guide that a body asks for; it may ask for one only."""
    found = guides(body)
    if body.response_format and (formatted := _of_format(body.response_format)):
        found["response_format"] = formatted
    if len(found) > 1:
        raise invalid(f"{' and '.join(found)} contradict; give one of them", next(iter(found)))
    return next(iter(found.values()), None)


def guides(body: Sampling) -> dict[str, Guide]:
    """Return the guides of fields beyond OpenAI's, by their names."""
    asked = {f"guided_{kind}": getattr(body, f"guided_{kind}") for kind in _KINDS}
    if body.structured_outputs:
        given = body.structured_outputs.model_dump(by_alias=True).items()
        wanted = {kind: value for kind, value in given if value is not None and value is not False}
        if not wanted:
            text = "structured_outputs must say what the output has to be"
            raise invalid(text, "structured_outputs")
        asked |= {f"structured_outputs.{kind}": value for kind, value in wanted.items()}
    return {name: _guide(name, value) for name, value in asked.items() if value is not None}


def _guide(name: str, value: Any) -> Guide:
    kind = name.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json_object":
        return Guide(GuideKind.JSON)
    if kind not in _KINDS:
        raise invalid(f"{name} is not supported", "structured_outputs", "unsupported_parameter")
    return Guide(_KINDS[kind], value if isinstance(value, str) else json.dumps(value))


def _of_format(format: ResponseFormat) -> Guide | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Guide(GuideKind.JSON)
    schema = format.json_schema.schema_ if format.json_schema else None
    place, kind, value = {
        "json_schema": ("json_schema.schema", "json", schema),
        "json": ("schema", "json", format.schema_),
        "regex": ("regex", "regex", format.regex),
        "ebnf": ("ebnf", "grammar", format.ebnf),
    }[format.type]
    if value is None:
        raise invalid(f"response_format must have {place}", "response_format")
    return _guide(kind, value)
