"""The API server with a model whose answers are written beforehand, for agents that run whole tasks."""

import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from cog_triton.faces.openai.app import create_app
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from tests.support import free_port, wait_until
from tests.unit.faces.openai.support import Backend, served


@dataclass(frozen=True)
class Step:
    """One call that the model makes."""

    tool: str
    arguments: dict[str, Any]


class ScriptedModel(Backend):
    """A model that makes one call a turn, in order, and says something in the end.

    Attributes:
        conversations: the messages of each request that was offered tools, as the chat template got them.
    """

    def __init__(self, steps: Sequence[Step], end: str) -> None:
        super().__init__(template="tools <tool_call>")
        self.context_length = 1_000_000
        self.conversations: list[list[dict[str, Any]]] = []
        self._steps, self._end = steps, end

    async def generate(
        self, request: Request, request_id: str | None = None, *tenant: Any
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request, request_id))
        self.tenants += tenant
        messages = list(self.tokenizer.messages)
        text = "A title"  # agents also ask for titles and summaries, without tools
        if self.tokenizer.tools:
            self.conversations.append(messages)
            results = [message for message in messages if message["role"] == "tool"]
            text = self._end
            if len(results) < len(self._steps):
                step = self._steps[len(results)]
                call = {"name": step.tool, "arguments": step.arguments}
                text = f"<tool_call>{json.dumps(call)}</tool_call>"
        for number, letter in enumerate(text, 1):
            yield Chunk(letter, number, 10)
        yield Chunk("", len(text), 10, "stop")


@contextlib.contextmanager
def serving(model: ScriptedModel) -> Iterator[str]:
    """Serve a model on a free port; yields the URL."""
    port = free_port()
    config = uvicorn.Config(
        create_app(served(model)), host="127.0.0.1", port=port, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, 60, "the start of the scripted server")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
