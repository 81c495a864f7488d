"""Queue and restarts in Prometheus' text format, on a port of their own; Triton's are of the engine."""

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
    """The metrics of one deployment."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._queued = Histogram(
            "cog_triton_queue_seconds",
            "Seconds that requests waited for a slot.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._requests = Counter(
            "cog_triton_requests",
            "Requests, by their outcome at the queue.",
            ["outcome"],
            registry=self.registry,
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Count a request that was admitted or refused, and its wait if it had one."""
        self._requests.labels(outcome).inc()
        if outcome in ("admitted", "late"):
            self._queued.observe(seconds)

    def watch(self, admission: Admission, restarts: Callable[[], int]) -> None:
        """Count an admission's requests; read the gauges when the metrics are."""
        admission.observers.append(self.observe)
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("requests_running", "Requests that have a slot.", lambda: admission.running),
            ("requests_waiting", "Requests that wait for one.", lambda: admission.waiting),
            ("restarts", "Restarts of tritonserver.", restarts),
        ]
        for name, text, value in gauges:
            Gauge(f"cog_triton_{name}", text, registry=self.registry).set_function(value)

    @contextlib.contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serve ``/metrics``; yield the port.

        Raises:
            ConfigurationError: the port cannot be listened on.
        """
        try:
            listener = bound(host, port)
            listener.listen()
        except OSError as error:
            raise ConfigurationError(
                f"PREDICTOR_METRICS_PORT={port}: cannot listen on {host}:{port} ({error.strerror})"
            ) from None
        limits = Limits(body_bytes=0, request_seconds=10.0)
        server = Server(Config(make_asgi_app(self.registry), limits))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
