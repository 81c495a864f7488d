"""OpenAI's API as `make openai` runs it, for the tests."""

import json
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.support import CogServer, Server, limit, server_sent_events

if TYPE_CHECKING:
    from typing_extensions import Self

QUESTION = "What is machine learning?"
ANSWER = "Machine learning is"  # how the demo model's begins
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class OpenAIServer(Server):
    """A real server on free ports."""

    script = "serve_openai.py"

    def __enter__(self) -> "Self":
        super().__enter__()
        try:
            self.wait_for_line("ready: http")
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def kill_all(self) -> None:
        process = psutil.Process(self.process.pid)
        process.suspend()  # first, so that it starts no other part
        parts = [process, *process.children(recursive=True)]
        for part in parts:
            part.suspend()
        for part in parts:
            part.kill()
        self.process.wait(limit(60))
        psutil.wait_procs(parts, 60)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=limit(60), **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, trust_env=False, timeout=limit(60), **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(**fields))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "demo", "prompt": "Hello", **fields})

    def stream(self, **fields: Any) -> AbstractContextManager[Iterator[Any]]:
        return streamed_chat(self.url, **fields)


class OpenAIBesideCog(OpenAIServer):
    """OpenAI's API of a Cog server that has OPENAI_PORT, which starts and ends with that server."""

    def __init__(self, cog: CogServer) -> None:
        self.port = int(cog.environment["OPENAI_PORT"])
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.metrics_port = cog.metrics_port
        self.engine = cog.engine
        self.environment = cog.environment
        self.log = cog.log
        self.process = cog.process


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, **fields}


@contextmanager
def streamed_chat(url: str, **fields: Any) -> Iterator[Iterator[Any]]:
    """The events of a chat; each as its object, and the text [DONE]."""
    body, url = chat_body(stream=True, **fields), f"{url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=limit(60)) as reply:
        assert reply.status_code == 200, reply.read()
        data = (data for _, data in server_sent_events(reply))
        yield ("[DONE]" if text.strip() == b"[DONE]" else json.loads(text) for text in data)


def contents(events: Iterator[Any]) -> str:
    """The text of a stream's first choice."""
    text = ""
    for event in events:
        if event == "[DONE]":
            continue
        assert "choices" in event, f"an event of an error: {event}"
        text += event["choices"][0]["delta"].get("content") or ""
    return text
