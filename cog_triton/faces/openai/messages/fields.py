"""The bodies of requests to /v1/messages, as Anthropic's reference has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cog_triton.faces.openai.fields import Body, Bounded, Name, Temperature


class Block(Body):
    """A block of a content; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Bounded] | None = None
    is_error: bool | None = None


class TurnMessage(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Bounded]


class CustomTool(Body):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class CountBody(Body):
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[TurnMessage], Field(min_length=1), Bounded]
    system: str | Annotated[list[Block], Bounded] | None = None
    tools: Annotated[list[CustomTool], Bounded] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Beyond Anthropic's:
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Beyond Anthropic's:
    seed: int | None = None
    min_p: float | None = None


# Those that ask for what is not done here, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}
IGNORED = frozenset(
    {"metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"}
    | {"context_management"}
)
