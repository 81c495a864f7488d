"""Dynamo's frontend with our workers on one machine: answers, guides, kills, a full queue and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.adapters import make_adapter
from tests.integration.conftest import Triton
from tests.support import ROOT, START_TIMEOUT, children, free_port, limit, processes, wait_until

pytest.importorskip("dynamo.common.backend", reason="Dynamo is not installed: make test-dynamo")
pytestmark = pytest.mark.rare

PROMPT = "What is a KV cache?"
STREAMS = 12
SECONDS = 120.0
MOVED = "migration retry scheduled"  # in the frontend's log
LONG = {"max_tokens": 600, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
TOPIC = {
    "type": "object",
    "properties": {"topic": {"enum": ["training", "inference"]}},
    "required": ["topic"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "topic", "schema": TOPIC}}


@dataclass
class Scaled:
    """``cog-triton scale``: a frontend and workers."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "worker" in child.cmdline()]

    def tritons(self, worker: psutil.Process) -> list[psutil.Process]:
        return [one for one in worker.children(recursive=True) if one.name() == "tritonserver"]

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        asked = {"model": "demo", "temperature": 0, **body}
        return httpx.post(f"{self.url}{path}", json=asked, timeout=SECONDS, trust_env=False)

    def text(self, **body: Any) -> str:
        answer = self.post(prompt=PROMPT, **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@contextlib.contextmanager
def scale(directory: Path, **settings: str) -> Iterator[Scaled]:
    log, port = directory / "log", free_port()
    command = [str(Path(sys.executable).with_name("cog-triton")), "scale", "--port", str(port)]
    patient = {"ENGINE": "transformers", "RESUME_TIMEOUT": "300"}  # a busy machine starts slowly
    environment = {**os.environ, **patient, **settings}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        server = Scaled(process, f"http://127.0.0.1:{port}", log)
        try:
            ready = f"ready: {server.url}".encode()
            wait_until(lambda: ready in log.read_bytes() or process.poll(), START_TIMEOUT, "start")
            assert process.poll() is None, log.read_text()
            assert serving(server.url), "ready before both workers were"
            yield server
        finally:
            process.terminate()
            try:
                assert process.wait(limit(60)) == 0, log.read_text()[-3000:]
            finally:
                process.kill()


@pytest.fixture(scope="module")
def scaled(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    directory = tmp_path_factory.mktemp("scale")
    adapters = make_adapter(demo_model, directory / "adapters" / "tuned").parent
    settings = {"MODEL": str(demo_model), "LORA_DIR": str(adapters)}
    settings["DYN_FILE_KV"] = str(directory / "discovery")
    with scale(directory, DYN_TOOL_CALL_PARSER="hermes", **settings) as server:
        yield server


def test_an_answer_and_its_usage(scaled: Scaled) -> None:
    body = scaled.post(prompt=PROMPT, max_tokens=20).json()
    assert body["choices"][0]["text"].startswith("A KV cache keeps the attention keys")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26}


def test_the_frontend_has_what_the_chart_asks_of_it(scaled: Scaled) -> None:
    """deploy/helm: probes, and the metric that scales."""
    for path in ("/health", "/live"):
        assert httpx.get(f"{scaled.url}{path}", trust_env=False).status_code == 200
    assert scaled.text(max_tokens=1)
    figures = httpx.get(f"{scaled.url}/metrics", trust_env=False).text
    helpers = (ROOT / "deploy/helm/templates/_helpers.tpl").read_text()
    (metric,) = re.findall(r'"dynamo" "(\w+)"\s', helpers)
    assert f"# TYPE {metric} gauge" in figures


def test_stop_strings_seeds_and_least_tokens(scaled: Scaled) -> None:
    assert scaled.text(stop=["attention"]) == "A KV cache keeps the "
    sampled = {"temperature": 1.9, "max_tokens": 40}
    assert scaled.text(**sampled, seed=5) == scaled.text(**sampled, seed=5)
    assert scaled.text(**sampled, seed=5) != scaled.text(**sampled, seed=6)
    usage = scaled.post(prompt="Hello", min_tokens=60, max_tokens=80).json()["usage"]
    assert usage["completion_tokens"] >= 60


def test_log_probabilities_of_a_chat(scaled: Scaled) -> None:
    asked = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    body = scaled.post("/v1/chat/completions", **CHAT, **asked).json()
    tokens = body["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in tokens] == ["A", " KV", " cache"]
    for token in tokens:
        assert token["top_logprobs"][0]["logprob"] == pytest.approx(token["logprob"])
        assert len(token["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"response_format": FORM}, r'\{\s*"topic"\s*:\s*"(training|inference)"\s*\}'),
        ({"guided_json": {"enum": ["training"]}}, '"training"'),
        ({"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
        ({"guided_choice": ["training", "inference"]}, "training|inference"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ],
)
def test_a_guide(scaled: Scaled, guide: dict[str, Any], pattern: str) -> None:
    answer = scaled.post("/v1/chat/completions", **CHAT, **guide)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, content), content


def test_an_adapter_is_a_model_of_its_name(scaled: Scaled) -> None:
    listed = httpx.get(f"{scaled.url}/v1/models", trust_env=False).json()["data"]
    assert {model["id"] for model in listed} == {"demo", "tuned"}
    plain, tuned = scaled.text(max_tokens=20), scaled.text(max_tokens=20, model="tuned")
    assert plain != tuned
    assert scaled.text(max_tokens=20, model="tuned") == tuned  # on the other worker


def test_a_tool_is_called(scaled: Scaled) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "look_up", "parameters": TOPIC}}]}
    chosen = {"tool_choice": {"type": "function", "function": {"name": "look_up"}}}
    choice = scaled.post("/v1/chat/completions", **CHAT, **tools, **chosen).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    called = choice["message"]["tool_calls"][0]["function"]
    assert called["name"] == "look_up"
    assert json.loads(called["arguments"])["topic"] in ("training", "inference")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": PROMPT, "n": 2, "temperature": 1}, "E1103 InvalidParameter: n must be 1"),
        ({"prompt": f"{PROMPT} " * 600}, "E1002 PromptTooLong: the prompt has"),
        ({"prompt": PROMPT, "n": 2, "temperature": 1, "stream": True}, "n must be 1, not 2"),
    ],
)
def test_a_refusal_is_the_clients(scaled: Scaled, body: dict[str, Any], text: str) -> None:
    answer = scaled.post(**body)
    assert answer.status_code == 400
    assert text in answer.text


