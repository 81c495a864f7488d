"""The body of /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from cog_triton.api.openai.schemas.base import (
    AnswerBody,
    Ignored,
    JsonObject,
    Refused,
    SetBy,
)
from cog_triton.api.openai.schemas.structured_output import JsonSchema
from cog_triton.api.openai.schemas.tools import Function, HostedTool, type_of
from cog_triton.api.openai.schemas.values import (
    AtMostMessages,
    Effort,
    Metadata,
    Name,
    OutputTokens,
    Texts,
)
from cog_triton.request.limits import TOP_LOG_PROBS

# Tools


class FlatTool(Function):
    """A function, whose fields this API has beside its type."""

    type: Literal["function"]


class CustomTool(JsonObject):
    """A tool whose input is a text, perhaps of a grammar."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


def _tool_kind(tool: Any) -> str:
    kind = type_of(tool)
    return kind if kind in ("function", "custom", "namespace") else "hosted"


class NamespaceTool(JsonObject):
    """Functions that belong together."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FlatTool, Tag("function")]
                | Annotated[CustomTool, Tag("custom")]
                | Annotated[HostedTool, Tag("namespace")]
                | Annotated[HostedTool, Tag("hosted")],
                Discriminator(_tool_kind),
            ]
        ],
        AtMostMessages,
    ]


AnyTool = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]
Tools = Annotated[list[AnyTool], AtMostMessages]

# Choices of tools


class FlatNamedTool(JsonObject):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class HostedToolChoice(JsonObject):
    """The choice of a tool that OpenAI's servers run; there may be further fields."""

    type: str


def _choice_kind(choice: Any) -> str:
    kind = type_of(choice)
    if kind in ("function", "custom"):
        return "named"
    return "allowed" if kind == "allowed_tools" else "hosted"


def _allowed_kind(tool: Any) -> str:
    kind = type_of(tool)
    return "hosted" if isinstance(kind, str) and kind not in ("function", "custom") else "named"


class FlatAllowedTools(JsonObject):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[FlatNamedTool, Tag("named")] | Annotated[HostedToolChoice, Tag("hosted")],
                Discriminator(_allowed_kind),
            ]
        ],
        Field(min_length=1),
        AtMostMessages,
    ]


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[FlatNamedTool, Tag("named")]
        | Annotated[FlatAllowedTools, Tag("allowed")]
        | Annotated[HostedToolChoice, Tag("hosted")],
        Discriminator(_choice_kind),
    ]
)

# Items of the input


class Part(JsonObject):
    """A part of a content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(JsonObject):
    """One item of the input; its fields depend on its type, which a message need not have."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], AtMostMessages] | None = None
    summary: Annotated[list[Part], AtMostMessages] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | Annotated[list[Part], AtMostMessages] | None = None


class AdditionalTools(JsonObject):
    """Tools that a client adds within the conversation; Codex sends some of its tools so."""

    type: Literal["additional_tools"]
    tools: Tools | None = None


class ForeignItem(JsonObject):
    """An item that nothing here can read; it may have any further fields."""

    type: str


CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
CALL_OUTPUTS = frozenset(
    {"function_call_output", "custom_tool_call_output", "local_shell_call_output"}
)
# Items of work that OpenAI's servers did, or of a form that only they can read. They are left out.
_FOREIGN_ITEMS = frozenset(
    {
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "ghost_snapshot",
        "item_reference",
        "program",
    }
)
_FOREIGN_ENDINGS = ("_call", "_call_output", "_output", "_list_tools")
_FOREIGN_BEGINNING = "mcp_"


def _item_kind(item: Any) -> str:
    kind = type_of(item)
    if kind == "additional_tools":
        return "tools"
    if not isinstance(kind, str) or kind in CALLS | CALL_OUTPUTS:
        return "readable"
    is_foreign = (
        kind in _FOREIGN_ITEMS
        or kind.endswith(_FOREIGN_ENDINGS)
        or kind.startswith(_FOREIGN_BEGINNING)
    )
    return "foreign" if is_foreign else "readable"


AnyItem = Annotated[
    Annotated[InputItem, Tag("readable")]
    | Annotated[AdditionalTools, Tag("tools")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(_item_kind),
]
ITEMS = TypeAdapter(list[AnyItem])

# The body


class ReasoningOptions(JsonObject):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(JsonObject):
    format: TextFormat | None = None


class ResponsesBody(AnswerBody):
    refused: ClassVar[Refused] = {"conversation": [], "prompt": []}
    ignored: ClassVar[Ignored] = frozenset(
        {
            "max_tool_calls",  # limits tools that only OpenAI's servers run
            "service_tier",
            "safety_identifier",
            "stream_options",
            "prompt_cache_key",
            "prompt_cache_retention",
        }
    )
    set_by: ClassVar[SetBy] = {
        "prompt": ["input"],
        "max_tokens": ["max_output_tokens"],
        "guide": ["text.format"],
    }

    input: str | Annotated[list[AnyItem], AtMostMessages]
    instructions: str | None = None
    max_output_tokens: OutputTokens | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)
    include: Texts | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # Beyond OpenAI's:
    stop: str | Texts | None = None
    chat_template_kwargs: dict[str, Any] | None = None
