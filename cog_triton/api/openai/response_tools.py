"""Tools of /v1/responses, as functions that any model can call, and its calls in the client's form.

A chat template knows functions alone. A function in a namespace is offered under both names, and a custom
tool as a function of one text. Tools that OpenAI's servers run are left out: nothing here can run them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from cog_triton.api.openai import custom_tools, fields, turns

NAMESPACE_MARK = "__"  # between the name of a namespace and that of its function


class FlatNamedTool(fields.Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class HostedToolChoice(fields.Body):
    """The choice of a tool that OpenAI's servers run; there may be further fields."""

    type: str


def choice_kind(choice: Any) -> str:
    """Return which class a tool_choice that is an object has."""
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    if kind in ("function", "custom"):
        return "named"
    return "allowed" if kind == "allowed_tools" else "hosted"


def allowed_kind(tool: Any) -> str:
    """Return which class one of the tools has that a choice allows."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return "hosted" if isinstance(kind, str) and kind not in ("function", "custom") else "named"


class FlatTool(fields.Function):
    type: Literal["function"]


class CustomTool(fields.Body):
    """A tool whose input is a text, perhaps of a grammar."""

    type: Literal["custom"]
    name: fields.Name
    description: str | None = None
    format: dict[str, Any] | None = None


class HostedTool(fields.Body):
    """A tool that OpenAI's servers run, or whose schema only its models know."""

    type: str


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "hosted"


class NamespaceTool(fields.Body):
    """Functions that belong together."""

    type: Literal["namespace"]
    name: fields.Name
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
        fields.Bounded,
    ]


AnyTool = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]
Tools = Annotated[list[AnyTool], fields.Bounded]


@dataclass(frozen=True)
class ClientTool:
    """How the client knows a function that the model is offered."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which a model knows a function, that of its namespace in front."""
    if not namespace:
        return name
    return namespace.rstrip("_") + NAMESPACE_MARK + name.lstrip("_")


def functions(tools: Sequence[Any], asking: fields.Asking) -> list[dict[str, Any]]:
    """Return the tools that a model can be offered, as functions of a chat; the others are noted."""
    offered = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            offered += [_function(inner, tool.name) for inner in _offerable(tool.tools, asking)]
        else:
            offered += [_function(one, None) for one in _offerable([tool], asking)]
    return offered


def _offerable(
    tools: Sequence[FlatTool | CustomTool | HostedTool], asking: fields.Asking
) -> list[FlatTool | CustomTool]:
    """Return the tools that the client runs, and note the others."""
    offerable: list[FlatTool | CustomTool] = []
    for tool in tools:
        if isinstance(tool, HostedTool):
            asking.leave_out(f"tool {tool.type}")
        else:
            offerable.append(tool)
    return offerable


def _function(tool: FlatTool | CustomTool, namespace: str | None) -> dict[str, Any]:
    name = flat_name(tool.name, namespace)
    if isinstance(tool, FlatTool):
        values = tool.model_dump(include=set(fields.Function.model_fields))
        return turns.function(**{**values, "name": name})
    return turns.function(
        name=name,
        description=custom_tools.description(tool.description, tool.format),
        parameters=custom_tools.parameters(),
    )


def chosen(choice: FlatNamedTool) -> dict[str, Any]:
    """Return a tool that a choice names, as a chat names it."""
    return turns.function(name=flat_name(choice.name, choice.namespace))


def client_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, ClientTool]:
    """Return how the client knows each function, by its flat name; ``tools`` as a response echoes them."""
    known: dict[str, ClientTool] = {}
    for tool in tools:
        if tool["type"] == "namespace":
            for inner in tool.get("tools", ()):
                _add(known, inner, tool["name"])
        else:
            _add(known, tool, None)
    return known


def _add(known: dict[str, ClientTool], tool: Mapping[str, Any], namespace: str | None) -> None:
    if tool["type"] in ("function", "custom"):
        client = ClientTool(tool["name"], namespace, custom=tool["type"] == "custom")
        known[flat_name(client.name, namespace)] = client
