"""Several targets under the same loads: each by itself, or in turns, round by round.

Figures of different machines, or of one machine at different times, say little. Where the targets take
turns, what counts are the ratios within a round, of which medians are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from tools.benchmark.drivers import DRIVERS
from tools.benchmark.load import Load
from tools.benchmark.measure import Running, Session
from tools.benchmark.report import Result, thinned

Say = Callable[[str], None]
Start = Callable[[str, ExitStack], Running]
Measure = Callable[..., Result]  # as Session.measure
Rounds = dict[str, list[Result]]  # of each target

MEDIANS = (
    "input_tokens_mean",
    "output_tokens_mean",
    "duration_s",
    "output_tokens_per_s",
    "requests_per_s",
    "ttft_ms",
    "itl_ms",
    "chunk_gap_ms",
    "e2e_ms",
    "tokens_per_chunk",
    "load_generator_cpu_share",
    "cpu_s",
)


def run_loads(
    targets: Sequence[str],
    baselines: Sequence[str],
    loads: Sequence[Load],
    start: Start,
    progress: Say,
) -> list[Result]:
    """Every load on every target, in the order of the targets, compared with the baselines.

    One server runs at a time, and each target has all its loads one after another. If the loads have
    several rounds, all servers run at once and the targets take turns.

    Args:
        start: starts what a target's driver needs, see ``Driver.server``, and ends it with the stack.

    Raises:
        CogTritonError, BenchmarkError: something could not be started or measured.
    """
    in_turns = any(load.rounds > 1 for load in loads)
    kinds = list(dict.fromkeys(map(_kind, targets)))
    rounds: list[Rounds] = [{} for _ in loads]
    for together in [kinds] if in_turns else [[kind] for kind in kinds]:
        with ExitStack() as servers:
            running = {kind: start(kind, servers) for kind in together}
            chosen = [target for target in targets if _kind(target) in running]
            for part in [chosen] if in_turns else [[target] for target in chosen]:
                with ExitStack() as generators:
                    measures = {
                        target: generators.enter_context(
                            Session(running[_kind(target)], target, loads)
                        ).measure
                        for target in part
                    }
                    for all_of, of_part in zip(
                        rounds, take_turns(measures, loads, progress), strict=True
                    ):
                        all_of |= of_part
    results = [result for of_load in rounds for result in compared(of_load, baselines)]
    return sorted(results, key=lambda result: targets.index(result.target))


def take_turns(
    measures: Mapping[str, Measure], loads: Sequence[Load], progress: Say
) -> list[Rounds]:
    """The rounds of each load. The order of the targets is turned round each time.

    Each turn has its own prompts, so that no cache knows them; loads of one round, which targets may
    have one after another, have the same for every target.
    """
    by_load: list[Rounds] = []
    turn = 0
    for load in loads:
        rounds: Rounds = {target: [] for target in measures}
        for number in range(load.rounds):
            order = list(measures) if number % 2 == 0 else list(measures)[::-1]
            for target in order:
                result = measures[target](load, turn, warm_up=number == 0)
                rounds[target].append(result)
                name = f"{target} {result.load_name}"
                name += f", round {number + 1}" if load.rounds > 1 else ""
                progress(f"{name}: {result.output_tokens_per_s:.0f} tokens/s")
                turn += load.rounds > 1
        turn += load.rounds == 1
        by_load.append(rounds)
    return by_load


def compared(rounds: Mapping[str, Sequence[Result]], baselines: Sequence[str]) -> list[Result]:
    """One result of each target under one load: the medians of its rounds, and of their ratios."""

    def against(target: str, figure: Callable[[Result, Result], float | None]) -> dict[str, float]:
        present = [name for name in baselines if name in rounds and name != target]
        figures = {
            baseline: [figure(a, b) for a, b in zip(rounds[target], rounds[baseline], strict=True)]
            for baseline in present
        }
        return {
            baseline: value
            for baseline in present
            if (value := _median(figures[baseline])) is not None
        }

    return [
        replace(
            medians(own),
            baseline=target in baselines,
            ratio_to_baseline=against(
                target, lambda a, b: _ratio(a.output_tokens_per_s, b.output_tokens_per_s)
            ),
            cpu_ratio_to_baseline=against(target, lambda a, b: _ratio(a.cpu_s, b.cpu_s)),
            ttft_p50_added_ms=against(
                target, lambda a, b: _difference(a.ttft_ms["p50"], b.ttft_ms["p50"])
            ),
        )
        for target, own in rounds.items()
    ]


def medians(rounds: Sequence[Result]) -> Result:
    """The rounds of one target under one load as one result."""
    first = rounds[0]
    if len(rounds) == 1:
        return first
    figures = {name: _median([getattr(result, name) for result in rounds]) for name in MEDIANS}
    samples = [sample for result in rounds for sample in result.ttft_samples_ms]
    return replace(
        first,
        **figures,
        requests=sum(result.requests for result in rounds),
        errors=dict(sum((Counter(result.errors) for result in rounds), Counter())),
        output_tokens=round(median(result.output_tokens for result in rounds)),
        ttft_samples_ms=list(thinned(samples)),
        processes=[_process(process["role"], rounds) for process in first.processes],
        rounds=len(rounds),
    )


def _kind(target: str) -> str:
    """Return the server that a target needs; a target without one is its own kind."""
    return DRIVERS[target].server or target


def _process(role: str, rounds: Sequence[Result]) -> dict[str, Any]:
    """Median CPU seconds and the most memory of a role."""
    of_role = [
        process for result in rounds for process in result.processes if process["role"] == role
    ]
    most = {
        name: max((process[name] for process in of_role if process[name] is not None), default=None)
        for name in ("rss_mb", "uss_mb")
    }
    return {"role": role, "cpu_s": median(process["cpu_s"] for process in of_role), **most}


def _median(values: Sequence[Any]) -> Any:
    """Of figures, or of each in statistics; None if one of them is missing."""
    if isinstance(values[0], Mapping):
        return {name: _median([value[name] for value in values]) for name in values[0]}
    return None if None in values else median(values)


def _ratio(value: float, baseline: float) -> float | None:
    return value / baseline if baseline else None


def _difference(value: float | None, baseline: float | None) -> float | None:
    return None if value is None or baseline is None else value - baseline
