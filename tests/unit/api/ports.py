"""The applications of both ports, in this process, on event loops that go on between requests."""

import asyncio
import contextlib
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx

from cog_triton.api.cog.front import Front
from cog_triton.api.openai.app import create_app
from cog_triton.settings import read_settings
from cog_triton.web.server import bound
from tests.unit.api.openai.support import CHUNKS, Backend, served


class Port:
    """A port whose application is asked on an event loop that goes on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class OpenAIPort(Port):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        backend = Backend(
            *CHUNKS, template="tools <tool_call>", STORE=str(directory / "journal.db")
        )
        self.app = create_app(served(backend))
        self.served = self.app.state.served
        self._transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)

    def ask(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://x") as client:
                raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
                return await client.request(method, target, content=body, headers=raw)

        return self.run(send())  # type: ignore[no-any-return]


class CogPort(Port):
    """The front before a server that answers each request that passes."""

    def __init__(self) -> None:
        super().__init__()
        listener = bound("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.front = self.run(self._start(listener))

    async def _start(self, listener: Any) -> Front:
        front = Front(listener, read_settings({"REPLICATE_LIST_TOKEN": "t"}))
        cogs = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        front.cog_server.port = cogs.sockets[0].getsockname()[1]
        listener.listen(16)
        self._serving = asyncio.create_task(front._server.serve(sockets=[listener]))
        return front

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"text/event-stream" in head:
            kind, body = b"text/event-stream", b'event: completed\ndata: {"status":"succeeded"}\n\n'
        else:
            kind, body = b"application/json", b"{}"
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: %b\r\n\r\n%b" % (kind, body))
        await writer.drain()
        writer.close()

    def ask(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            connection.request(method, target, body, raw)
            reply = connection.getresponse()
            return httpx.Response(reply.status, headers=reply.getheaders(), content=reply.read())

    def close(self) -> None:
        self.front._server.should_exit = True
        self.run(asyncio.wait([self._serving]))
        self.front.predictions.files.remove_all()
        super().close()
