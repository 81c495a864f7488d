"""deploy/prometheus, by a real Prometheus, and the trace of a request, by a collector."""

import base64
import json
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from google.protobuf.json_format import MessageToDict

from tests import support
from tests.openai_server import chat_body
from tests.support import ROOT, START_TIMEOUT, CogServer, free_port, wait_until

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="apt-get install prometheus"),
]
DEPLOY = ROOT / "deploy" / "prometheus"
NO_GPU = shutil.which("nvidia-smi") is None
PACE_MS = 10
TOKENS = 20


class DynamoWorker(support.Server):
    """Without a frontend; on a port of its own metrics and one of Dynamo's."""

    script = ""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        hosts = ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE", "SYSTEM")
        super().__init__({f"DYN_{name}_HOST": "127.0.0.1" for name in hosts} | environment, log)
        program = str(Path(sys.executable).with_name("cog-triton"))
        self.command = [program, "worker", "--discovery-backend", "file"]


class Prometheus(support.Server):
    """Debian's, on deploy/prometheus with the ports of this test."""

    script = ""

    def __init__(self, targets: dict[str, list[int]], directory: Path) -> None:
        super().__init__({}, directory / "prometheus.log")
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        jobs = {job["job_name"]: job for job in config["scrape_configs"]}
        config["scrape_configs"] = [jobs[name] for name in targets]
        for name, ports in targets.items():
            jobs[name]["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
            jobs[name].pop("authorization", None)
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.command = ["prometheus", f"--config.file={directory / 'prometheus.yml'}"]
        self.command += [f"--storage.tsdb.path={directory}", f"--web.listen-address={self.address}"]

    def ask(self, path: str, **parameters: str) -> Any:
        try:
            reply = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, trust_env=False)
            return reply.json()["data"]
        except (httpx.TransportError, ValueError, KeyError):  # not ready yet
            return {}

    def values(self, query: str) -> list[float]:
        """The present values of a query, but those that are no numbers."""
        samples = self.ask("query", query=query).get("result", [])
        values = [float(sample["value"][1]) for sample in samples]
        return [value for value in values if value == value]


