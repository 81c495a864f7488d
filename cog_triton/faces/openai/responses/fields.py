"""The bodies of requests to /v1/responses, as OpenAI's reference has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cog_triton.faces.openai.fields import (
    Body,
    Bounded,
    Effort,
    Name,
    OutputTokens,
    Temperature,
)


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """Of the tools, those that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), Bounded]


class Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None


class Part(Body):
    """A part of a content; which types there are is looked at where they are read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Body):
    """One item of the input; which fields it has depends on its type, which a message need not have."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], Bounded] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], Bounded] | None = None


class ResponsesBody(Body):
    """The body of /v1/responses."""

    model: str
    input: str | Annotated[list[Item], Bounded]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: OutputTokens | None = None
    temperature: Temperature | None = None
    reasoning: Reasoning | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Bounded] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # Beyond OpenAI's:
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def names(self) -> dict[str, str]:
        return {"prompt": "input", "max_tokens": "max_output_tokens", "guide": "text.format"}


# Those that ask for what is not done here, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": ("",),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
}
IGNORED = frozenset(
    {"service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"stream_options"}
)
LOG_PROBS = "message.output_text.logprobs"
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content")
"""What may be asked for; thoughts are not encrypted: their text comes in any case."""
