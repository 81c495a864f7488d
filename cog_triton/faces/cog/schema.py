"""The OpenAPI schema of a Cog predictor: what its code says, in the skeleton that openapi.yaml has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cog_triton.data_files import read_data

SKELETON = Path(__file__).with_name("openapi.yaml")


class Skeleton(BaseModel):
    """What the schema of every predictor has.

    Attributes:
        paths: by path and method, OpenAPI's operation objects.
        schemas: by name, those that do not depend on the predictor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    openapi: str
    info: dict[str, str]
    paths: dict[str, dict[Literal["get", "post", "put"], dict[str, Any]]]
    schemas: dict[str, dict[str, Any]]


def openapi_schema(module: str, predictor: str, training: str) -> dict[str, Any]:
    """The schema of a streaming predictor and a training, as a JSON object.

    Args:
        module: has the class ``predictor``.
        training: a module that has a function of the same name.
    """
    from cog._inspector import create_predictor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # predict() is the name we keep
        info = create_predictor(module, predictor)
        training_info = create_predictor(training, training)
    skeleton = read_data(SKELETON, Skeleton)
    schemas = {
        "Input": _inputs("Input", info),
        "Output": info.output.json_type(),
        # Cog's server reads these two instead when it trains.
        "TrainingInput": _inputs("TrainingInput", training_info),
        "TrainingOutput": {**training_info.output.json_type(), "title": "TrainingOutput"},
        **skeleton.schemas,
    }
    return {
        "openapi": skeleton.openapi,
        "info": skeleton.info,
        "paths": skeleton.paths,
        "components": {"schemas": schemas},
    }


def _inputs(title: str, info: Any) -> dict[str, Any]:
    fields = sorted(info.inputs.values(), key=lambda field: field.order)
    return {
        "title": title,
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
        "required": [field.name for field in fields if _required(field)],
    }


def _required(field: Any) -> bool:
    return field.default is None and not _optional(field)


def _optional(field: Any) -> bool:
    return str(field.type.repetition.name).startswith("OPTIONAL")


def _property(field: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {
        **field.type.json_type(),
        "title": field.name.replace("_", " ").title(),
        "x-order": field.order,
    }
    limits = {"minimum": field.ge, "maximum": field.le}
    if field.type.primitive.name == "INTEGER":
        # Cog makes a float of a limit, which rounds the largest integer of its server up.
        limits = {name: v if v is None else min(int(v), 2**64 - 1) for name, v in limits.items()}
    schema.update({name: v for name, v in limits.items() if v is not None})
    if field.description:
        schema["description"] = field.description
    if field.default is not None:
        schema["default"] = field.default
    if _optional(field):
        schema["nullable"] = True
    return schema
