"""LangChain's models in LangGraph's agent."""

from collections.abc import AsyncIterator
from typing import Any

import common
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def model(api: str) -> Any:
    if api == "messages":
        return ChatAnthropic(
            model=common.MODEL, base_url=common.URL, api_key=common.KEY, max_retries=0
        )
    return ChatOpenAI(
        model=common.MODEL,
        base_url=common.OPENAI_URL,
        api_key=common.KEY,
        use_responses_api=api == "responses",
        max_retries=0,
    )


def agent(api: str, **options: Any) -> Any:
    return create_agent(model(api), system_prompt="You mend notes.", **options)


def asked(text: Any) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def task(api: str) -> dict[str, Any]:
    final = agent(api, tools=common.TOOLS).invoke(asked(common.TASK))
    return common.answer(final["messages"][-1].text)


async def streamed_task(api: str) -> dict[str, Any]:
    pieces, last = [], ""
    mender = agent(api, tools=common.TOOLS)
    async for mode, found in mender.astream(asked(common.TASK), stream_mode=["messages", "values"]):
        if mode == "values":
            last = found["messages"][-1].text
        elif isinstance(found[0], AIMessageChunk) and found[0].text:
            pieces.append(found[0].text)
    return common.answer(last, pieces)


def structured(api: str) -> dict[str, Any]:
    final = agent(api, response_format=ProviderStrategy(Weather)).invoke(asked(common.QUESTION))
    return {"parsed": final["structured_response"].model_dump()}


def forced(api: str) -> dict[str, Any]:
    """Structured output by a tool that has to be called."""
    final = agent(api, response_format=ToolStrategy(Weather)).invoke(asked(common.QUESTION))
    return {"parsed": final["structured_response"].model_dump()}


async def counted(api: str) -> AsyncIterator[str]:
    async for chunk in model(api).astream(common.ENDLESS):
        if chunk.text:
            yield chunk.text


async def cancelled(api: str) -> dict[str, Any]:
    """By the end of the task; ChatOpenAI may read on then, so its stream is closed."""
    if api == "messages":
        return await common.cancel(counted(api))
    pieces: list[str] = []
    stream = counted(api)
    async for piece in stream:
        pieces.append(piece)
        if len(pieces) == common.ENOUGH:
            break
    await stream.aclose()
    return {"pieces": pieces}


def image(api: str) -> dict[str, Any]:
    picture = {"type": "image", "base64": common.PIXEL, "mime_type": "image/png"}
    final = agent(api).invoke(asked([{"type": "text", "text": common.TASK}, picture]))
    return common.answer(final["messages"][-1].text)


common.serve(
    ["chat", "responses", "messages"],
    {
        "task": task,
        "streamed": streamed_task,
        "structured": structured,
        "forced": forced,
        "cancelled": cancelled,
        "image": image,
    },
)
