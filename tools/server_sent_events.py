"""Streamed answers: server-sent events, and the parts that those of Cog's and OpenAI's APIs have."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CANCELED, CUT = "canceled", "cut off"
_CODE = re.compile(r"\bE\d{4}\b")


class AnswerError(Exception):
    """An answer that is an error; ``code`` is E and four digits, or what else to count it as."""

    def __init__(self, message: str, code: str = "", *, otherwise: str = "failed") -> None:
        super().__init__(message)
        found = _CODE.search(message)
        self.code = code or (found[0] if found else otherwise)


@dataclass(frozen=True)
class Part:
    """A part of an answer; ``tokens`` is the count so far, where the server says it."""

    text: str = ""
    tokens: int = 0
    ids: Sequence[int] = ()
    last: bool = False


class EventParser:
    """Server-sent events of servers that stream JSON: a line of data, maybe after a name."""

    def __init__(self) -> None:
        self._unfinished = b""  # the line that is not complete yet
        self._name = "message"

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the name, or "message", and the data of each event that these bytes complete."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                events.append((self._name, line[5:]))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode()
            elif line in (b"", b"\r"):
                self._name = "message"
        return events


def cog_part(name: str, data: bytes) -> Part:
    """Read an event of a prediction. Raises ``AnswerError``: the prediction did not succeed."""
    event = json_object(data)
    if name == "output":
        return Part(event["chunk"])
    if name == "metric" and event["name"] == "output_token_count":
        return Part(tokens=int(event["value"]))
    if name in ("completed", "error"):
        check_prediction(event)
        return Part(last=True)
    return Part()


def check_prediction(prediction: Mapping[str, Any]) -> None:
    """Raise ``AnswerError`` for a prediction that did not succeed."""
    if (status := prediction.get("status") or "failed") != "succeeded":
        reason = str(prediction.get("error") or prediction)
        raise AnswerError(reason, CANCELED if status == CANCELED else "")


def openai_part(_: str, data: bytes) -> Part:
    """Read an event of a chat or a completion. Raises ``AnswerError``: it is an error."""
    if data.strip() == b"[DONE]":
        return Part(last=True)
    event = json_object(data)
    if "error" in event:
        raise http_error(data)
    usage = event.get("usage") or {}
    texts = (one.get("text") or one.get("delta", {}).get("content") for one in event["choices"])
    return Part("".join(filter(None, texts)), int(usage.get("completion_tokens", 0)))


def http_error(body: bytes, status: int = 200) -> AnswerError:
    """Return the error that a body or an event is, of any of the servers."""
    where = f"HTTP {status}"
    try:
        answer = json_object(body)
    except AnswerError as error:
        return AnswerError(f"{where}: {error}", otherwise=where)
    reason = answer.get("error") or answer.get("detail") or answer
    fields = reason if isinstance(reason, dict) else {"message": reason}
    code = "E2106" if fields.get("code") == "rate_limit_exceeded" else fields.get("code")
    text = str(fields.get("message") or reason)
    return AnswerError(text if status == 200 else f"{where}: {text}", code or "", otherwise=where)


def json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ``AnswerError``: it is something else."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(data), dict):
            return value
    raise AnswerError(f"not a JSON object: {data[:100]!r}")
