"""The OpenAI face as `make openai` runs it, for the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support import ROOT, START_TIMEOUT, EngineCounters, free_port, wait_until

MESSAGES: Any = [{"role": "user", "content": "What is machine learning?"}]


class OpenAIServer:
    """A real server on free ports."""

    def __init__(self, environment: dict[str, str], log: Path, *arguments: str) -> None:
        self.port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = EngineCounters(f"127.0.0.1:{metrics_port}")
        self.log = log
        self._arguments = arguments
        self._environment = {
            **os.environ,
            "TRITON_HTTP_PORT": "0",
            "TRITON_GRPC_PORT": "0",
            "TRITON_METRICS_PORT": str(metrics_port),
            **environment,
        }

    def __enter__(self) -> OpenAIServer:
        script = str(ROOT / "scripts" / "serve_openai.py")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, script, "--port", str(self.port), *self._arguments],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(self._is_ready, START_TIMEOUT, "the start of the OpenAI face")
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ends it; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout=60)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=60, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, trust_env=False, timeout=60, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "demo", "prompt": "Hello", **fields})

    def stream(self, **fields: Any) -> AbstractContextManager[Iterator[Any]]:
        return streamed_chat(self.url, **fields)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return "ready: http" in self.log.read_text()


@contextmanager
def streamed_chat(url: str, **fields: Any) -> Iterator[Iterator[Any]]:
    """The events of a chat; each as its object, and the text [DONE]."""
    body = {"model": "demo", "messages": MESSAGES, "stream": True, **fields}
    url = f"{url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        yield (_event(line) for line in reply.iter_lines() if line)


def _event(line: str) -> Any:
    assert line.startswith("data: ")
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def contents(events: Iterator[Any]) -> str:
    """The text of a stream's first choice."""
    deltas = [event["choices"][0]["delta"] for event in events if event != "[DONE]"]
    return "".join(delta.get("content") or "" for delta in deltas)
