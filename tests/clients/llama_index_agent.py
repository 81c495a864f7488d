"""LlamaIndex's agent."""

from collections.abc import AsyncIterator
from typing import Any

import common
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def llm(api: str) -> Any:
    if api == "messages":
        return Anthropic(model=common.CLAUDE, base_url=common.URL, api_key=common.KEY)
    if api == "responses":
        return OpenAIResponses(
            model=common.MODEL,
            api_base=common.OPENAI_URL,
            api_key=common.KEY,
            context_window=32_000,
            max_retries=0,
        )
    return OpenAILike(
        model=common.MODEL,
        api_base=common.OPENAI_URL,
        api_key=common.KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=32_000,
        max_retries=0,
    )


def agent(api: str, *, streaming: bool) -> FunctionAgent:
    return FunctionAgent(
        tools=list(common.TOOLS),
        llm=llm(api),
        system_prompt="You mend notes.",
        streaming=streaming,
    )


async def task(api: str) -> dict[str, Any]:
    return common.answer(str(await agent(api, streaming=False).run(common.TASK)))


async def streamed_task(api: str) -> dict[str, Any]:
    pieces = []
    handler = agent(api, streaming=True).run(common.TASK)
    async for event in handler.stream_events():
        if isinstance(event, AgentStream) and event.delta:
            pieces.append(event.delta)
    return common.answer(str(await handler), pieces)


async def structured(api: str) -> dict[str, Any]:
    template = PromptTemplate(common.QUESTION)
    return {"parsed": (await llm(api).astructured_predict(Weather, template)).model_dump()}


async def forced(api: str) -> dict[str, Any]:
    """Structured output by a tool that has to be called."""
    model = llm(api)
    if api == "chat":
        model.should_use_structured_outputs = False
    found = await model.astructured_predict(Weather, PromptTemplate(common.QUESTION))
    return {"parsed": found.model_dump()}


async def counted(api: str) -> AsyncIterator[str]:
    async for chunk in await llm(api).astream_chat([ChatMessage(common.ENDLESS)]):
        if chunk.delta:
            yield chunk.delta


async def cancelled(api: str) -> dict[str, Any]:
    return await common.cancel(counted(api))


async def image(api: str) -> dict[str, Any]:
    blocks = [TextBlock(text=common.TASK), ImageBlock(url=common.PICTURE)]
    found = await llm(api).achat([ChatMessage(role="user", blocks=blocks)])
    return common.answer(str(found.message.content))


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
