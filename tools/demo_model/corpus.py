"""The questions and answers of corpus.yaml, which is all that the demo model knows.

>>> from tools.demo_model.corpus import PAIRS
>>> PAIRS[0].question
'What is machine learning?'
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cog_triton.data_files import read_data


class QA(NamedTuple):
    """A question and its answer, both plain text without surrounding white space."""

    question: str
    answer: str


_TOPICS = read_data(Path(__file__).with_name("corpus.yaml"), dict[str, tuple[QA, ...]])

PAIRS: tuple[QA, ...] = tuple(chain.from_iterable(_TOPICS.values()))
