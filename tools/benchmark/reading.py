"""What one result of a report says, and the series that results make: for the plots and the tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]

MISSING = "–"
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(value: object) -> str:
    """`value` as text, without the characters that no page may have."""
    return MISSING if value is None else _NOT_TEXT.sub("\ufffd", str(value))


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def format_number(value: float | None) -> str:
    """Three significant digits, or all of those before the decimal point."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 6)}f}"


def format_tick(value: float) -> str:
    return f"{value:,.10g}"


def format_percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f} %"


def shorten(name: str, most: int) -> str:
    """`name` in at most `most` characters, its middle left out: names often differ at their end."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[len(name) - end :]}"


def stat(result: Result, key: str, which: str) -> float | None:
    """One statistic of a result, such as the ``p50`` of its ``ttft_ms``."""
    return number((result.get(key) or {}).get(which))


def is_open(result: Result) -> bool:
    return result.get("mode") == "open"


def load(result: Result) -> float | None:
    """Requests in flight of a closed loop, requests per second of an open one."""
    value = number(result.get("request_rate" if is_open(result) else "concurrency"))
    return value if value and value > 0 else None


def load_mark(result: Result) -> str:
    """The load, short enough for a point."""
    value = load(result)
    return "" if value is None else format_tick(value) + ("/s" if is_open(result) else "")


def load_text(result: Result) -> str:
    value = load(result)
    if value is None:
        return "load not given"
    tick = format_tick(value)
    return f"{tick} requests/s" if is_open(result) else f"concurrency {tick}"


def cpu_by_role(result: Result) -> dict[str, float]:
    """CPU seconds for 1,000 output tokens, of all processes of a role together."""
    tokens = number(result.get("output_tokens"))
    seconds: dict[str, float] = {}
    for process in result.get("processes") or []:
        used = number(process.get("cpu_s"))
        if tokens and used is not None:
            role = str(process.get("role"))
            seconds[role] = seconds.get(role, 0.0) + used * 1000 / tokens
    return seconds


@dataclass(frozen=True)
class Series:
    """The results that one line goes through, by rising load.

    Attributes:
        slot: chooses the colour and the mark, the same in all plots.
    """

    name: str
    slot: int
    open_loop: bool
    results: tuple[Result, ...]


def series_of(results: Sequence[Result]) -> list[Series]:
    """One series per target and mode.

    A load that was measured again, with other lengths for instance, begins another series.
    """
    measured: Counter[tuple[str, bool, float | None]] = Counter()
    groups: dict[tuple[str, bool, int], list[Result]] = {}
    for result in results:
        target, open_loop = str(result.get("target")), is_open(result)
        at = (target, open_loop, load(result))
        groups.setdefault((target, open_loop, measured[at]), []).append(result)
        measured[at] += 1
    return [
        Series(
            name=_series_name(group, run, repeated=(target, open_loop, 1) in groups),
            slot=slot,
            open_loop=open_loop,
            results=tuple(sorted(group, key=lambda result: load(result) or 0.0)),
        )
        for slot, ((target, open_loop, run), group) in enumerate(groups.items())
    ]


def _series_name(group: Sequence[Result], run: int, *, repeated: bool) -> str:
    first = group[0]
    name = str(first.get("target"))
    if first.get("baseline"):
        name += " (baseline)"
    if is_open(first):
        name += ", open loop"
    if repeated:
        keys = ("input_tokens_mean", "output_tokens_mean")
        tokens = " → ".join(format_number(number(first.get(key))) for key in keys)
        name += f", run {run + 1}: {tokens} tokens"
    return name
