"""A backend that answers with what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from cog_triton.errors import TritonUnavailable
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.request.admission import Admission, Tenant
from cog_triton.request.limits import TextLimits
from cog_triton.request.request import Request
from cog_triton.settings import read_settings

LAST = Chunk("", 2, 3, "stop")
CHUNKS = (Chunk("a", 1, 3), Chunk("b", 2, 3), LAST)
MESSAGES = [{"role": "user", "content": "Hello"}]


class Tokenizer:
    """As much of one as the face uses; a character is a token."""

    bos_token = "<s>"
    all_special_ids = (0,)

    def __init__(self, template: str = "a template") -> None:
        self.chat_template = template
        self.options: dict[str, Any] = {}  # of the last chat

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        ids = [0] * add_special_tokens + [ord(char) for char in text]
        return type("Encoding", (), {"input_ids": ids})

    def __len__(self) -> int:
        return 0x110000

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.options = options
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class StrictTokenizer(Tokenizer):
    """Takes what is Unicode alone, as those of Hugging Face do."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        text.encode()
        return super().__call__(text, add_special_tokens=add_special_tokens)


class Backend:
    """See ``served.Backend``.

    Attributes:
        asked: the requests that came, with their names.
        open: how many of them are being answered.
        wait: is waited for before each chunk but the first.
    """

    def __init__(
        self, *chunks: Chunk | Exception, template: str = "a template", **environment: str
    ) -> None:
        self.settings = read_settings(environment)
        self.limits = TextLimits()
        self.tokenizer: Any = Tokenizer(template)
        self.context_length: int | None = 64
        self.asked: list[tuple[Request, str | None]] = []
        self.tenants: list[Tenant | None] = []
        self.admission = Admission(9, 9, 60)
        self.open = 0
        self.is_healthy = True
        self.wait: asyncio.Event | None = None
        self._chunks = chunks
        self._tasks: set[asyncio.Task[Any]] = set()

    async def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request, request_id))
        self.tenants.append(tenant)
        self.open += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            for number, chunk in enumerate(self._chunks):
                if self.wait is not None and number:
                    await self.wait.wait()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self._tasks.discard(task)
            self.open -= 1

    def close(self) -> None:
        self._chunks = (TritonUnavailable("send the request again"),)
        if self.wait is not None:
            self.wait.set()

    async def healthy(self) -> bool:
        return self.is_healthy

    async def stop(self) -> None:
        pass


def served(backend: Backend) -> Served:
    return Served(backend, ("m", "other"), created=1)


def ask(backend: Backend, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to the application of a backend, in this process."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(served(backend)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def chat(backend: Backend, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": MESSAGES, **fields}
    return ask(backend, "POST", "/v1/chat/completions", json=body)


def complete(backend: Backend, **fields: Any) -> httpx.Response:
    return ask(backend, "POST", "/v1/completions", json={"model": "m", "prompt": "xy", **fields})


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream's events."""
    assert reply.status_code == 200, reply.text
    *lines, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


THOUGHT_TEXT_AND_CALL = (
    Chunk("<think>Let me", 2, 3),
    Chunk(" see</think>\n\n", 4, 3),
    Chunk("Well.", 5, 3),
    Chunk('\n<tool_call>{"name": "f", "arguments": {"a"', 9, 3),
    Chunk(": 1}}</tool_call>", 12, 3),
    Chunk("", 13, 3, "stop"),
)


def talkative(*chunks: Chunk | Exception) -> Backend:
    """A backend of a model that thinks and calls."""
    return Backend(*(chunks or THOUGHT_TEXT_AND_CALL), template="tools <tool_call> </think>")


def typed_events(text: str) -> list[tuple[str, Any]]:
    """The events of a newer API: their names, and their objects."""
    *blocks, end = text.split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append((value["type"], value))
    return events
