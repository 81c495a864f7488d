"""The report of a soak: its goals, a table, and a plot for each server."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tools.benchmark.report import Check, Report, axis
from tools.soak.load import RETRYABLE
from tools.soak.watch import GUARD, Phase

MOST_GROWTH = 5.0  # %
POINTS = 400  # most of a line over time
COUNTS = ("requests", "whole", "left", "broken", "tokens", "lost", "wrong", "lines", "unanswered")
COLUMNS = ("engine", "kind", "requests", "whole", "left", "broken", "tokens", "kills", "restarts")


def judge(phases: Sequence[Phase]) -> list[Check]:
    """Return every goal and whether it was met."""
    counts = sum((phase.tally.counts for phase in phases), Counter())
    errors = sum((phase.tally.errors for phase in phases), Counter())
    retryable = sum(errors[code] for code in RETRYABLE)
    parts = [(phase, part) for phase in phases for part in phase.watch.parts.values()]
    none = {
        "tokens lost": counts["lost"],
        "tokens wrong": counts["wrong"],
        "lines of batches not answered exactly once": counts["unanswered"],
        "background responses that differ from the first": counts["changed"],
        "requests that failed": errors.total() - retryable,
        "requests that failed with a retryable error, six times in a row": retryable,
        "requests that broke although nothing was killed": sum(
            phase.tally.counts["broken"] for phase in phases if not phase.recoveries
        ),
        "streams that did not end, or servers that did not come back": sum(
            len(phase.unfinished) for phase in phases
        ),
        "unexpected crashes": sum(len(p.watch.crashes(p.ended)) for p in phases),
        "left behind: processes, shared memory, files": sum(len(phase.left) for phase in phases),
    }
    growth = max((part.growth(phase.began, phase.ended) for phase, part in parts), default=0.0)
    return [
        Check("whole answers", counts["whole"], 1),  # a soak without any shows nothing
        *(Check(what, count, 0, least=False) for what, count in none.items()),
        Check(
            "largest growth of a process's resident memory", growth, MOST_GROWTH, "%", least=False
        ),
    ]


def report_of(phases: Sequence[Phase], environment: Mapping[str, str]) -> Report:
    """Return the report. Times are seconds since a phase began; memory is in MB."""
    found = [_phase(phase) for phase in phases]
    rows = [
        [
            *(str(one[name]) for name in COLUMNS),
            _counts_text(one["retries"]),
            _counts_text(one["errors"]),
            f"{max((kill['token_s'] or 0.0 for kill in one['recoveries']), default=0.0):.1f}",
        ]
        for one in found
    ]
    notes = [
        f"{one['engine']}, {one['kind']}: {name}: {text}"
        for one in found
        for name in ("crashes", "left_behind", "unfinished", "notes")
        for text in one[name][:20]
    ]
    return Report(
        title="Soak",
        environment=environment,
        content={"phases": found},
        tables=[((*COLUMNS, "retried", "failed", "slowest recovery (s)"), rows)],
        checks=judge(phases),
        plots={f"{one['engine']}, {one['kind']}": _plot(one) for one in found},
        notes=notes,
    )


def _counts_text(counts: Mapping[str, int]) -> str:
    """Return how often each code came, as a cell of the table."""
    return ", ".join(f"{number} {code}" for code, number in counts.items())


def _phase(phase: Phase) -> dict[str, Any]:
    tally, began = phase.tally, phase.began
    usage = {
        role: _thinned({round(at - began, 2): round(mb, 1) for at, mb in samples.items()})
        for role, samples in phase.watch.usage().items()
    }
    return {
        "engine": phase.engine,
        "kind": phase.kind,
        "seconds": phase.ended - began,
        **{name: tally.counts[name] for name in COUNTS},
        **{name: dict(getattr(tally, name)) for name in ("errors", "retries", "servers")},
        "kills": len(phase.recoveries),
        "restarts": len(phase.watch.of(GUARD)) - 1,
        "recoveries": phase.recoveries,
        "unfinished": phase.unfinished,
        "left_behind": phase.left,
        "crashes": phase.watch.crashes(phase.ended),
        "notes": tally.notes,
        "tokens_per_s": _thinned({at - int(began): n for at, n in sorted(tally.rate.items())}),
        "usage": usage,
    }


def _plot(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plot: tokens a second with the kills, above memory by role."""
    kills = one["recoveries"]
    texts = [f"{kill['killed']} killed" for kill in kills]
    marks = {"x": [kill["at"] for kill in kills], "y": [0] * len(kills), "hovertext": texts}
    rate, usage = one["tokens_per_s"], one["usage"]
    data = [
        {"name": "tokens/s", "x": list(rate), "y": list(rate.values())},
        {"name": "kills", "mode": "markers", **marks},
        *(
            {"name": role, "x": list(mb), "y": list(mb.values()), "yaxis": "y2"}
            for role, mb in usage.items()
        ),
    ]
    upper, lower = axis("Tokens/s", domain=[0.55, 1]), axis("RSS (MB)", domain=[0, 0.45])
    layout = {"height": 700, "xaxis": axis("Seconds"), "yaxis": upper, "yaxis2": lower}
    return {"data": data, "layout": layout}


def _thinned(values: dict[Any, Any]) -> dict[Any, Any]:
    step = -(-len(values) // POINTS) or 1
    return dict(list(values.items())[::step])
