"""The body of a request that begins a prediction."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cog_triton.api.cog.passage import Passage, fields_of, invalid
from cog_triton.api.cog.predictions import Predictions

MODEL = "cog-triton/model"
# As of Replicate's official models, which have one version.
VERSION = "hidden"
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+-]+=[\w.+-]+)*;base64,")


@dataclass(frozen=True)
class Creation:
    """A prediction to begin: what Replicate's client sees of it, and what Cog's server gets."""

    model: str
    version: str
    inputs: dict[str, Any]
    passage: Passage


def read_creation(
    body: bytes, *, identifier: str, path: Mapping[str, str], predictions: Predictions
) -> Creation:
    """Read a body, or raise Refusal. It may be called in a thread.

    Args:
        identifier: that of the new prediction.
        path: the parameters of the request's path: ``owner`` and ``name``, where it names a model.
    """
    fields = fields_of(body)
    model, version = _model_and_version(fields.get("version"), path)
    sent_inputs = fields.get("input") or {}
    if not isinstance(sent_inputs, dict):
        raise invalid(["body", "input"], "must be an object", "type_error")
    inputs = {name: text_of_file(name, value) for name, value in sent_inputs.items()}
    cogs_body = orjson.dumps({**_webhook_fields(fields), "input": inputs})
    passage = predictions.check("PUT", f"/predictions/{identifier}", cogs_body)
    return Creation(model or MODEL, version or VERSION, inputs, passage)


def _model_and_version(version: Any, path: Mapping[str, str]) -> tuple[str, str]:
    """Return both, empty if they are not named; a version may be written OWNER/NAME:VERSION."""
    if version is not None and not isinstance(version, str):
        raise invalid(["body", "version"], "must be a string", "type_error")
    model, _, identifier = (version or "").rpartition(":")
    if "owner" in path:
        return f"{path['owner']}/{path['name']}", identifier
    if "/" in identifier:
        return identifier, ""
    return model, identifier


def _webhook_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of webhooks that Cog's server knows."""
    webhooks = {name: value for name, value in fields.items() if name.startswith("webhook")}
    # Replicate's older name.
    completed = webhooks.pop("webhook_completed", None)
    if completed:
        return {"webhook": completed, "webhook_events_filter": ["completed"]}
    return webhooks


def text_of_file(name: str, value: Any) -> Any:
    """Return the text of a file that came as a data URL, and any other value as it is."""
    if not isinstance(value, str):
        return value
    start = _DATA_URL.match(value)
    if start is None:
        return value
    try:
        return base64.b64decode(value[start.end() :], validate=True).decode()
    except ValueError:
        text = "the file must be UTF-8 text"
        raise invalid(["body", "input", name], text, "value_error") from None
