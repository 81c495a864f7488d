"""pydantic-ai."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import common
from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    BinaryContent,
    NativeOutput,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.run import AgentRunResultEvent

OPENAI = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Weather(BaseModel):
    city: str
    degrees: int


def agent(api: str, **options: Any) -> Agent[None, Any]:
    model: Any
    if api == "messages":
        client = AsyncAnthropic(base_url=common.URL, api_key=common.KEY)
        model = AnthropicModel(common.CLAUDE, provider=AnthropicProvider(anthropic_client=client))
    else:
        model = OPENAI[api](
            common.MODEL,
            provider=OpenAIProvider(base_url=common.OPENAI_URL, api_key=common.KEY),
        )
    return Agent(model, instructions="You mend notes.", retries=0, **options)


async def task(api: str) -> dict[str, Any]:
    result = await agent(api, tools=common.TOOLS).run(common.TASK)
    return common.answer(result.output)


async def streamed_task(api: str) -> dict[str, Any]:
    pieces, output = [], ""
    async with agent(api, tools=common.TOOLS).run_stream_events(common.TASK) as events:
        async for event in events:
            if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
                pieces.append(event.part.content)
            if isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
                pieces.append(event.delta.content_delta)
            if isinstance(event, AgentRunResultEvent):
                output = event.result.output
    return common.answer(output, pieces)


async def structured(api: str) -> dict[str, Any]:
    result = await agent(api, output_type=NativeOutput(Weather)).run(common.QUESTION)
    return {"parsed": result.output.model_dump()}


async def forced(api: str) -> dict[str, Any]:
    """Its default for structured output: a tool that has to be called."""
    result = await agent(api, output_type=Weather).run(common.QUESTION)
    return {"parsed": result.output.model_dump()}


async def counted(api: str) -> AsyncIterator[str]:
    async with agent(api).run_stream(common.ENDLESS) as result:
        async for piece in result.stream_text(delta=True, debounce_by=None):
            yield piece


async def cancelled(api: str) -> dict[str, Any]:
    return await common.cancel(counted(api))


async def image(api: str) -> dict[str, Any]:
    picture = BinaryContent(base64.b64decode(common.PIXEL), media_type="image/png")
    result = await agent(api).run([common.TASK, picture])
    return common.answer(result.output)


common.serve(
    [*OPENAI, "messages"],
    {
        "task": task,
        "streamed": streamed_task,
        "structured": structured,
        "forced": forced,
        "cancelled": cancelled,
        "image": image,
    },
)
