"""Which requests reach Cog's server, and how; what the health routes say. No I/O."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson

from cog_triton.web.limits import Refusal

IDENTIFIER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_IDENTIFIER_RULE = "1 to 128 letters, digits, '_', '-' and '.', and no '.' in front"


@dataclass(frozen=True)
class Passage:
    """A request as Cog's server gets it.

    Attributes:
        starts: the id of the prediction that it starts; None if it starts none.
        cancels: the id of the prediction that it cancels.
    """

    method: str
    target: str
    body: bytes = field(default=b"", repr=False)
    starts: str | None = None
    cancels: str | None = None


def check(
    method: str, target: str, body: bytes, *, draining: bool = False, inputs: Sequence[str] = ()
) -> Passage:
    """Check a request.

    A prediction without an id gets one here, by which its end and its directory are known. Inputs that are
    null are left out: Cog's server refuses null for an optional input.

    Args:
        draining: no new predictions are taken.
        inputs: a prediction has to have one of them.

    Raises:
        Refusal: it does not reach Cog's server.
    """
    path, _, query = target.partition("?")
    collection, *rest = [unquote(part) for part in path.split("/")[1:]]
    if collection not in ("predictions", "trainings"):
        return Passage(method, target, body)
    if rest:
        check_identifier(rest[0], ["path", "prediction_id"])
    if method == "POST" and collection == "predictions" and rest[1:] == ["cancel"]:
        return Passage(method, target, body, cancels=rest[0])
    if len(rest) > 1 or method != ("PUT" if rest else "POST"):
        return Passage(method, target, body)
    if draining:
        raise Refusal(503, "the server is stopping and takes no new predictions", retry_after=5)
    fields = fields_of(body)
    if collection == "predictions":
        body = with_inputs(body, fields, inputs)
    if rest:
        return Passage(method, target, body, starts=rest[0])
    if isinstance(given := fields.get("id"), str):
        check_identifier(given, ["body", "id"])
        return Passage(method, target, body, starts=given)
    drawn = uuid.uuid4().hex
    target = f"/{collection}/{drawn}{'?' if query else ''}{query}"
    return Passage("PUT", target, body, starts=drawn)


def check_identifier(identifier: str, place: list[str]) -> None:
    """Refuse what could not name a directory of its own, in the form of Cog's own errors."""
    if not IDENTIFIER.fullmatch(identifier):
        raise invalid(place, f"must be {_IDENTIFIER_RULE}", "value_error")


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse the body of a new prediction; what is not an object is left to Cog's server."""
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    return fields if isinstance(fields, dict) else {}


def with_inputs(body: bytes, fields: dict[str, Any], inputs: Sequence[str]) -> bytes:
    """Return a prediction's body without inputs that are null; refuse one that lacks ``inputs``."""
    given = fields.get("input")
    given = given if isinstance(given, dict) else {}
    left = {name: value for name, value in given.items() if value is not None}
    if inputs and not any(name in left for name in inputs):
        text = f"E1001 PromptRequired: {' or '.join(inputs)} is required"
        raise invalid(["body", "input", inputs[0]], text, "value_error.missing")
    return orjson.dumps({**fields, "input": left}) if len(left) < len(given) else body


def invalid(place: list[str], text: str, kind: str) -> Refusal:
    return Refusal(422, [{"loc": place, "msg": text, "type": kind}])


def liveness_problem(status: str | None, worker_ended: bool, draining: bool) -> str | None:
    """Return why this process is of no use, now or when it has started.

    Args:
        status: of Cog's server; None if it does not answer.
    """
    if worker_ended:
        return "the predictor's process has ended"
    # After a SIGINT, Cog's server takes no connection while it ends.
    if (status is None and not draining) or status == "DEFUNCT":
        return "Cog's server does not answer"
    return None


def readiness_problem(
    status: str | None, busy_for: float, busy_limit: float, draining: bool
) -> str | None:
    """Return why predictions may not be sent here.

    Args:
        status: of Cog's server; None if it does not answer.
        busy_for: seconds for which all slots have been taken without progress.
    """
    if draining:
        return "the server is stopping"
    if status is None:
        return "Cog's server does not answer"
    if status == "BUSY" and busy_for > busy_limit:
        return f"all slots have been taken for {busy_for:.0f} s, and nothing comes of it"
    return None if status in ("READY", "BUSY") else "Cog's server is not ready"
