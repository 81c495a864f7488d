"""A backend that answers with what it is told to, and requests to the application on it."""

import asyncio
import functools
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from fastapi import FastAPI

from cog_triton.api.openai.app import create_app
from cog_triton.api.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.request.admission import Admission
from cog_triton.request.limits import TextLimits
from cog_triton.request.request import Request
from cog_triton.settings import read_settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
LAST = Chunk("", 2, 3, "stop")
CHUNKS = (Chunk("a", 1, 3), Chunk("b", 2, 3), LAST)
MESSAGES = [{"role": "user", "content": "Hello"}]
# Of every chat, to its template.
ARGUMENTS = ("chat_template", "tokenize", "add_generation_prompt", "continue_final_message")


class Tokenizer:
    """As much of one as OpenAI's API uses; a character is a token. It keeps the last chat's variables."""

    bos_token = "<s>"
    all_special_ids = (0,)

    def __init__(self, template: str) -> None:
        self.chat_template = template
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}  # of which the switches are the user's
        self.switches: dict[str, Any] = {}

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        text.encode()  # those of Hugging Face refuse what is not Unicode
        ids = [0] * add_special_tokens + [ord(char) for char in text]
        return type("Encoding", (), {"input_ids": ids})

    def __len__(self) -> int:
        return 0x110000

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: Any = None, **options: Any
    ) -> str:
        self.messages, self.tools, self.options = messages, tools or [], options
        self.switches = {name: value for name, value in options.items() if name not in ARGUMENTS}
        return "".join(map(self._rendered, messages))

    def _rendered(self, message: dict[str, Any]) -> str:
        calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
        return f"<{message['role']}>{message['content']}{calls}"

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(token) for token in ids]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class Backend:
    """A stand-in for a ``Deployment``.

    Attributes:
        asked: the requests that came, with their names.
        open: how many of them are being answered.
    """

    def __init__(
        self, *chunks: Chunk | Exception, template: str = "a template", **environment: str
    ) -> None:
        self.settings = read_settings({"STORE": "0", **environment})
        self.limits = TextLimits()
        self.tokenizer: Any = Tokenizer(template)
        self.context_length: int | None = 64
        self.draws_seeds = True
        self.sampling_defaults: dict[str, float] = {}
        self.asked: list[tuple[Request, str | None]] = []
        self.tenants: list[Any] = []
        self.admission = Admission(9, 9, 60)
        self.open = 0
        self._chunks = chunks

    async def generate(
        self, request: Request, request_id: str | None = None, *tenant: Any
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request, request_id))
        self.tenants += tenant
        self.open += 1
        try:
            for chunk in self._chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.open -= 1

    async def healthy(self) -> bool:
        return True


def talkative(*chunks: Chunk | Exception) -> Backend:
    """A backend of a model that thinks and calls."""
    return Backend(*chunks, template="tools <tool_call> </think>")


def served(backend: Backend) -> Served:
    stand_in: Any = backend
    return Served(stand_in, ("m", "other"), created=1)


_ROUTES: dict[bool, list[Any]] = {}


def application(served: Served) -> FastAPI:
    """An application of its own, whose routes are shared: FastAPI prepares each for its first request."""
    app = create_app(served)
    app.router.routes = _ROUTES.setdefault(served.settings.chat_page, app.router.routes)
    return app


@functools.cache
def described_paths() -> dict[str, Any]:
    """The paths of the application's description, which takes FastAPI a while to make."""
    paths: dict[str, Any] = create_app(served(Backend())).openapi()["paths"]
    return paths


def ask_in_turn(
    backend: Backend, *requests: tuple[str, str, dict[str, Any]]
) -> list[httpx.Response]:
    """The answers of one application to requests: their methods, paths and options."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application(served(backend)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(how, path, **more) for how, path, more in requests]

    return asyncio.run(send())


def ask(backend: Backend, method: str, path: str, **options: Any) -> httpx.Response:
    (reply,) = ask_in_turn(backend, (method, path, options))
    return reply


def post(backend: Backend, path: str, **fields: Any) -> httpx.Response:
    """A request with the fields that its path needs, and others."""
    needed: dict[str, dict[str, Any]] = {
        CHAT: {"messages": MESSAGES},
        TEXT: {"prompt": "xy"},
        RESPONSES: {"input": "Hello"},
        ANTHROPIC: {"messages": MESSAGES, "max_tokens": 9},
    }
    return ask(backend, "POST", path, json={"model": "m", **needed.get(path, {}), **fields})


def chat(backend: Backend, **fields: Any) -> httpx.Response:
    return post(backend, CHAT, **fields)


def complete(backend: Backend, **fields: Any) -> httpx.Response:
    return post(backend, TEXT, **fields)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream's events; those of the newer APIs have names, the others an end."""
    assert reply.status_code == 200, reply.text
    *blocks, end = reply.text.split("\n\n")
    assert end == ""
    if blocks[0].startswith("event: "):
        named = [block.split("\ndata: ") for block in blocks]
        values = [json.loads(data) for _, data in named]
        assert [name for name, _ in named] == [f"event: {value['type']}" for value in values]
        return values
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]
