"""What is promised, and whether it was met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.benchmark.tables import text_table


@dataclass(frozen=True)
class Check:
    """One promise, and what was measured.

    Attributes:
        measured, bound: with their units, as they are shown.
        value, limit: the same as numbers, in the same unit.
    """

    name: str
    measured: str
    bound: str
    met: bool
    value: float
    limit: float


def at_least(
    name: str, value: float, bound: float, unit: str = "", digits: int | None = None
) -> Check:
    """A promise kept by great values. ``digits``: after the point; None for some three in all."""
    texts = _text(value, unit, digits), f">= {_text(bound, unit)}"
    return Check(name, *texts, value >= bound, value, bound)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A promise kept by small values."""
    return Check(name, _text(value, unit), f"<= {_text(bound, unit)}", value <= bound, value, bound)


def report_rows(checks: Sequence[Check]) -> str:
    """The promises as a table."""
    header = ("", "promise", "measured", "bound")
    rows = [("met" if one.met else "MISSED", one.name, one.measured, one.bound) for one in checks]
    return text_table(header, rows, wrapped=(1,))


def verdict(checks: Sequence[Check]) -> str:
    """Return the number of missed promises, and a line for each."""
    missed = [
        (name, one) for name, one in zip(_full_names(checks), checks, strict=True) if not one.met
    ]
    if not missed:
        return f"All {len(checks)} promises were met."
    lines = (f"  {name}: {one.measured}, promised {one.bound}" for name, one in missed)
    return "\n".join([f"{len(missed)} of {len(checks)} promises were missed:", *lines])


def as_report(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The promises as the HTML report and the JSON have them; what is no number is null there."""
    return [
        {
            **asdict(one),
            "name": name,
            "value": one.value if math.isfinite(one.value) else None,
        }
        for name, one in zip(_full_names(checks), checks, strict=True)
    ]


def _full_names(checks: Sequence[Check]) -> list[str]:
    """An indented name goes on with what stands before the colon of the last one that is not."""
    names, about = [], ""
    for one in checks:
        indented = one.name.startswith(" ")
        about = about if indented else one.name.partition(":")[0]
        names.append(f"{about}: {one.name.strip()}" if indented else one.name)
    return names


def _text(value: float, unit: str, digits: int | None = None) -> str:
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()
