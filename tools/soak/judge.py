"""What is promised of a soak, and whether it was kept. Pure: figures in, promises out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.benchmark.report import Check
from tools.soak.chaos import Recovery
from tools.soak.faces import CUT, RETRYABLE
from tools.soak.streams import Outcome
from tools.soak.watch import FACE, Growth

MOST_GROWTH = 5.0  # %
NO_GROWTH_MB = 2.0  # what an allocator keeps or gives back; no leak shows in so little
LEAST_SECONDS = 60.0  # that a process has to run under load for its growth to be judged


@dataclass
class Tally:
    """Outcomes of the requests of a phase, counted as they end.

    Attributes:
        cut: those of the broken whose connection was lost.
        errors: of requests that failed in the end, by code.
        retries: errors after which a client sent a request again, by code.
        notes: of each request with an answer that is lost or wrong, or that failed: the request, and why.
    """

    requests: int = 0
    whole: int = 0
    left: int = 0
    broken: int = 0
    cut: int = 0
    tokens: int = 0
    lost: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    faces: Counter[str] = field(default_factory=Counter)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.requests += 1
        self.whole += outcome.end == "whole"
        self.left += outcome.end == "left"
        self.broken += outcome.end == "broken"
        self.cut += outcome.end == "broken" and outcome.code == CUT
        self.tokens += outcome.tokens
        self.lost += outcome.lost
        self.wrong += outcome.wrong
        self.faces[outcome.face] += 1
        self.retries.update(outcome.tried)
        if outcome.end == "failed":
            self.errors[outcome.code] += 1
        if outcome.end == "failed" or outcome.lost or outcome.wrong:
            self.notes.append({**vars(outcome)})

    def excuse(self, killed: Collection[str]) -> None:
        """Counts as failed what broke though nobody had killed what it could break with.

        Args:
            killed: the roles of what was killed.
        """
        failed = self.broken if not killed else self.cut if FACE not in killed else 0
        if failed:
            self.errors["broken"] += failed
            self.broken -= failed

    def __add__(self, other: Tally) -> Tally:
        values = {name: getattr(self, name) + getattr(other, name) for name in vars(self)}
        return Tally(**values)


@dataclass(frozen=True)
class Figures:
    """The figures by which a soak is judged.

    Attributes:
        crashes: a text each, of what ended that nobody had killed.
        left: a text each, of what a server left behind.
        unfinished: a text each, of what did not come to its end: streams, servers that did not come back.
    """

    tally: Tally
    growths: Sequence[Growth] = ()
    recoveries: Sequence[Recovery] = ()
    crashes: Sequence[str] = ()
    left: Sequence[str] = ()
    unfinished: Sequence[str] = ()


def judge(figures: Figures) -> list[Check]:
    """Every promise, and whether it was kept."""
    tally = figures.tally
    retryable = sum(tally.errors[code] for code in RETRYABLE)
    failed = sum(tally.errors.values()) - retryable
    none = {
        "tokens lost": tally.lost,
        "tokens wrong": tally.wrong,
        "requests that failed": failed,
        "requests that failed with a retryable error, six times in a row": retryable,
        "streams or servers that did not come to an end, or back": len(figures.unfinished),
        "crashes that nobody caused": len(figures.crashes),
        "left behind: processes, shared memory, files": len(figures.left),
    }
    name = "resident memory, most growth of a process"
    return [
        Check("whole answers", tally.whole, 1),  # a soak without any shows nothing
        *(Check(what, count, 0, least=False) for what, count in none.items()),
        Check(name, worst(figures.growths), MOST_GROWTH, "%", least=False),
    ]


def growth(memory: Growth) -> float:
    """By how much a process grew, in %; 0 for less than what does not count."""
    more = memory.after - memory.before
    return 0.0 if more <= NO_GROWTH_MB else 100 * more / memory.before


def worst(growths: Sequence[Growth]) -> float:
    """The growth of the process that grew most, in %."""
    return max(map(growth, growths), default=0.0)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that so large a share does not exceed; None of no values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


def recovery_table(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """The times of recovery by what was killed, and of all kills; hasty ones are not among them."""
    counted = [recovery for recovery in recoveries if not recovery.hasty]
    roles = sorted({recovery.role for recovery in counted})
    rows = [_row(role, [r for r in counted if r.role == role]) for role in roles]
    return [*rows, _row("all", counted)]


def _row(role: str, recoveries: Sequence[Recovery]) -> dict[str, Any]:
    figures = {
        f"{name}_p{share}_s": percentile(
            [t for r in recoveries if (t := getattr(r, name)) is not None], share / 100
        )
        for name in ("token", "healthy")
        for share in (50, 99)
    }
    return {"killed": role, "kills": len(recoveries), **figures}
