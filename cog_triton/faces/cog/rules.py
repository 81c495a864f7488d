"""Which requests reach Cog's server, and the schema by which it checks their inputs."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
import yaml

from cog_triton.web import Refusal

IDENTIFIER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
SKELETON = Path(__file__).with_name("openapi.yaml")


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
        _check_identifier(rest[0], ["path", "prediction_id"])
    if method == "POST" and collection == "predictions" and rest[1:] == ["cancel"]:
        return Passage(method, target, body, cancels=rest[0])
    if len(rest) > 1 or method != ("PUT" if rest else "POST"):
        return Passage(method, target, body)
    if draining:
        raise Refusal(503, "the server is stopping and takes no new predictions", retry_after=5)
    fields = fields_of(body)
    if collection == "predictions":
        given = fields.get("input")
        given = given if isinstance(given, dict) else {}
        left = {name: value for name, value in given.items() if value is not None}
        if inputs and not left.keys() & set(inputs):
            text = f"E1001 PromptRequired: {' or '.join(inputs)} is required"
            raise invalid(["body", "input", inputs[0]], text, "value_error.missing")
        if len(left) < len(given):
            body = orjson.dumps({**fields, "input": left})
    if rest:
        return Passage(method, target, body, starts=rest[0])
    if isinstance(identifier := fields.get("id"), str):
        _check_identifier(identifier, ["body", "id"])
        return Passage(method, target, body, starts=identifier)
    drawn = uuid.uuid4().hex
    target = f"/{collection}/{drawn}{'?' if query else ''}{query}"
    return Passage("PUT", target, body, starts=drawn)


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse the body of a new prediction; what is not an object is left to Cog's server."""
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    return fields if isinstance(fields, dict) else {}


def invalid(place: list[str], text: str, kind: str) -> Refusal:
    """Return a refusal in the form of Cog's own errors."""
    return Refusal(422, [{"loc": place, "msg": text, "type": kind}])


def _check_identifier(identifier: str, place: list[str]) -> None:
    if not IDENTIFIER.fullmatch(identifier):  # it could not name a directory of its own
        rule = "must be 1 to 128 letters, digits, '_', '-' and '.', and no '.' in front"
        raise invalid(place, rule, "value_error")


def openapi_schema(module: str, predictor: str, training: str) -> dict[str, Any]:
    """Return the schema of a streaming predictor and a training, in the skeleton of openapi.yaml.

    Args:
        module: has the class ``predictor``.
        training: a module that has a function of the same name.
    """
    from cog._inspector import create_predictor

    skeleton = yaml.safe_load(SKELETON.read_text(encoding="utf-8"))
    schemas = skeleton.pop("schemas")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # predict() is the name we keep
        # Cog's server reads those of the training instead when it trains.
        for prefix, of in (("", (module, predictor)), ("Training", (training, training))):
            info = create_predictor(*of)
            fields = sorted(info.inputs.values(), key=lambda field: field.order)
            inputs = {field.name: _property(field) for field in fields}
            optional = {"default", "nullable"}
            schemas[f"{prefix}Input"] = {
                "title": f"{prefix}Input",
                "type": "object",
                "properties": inputs,
                "required": [
                    name for name, schema in inputs.items() if not optional & schema.keys()
                ],
            }
            title = {"title": f"{prefix}Output"} if prefix else {}
            schemas[f"{prefix}Output"] = {**info.output.json_type(), **title}
    return {**skeleton, "components": {"schemas": schemas}}


def _property(field: Any) -> dict[str, Any]:
    limits: tuple[Any, ...] = (field.ge, field.le)
    if field.type.primitive.name == "INTEGER":
        # Cog makes a float of a limit, which rounds the largest integer of its server up.
        limits = tuple(None if v is None else min(int(v), 2**64 - 1) for v in limits)
    given = {
        **field.type.json_type(),
        "title": field.name.replace("_", " ").title(),
        "x-order": field.order,
        "minimum": limits[0],
        "maximum": limits[1],
        "description": field.description or None,
        "default": field.default,
        "nullable": str(field.type.repetition.name).startswith("OPTIONAL") or None,
    }
    return {name: value for name, value in given.items() if value is not None}
