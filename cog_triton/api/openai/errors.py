"""Every error as a client reads it: one table from types of errors to statuses and bodies.

``FORMS`` has all that a route may raise, FastAPI's own errors included. The bodies have the form of
OpenAI's API, whose clients know it, or of Anthropic's.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cog_triton.errors import (
    ChatTemplateError,
    CogTritonError,
    JournalUnavailable,
    PromptRequired,
    PromptTooLong,
    TritonOverloaded,
    TritonUnavailable,
    UserError,
    prompt_too_long,
    shortened,
    shown,
)
from cog_triton.web.bodies import BadBody

INVALID = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_SECONDS = 5  # after which clients may ask again while there is no server to answer
CLIENT_GONE = 499  # the status in the log of a request whose client has left
MESSAGES_PATH = "/v1/messages"  # begins the routes of Anthropic's API, whose errors have its form
PROMPT_TOO_LONG = "context_length_exceeded"  # OpenAI's code
LOGGED_CHARACTERS = 300  # how much of an error's text is logged
# The types of errors in Anthropic's API, by status; for any other status it is api_error.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Names in the texts of errors, and what OpenAI's requests call them.
_OPENAI_NAMES = {
    "stop_sequences": "stop",
    "log_probs": "logprobs",
    "prompt_logprobs": "echo",
    "adapter": "model",
}
# OpenAI's codes of requests that reach no route, by the status.
_ROUTE_CODES = {404: "unknown_url", 405: "method_not_supported"}
# What an error's text quotes of a request. A name of a model or a field is not of a prompt.
_QUOTED = re.compile(r"(?P<quote>[\"'`])(?P<text>.*?)(?P=quote)", re.DOTALL)
# The counts in TensorRT-LLM's text, or in that of ``prompt_too_long``.
_TOKEN_COUNTS = re.compile(
    r"(?P<tokens>\d+)"
    r"(?:\) exceeds maximum input length \(| tokens, but this model's maximum context length is )"
    r"(?P<limit>\d+)(?: tokens|\))"
)
_NAME_LIKE = re.compile(r"[\w.:/@+,-]{0,64}", re.ASCII)
_NAMES = re.compile(r"(?:^|does not support )([a-z_]+)")
_GUIDE = re.compile(r"\bguide\b|guided_decoding|^a JSON schema|^choice must")


@dataclass
class ApiError(Exception):
    """An error as a client reads it.

    Attributes:
        param: the field of the request that is at fault.
        log_message: logged in place of the message, if that has some of a prompt's text.
    """

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    log_message: str | None = None

    def __post_init__(self) -> None:
        # They may have some of the request in them, which may not be Unicode.
        self.message = self.message.encode(errors="replace").decode()
        self.param = self.param and self.param.encode(errors="replace").decode()

    def log_text(self) -> str:
        """Return the code, the field and the message as a line of the log has them.

        It is one line, it is not long, and it has nothing of a prompt's text.
        """
        message = self.message if self.log_message is None else self.log_message
        message = _QUOTED.sub(_logged_quotation, message)
        names = f"code={self.code or '-'} param={shown(self.param or '-')}"
        line = f"{names}: {shortened(message, LOGGED_CHARACTERS)}"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

    def body(self, path: str = "", request_id: str | None = None) -> dict[str, Any]:
        """Return it in the form of the API that has a path; errors in a stream have no id."""
        if not path.startswith(MESSAGES_PATH):
            names = ("message", "type", "param", "code")
            return {"error": {name: getattr(self, name) for name in names}}
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        message = self.message if self.code != PROMPT_TOO_LONG else _anthropics_text(self.message)
        body = {"type": "error", "error": {"type": kind, "message": message}}
        return body if request_id is None else {**body, "request_id": request_id}


def _anthropics_text(message: str) -> str:
    """Return the text by which Anthropic's clients know that they must shorten the conversation."""
    counts = _TOKEN_COUNTS.search(message)
    if counts is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {counts['tokens']} tokens > {counts['limit']} maximum"


def _logged_quotation(found: re.Match[str]) -> str:
    return found[0] if _NAME_LIKE.fullmatch(found["text"]) else f"{found['quote']}…{found['quote']}"


