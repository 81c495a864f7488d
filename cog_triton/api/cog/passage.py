"""Checks of the requests that go to Cog's server: what it cannot bear never reaches it.

(method, target, body) ──▶ Route ──▶ Passage: what Cog's server gets
                                └──▶ Refusal: 400 or 422
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
from pydantic_core import Url

from cog_triton.errors import PromptTooLong
from cog_triton.request.limits import TextLimits
from cog_triton.web import Refusal
from cog_triton.web.bodies import LARGE_BYTES, BadBody, parse_json

WEBHOOK_EVENTS = ("start", "output", "logs", "completed")
_COLLECTIONS = ("predictions", "trainings")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_URL_CHARACTERS = 2048
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f]")
# What Cog's server needs of a large body. It sends its worker the field ``context`` too: one of 8 MB fails
# there and takes a slot of predictions for good.
_NEEDED_FIELDS = ("id", "input", "webhook", "webhook_events_filter")
# Characters of all inputs together, beyond those of a prompt and a system prompt: a chat as JSON, a guide.
_OTHER_CHARACTERS = 2**20


@dataclass(frozen=True)
class Passage:
    """A request as Cog's server gets it."""

    method: str
    target: str
    body: bytes = b""
    # Ids of the prediction that it starts, or cancels.
    starts: str | None = None
    cancels: str | None = None
    has_webhook: bool = False


