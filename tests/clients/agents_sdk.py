"""OpenAI's Agents SDK."""

import json
from typing import Any

import common
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

set_tracing_disabled(True)
MODELS: dict[str, Any] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Weather(BaseModel):
    city: str
    degrees: int


def agent(api: str, **options: Any) -> Agent:
    client = AsyncOpenAI(base_url=common.OPENAI_URL, api_key=common.KEY)
    return Agent(
        name="mender",
        instructions="You mend notes.",
        model=MODELS[api](model=common.MODEL, openai_client=client),
        **options,
    )


def tools() -> list[Any]:
    return [function_tool(tool) for tool in common.TOOLS]


async def task(api: str) -> dict[str, Any]:
    result = await Runner.run(agent(api, tools=tools()), common.TASK)
    return common.answer(result.final_output)


async def streamed_task(api: str) -> dict[str, Any]:
    result = Runner.run_streamed(agent(api, tools=tools()), common.TASK)
    pieces = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            pieces.append(event.data.delta)
    return common.answer(result.final_output, pieces)


async def structured(api: str) -> dict[str, Any]:
    result = await Runner.run(agent(api, output_type=Weather), common.QUESTION)
    return {"parsed": result.final_output.model_dump()}


async def forced(api: str) -> dict[str, Any]:
    """A tool that has to be called, and whose result is the answer."""

    @function_tool
    def weather(city: str, degrees: int) -> str:
        return json.dumps({"city": city, "degrees": degrees})

    asked = agent(
        api,
        tools=[weather],
        model_settings=ModelSettings(tool_choice="required"),
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(asked, common.QUESTION)
    return {"parsed": json.loads(result.final_output)}


async def cancelled(api: str) -> dict[str, Any]:
    """By the SDK's method."""
    result = Runner.run_streamed(agent(api), common.ENDLESS)
    pieces = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            pieces.append(event.data.delta)
            if len(pieces) == common.ENOUGH:
                result.cancel()
    return {"pieces": pieces}


async def image(api: str) -> dict[str, Any]:
    picture = {"type": "input_image", "image_url": common.PICTURE, "detail": "auto"}
    text = {"type": "input_text", "text": common.TASK}
    result = await Runner.run(agent(api), [{"role": "user", "content": [text, picture]}])
    return common.answer(result.final_output)


common.serve(
    MODELS,
    {
        "task": task,
        "streamed": streamed_task,
        "structured": structured,
        "forced": forced,
        "cancelled": cancelled,
        "image": image,
    },
)
