"""smolagents' agent that calls tools. It requires a call in every turn: the last one is the answer."""

from typing import Any

import common
from smolagents import OpenAIModel, ToolCallingAgent, tool

TOOLS = [tool(function) for function in common.TOOLS]


def model() -> OpenAIModel:
    return OpenAIModel(model_id=common.MODEL, api_base=common.OPENAI_URL, api_key=common.KEY)


def task(_: str) -> dict[str, Any]:
    return common.answer(ToolCallingAgent(tools=TOOLS, model=model()).run(common.TASK))


common.serve(["chat"], {"task": task})