@dataclass(frozen=True)
class Asked:
    """What the request of an error asked for.

    Attributes:
        names: the fields of its body, see ``RequestBody.names``.
        route: its method and path.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    route: str = ""


@dataclass(frozen=True)
class Form:
    """How clients read the errors of a class; without a ``code``, by that of the class."""

    status: int
    type: str
    code: str | None = None
    about_prompt: bool = False  # the prompt is at fault, whatever the text names

    def __call__(self, error: CogTritonError, asked: Asked) -> ApiError:
        headers = {}
        if error.retryable:
            seconds = max(1, round(getattr(error, "retry_after", RETRY_SECONDS)))
            headers["Retry-After"] = str(seconds)
        message = error.message
        counts = _TOKEN_COUNTS.search(message) if self.about_prompt else None
        if counts:
            message = prompt_too_long(int(counts["tokens"]), int(counts["limit"])).message
        param = self._field_at_fault(error.message, asked.names) if self.status == 400 else None
        return ApiError(self.status, message, self.type, param, self.code or error.code, headers)

    def _field_at_fault(self, message: str, names: Mapping[str, str]) -> str | None:
        """Return the field of the body that a message is about, if it is known."""
        if self.about_prompt:
            return names.get("prompt")
        # The fields that the text may name, the likeliest first.
        named = [_OPENAI_NAMES.get(name, name) for name in _NAMES.findall(message)]
        if _GUIDE.search(message):
            named.insert(0, "guide")
        return next((names[name] for name in named if name in names), None)


def _same(error: ApiError, _asked: Asked) -> ApiError:
    return error


def _of_route(error: HTTPException, asked: Asked) -> ApiError:
    """Return the error of a request that no route takes."""
    text = f"{error.detail} ({asked.route})"
    if error.status_code == 404:
        text = f"Invalid URL ({asked.route})"
    code = _ROUTE_CODES.get(error.status_code)
    return ApiError(error.status_code, text, code=code, headers=dict(error.headers or {}))


def _of_parameter(error: RequestValidationError, _asked: Asked) -> ApiError:
    """Return FastAPI's own refusal, of a parameter of the path or the query."""
    problem = error.errors()[0]
    name = str(problem["loc"][-1])
    return invalid(f"{shown(name)}: {problem['msg']}", name, "invalid_value")


def _of_body(error: BadBody, _asked: Asked) -> ApiError:
    return invalid(f"the body {error}")


def _internal(_error: Exception, _asked: Asked) -> ApiError:
    return ApiError(500, "internal error; see the server's log", SERVER_ERROR)


# The form of an error is that of its class, or else of the nearest of its bases.
FORMS: Mapping[type[Exception], Callable[[Any, Asked], ApiError]] = {
    ApiError: _same,
    HTTPException: _of_route,
    RequestValidationError: _of_parameter,
    BadBody: _of_body,
    PromptTooLong: Form(400, INVALID, PROMPT_TOO_LONG, about_prompt=True),
    PromptRequired: Form(400, INVALID, about_prompt=True),
    ChatTemplateError: Form(400, INVALID, about_prompt=True),
    UserError: Form(400, INVALID),
    TritonOverloaded: Form(429, "requests", "rate_limit_exceeded"),
    TritonUnavailable: Form(503, SERVER_ERROR),
    JournalUnavailable: Form(503, SERVER_ERROR),
    CogTritonError: Form(500, SERVER_ERROR),
    Exception: _internal,
}
# These are answered by FastAPI's handlers; what else is raised is a mistake of this server's.
HANDLED = tuple(kind for kind in FORMS if kind is not Exception)


def api_error(error: Exception, asked: Asked | None = None) -> ApiError:
    """Return any error as a client reads it."""
    form = next(FORMS[kind] for kind in type(error).__mro__ if kind in FORMS)
    return form(error, asked or Asked())


def invalid(
    message: str,
    param: str | None = None,
    code: str | None = None,
    log_message: str | None = None,
) -> ApiError:
    return ApiError(400, message, param=param, code=code, log_message=log_message)


def no_embeddings() -> ApiError:
    """Return the refusal of vectors; after a 501, clients would send the request again."""
    text = "embeddings are not supported: the models on this server only generate text"
    return ApiError(404, text, code="unknown_url")
