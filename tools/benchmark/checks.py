"""What is promised, and whether it was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One promise, and what was measured."""

    name: str
    measured: str
    bound: str
    met: bool


def at_least(
    name: str, value: float, bound: float, unit: str = "", digits: int | None = None
) -> Check:
    """A promise kept by great values. ``digits``: after the point; None for some three in all."""
    texts = _text(value, unit, digits), f">= {_text(bound, unit)}"
    return Check(name, *texts, value >= bound)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A promise kept by small values."""
    return Check(name, _text(value, unit), f"<= {_text(bound, unit)}", value <= bound)


def report_rows(checks: Sequence[Check]) -> str:
    """The promises as a table."""
    header = ("", "promise", "measured", "bound")
    rows = [("met" if one.met else "MISSED", one.name, one.measured, one.bound) for one in checks]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows))


def as_report(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The promises as the HTML report and the JSON have them."""
    return [{**asdict(one), "name": one.name.strip()} for one in checks]


def _text(value: float, unit: str, digits: int | None = None) -> str:
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()
