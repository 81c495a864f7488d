"""The OpenAPI schema of a Cog predictor: what its code says, in the skeleton that openapi.yaml has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import yaml

SKELETON = Path(__file__).with_name("openapi.yaml")


def openapi_schema(module: str, predictor: str, training: str) -> dict[str, Any]:
    """Return the schema of a streaming predictor and a training, as a JSON object.

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
            properties = {field.name: _property(field) for field in fields}
            required = [
                name
                for name, schema in properties.items()
                if "default" not in schema and not schema.get("nullable")
            ]
            inputs = {"type": "object", "properties": properties, "required": required}
            schemas[f"{prefix}Input"] = {"title": f"{prefix}Input", **inputs}
            title = {"title": f"{prefix}Output"} if prefix else {}
            schemas[f"{prefix}Output"] = {**info.output.json_type(), **title}
    return {**skeleton, "components": {"schemas": schemas}}


def _property(field: Any) -> dict[str, Any]:
    limits: tuple[Any, ...] = (field.ge, field.le)
    if field.type.primitive.name == "INTEGER":
        # Cog makes a float of a limit, which rounds the largest integer of its server up.
        limits = tuple(None if v is None else min(int(v), 2**64 - 1) for v in limits)
    given = {
        "minimum": limits[0],
        "maximum": limits[1],
        "description": field.description or None,
        "default": field.default,
        "nullable": str(field.type.repetition.name).startswith("OPTIONAL") or None,
    }
    schema = {"title": field.name.replace("_", " ").title(), "x-order": field.order}
    found = {name: value for name, value in given.items() if value is not None}
    return {**field.type.json_type(), **schema, **found}
