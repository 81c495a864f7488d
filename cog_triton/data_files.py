"""Tables that are data: YAML files beside the code that uses them, each checked by a type."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import TypeAdapter

Shape = TypeVar("Shape")


def read_data(file: Path, shape: type[Shape]) -> Shape:
    """The content of a YAML file as ``shape``, a type that pydantic can check.

    Raises:
        pydantic.ValidationError: the file has another shape; every place is named.
    """
    # The parser in C, where PyYAML has it, is eight times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    return TypeAdapter(shape).validate_python(content)
