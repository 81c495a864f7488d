"""HTTP status and body of each error: those of OpenAI's API, whose clients know them, and Anthropic's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cog_triton.errors import CogTritonError, prompt_too_long, shortened, shown


def table(name: str) -> Any:
    """Return what a file of YAML in this folder has."""
    return yaml.safe_load(Path(__file__).with_name(name).read_bytes())


TABLES: dict[str, Any] = table("apis.yaml")
INVALID = "invalid_request_error"
RETRY_SECONDS = 5  # of those who ask while there is no server to answer
CLIENT_GONE = 499
MESSAGES_PATH = "/v1/messages"  # begins the routes of Anthropic's API, whose errors have its form
PROMPT_TOO_LONG = "context_length_exceeded"  # OpenAI's code
LOGGED_CHARACTERS = 300  # of an error's text
# What an error's text quotes of a request. A name of a model or a field is not of a prompt.
_QUOTED = re.compile(r"(?P<quote>[\"'`])(?P<text>.*?)(?P=quote)", re.DOTALL)
# In TensorRT-LLM's text, and in that of ``prompt_too_long``.
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
    """An error as a client reads it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None  # the field of the request that is at fault
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    log_message: str | None = None  # in place of the message in the log

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
        kind = TABLES["message_errors"].get(self.status, "api_error")
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


def api_error(error: CogTritonError, names: Mapping[str, str] = {}) -> ApiError:
    """Return an error as a client reads it; for the names of fields see ``Body.names``."""
    rows = (TABLES["errors"].get(kind.__name__) for kind in type(error).__mro__)
    status, kind, code, about_prompt = next(row for row in rows if row)
    retry = max(1, round(getattr(error, "retry_after", RETRY_SECONDS)))
    headers = {"Retry-After": str(retry)} if error.retryable else {}
    # The fields that the text may name, the likeliest first.
    named = [TABLES["renamed"].get(name, name) for name in _NAMES.findall(error.message)]
    message = error.message
    if about_prompt:
        named = ["prompt"]
        if counts := _TOKEN_COUNTS.search(message):
            message = prompt_too_long(int(counts["tokens"]), int(counts["limit"])).message
    elif _GUIDE.search(error.message):
        named.insert(0, "guide")
    param = next((names[name] for name in named if name in names), None) if status == 400 else None
    return ApiError(status, message, kind, param, code or error.code, headers)


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
