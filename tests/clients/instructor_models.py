"""instructor, in the modes of OpenAI's and Anthropic's clients."""

from typing import Any

import common
import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: int


def client(api: str, mode: Any) -> Any:
    if api == "messages":
        return instructor.from_anthropic(
            Anthropic(base_url=common.URL, api_key=common.KEY), mode=mode
        )
    return instructor.from_openai(OpenAI(base_url=common.OPENAI_URL, api_key=common.KEY), mode=mode)


def ask(api: str, mode: Any) -> dict[str, Any]:
    found = client(api, mode).create(
        model=common.MODEL,
        max_tokens=1000,
        max_retries=0,
        response_model=Weather,
        messages=[{"role": "user", "content": common.QUESTION}],
    )
    return {"parsed": found.model_dump()}


def structured(api: str) -> dict[str, Any]:
    """In the text."""
    return ask(
        api, instructor.Mode.JSON_SCHEMA if api == "chat" else instructor.Mode.ANTHROPIC_JSON
    )


def forced(api: str) -> dict[str, Any]:
    """By a tool that has to be called."""
    return ask(api, instructor.Mode.TOOLS if api == "chat" else instructor.Mode.ANTHROPIC_TOOLS)


common.serve(["chat", "messages"], {"structured": structured, "forced": forced})
