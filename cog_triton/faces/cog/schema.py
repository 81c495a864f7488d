"""The OpenAPI schema of a Cog predictor, from its code."""

from __future__ import annotations

import warnings
from typing import Any


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
    schemas = {
        "Input": _inputs("Input", info),
        "Output": info.output.json_type(),
        # Cog's server reads these two instead when it trains.
        "TrainingInput": _inputs("TrainingInput", training_info),
        "TrainingOutput": {**training_info.output.json_type(), "title": "TrainingOutput"},
        "Status": {
            "title": "Status",
            "type": "string",
            "enum": ["starting", "processing", "succeeded", "canceled", "failed"],
        },
        "PredictionRequest": _request(),
        "PredictionResponse": _response(),
        "HTTPValidationError": _validation_error(),
    }
    return {
        "openapi": "3.0.2",
        "info": {"title": "Cog", "version": "0.1.0"},
        "paths": _paths(),
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
    whole = field.type.primitive.name == "INTEGER"
    schema.update({name: int(v) if whole else v for name, v in limits.items() if v is not None})
    if field.description:
        schema["description"] = field.description
    if field.default is not None:
        schema["default"] = field.default
    if _optional(field):
        schema["nullable"] = True
    return schema


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _paths() -> dict[str, Any]:
    body = {
        "content": {"application/json": {"schema": _ref("PredictionRequest")}},
        "required": True,
    }
    answers = {
        "200": _json(_ref("PredictionResponse"), "The prediction"),
        "409": _json({"type": "object"}, "All slots are taken"),
        "422": _json(_ref("HTTPValidationError"), "An input is not valid"),
    }
    prediction_id = {
        "name": "prediction_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
    }
    done = {"200": _json({"type": "object"}, "Done")}
    return {
        "/health-check": {"get": {"summary": "Healthcheck", "responses": done}},
        "/predictions": {
            "post": {
                "summary": "Predict",
                "x-cog-streaming": True,
                "requestBody": body,
                "responses": answers,
            }
        },
        "/predictions/{prediction_id}": {
            "put": {
                "summary": "Predict, idempotent",
                "x-cog-streaming": True,
                "parameters": [prediction_id],
                "requestBody": body,
                "responses": answers,
            }
        },
        "/predictions/{prediction_id}/cancel": {
            "post": {"summary": "Cancel", "parameters": [prediction_id], "responses": done}
        },
    }


def _request() -> dict[str, Any]:
    return {
        "title": "PredictionRequest",
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "input": _ref("Input"),
            "webhook": {"type": "string", "format": "uri"},
            "webhook_events_filter": {"type": "array", "items": {"type": "string"}},
        },
    }


def _response() -> dict[str, Any]:
    return {
        "title": "PredictionResponse",
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "input": _ref("Input"),
            "output": _ref("Output"),
            "status": _ref("Status"),
            "error": {"type": "string"},
            "logs": {"type": "string"},
            "metrics": {"type": "object"},
        },
    }


def _validation_error() -> dict[str, Any]:
    item = {
        "type": "object",
        "properties": {
            "loc": {"type": "array", "items": {"type": "string"}},
            "msg": {"type": "string"},
            "type": {"type": "string"},
        },
    }
    return {
        "title": "HTTPValidationError",
        "type": "object",
        "properties": {"detail": {"type": "array", "items": item}},
    }
