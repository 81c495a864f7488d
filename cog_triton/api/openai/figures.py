"""The figures of an application, by the names of vLLM and in Prometheus' format.

Several processes write their figures to one directory, and any of them answers for all: the multiprocess
mode of prometheus_client, which ``supervisor.Workers`` turns on.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from cog_triton.api.openai.call import Call
from cog_triton.deployment.deployment import queue_metrics
from cog_triton.request.admission import Admission

REFRESH_SECONDS = 1.0
DESCRIPTION = "Same as vLLM's metric of this name."
# Upper bounds of the histograms' buckets, by vLLM's names and with its values.
LATENCY_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000,
)  # fmt: skip
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "inter_token_latency_seconds": (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
    ),
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
        80, 160,
    ),
    "e2e_request_latency_seconds": LATENCY_BUCKETS,
    "request_queue_time_seconds": LATENCY_BUCKETS,
    "request_prompt_tokens": TOKEN_BUCKETS,
    "request_generation_tokens": TOKEN_BUCKETS,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """How many requests run, and how many wait, in all processes."""

    running: int
    waiting: int


class Figures:
    """The figures of calls. Their label is the model's first name, whichever a client asks for."""

    def __init__(self, model: str, admission: Admission, processes: int = 1) -> None:
        self._model = model
        self._admission = admission
        self._processes = processes
        self._registry = queue_metrics(admission)
        self._histograms = {
            name: self._figure(Histogram, name, buckets=buckets)
            for name, buckets in HISTOGRAMS.items()
        }
        self.on_gap = self._histograms["inter_token_latency_seconds"].observe
        self._prompt_tokens = self._figure(Counter, "prompt_tokens")
        self._generated_tokens = self._figure(Counter, "generation_tokens")
        self._running = self._figure(Gauge, "num_requests_running", multiprocess_mode="livesum")
        self._waiting = self._figure(Gauge, "num_requests_waiting", multiprocess_mode="livesum")
        self._success = Counter(
            "vllm:request_success",
            DESCRIPTION,
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._errors = Counter(
            "cog_triton_errors",
            "Requests that failed, by the response's status and the error's code.",
            ["status", "code"],
            registry=self._registry,
        )

    def _figure(self, kind: type[Any], name: str, **options: Any) -> Any:
        """Return a figure of vLLM's with the label of the model."""
        figure = kind(
            f"vllm:{name}", DESCRIPTION, ["model_name"], registry=self._registry, **options
        )
        return figure.labels(self._model)

    def refresh(self) -> None:
        self._running.set(self._admission.running)
        self._waiting.set(self._admission.waiting)

    async def keep_fresh(self) -> None:
        """Refresh until cancelled, for the processes that are asked in place of this one."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    def text(self) -> bytes:
        return generate_latest(self._registry_of_all_processes())

    def load(self) -> Load:
        registry = self._registry_of_all_processes()
        labels = {"model_name": self._model}
        running = registry.get_sample_value("vllm:num_requests_running", labels)
        waiting = registry.get_sample_value("vllm:num_requests_waiting", labels)
        return Load(running=int(running or 0), waiting=int(waiting or 0))

    def _registry_of_all_processes(self) -> CollectorRegistry:
        self.refresh()
        if self._processes == 1:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def on_end(self, call: Call) -> None:
        """Count a call that has ended."""
        if call.status >= 400 or call.error:
            self._errors.labels(str(call.status), call.error).inc()
        if not call.finish_reasons:
            return
        for reason in call.finish_reasons:
            self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(call.input_tokens)
        self._generated_tokens.inc(call.output_tokens)
        if call.batch:  # nobody waits for it
            return
        self._histograms["request_prompt_tokens"].observe(call.input_tokens)
        self._histograms["request_generation_tokens"].observe(call.output_tokens)
        self._histograms["e2e_request_latency_seconds"].observe(call.seconds())
        self._histograms["request_queue_time_seconds"].observe(call.queued)
        if call.first_token is not None:
            self._histograms["time_to_first_token_seconds"].observe(call.first_token)