class Watched:
    """Cog's server with OpenAI's API beside it, a Prometheus, and what a collector got."""

    def __init__(self, model: Path, directory: Path, stack: ExitStack) -> None:
        own, openai, received = free_port(), free_port(), []

        class Collector(support.QuietHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

        engine = {
            "MODEL": str(model),
            "ENGINE": "simulated",
            "SIMULATED_INTER_TOKEN_MS": str(PACE_MS),
            "NO_PROXY": "127.0.0.1",
        }
        environment = {
            **engine,
            "PREDICTOR_METRICS_PORT": str(own),
            "OPENAI_PORT": str(openai),
            "OPENAI_OPEN_METRICS": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(support.http_server(Collector)),
        }
        self.cog = stack.enter_context(CogServer(environment, directory / "cog.log"))
        self.openai, self._received = f"http://127.0.0.1:{openai}/v1/chat/completions", received
        targets = {"cog-triton": [own], "cog-triton-openai": [openai]}
        targets["triton"] = [self.cog.metrics_port]
        if find_spec("dynamo"):
            own, dynamos = free_port(), free_port()
            engine |= {"DYN_FILE_KV": str(directory), "DYN_SYSTEM_PORT": str(dynamos)}
            engine["PREDICTOR_METRICS_PORT"] = str(own)
            stack.enter_context(DynamoWorker(engine, directory / "worker.log"))
            targets["cog-triton"].append(own)
            targets["dynamo"] = [dynamos]
        self.cog.wait_until_ready()
        self.prometheus = stack.enter_context(Prometheus(targets, directory))

    def load(self) -> None:
        """Answers through both APIs, and a refusal; then a scrape."""
        for model, status in (("demo", 200), ("none", 404)):
            body = chat_body(max_tokens=TOKENS, model=model)
            assert httpx.post(self.openai, json=body, trust_env=False).status_code == status
        assert self.cog.predict(prompt="Hello", max_tokens=TOKENS)["status"] == "succeeded"
        after = f"min(timestamp(up)) > {time.time()}"
        wait_until(partial(self.prometheus.values, after), 60, "a scrape after the load")

    def spans(self, trace: str) -> dict[str, dict[str, Any]]:
        """The spans of a trace by their ids; Triton sends JSON."""
        found = []
        for body in self._received:
            if body.startswith(b"{"):
                found += spans_of(json.loads(body))
                continue
            message = trace_service.ExportTraceServiceRequest.FromString(body)
            for span in spans_of(MessageToDict(message)):
                ids = {name: text for name, text in span.items() if name.endswith("Id")}
                found.append(span | {n: base64.b64decode(t).hex() for n, t in ids.items()})
        return {span["spanId"]: span for span in found if span["traceId"] == trace}


def spans_of(export: dict[str, Any]) -> list[dict[str, Any]]:
    scopes = [scope for part in export["resourceSpans"] for scope in part["scopeSpans"]]
    return [span for scope in scopes for span in scope["spans"]]


@pytest.fixture(scope="module")
def watched(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(demo_model, tmp_path_factory.mktemp("watched"), stack)


def test_every_target_is_up_and_what_dashboards_and_alerts_ask_is_there(watched: Watched) -> None:
    prometheus = watched.prometheus

    def all_up() -> bool:
        targets = prometheus.ask("targets").get("activeTargets", [])
        return bool(targets) and all(target["health"] == "up" for target in targets)

    wait_until(all_up, START_TIMEOUT, "every target up")
    for _ in range(2):  # a rate needs the count before and after
        watched.load()
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    alerts = (DEPLOY / "alerts.yml").read_text()
    queries += set(re.findall(r"\b(?:cog_triton_|nv_|vllm:)\w+", alerts))
    empty = [one for one in queries if not prometheus.values(one.replace("$__rate_interval", "1m"))]
    assert [one for one in empty if not (NO_GPU and "nv_gpu_" in one)] == []
    (group,) = prometheus.ask("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert prometheus.values('ALERTS{alertstate="firing"}') == []


@pytest.mark.parametrize("arguments", ["check rules alerts.yml", "test rules alerts_test.yml"])
def test_promtool(arguments: str) -> None:
    command = ["promtool", *arguments.split()]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("api", ["cog", "openai"])
def test_a_trace_goes_from_the_client_to_the_engine(watched: Watched, api: str) -> None:
    trace, client = secrets.token_hex(16), secrets.token_hex(8)
    url, body = watched.openai, chat_body(max_tokens=TOKENS)
    if api == "cog":
        asked = {"prompt": "Hello", "max_tokens": TOKENS}
        url, body = f"{watched.cog.url}/predictions", {"input": asked}
    headers = {"traceparent": f"00-{trace}-{client}-01"}
    assert httpx.post(url, json=body, headers=headers, trust_env=False).status_code == 200

    def path(name: str) -> list[str]:
        """The names of a span and those above it, once they have come up to the client's."""
        spans = watched.spans(trace)
        above = next((one["spanId"] for one in spans.values() if one["name"] == name), "")
        names = []
        while above in spans:
            names.append(spans[above]["name"])
            above = spans[above].get("parentSpanId", "")
        return names if above == client else []

    below = wait_until(partial(path, "generate"), 60, "the API's spans")
    assert below[1:] == ["chat demo"] if api == "openai" else below[1].startswith("cog.")
    for name in ("admission", "triton"):
        assert wait_until(partial(path, name), 30, name) == [name, *below]
    # Triton sends the span of the stream itself, InferRequest, when it likes.
    tritons = {"ensemble_ids", "preprocessing", "tensorrt_llm"}
    wait_until(
        lambda: tritons <= {span["name"] for span in watched.spans(trace).values()}, 30, "Triton's"
    )
    (span,) = (one for one in watched.spans(trace).values() if one["name"] == "triton")
    assert [event["name"] for event in span["events"]] == ["first token"]
    took = int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
    assert took > (TOKENS - 1) * PACE_MS * 1e6