@contextlib.contextmanager
def frontend(discovery: Path, *options: str, workers: int) -> Iterator[str]:
    """A further frontend, once it lists so many workers."""
    host, port = "127.0.0.1", str(free_port())
    command = [sys.executable, "-m", "dynamo.frontend", "--http-host", host, "--http-port", port]
    command += ["--discovery-backend", "file", "--event-plane", "zmq", *options]
    own = dict.fromkeys(("DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), host)
    own |= {"DYN_FILE_KV": str(discovery), "DYN_LOG": "error"}
    process = subprocess.Popen(command, env={**os.environ, **own})
    try:
        url = f"http://{host}:{port}"
        wait_until(lambda: serving(url, workers), START_TIMEOUT, "the workers of a frontend")
        yield url
    finally:
        process.terminate()
        process.wait(limit(60))


def router(scaled: Scaled, *options: str) -> contextlib.AbstractContextManager[str]:
    """A further frontend, which routes by KV cache."""
    discovery = scaled.log.parent / "discovery"
    return frontend(discovery, "--router-mode", "kv", *options, workers=2)


def serving(url: str, workers: int = 2) -> bool:
    """Ask a frontend if it lists so many workers, and the model."""
    with contextlib.suppress(httpx.TransportError, KeyError):
        instances = httpx.get(f"{url}/health", trust_env=False).json()["instances"]
        models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        return bool(models) and sum(one["endpoint"] == "generate" for one in instances) == workers
    return False


def test_a_router_finds_what_was_cached_before_it_came(scaled: Scaled) -> None:
    """By the workers' events; without them it has to guess."""
    prompts = [f"{number}: {PROMPT * 20}" for number in range(24)]

    def worker(url: str, prompt: str, **extra: list[str]) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "nvext": extra}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS, trust_env=False)
        return int(answer.json()["nvext"]["worker_id"]["decode_worker_id"])

    def hits(url: str) -> int:
        chosen = [worker(url, one, annotations=["query_instance_id:"]) for one in prompts]
        return sum(map(int.__eq__, homes, chosen))

    homes = [worker(scaled.url, prompt, extra_fields=["worker_id"]) for prompt in prompts]
    assert len({*homes}) == 2
    with router(scaled) as told, router(scaled, "--no-router-kv-events") as guessing:
        wait_until(lambda: hits(told) == len(prompts), START_TIMEOUT, "a router that knows")
        assert hits(guessing) < len(prompts)


