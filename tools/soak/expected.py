"""What came of an answer, against what was to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Expected:
    """The answer to a case from a server that nothing disturbs."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """The difference between an answer and the expected one.

    Attributes:
        lost: of the expected, what did not come; 0 for an answer that was left early.
        wrong: what came after the last place up to which both are the same.
    """

    lost: int = 0
    wrong: int = 0

    def __bool__(self) -> bool:
        return bool(self.lost or self.wrong)


def compare(expected: Sequence[Any], came: Sequence[Any], *, whole: bool) -> Difference:
    """Compare an answer's items: token ids, or characters of a text.

    Args:
        whole: whether it came to its end; else it is to be a beginning of what is expected.
    """
    pairs = enumerate(zip(expected, came, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(came)))
    lost = max(0, len(expected) - len(came)) if whole else 0
    return Difference(lost, len(came) - same)
