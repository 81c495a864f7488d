"""What the cache knows about its files: small JSON files, whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

Record = TypeVar("Record", bound=BaseModel)


def read_record(model: type[Record], path: Path) -> Record | None:
    """The record in ``path``; None if there is none that can be read."""
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: BaseModel) -> None:
    """Puts ``record`` in ``path``, in the place of one before it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record.model_dump(), indent=2) + "\n", encoding="utf-8")
    new.replace(path)