def requests() -> list[dict[str, Any]]:
    """Greedy, seeded and penalized ones in turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "seed": 7},
        {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    ]
    return [{"prompt": f"{PROMPT} {i}", **LONG, **kinds[i % 3]} for i in range(STREAMS)]


class Failed(Exception):
    """Say how a stream ended without its answer."""


async def streamed(url: str, body: dict[str, Any], began: asyncio.Event) -> str:
    """Return the text of a stream; set ``began`` once there is some."""
    text = ""
    asked = {"model": "demo", "stream": True, **body}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=SECONDS) as client,
        client.stream("POST", f"{url}/v1/completions", json=asked) as response,
    ):
        if response.status_code != 200:
            raise Failed(response.status_code)
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event or "choices" not in event:
                    raise Failed(event)
                text += "".join(choice["text"] or "" for choice in event["choices"])
                began.set()
    return text


async def texts(asked: list[tuple[str, dict[str, Any]]], harm: Callable[[], object]) -> list[str]:
    """Return the texts of streams of these frontends, harmed once half of them have begun."""
    began = [asyncio.Event() for _ in asked]
    answers = asyncio.gather(*(streamed(*one, b) for one, b in zip(asked, began, strict=True)))
    while not answers.done() and 2 * sum(event.is_set() for event in began) < len(began):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(harm)
    return await asyncio.wait_for(answers, SECONDS)


def under_load(
    scaled: Scaled, victims: list[psutil.Process], number: int, *bodies: dict[str, Any]
) -> list[str]:
    """Return the texts of streams, in whose middle some processes get a signal."""

    def harm() -> None:
        for victim in victims:
            victim.send_signal(number)

    return asyncio.run(texts([(scaled.url, body) for body in bodies or requests()], harm))


GUIDED = {"prompt": PROMPT, "guided_regex": "[a-c]{300}", "max_tokens": 350, "temperature": 0}


@pytest.fixture(scope="module")
def uninterrupted(scaled: Scaled) -> list[str]:
    """Return the texts of all requests, the guided one last."""
    answers = under_load(scaled, [], 0, *requests(), GUIDED)
    assert len(set(answers)) > STREAMS // 2
    assert re.fullmatch("[a-c]{300}", answers[-1])
    return answers


def test_no_stream_is_lost_with_the_tritonservers(scaled: Scaled, uninterrupted: list[str]) -> None:
    """A guided stream, which Dynamo does not move, continues as well."""
    victims = [one for worker in scaled.workers() for one in scaled.tritons(worker)]
    assert len(victims) == 2
    assert under_load(scaled, victims, signal.SIGKILL, *requests(), GUIDED) == uninterrupted
    assert MOVED not in scaled.log.read_text()


def test_no_stream_is_lost_with_a_worker(scaled: Scaled, uninterrupted: list[str]) -> None:
    """New requests do not meet it either: it leaves the list before another takes its place."""
    ended = threading.Event()

    def ask() -> set[int]:
        statuses = set()
        while not ended.is_set():
            statuses.add(scaled.post(prompt=PROMPT, max_tokens=4).status_code)
        return statuses

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        left = lambda: serving(scaled.url, 1)  # noqa: E731
        leaving = pool.submit(wait_until, left, START_TIMEOUT, "a list without the killed worker")
        try:
            answers = under_load(scaled, scaled.workers()[:1], signal.SIGKILL)
        finally:
            ended.set()
        assert {status for one in asking for status in one.result()} == {200}
        leaving.result()
    assert answers == uninterrupted[:STREAMS]
    assert MOVED in scaled.log.read_text()
    wait_until(lambda: serving(scaled.url), START_TIMEOUT, "two workers again")


def test_no_stream_moves_from_a_worker_told_to_stop(
    scaled: Scaled, uninterrupted: list[str]
) -> None:
    before = scaled.log.read_text().count(MOVED)
    assert under_load(scaled, scaled.workers()[:1], signal.SIGTERM) == uninterrupted[:STREAMS]
    assert scaled.log.read_text().count(MOVED) == before


def test_a_full_queue_and_no_worker_left(demo_model: Path, tmp_path: Path) -> None:
    """Two workers with room for one request each."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200}
    settings = {"MODEL": str(demo_model), "ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "20"}
    settings["TRITON_RESTARTS"] = "0"

    async def two_run_and_two_come(scaled: Scaled) -> None:
        began = [asyncio.Event() for _ in range(2)]
        running = asyncio.gather(*(streamed(scaled.url, body, event) for event in began))
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in began)), SECONDS)
        posts = (asyncio.to_thread(scaled.post, **body, stream=one) for one in (False, True))
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [503, 503]
        first, second = await running
        assert first == second != ""

    with scale(tmp_path, MAX_RUNNING="1", MAX_WAITING="0", **settings) as scaled:
        asyncio.run(two_run_and_two_come(scaled))
        # Dynamo takes a worker that was full for a dead one, for five seconds.
        free = lambda: scaled.post(prompt=PROMPT, max_tokens=1).status_code == 200  # noqa: E731
        wait_until(free, SECONDS, "a worker with room")
        # A worker whose Triton has been given up (TRITON_RESTARTS) ends. `scale`
        # is stopped meanwhile: it would start another, and the stream would continue there.
        workers = scaled.workers()
        victims = [workers[0], *scaled.tritons(workers[1])]
        scaled.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(Failed, match="unavailable"):
                under_load(scaled, victims, signal.SIGKILL, body | LONG)
        finally:
            scaled.process.send_signal(signal.SIGCONT)
        assert not psutil.wait_procs(workers, START_TIMEOUT)[1]


def test_a_worker_of_a_triton_that_runs_already(
    triton: Triton, demo_model: Path, tmp_path: Path
) -> None:
    """Its Triton keeps running after the worker has ended."""
    discovery = tmp_path / "discovery"
    program = str(Path(sys.executable).with_name("cog-triton"))
    options = ["--triton", triton.endpoints.grpc, "--discovery-backend", "file"]
    own = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1")
    own |= {"DYN_FILE_KV": str(discovery), "MODEL": str(demo_model)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [program, "worker", *options], env={**os.environ, **own}, stdout=output, stderr=output
        )
    try:
        with frontend(discovery, workers=1) as url:
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            answer = httpx.post(
                f"{url}/v1/completions", json=body, timeout=SECONDS, trust_env=False
            )
            text = answer.json()["choices"][0]["text"]
            assert text.startswith("A KV cache keeps the attention keys"), answer.text
            assert not {*children(worker.pid)} & {*processes("tritonserver")}
            worker.terminate()
            assert worker.wait(limit(60)) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()
    assert triton.is_ready()
