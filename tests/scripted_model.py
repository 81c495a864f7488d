"""The API server with a model whose answers are written beforehand, for agents that run whole tasks."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from cog_triton.api.openai.app import create_app
from cog_triton.errors import prompt_too_long
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from tests.support import free_port, wait_until
from tests.unit.api.openai.support import Backend, served


@dataclass(frozen=True)
class Step:
    """One call that the model makes."""

    tool: str
    arguments: dict[str, Any]


class ScriptedModel(Backend):
    """A model that makes one call a turn, in order, and says something in the end.

    Attributes:
        conversations: the messages of each request that was offered tools, as the chat template got them.
        tools: the names of the tools that the last of these requests offered.
        stalls: whether the last answer stops in the middle and waits for its cancel.
        stalled: set when an answer waits.
        cancelled: set when an answer that waited was cancelled.
        refuses_above: tokens of a prompt from which on one request is refused as too long; None for never.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        end: str,
        *,
        stalls: bool = False,
        refuses_above: int | None = None,
    ) -> None:
        super().__init__(template="tools <tool_call>")
        self.context_length = 1_000_000
        self.conversations: list[list[dict[str, Any]]] = []
        self.tools: list[str] = []
        self.stalls = stalls
        self.refuses_above = refuses_above
        self.stalled = threading.Event()
        self.cancelled = threading.Event()
        self._steps, self._end = steps, end

    def results(self) -> list[str]:
        """Return what the tools said, as the model read it in the last turn."""
        return [turn["content"] for turn in self.conversations[-1] if turn["role"] == "tool"]

    async def generate(
        self, request: Request, request_id: str | None = None, *tenant: Any
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request, request_id))
        self.tenants += tenant
        messages = list(self.tokenizer.messages)
        text = "A title"  # agents also ask for titles and summaries, without tools
        in_task = bool(self.tokenizer.tools)
        prompt_tokens = len(request.prompt) // 4
        if in_task and self.refuses_above is not None and prompt_tokens > self.refuses_above:
            limit = self.refuses_above
            self.refuses_above = None
            raise prompt_too_long(prompt_tokens, limit)
        if in_task:
            self.tools = [tool["function"]["name"] for tool in self.tokenizer.tools]
            self.conversations.append(messages)
            text = self._answer(messages)
        for number, letter in enumerate(text, 1):
            yield Chunk(letter, number, prompt_tokens)
            if in_task and self.stalls:
                await self._wait_for_cancel()
        yield Chunk("", len(text), prompt_tokens, "stop")

    def _answer(self, messages: Sequence[dict[str, Any]]) -> str:
        results = [message for message in messages if message["role"] == "tool"]
        if len(results) >= len(self._steps):
            return self._end
        step = self._steps[len(results)]
        call = {"name": step.tool, "arguments": step.arguments}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    async def _wait_for_cancel(self) -> None:
        self.stalled.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@contextlib.contextmanager
def serving(model: Backend, *names: str) -> Iterator[str]:
    """Serve a model, by these names if any are given, on a free port; yields the URL."""
    port = free_port()
    models = dataclasses.replace(served(model), models=names) if names else served(model)
    config = uvicorn.Config(
        create_app(models), host="127.0.0.1", port=port, log_level="warning", lifespan="off"
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
