"""Which requests Cog's server gets to see. No I/O."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson

from cog_triton.web import limits
from cog_triton.web.limits import Refusal

LIVE = "/health/live"
READY = "/health/ready"
SHUTDOWN = "/shutdown"
IDENTIFIER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_IDENTIFIER_RULE = "1 to 128 letters, digits, '_', '-' and '.', and no '.' in front"
_COLLECTIONS = ("predictions", "trainings")


@dataclass(frozen=True)
class Limits(limits.Limits):
    """Limits of requests, and of times beside them.

    Attributes:
        drain_seconds: that running predictions get when the process is told to stop.
        busy_seconds: for which all slots may be taken without anything coming of it.
    """

    drain_seconds: float = 30.0
    busy_seconds: float = 900.0


@dataclass(frozen=True)
class Request:
    """A whole request, its body decoded."""

    method: str
    target: str
    version: str = "1.1"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = field(default=b"", repr=False)
    keep_alive: bool = True

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(frozen=True)
class Passage:
    """What Cog's server is sent in place of a request.

    Attributes:
        method, target: its first line.
        prediction: the id of the prediction that it starts; None if it starts none.
        cancels: the id of the prediction that it cancels.
        body: its body, if that is another one.
    """

    method: str
    target: str
    prediction: str | None = None
    cancels: str | None = None
    body: bytes | None = field(default=None, repr=False)


def check(request: Request, draining: bool = False, inputs: Sequence[str] = ()) -> Passage:
    """How a request goes on to Cog's server.

    A prediction without an id gets one here, by which its end and its directory are known. Inputs that are
    null are left out: for Cog's server null is not a value of an optional input.

    Args:
        draining: no new predictions are taken.
        inputs: one of these has to be there.

    Raises:
        Refusal: it does not.
    """
    collection, identifier, rest = _parts(request.path)
    unchanged = Passage(request.method, request.target)
    if collection is None:
        return unchanged
    if identifier is not None:
        check_identifier(identifier, ["path", "prediction_id"])
        if collection == "predictions" and rest == ["cancel"] and request.method == "POST":
            return Passage(request.method, request.target, cancels=identifier)
    starts = not rest and request.method == ("POST" if identifier is None else "PUT")
    if not starts:
        return unchanged
    if draining:
        raise Refusal(503, "the server is stopping and takes no new predictions", retry_after=5)
    fields = fields_of(request.body)
    body = without_nulls(fields, inputs) if collection == "predictions" else None
    if identifier is not None:
        return Passage(request.method, request.target, identifier, body=body)
    if isinstance(given := fields.get("id"), str):
        check_identifier(given, ["body", "id"])
        return Passage(request.method, request.target, given, body=body)
    drawn = uuid.uuid4().hex
    query = request.target[len(request.path) :]
    return Passage("PUT", f"/{collection}/{drawn}{query}", drawn, body=body)


def check_identifier(identifier: str, place: list[str]) -> None:
    """Refuses what could not name a directory of its own.

    Raises:
        Refusal: with the form of Cog's own errors of validation.
    """
    if not IDENTIFIER.fullmatch(identifier):
        problem = {"loc": place, "msg": f"must be {_IDENTIFIER_RULE}", "type": "value_error"}
        raise Refusal(422, [problem])


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse the body of a new prediction.

    Raises:
        Refusal: it is not JSON. What is not an object is left to Cog's server.
    """
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    return fields if isinstance(fields, dict) else {}


def without_nulls(fields: dict[str, Any], inputs: Sequence[str]) -> bytes | None:
    """Return a prediction's body without inputs that are null; None if there are none.

    Raises:
        Refusal: it has none of the ``inputs`` that a prediction needs.
    """
    given = fields.get("input")
    given = given if isinstance(given, dict) else {}
    left = {name: value for name, value in given.items() if value is not None}
    if inputs and not any(name in left for name in inputs):
        text = f"E1001 PromptRequired: {' or '.join(inputs)} is required"
        raise Refusal(
            422,
            [{"loc": ["body", "input", inputs[0]], "msg": text, "type": "value_error.missing"}],
        )
    return orjson.dumps({**fields, "input": left}) if len(left) < len(given) else None


def _parts(path: str) -> tuple[str | None, str | None, list[str]]:
    """The collection that a path leads into, the id after it, and what follows."""
    collection, *others = [unquote(part) for part in path.split("/")[1:]]
    if collection not in _COLLECTIONS:
        return None, None, []
    return collection, others[0] if others else None, others[1:]
