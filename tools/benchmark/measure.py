"""Loads on targets, one target after another or in turns, and what each took beside the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from tools.benchmark.generator import Generator, Record
from tools.benchmark.load import Load, plan
from tools.benchmark.processes import LOAD_GENERATOR, Watch
from tools.benchmark.report import Result, medians, result
from tools.benchmark.targets import Endpoints
from tools.benchmark.triton_targets import TARGETS, load_tokenizer

Say = Callable[[str], object]
Start = Callable[[str, ExitStack], Endpoints]


class Session:
    """The load generators of one target, for any number of loads until the end of the context."""

    def __init__(self, endpoints: Endpoints, target: str, loads: Sequence[Load]) -> None:
        self._endpoints, self._target = endpoints, target
        self._tokenizer = load_tokenizer(endpoints.tokenizer)
        self._count = max(
            min(load.generators, load.concurrency or load.generators) for load in loads
        )
        self._load = loads[0]
        self._cleanup = ExitStack()

    def __enter__(self) -> Session:
        with ExitStack() as cleanup:
            self._generators = [
                cleanup.enter_context(Generator(self._target, self._endpoints, self._load))
                for _ in range(self._count)
            ]
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def measure(self, load: Load, turn: int = 0, *, warm_up: bool = True) -> Result:
        """Put a load on the target. Raises ``BenchmarkError``."""
        shares = plan(load, self._tokenizer, turn)
        generators = self._generators[: len(shares)]
        for generator, share in zip(generators, shares, strict=True):
            generator.send((share if warm_up else replace(share, warmup=[]), load.timeout))
        for generator in generators:
            generator.read()  # ready
        server = TARGETS[self._target].server
        pids = [generator.pid for generator in generators]
        watched = self._endpoints.pids if server else ()
        watch = Watch(watched, pids, role=LOAD_GENERATOR if server else self._target)
        for generator in generators:
            generator.send("go")
        for generator in generators:
            generator.read()  # done
        usages = watch.stop()
        reports = [generator.read() for generator in generators]
        records: list[Record] = [record for found, _ in reports for record in found]
        return result(self._target, load, records, usages, [cpu_s for _, cpu_s in reports])


def measure(endpoints: Endpoints, target: str, load: Load) -> Result:
    """Put one load on one target. May be called by several threads at once."""
    with Session(endpoints, target, [load]) as session:
        return session.measure(load)


def run_loads(
    targets: Sequence[str],
    baselines: Sequence[str],
    loads: Sequence[Load],
    start: Start,
    progress: Say,
) -> list[Result]:
    """Put every load on every target; return the results in the order of the targets.

    One server runs at a time, and each target has all its loads one after another. If the loads have
    several rounds, all servers run at once and the targets take turns: figures of a machine at
    different times say little, and the ratios within a round say more.

    Args:
        start: starts what a target needs, see ``servers.started``, until the stack ends.

    Raises:
        CogTritonError, BenchmarkError: something could not be started or measured.
    """
    in_turns = any(load.rounds > 1 for load in loads)
    kinds = {target: TARGETS[target].server or target for target in targets}
    found: list[dict[str, list[Result]]] = [{} for _ in loads]
    together = [list(targets)] if in_turns else [[target] for target in targets]
    with ExitStack() as servers:
        running: dict[str, Endpoints] = {}
        for part in together:
            if not in_turns and kinds[part[0]] not in running:
                servers.close()  # the one before
                running.clear()
            for kind in dict.fromkeys(kinds[target] for target in part):
                if kind not in running:
                    running[kind] = start(kind, servers)
            with ExitStack() as generators:
                sessions = {
                    target: generators.enter_context(Session(running[kinds[target]], target, loads))
                    for target in part
                }
                _take_turns(sessions, loads, found, progress)
    results = [one for rounds in found for one in compared(rounds, baselines)]
    return sorted(results, key=lambda one: targets.index(one.target))


def _take_turns(
    sessions: Mapping[str, Session],
    loads: Sequence[Load],
    found: Sequence[dict[str, list[Result]]],
    progress: Say,
) -> None:
    """Add the rounds of each load. The order is turned round each time; each turn has its prompts."""
    turn = 0
    for load, rounds in zip(loads, found, strict=True):
        for number in range(load.rounds):
            for target in list(sessions) if number % 2 == 0 else list(sessions)[::-1]:
                one = sessions[target].measure(load, turn, warm_up=number == 0)
                rounds.setdefault(target, []).append(one)
                name = f"{target} {load.name}"
                name += f", round {number + 1}" if load.rounds > 1 else ""
                progress(f"{name}: {one.output_tokens_per_s:.0f} tokens/s")
                turn += load.rounds > 1
        turn += load.rounds == 1  # targets that run one after another get the same prompts


def compared(rounds: Mapping[str, Sequence[Result]], baselines: Sequence[str]) -> list[Result]:
    """Return the medians of each target's rounds, and those of the ratios within a round."""
    results = []
    for target, own in rounds.items():
        one = replace(medians(own), baseline=target in baselines)
        for baseline in baselines:
            if baseline == target or baseline not in rounds:
                continue
            pairs = list(zip(own, rounds[baseline], strict=True))
            if all(b.output_tokens_per_s for _, b in pairs):
                ratios = [a.output_tokens_per_s / b.output_tokens_per_s for a, b in pairs]
                one.ratio_to_baseline[baseline] = median(ratios)
            if all(b.cpu_s for _, b in pairs):
                one.cpu_ratio_to_baseline[baseline] = median([a.cpu_s / b.cpu_s for a, b in pairs])
            firsts = [(a.ttft_ms["p50"], b.ttft_ms["p50"]) for a, b in pairs]
            added = [a - b for a, b in firsts if a is not None and b is not None]
            if len(added) == len(pairs):
                one.ttft_p50_added_ms[baseline] = median(added)
        results.append(one)
    return results
