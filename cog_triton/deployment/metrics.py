"""What a deployment counts, in Prometheus' text format on a port of its own.

Triton's metrics, on its own port, tell of the engine; these tell of what stands in front of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_asgi_app

from cog_triton.errors import ConfigurationError
from cog_triton.request.admission import Admission, Outcome
from cog_triton.web.limits import Limits
from cog_triton.web.server import Config, Server, bound

SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
"""Upper bounds of the classes of waiting times; the first holds those that did not wait."""


class Metrics:
    """The figures of one deployment."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._queued = Histogram(
            "cog_triton_queue_seconds",
            "Seconds that requests waited for a place.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._requests = Counter(
            "cog_triton_requests",
            "Requests, by what became of them at the queue.",
            ["outcome"],
            registry=self.registry,
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Counts a request that has been let in or refused, and its wait if it had one to do."""
        self._requests.labels(outcome).inc()
        if outcome in ("admitted", "late"):
            self._queued.observe(seconds)

    def watch(self, admission: Admission, restarts: Callable[[], int]) -> None:
        """Counts what an admission does, and adds what is asked for when somebody looks."""
        admission.observers.append(self.observe)
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("requests_running", "Requests that have a place.", lambda: admission.running),
            ("requests_waiting", "Requests that wait for one.", lambda: admission.waiting),
            ("restarts", "How often tritonserver was started again.", restarts),
        ]
        for name, text, value in gauges:
            Gauge(f"cog_triton_{name}", text, registry=self.registry).set_function(value)

    @contextlib.contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Answers on ``/metrics`` of a port meanwhile; yields the port.

        Raises:
            ConfigurationError: nothing can listen there.
        """
        try:
            listener = bound(host, port)
            listener.listen()
        except OSError as error:
            raise ConfigurationError(
                f"PREDICTOR_METRICS_PORT={port}: cannot listen on {host}:{port} ({error.strerror})"
            ) from None
        server = Server(
            Config(make_asgi_app(self.registry), Limits(body_bytes=0, request_seconds=10.0))
        )
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
