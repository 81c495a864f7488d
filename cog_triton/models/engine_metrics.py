"""The figures of an embedded engine, on Triton's metrics endpoint."""

import logging
import threading
from typing import Any

from cog_triton.engines.serving import Serving
from cog_triton.models import stub

logger = logging.getLogger(__name__)

# The change of a metric is a round trip to Triton.
SECONDS = 0.05
PREFIX = "cog_triton_engine_"


class EngineMetrics:
    """Reports the figures of an engine from a thread of its own."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._report, name="engine-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _report(self) -> None:
        """Report until the end.

        The metrics are a local variable, which is dropped as this returns, while the stub still has its
        shared memory: a metric that is dropped later ends the stub by a segmentation fault.
        """
        metrics = _Metrics()
        reported = dict.fromkeys(metrics.by_figure, 0)
        while not self._closed.wait(SECONDS):
            # The active requests are read first: when there are none, the other figures are complete.
            figures = {"active": len(self._serving.engine.running), **self._serving.counters}
            for name, metric in metrics.by_figure.items():
                change = figures[name] - reported[name]
                if not change:
                    continue
                try:
                    metric.increment(change)
                except Exception:
                    # The next report has the difference.
                    logger.exception("the metric %s could not be reported", name)
                else:
                    reported[name] = figures[name]


class _Metrics:
    """Triton's metrics by the names of the figures. It keeps their families: without one, they end."""

    def __init__(self) -> None:
        family = stub.pb_utils.MetricFamily
        self._active = family(
            f"{PREFIX}active_requests", "Running and waiting requests", family.GAUGE
        )
        self._tokens = family(f"{PREFIX}tokens", "Tokens generated and tokens sent", family.COUNTER)
        self._requests = family(
            f"{PREFIX}requests", "Finished requests, by outcome", family.COUNTER
        )
        self.by_figure: dict[str, Any] = {"active": self._active.Metric(labels={})}
        for kind in ("generated", "served"):
            self.by_figure[kind] = self._tokens.Metric(labels={"kind": kind})
        for outcome in ("finished", "stopped", "failed"):
            self.by_figure[outcome] = self._requests.Metric(labels={"outcome": outcome})
