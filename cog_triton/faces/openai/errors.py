"""HTTP status and body of each error: those of OpenAI's API, whose clients know them, and Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cog_triton.errors import (
    ChatTemplateError,
    CogTritonError,
    PromptRequired,
    PromptTooLong,
    TritonOverloaded,
    TritonUnavailable,
    UserError,
)

INVALID = "invalid_request_error"
RETRY_SECONDS = 5
"""For those who ask while there is no server to answer."""
CLIENT_GONE = 499

# First match wins: class, status, type, code. Where OpenAI has no code of its own, it is that of the error.
_TABLE: tuple[tuple[type[CogTritonError], int, str, str | None], ...] = (
    (PromptTooLong, 400, INVALID, "context_length_exceeded"),
    (UserError, 400, INVALID, None),
    (TritonOverloaded, 429, "requests", "rate_limit_exceeded"),
    (TritonUnavailable, 503, "server_error", None),
    (CogTritonError, 500, "server_error", None),
)
# The names that OpenAI's requests have for those in the texts of errors.
_FIELDS = {
    "stop_sequences": "stop",
    "log_probs": "logprobs",
    "prompt_logprobs": "echo",
    "adapter": "model",
}
MESSAGES_PATH = "/v1/messages"
"""The routes of Anthropic's API begin with it; their errors are of its form."""
_MESSAGE_TYPES = {
    **dict.fromkeys((400, 405, 415, 422), INVALID),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_NAMES = (re.compile(r"^([a-z_]+)"), re.compile(r"does not support ([a-z_]+)"))
_GUIDE = re.compile(r"\bguide\b|guided_decoding|^a JSON schema|^choice must")


@dataclass
class ApiError(Exception):
    """An error as a client reads it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None  # the field of the request that is at fault
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # They may have some of the request in them, which may be no Unicode.
        self.message = self.message.encode(errors="replace").decode()
        self.param = self.param and self.param.encode(errors="replace").decode()

    def body(self) -> dict[str, Any]:
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}


def api_error(
    error: CogTritonError, fields: frozenset[str] = frozenset(), names: Mapping[str, str] = {}
) -> ApiError:
    """Return an error as a client reads it.

    Args:
        fields: names that a request may have; the error is about the one that its text names.
        names: see ``Body.names``.
    """
    _, status, kind, code = next(row for row in _TABLE if isinstance(error, row[0]))
    headers = {}
    if isinstance(error, TritonOverloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    elif error.retryable:
        headers["Retry-After"] = str(RETRY_SECONDS)
    param = _param(error, fields, names) if status == 400 else None
    return ApiError(status, error.message, kind, param, code or error.code, headers)


def message_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return an error in the form of Anthropic's API; those in a stream have no id."""
    kind = _MESSAGE_TYPES.get(error.status, "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body if request_id is None else {**body, "request_id": request_id}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that is at fault."""
    return ApiError(400, message, param=param, code=code)


def _param(error: CogTritonError, fields: frozenset[str], names: Mapping[str, str]) -> str | None:
    if isinstance(error, PromptTooLong | PromptRequired | ChatTemplateError):
        return names.get("prompt")
    if _GUIDE.search(error.message) and "guide" in names:
        return names["guide"]
    for pattern in _NAMES:
        if named := pattern.search(error.message):
            name = _FIELDS.get(named[1], named[1])
            if name in names or name in fields:
                return names.get(name, name)
    return None
