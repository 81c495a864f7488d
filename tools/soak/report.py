"""What a soak has shown, as JSON and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tools.benchmark.report import Check, check_table, text_table, verdict
from tools.soak.chaos import Recovery
from tools.soak.judge import Figures, Tally, growth, recovery_table
from tools.soak.phase import PhaseReport
from tools.soak.watch import Sample

BINS = 400  # most points of a line over time


def figures(reports: Sequence[PhaseReport]) -> Figures:
    """All phases as one."""
    return Figures(
        tally=sum((report.tally for report in reports), Tally()),
        growths=[growth for report in reports for growth in report.growths],
        recoveries=recoveries(reports),
        crashes=_named(reports, "crashes"),
        left=_named(reports, "left"),
        unfinished=_named(reports, "unfinished"),
    )


def recoveries(reports: Sequence[PhaseReport]) -> list[Recovery]:
    return [recovery for report in reports for recovery in report.recoveries]


def as_json(
    about: dict[str, Any], reports: Sequence[PhaseReport], checks: Sequence[Check]
) -> dict[str, Any]:
    """The whole report. Times are seconds, of a series those since the phase began; memory is in MB."""
    by_engine: dict[str, list[PhaseReport]] = {}
    for report in reports:
        by_engine.setdefault(report.phase.engine, []).append(report)
    return {
        **about,
        "checks": [check.as_report() for check in checks],
        "recovery": {name: recovery_table(recoveries(of)) for name, of in by_engine.items()},
        "phases": [_phase(report) for report in reports],
    }


def terminal(report: dict[str, Any], checks: Sequence[Check]) -> str:
    """The report as tables."""
    tables = [text_table(*phase_rows(report))]
    for engine, rows in report["recovery"].items():
        if rows[-1]["kills"]:
            tables.append(f"Seconds from a kill, {engine}:\n{text_table(*recovery_rows(rows))}")
    return "\n\n".join([*tables, check_table(checks), verdict(checks)])


PHASE_HEADER = (
    *("server", "seconds", "requests", "whole", "left", "broken", "tokens"),
    *("kills", "restarts", "resumed", "retried", "failed"),
)
RECOVERY_HEADER = (
    *("killed", "kills", "first token p50", "first token p99", "healthy p50", "healthy p99"),
)


def phase_rows(report: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each phase, under its heading."""
    rows = [
        (
            *(phase["server"], f"{phase['seconds']:.0f}"),
            *(
                f"{phase[name]:,}"
                for name in ("requests", "whole", "left_early", "broken", "tokens")
            ),
            *(str(phase[name]) for name in ("kills", "restarts", "resumed")),
            *(_counts(phase[name]) for name in ("retries", "errors")),
        )
        for phase in report["phases"]
    ]
    return PHASE_HEADER, rows


def recovery_rows(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The times of recovery, under their heading."""
    names = ("token_p50_s", "token_p99_s", "healthy_p50_s", "healthy_p99_s")
    shown = [
        (
            row["killed"],
            str(row["kills"]),
            *("-" if row[n] is None else f"{row[n]:.1f}" for n in names),
        )
        for row in rows
    ]
    return RECOVERY_HEADER, shown


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in counts.items()) or "0"


def _named(reports: Sequence[PhaseReport], name: str) -> list[str]:
    return [f"{report.phase}: {text}" for report in reports for text in getattr(report, name)]


def _phase(report: PhaseReport) -> dict[str, Any]:
    tally, began = report.tally, report.began
    return {
        "server": str(report.phase),
        **asdict(report.phase),
        "seconds": report.seconds,
        "left_early": tally.left,
        **{name: getattr(tally, name) for name in ("requests", "whole", "broken", "tokens")},
        **{name: getattr(tally, name) for name in ("lost", "wrong", "notes")},
        **{name: dict(getattr(tally, name)) for name in ("errors", "retries", "faces")},
        "kills": len(report.kills),
        "restarts": report.restarts,
        "resumed": report.resumed,
        "recoveries": [{**asdict(r), "at": r.at - began} for r in report.recoveries],
        "growths": [{**asdict(g), "percent": growth(g)} for g in report.growths],
        **{name: getattr(report, name) for name in ("crashes", "left", "unfinished", "signs")},
        "tokens_per_s": rate(report.rate, began),
        "usage": {role: _series(samples, began) for role, samples in report.usage.items()},
        "shared_memory": {
            "at": [round(shared.at - began, 2) for shared in thinned(report.shared)],
            "mb": [shared.mb for shared in thinned(report.shared)],
            "regions": [shared.regions for shared in thinned(report.shared)],
        },
    }


def rate(counts: Sequence[tuple[float, int]], began: float) -> dict[str, list[float]]:
    """Tokens a second, for each second from the first on, or of longer bins if there are too many."""
    if not counts:
        return {"at": [], "tokens": []}
    width = max(1.0, (counts[-1][0] - began) / BINS)
    bins = [0] * (int((counts[-1][0] - began) / width) + 1)
    for at, tokens in counts:
        bins[max(0, int((at - began) / width))] += tokens
    return {
        "at": [round(number * width, 2) for number in range(len(bins))],
        "tokens": [tokens / width for tokens in bins],
    }


def _series(samples: Sequence[Sample], began: float) -> dict[str, list[float]]:
    kept = thinned(samples)
    return {
        "at": [round(sample.at - began, 2) for sample in kept],
        "rss_mb": [round(sample.rss_mb, 1) for sample in kept],
        "descriptors": [sample.descriptors for sample in kept],
        "threads": [sample.threads for sample in kept],
    }


def thinned(values: Sequence[Any]) -> Sequence[Any]:
    """At most BINS of the values, evenly apart."""
    step = -(-len(values) // BINS) or 1
    return values[::step]
