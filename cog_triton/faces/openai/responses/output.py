"""The output of a response: its items, and what is said of them while they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cog_triton.faces.openai.answers import new_id
from cog_triton.faces.openai.tools.events import Arguments, CallStart, Event, Reasoning, Text


@dataclass(frozen=True)
class Kind:
    """A type of items.

    Attributes:
        prefix: of an item's id.
        text: what its text is called in the names of events.
        part: the type of the part of its content that has the text; empty where there are no parts.
        value: the field that has the text.
    """

    type: str
    prefix: str
    text: str
    part: str = ""
    value: str = "text"


MESSAGE = Kind("message", "msg_", "output_text", "output_text")
REASONING = Kind("reasoning", "rs_", "reasoning_text", "reasoning_text")
CALL = Kind("function_call", "fc_", "function_call_arguments", value="arguments")


@dataclass
class Item:
    """An item that is being made.

    Attributes:
        fields: those that its type has beside id, type, status and text.
    """

    kind: Kind
    index: int
    fields: dict[str, Any]
    id: str = ""
    texts: list[str] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_id(self.kind.prefix)

    def begun(self) -> list[dict[str, Any]]:
        """The events before its text."""
        added = [self._of_item("added", self._body("in_progress", [] if self.kind.part else ""))]
        if not self.kind.part:
            return added
        return [*added, self._event("response.content_part.added", part=self._part("", []))]

    def delta(self, text: str, log_probs: list[Any]) -> dict[str, Any]:
        """The event of a piece of its text."""
        self.texts.append(text)
        self.log_probs += log_probs
        more = {"logprobs": log_probs} if self.kind is MESSAGE else {}
        return self._event(f"response.{self.kind.text}.delta", delta=text, **more)

    def done(self, status: str) -> list[dict[str, Any]]:
        """The events behind its text."""
        text = "".join(self.texts)
        values: dict[str, Any] = {self.kind.value: text}
        if self.kind is MESSAGE:
            values["logprobs"] = self.log_probs
        if self.kind is CALL:
            values["name"] = self.fields["name"]
        events = [self._event(f"response.{self.kind.text}.done", **values)]
        if self.kind.part:
            part = self._part(text, self.log_probs)
            events.append(self._event("response.content_part.done", part=part))
        return [*events, self._of_item("done", self.body(status))]

    def body(self, status: str) -> dict[str, Any]:
        """As JSON's object, with all of its text."""
        text = "".join(self.texts)
        return self._body(status, [self._part(text, self.log_probs)] if self.kind.part else text)

    def _body(self, status: str, value: Any) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind.type, "status": status, **self.fields}
        return {**head, "content" if self.kind.part else self.kind.value: value}

    def _part(self, text: str, log_probs: list[Any]) -> dict[str, Any]:
        part = {"type": self.kind.part, "text": text}
        if self.kind is MESSAGE:
            return {**part, "annotations": [], "logprobs": log_probs}
        return part

    def _of_item(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": f"response.output_item.{what}",
            "output_index": self.index,
            "item": item,
        }

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        place = {"item_id": self.id, "output_index": self.index}
        if self.kind.part:
            place["content_index"] = 0
        return {"type": kind, **place, **values}


class Output:
    """The items of a response, one after the other."""

    def __init__(self) -> None:
        self._done: list[dict[str, Any]] = []
        self._open: Item | None = None
        self._log_probs: list[Any] = []  # of tokens whose text has not come yet

    def take(self, events: list[Event], log_probs: list[Any]) -> list[dict[str, Any]]:
        """What is said of the next events of an answer, whose tokens have these log probabilities."""
        self._log_probs += log_probs
        said = [told for event in events for told in self._take(event)]
        if self._kind() not in (None, MESSAGE):
            self._log_probs = []  # those of thoughts and calls are no output text's
        return said

    def close(self, status: str) -> list[dict[str, Any]]:
        """What is said at the end of the item that is being made."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._done.append(item.body(status))
        return item.done(status)

    def items(self) -> list[dict[str, Any]]:
        """Those that have ended."""
        return self._done

    def reasoning(self) -> str:
        """The text of all thoughts."""
        items = [item for item in self._done if item["type"] == REASONING.type]
        return "".join(part["text"] for item in items for part in item["content"])

    def _take(self, event: Event) -> list[dict[str, Any]]:
        said = []
        if isinstance(event, CallStart):
            return self._begin(CALL, {"call_id": event.id, "name": event.name})
        if isinstance(event, Text) and self._kind() is not MESSAGE:
            said = self._begin(MESSAGE, {"role": "assistant"})
        if isinstance(event, Reasoning) and self._kind() is not REASONING:
            said = self._begin(REASONING, {"summary": [], "encrypted_content": None})
        assert self._open is not None
        log_probs: list[Any] = []
        if not isinstance(event, Reasoning | Arguments):
            log_probs, self._log_probs = self._log_probs, []
        return [*said, self._open.delta(event.text, log_probs)]

    def _kind(self) -> Kind | None:
        return self._open.kind if self._open else None

    def _begin(self, kind: Kind, fields: dict[str, Any]) -> list[dict[str, Any]]:
        said = self.close("completed")
        self._open = Item(kind, len(self._done), fields)
        return [*said, *self._open.begun()]
