"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from cog_triton.api.openai.schemas.base import (
    AnswerBody,
    Ignored,
    JsonObject,
    Refused,
    RequestBody,
    SetBy,
)
from cog_triton.api.openai.schemas.tools import type_of
from cog_triton.api.openai.schemas.values import AtMostMessages, Name, Texts


class ContentBlock(JsonObject):
    """A block of a content; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | dict[str, Any] | Annotated[list["ContentBlock"], AtMostMessages] | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None


class MessageTurn(JsonObject):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], AtMostMessages]


class ClientTool(JsonObject):
    """A tool that the client runs, described by its schema."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class AnthropicTool(JsonObject):
    """A tool that Anthropic's servers run, or whose schema only its models know; its type has a date."""

    type: str
    name: str | None = None


def _tool_kind(tool: Any) -> str:
    kind = type_of(tool)
    return "client" if kind in (None, "custom") or not isinstance(kind, str) else "anthropic"


AnyTool = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[AnthropicTool, Tag("anthropic")],
    Discriminator(_tool_kind),
]


class ToolChoice(JsonObject):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(JsonObject):
    type: str
    budget_tokens: int | None = None


class OutputFormat(JsonObject):
    type: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(JsonObject):
    format: OutputFormat | None = None
    effort: str | None = None


class ContextManagement(JsonObject):
    edits: list[Any] | None = None


class MessageFields(JsonObject):
    """The fields that a count of tokens and a request for an answer share."""

    model: str
    messages: Annotated[list[MessageTurn], Field(min_length=1), AtMostMessages]
    system: str | Annotated[list[ContentBlock], AtMostMessages] | None = None
    tools: Annotated[list[AnyTool], AtMostMessages] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the name in the beta of structured outputs
    context_management: ContextManagement | None = None
    # Beyond Anthropic's:
    chat_template_kwargs: dict[str, Any] | None = None


class CountBody(MessageFields, RequestBody):
    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {}


class MessagesBody(MessageFields, AnswerBody):
    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset(
        {
            "metadata",
            "service_tier",
            "cache_control",
            "inference_geo",
            "speed",
            "diagnostics",
        }
    )
    set_by: ClassVar[SetBy] = {}

    max_tokens: int
    stop_sequences: Texts | None = None
