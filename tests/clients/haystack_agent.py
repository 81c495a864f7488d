"""Haystack's agent."""

import asyncio
import contextlib
from typing import Any

import common
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

GENERATORS: dict[str, Any] = {
    "chat": OpenAIChatGenerator,
    "responses": OpenAIResponsesChatGenerator,
}
FORMATS = {"chat": "response_format", "responses": "text_format"}


class Weather(BaseModel):
    city: str
    degrees: int


def generator(api: str, **options: Any) -> Any:
    return GENERATORS[api](
        api_key=Secret.from_token(common.KEY),
        api_base_url=common.OPENAI_URL,
        model=common.MODEL,
        max_retries=0,
        **options,
    )


def run_task(api: str, streaming_callback: Any = None) -> str:
    agent = Agent(
        chat_generator=generator(api),
        tools=[create_tool_from_function(tool) for tool in common.TOOLS],
        system_prompt="You mend notes.",
        streaming_callback=streaming_callback,
    )
    agent.warm_up()
    return agent.run(messages=[ChatMessage.from_user(common.TASK)])["messages"][-1].text


def task(api: str) -> dict[str, Any]:
    return common.answer(run_task(api))


def streamed_task(api: str) -> dict[str, Any]:
    pieces = []

    def add(chunk: Any) -> None:
        if chunk.content and not chunk.tool_call_result:
            pieces.append(chunk.content)

    return common.answer(run_task(api, add), pieces)


def structured(api: str) -> dict[str, Any]:
    asked = generator(api, generation_kwargs={FORMATS[api]: Weather})
    (reply,) = asked.run([ChatMessage.from_user(common.QUESTION)])["replies"]
    return {"parsed": Weather.model_validate_json(reply.text).model_dump()}


async def cancelled(api: str) -> dict[str, Any]:
    pieces: list[str] = []
    enough = asyncio.Event()

    async def add(chunk: Any) -> None:
        if chunk.content:
            pieces.append(chunk.content)
        if len(pieces) == common.ENOUGH:
            enough.set()

    asked = [ChatMessage.from_user(common.ENDLESS)]
    running = asyncio.create_task(generator(api).run_async(asked, streaming_callback=add))
    await enough.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return {"pieces": pieces}


def image(api: str) -> dict[str, Any]:
    picture = ImageContent(base64_image=common.PIXEL, mime_type="image/png")
    asked = ChatMessage.from_user(content_parts=[common.TASK, picture])
    (reply,) = generator(api).run([asked])["replies"]
    return common.answer(reply.text)


common.serve(
    GENERATORS,
    {
        "task": task,
        "streamed": streamed_task,
        "structured": structured,
        "cancelled": cancelled,
        "image": image,
    },
)
