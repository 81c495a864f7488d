"""AutoGen's agent."""

from typing import Any

import common
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, StructuredMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: int


def client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=common.MODEL,
        base_url=common.OPENAI_URL,
        api_key=common.KEY,
        model_info={
            "family": "unknown",
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "vision": False,
        },
    )


def agent(**options: Any) -> AssistantAgent:
    return AssistantAgent(
        "mender",
        model_client=client(),
        system_message="You mend notes.",
        **options,
    )


def mender(**options: Any) -> AssistantAgent:
    return agent(
        tools=list(common.TOOLS),
        max_tool_iterations=9,
        **options,
    )


async def task(_: str) -> dict[str, Any]:
    result = await mender().run(task=common.TASK)
    return common.answer(result.messages[-1].content)


async def streamed_task(_: str) -> dict[str, Any]:
    pieces, last = [], ""
    async for event in mender(model_client_stream=True).run_stream(task=common.TASK):
        if isinstance(event, ModelClientStreamingChunkEvent):
            pieces.append(event.content)
        if isinstance(event, TaskResult):
            last = event.messages[-1].content
    return common.answer(last, pieces)


async def structured(_: str) -> dict[str, Any]:
    result = await agent(output_content_type=Weather).run(task=common.QUESTION)
    message = result.messages[-1]
    assert isinstance(message, StructuredMessage)
    return {"parsed": message.content.model_dump()}


common.serve(["chat"], {"task": task, "streamed": streamed_task, "structured": structured})
