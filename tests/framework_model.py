"""A model that goes through one task, whichever agent framework asks it."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from tests.unit.api.openai.support import Backend

BEFORE = "the answer is 41\n"
AFTER = "the answer is 42\n"
BEGINNING = "I look at the note twice."
END = "The note is mended."
WEATHER = {"city": "Paris", "degrees": 21}
THOUGHT = "<think>What is next?</think>"
# The calls of each turn: the first has two of them.
Call = tuple[str, dict[str, str]]
TURNS: list[list[Call]] = [
    [
        ("read_file", {"path": "note.txt"}),
        ("run_command", {"command": "cat note.txt"}),
    ],
    [("edit_file", {"path": "note.txt", "old": "41", "new": "42"})],
    [("run_command", {"command": "cat note.txt"})],
]
RESULTS = [BEFORE, BEFORE, "done", AFTER]


class FrameworkModel(Backend):
    """A model that thinks and calls tools, gives the weather in JSON, and counts forever.

    Attributes:
        conversations: the messages of each request, as the chat template got them.
        left: an answer that has no end was closed.
    """

    def __init__(self) -> None:
        super().__init__(template="tools <tool_call> </think>")
        self.context_length = 1_000_000
        self.conversations: list[list[dict[str, Any]]] = []
        self.left = threading.Event()

    async def generate(
        self, request: Request, request_id: str | None = None, *tenant: Any
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request, request_id))
        self.tenants += tenant
        messages = list(self.tokenizer.messages)
        self.conversations.append(messages)
        question = text_of([message for message in messages if message["role"] == "user"][-1])
        if "Count." in question:
            async for chunk in self._count():
                yield chunk
            return
        text = self._written(request, messages, question)
        for number, letter in enumerate(text, 1):
            yield Chunk(letter, number, 10)
        yield Chunk("", len(text), 10, "stop")

    async def _count(self) -> AsyncGenerator[Chunk, None]:
        number = 0
        try:
            while True:
                number += 1
                yield Chunk(f"{number} ", number, 10)
                await asyncio.sleep(0.01)  # the pace of a model
        finally:
            self.left.set()

    def _written(self, request: Request, messages: list[dict[str, Any]], question: str) -> str:
        tools = {tool["function"]["name"]: tool["function"] for tool in self.tokenizer.tools}
        if "weather" in question:
            if request.guide is not None:
                schema = json.loads(request.guide.text or "{}")
                return json.dumps(example(schema) if schema else WEATHER)
            for name, tool in tools.items():
                if "city" in tool["parameters"]["properties"]:
                    return THOUGHT + written_call(name, WEATHER)
            return THOUGHT + json.dumps(WEATHER)
        calls = next_calls(messages) if tools else []
        if request.guide is not None:  # a call is required: so smolagents asks for the answer, too
            calls = calls or [("final_answer", {"answer": END})]
            return json.dumps([{"name": name, "arguments": values} for name, values in calls])
        said = END if not calls else BEGINNING if calls is TURNS[0] else ""
        return THOUGHT + said + "".join(written_call(*call) for call in calls)


def next_calls(messages: list[dict[str, Any]]) -> list[Call]:
    """The calls of the next turn, one turn after each answer; none after the last."""
    answers = sum(message["role"] == "assistant" for message in messages)
    return TURNS[answers] if answers < len(TURNS) else []


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """A call in Hermes' form."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def example(schema: dict[str, Any]) -> Any:
    """A value that a schema of the weather allows, or a schema of calls that return it."""

    def value(part: dict[str, Any], name: str) -> Any:
        if "$ref" in part:
            found: Any = schema
            for key in part["$ref"].removeprefix("#/").split("/"):
                found = found[key]
            return value(found, name)
        if "const" in part:
            return part["const"]
        if "anyOf" in part:
            return value(part["anyOf"][0], name)
        if part.get("type") == "array":
            return [value(part["items"], name)]
        if "properties" in part:
            return {key: value(inner, key) for key, inner in part["properties"].items()}
        return WEATHER[name]

    return value(schema, "")
