"""The embedded engine's counters, beside Triton's own on its metrics endpoint."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from cog_triton.engines.serving import Serving

PERIOD_SECONDS = 0.05  # a change of a metric is a round trip to Triton: never per token


class EngineMetrics:
    """Reports a ``Serving``'s counters as

    - cog_triton_engine_tokens{kind="generated" | "served"}, counters,
    - cog_triton_engine_requests{outcome="finished" | "stopped" | "failed"}, counters,
    - cog_triton_engine_active_requests, a gauge of those that run or wait.
    """

    def __init__(self, serving: Serving, pb_utils: Any) -> None:
        self._serving = serving
        self._values: dict[str, float] = {}
        family = pb_utils.MetricFamily
        self._families = [
            family("cog_triton_engine_tokens", "Tokens by what happened to them", family.COUNTER),
            family("cog_triton_engine_requests", "Requests by how they ended", family.COUNTER),
            family("cog_triton_engine_active_requests", "Requests that run or wait", family.GAUGE),
        ]
        tokens, requests, active = self._families
        self._metrics = {
            "generated": tokens.Metric(labels={"kind": "generated"}),
            "served": tokens.Metric(labels={"kind": "served"}),
            "finished": requests.Metric(labels={"outcome": "finished"}),
            "stopped": requests.Metric(labels={"outcome": "stopped"}),
            "failed": requests.Metric(labels={"outcome": "failed"}),
            "active": active.Metric(labels={}),
        }
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reports a last time and stops."""
        self._closed.set()
        self._thread.join()
        # While the stub still has its shared memory: a metric that it drops later ends it by a segfault.
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_SECONDS):
            self._report()

    def _report(self) -> None:
        active = self._serving.active()  # first: where it is 0, the counts are complete
        now = {**asdict(self._serving.counters), "active": active}
        for name, value in now.items():
            before = self._values.get(name, 0)
            if value == before:
                continue
            if name == "active":
                self._metrics[name].set(value)
            else:
                self._metrics[name].increment(value - before)
            self._values[name] = value
