"""The questions and answers of corpus.yaml, which is all that the demo model knows.

>>> from tools.demo_model.corpus import PAIRS
>>> PAIRS[0].question
'What is machine learning?'
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import TypeAdapter

Shape = TypeVar("Shape")


class QA(NamedTuple):
    """A question and its answer, both plain text without surrounding white space."""

    question: str
    answer: str


def read_data(file: Path, shape: type[Shape]) -> Shape:
    """The content of a YAML file as ``shape``, a type that pydantic can check.

    Raises:
        pydantic.ValidationError: the file has another shape; every place is named.
    """
    # The parser in C, where PyYAML has it, is eight times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    return TypeAdapter(shape).validate_python(content)


_TOPICS = read_data(Path(__file__).with_name("corpus.yaml"), dict[str, tuple[QA, ...]])

PAIRS: tuple[QA, ...] = tuple(chain.from_iterable(_TOPICS.values()))
