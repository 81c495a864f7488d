"""Tools of a chat, and choices of tools."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cog_triton.api.openai.schemas.base import JsonObject
from cog_triton.api.openai.schemas.values import AtMostMessages, JsonSchemaObject, Name


class NamedFunction(JsonObject):
    """The name of a function, or of a custom tool, as a choice has it."""

    name: str


class NamedTool(JsonObject):
    type: Literal["function"]
    function: NamedFunction


class Function(NamedFunction):
    name: Name
    description: str | None = None
    parameters: JsonSchemaObject | None = None
    strict: bool | None = None


class Tool(NamedTool):
    function: Function


class Custom(NamedFunction):
    """What a custom tool is; its input is a text, perhaps of a grammar."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class NamedCustomTool(JsonObject):
    type: Literal["custom"]
    custom: NamedFunction


class CustomTool(NamedCustomTool):
    custom: Custom


class HostedTool(JsonObject):
    """A tool of another type, or the choice of one: OpenAI's servers run it, and nothing here can."""

    type: str


def type_of(value: Any) -> Any:
    """Return the type of an object, which is JSON or was made by a class."""
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def _tool_kind(tool: Any) -> str:
    kind = type_of(tool)
    if kind == "custom":
        return "custom"
    return "hosted" if isinstance(kind, str) and kind != "function" else "function"


def _choice_kind(choice: Any) -> str:
    return "allowed" if type_of(choice) == "allowed_tools" else _tool_kind(choice)


AnyTool = Annotated[
    Annotated[Tool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]
AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("function")]
    | Annotated[NamedCustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]


class AllowedToolNames(JsonObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamedTool], Field(min_length=1), AtMostMessages]


class AllowedTools(JsonObject):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("function")]
        | Annotated[NamedCustomTool, Tag("custom")]
        | Annotated[AllowedTools, Tag("allowed")]
        | Annotated[HostedTool, Tag("hosted")],
        Discriminator(_choice_kind),
    ]
)