@dataclass(frozen=True)
class Inputs:
    """The inputs of the predictor, as it describes them in its message ``hello``."""

    # A prediction must have one of these.
    needed: Sequence[str] = ()
    # All names; empty if they are not known.
    names: Sequence[str] = ()
    # Of the prompt; None if they are not known.
    limits: TextLimits | None = None

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Inputs":
        limits = message["limits"]
        return cls(
            needed=message["needed"],
            names=message["names"],
            limits=None if limits is None else TextLimits(**limits),
        )

    def check_presence(self, values: dict[str, Any]) -> None:
        """Refuse inputs without any of the needed ones."""
        if self.needed and values.keys().isdisjoint(self.needed):
            text = f"E1001 PromptRequired: {' or '.join(self.needed)} is required"
            raise invalid(["body", "input", self.needed[0]], text, "value_error.missing")

    def check_sizes(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a large request that the predictor takes, or raise Refusal.

        The predictor refuses too long texts as well, but Cog's server would parse them before, on the one
        thread that answers everybody.
        """
        if self.names:
            values = {name: value for name, value in values.items() if name in self.names}
        for name, value in values.items():
            if isinstance(value, dict | list):
                text = "must be a string, a number or a boolean"
                raise invalid(["body", "input", name], text, "type_error")
        if self.limits is not None:
            _check_lengths(values, self.limits)
        return values


@dataclass(frozen=True)
class Route:
    """A method and a target, and what they do to predictions."""

    method: str
    target: str
    # The path's parts: predictions or trainings, an id, and an action. Empty strings where there are none.
    collection: str
    identifier: str
    action: str
    starts: bool

    @classmethod
    def parse(cls, method: str, target: str) -> "Route":
        """Read a request line, or raise Refusal if its id could name no directory."""
        path = target.partition("?")[0]
        parts = [unquote(part) for part in path.split("/")[1:]]
        collection = parts[0]
        identifier = parts[1] if len(parts) > 1 else ""
        action = "/".join(parts[2:])
        is_prediction = collection in _COLLECTIONS
        if is_prediction and len(parts) > 1:
            _check_identifier(identifier, ["path", "prediction_id"])
        starting_method = "POST" if len(parts) == 1 else "PUT"
        starts = is_prediction and len(parts) <= 2 and method == starting_method
        return cls(method, target, collection, identifier, action, starts)

    @property
    def cancels(self) -> bool:
        is_action = self.collection == "predictions" and self.action == "cancel"
        return is_action and self.method == "POST"

    def passage(self, body: bytes, inputs: Inputs) -> Passage:
        """Return what Cog's server gets, or raise Refusal.

        A prediction without an id gets one here, by which its end and its directory are known. What starts
        no prediction has no use for a body, which Cog's server may leave unread.
        """
        if self.cancels:
            return Passage(self.method, self.target, cancels=self.identifier)
        if not self.starts:
            return Passage(self.method, self.target)
        fields = fields_of(body)
        _check_webhook(fields)
        method = self.method
        target = self.target
        identifier = self.identifier or fields.get("id")
        if not isinstance(identifier, str):
            identifier = uuid.uuid4().hex
            _, question_mark, query = target.partition("?")
            method = "PUT"
            target = f"/{self.collection}/{identifier}{question_mark}{query}"
        elif not self.identifier:
            _check_identifier(identifier, ["body", "id"])
        return Passage(
            method,
            target,
            self._checked_body(fields, body, inputs),
            starts=identifier,
            has_webhook=bool(fields.get("webhook")),
        )

    def _checked_body(self, fields: dict[str, Any], body: bytes, inputs: Inputs) -> bytes:
        """Return the body that Cog's server gets: of a large one, only what it needs.

        Inputs that are null are left out: Cog's server refuses null for an optional input.
        """
        is_large = len(body) >= LARGE_BYTES
        checked = fields
        if is_large:
            checked = {name: fields[name] for name in _NEEDED_FIELDS if name in fields}
        if self.collection == "predictions":
            sent = fields.get("input")
            values = sent if isinstance(sent, dict) else {}
            kept = {name: value for name, value in values.items() if value is not None}
            inputs.check_presence(kept)
            if is_large:
                kept = inputs.check_sizes(kept)
            if len(kept) < len(values):
                checked = {**checked, "input": kept}
        return body if checked is fields else orjson.dumps(checked)


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse a prediction's body; one that is not an object is left to Cog's server."""
    try:
        fields = parse_json(body or b"{}")
    except BadBody as error:
        raise Refusal(400, f"the body {error}") from None
    return fields if isinstance(fields, dict) else {}


def invalid(place: list[str], text: str, kind: str) -> Refusal:
    """Return the refusal of a value, in the form of Cog's server."""
    return Refusal(422, [{"loc": place, "msg": text, "type": kind}])


def _check_identifier(identifier: str, place: list[str]) -> None:
    """Refuse an id that could not name a directory."""
    if not _IDENTIFIER.fullmatch(identifier):
        rule = "must be 1 to 128 letters, digits, '_', '-' and '.', and must not start with '.'"
        raise invalid(place, rule, "value_error")


def _check_lengths(values: dict[str, Any], limits: TextLimits) -> None:
    """Refuse texts that no prompt of this model could hold."""
    lengths = {name: len(value) for name, value in values.items() if isinstance(value, str)}
    total = sum(lengths.values())
    limit = 2 * limits.characters + _OTHER_CHARACTERS
    # The input that is being checked, for the error.
    name = "prompt"
    try:
        limits.check("the prompt", lengths.get("prompt", 0))
        name = "system_prompt"
        limits.check("the system prompt", lengths.get("system_prompt", 0))
        # Of all inputs together, the longest is to blame.
        name = max(lengths, key=lengths.__getitem__, default="prompt")
        if total > limit:
            raise PromptTooLong(f"the inputs have {total} characters; the limit is {limit}")
    except PromptTooLong as error:
        raise invalid(["body", "input", name], str(error), "value_error") from None


def _check_webhook(fields: dict[str, Any]) -> None:
    """Refuse a webhook that cannot be called, or a list of events that Cog's server does not know."""
    address = fields.get("webhook")
    if address is not None and not _is_http_url(address):
        raise invalid(["body", "webhook"], "must be an http or https URL", "value_error.url")
    events = fields.get("webhook_events_filter")
    if events is None:
        return
    if not isinstance(events, list) or any(event not in WEBHOOK_EVENTS for event in events):
        text = f"must be a list of {', '.join(WEBHOOK_EVENTS)}"
        raise invalid(["body", "webhook_events_filter"], text, "value_error")


def _is_http_url(address: Any) -> bool:
    """Return whether Cog's server can call an address; it would try a malformed one for minutes."""
    if not isinstance(address, str) or len(address) > _URL_CHARACTERS:
        return False
    # Parsers drop such characters, each in its way.
    if _NOT_IN_URLS.search(address):
        return False
    try:
        parts = urlsplit(address)
        # The parser of Cog's server, which refuses more names of hosts.
        Url(address)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
