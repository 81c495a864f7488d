"""One call as a model wrote it, and what all readers of calls share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The JSON schemas of the tools' parameters, by the names of the tools.
Schemas = Mapping[str, Mapping[str, Any]]
NAME = r"[\w.:/-]{1,128}"  # the name of a tool, as a regular expression


@dataclass(frozen=True)
class WrittenCall:
    """One call.

    Attributes:
        arguments: the text of a JSON object.
        id: the call's id, if the model chose one.
    """

    name: str
    arguments: str
    id: str | None = None


def all_or_none(calls: Sequence[WrittenCall | None]) -> list[WrittenCall] | None:
    """Return the calls, or None if one of them could not be read or there are none."""
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def dumps(value: Any) -> str:
    """Return a value as JSON that can be sent: half of a surrogate pair stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
