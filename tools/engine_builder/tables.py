"""Reads the tables of this package: YAML files beside the modules, checked for their type."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import TypeAdapter

Table = TypeVar("Table")


def read(name: str, kind: type[Table]) -> Table:
    """The content of a file of this directory.

    Raises:
        pydantic.ValidationError: it is not of that type.
    """
    content = yaml.safe_load(Path(__file__).with_name(name).read_bytes())
    return TypeAdapter(kind).validate_python(content)
