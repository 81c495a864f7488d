"""Tools of /v1/responses, as functions that any model can call, and its calls in the client's form.

A chat template knows functions alone. A function in a namespace is offered under both names, and a custom
tool as a function of one text. Tools that OpenAI's servers run are left out: nothing here can run them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cog_triton.api.openai.chats import custom_tools
from cog_triton.api.openai.chats.tool_use import function
from cog_triton.api.openai.schemas.base import AnswerBody
from cog_triton.api.openai.schemas.responses import (
    CustomTool,
    FlatNamedTool,
    FlatTool,
    NamespaceTool,
)
from cog_triton.api.openai.schemas.tools import Function, HostedTool

NAMESPACE_MARK = "__"  # between the name of a namespace and that of its function


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


def functions(tools: Sequence[Any], body: AnswerBody) -> list[dict[str, Any]]:
    """Return the tools that a model can be offered, as functions of a chat; the others are noted."""
    offered = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            offered += [_function(inner, tool.name) for inner in _offerable(tool.tools, body)]
        else:
            offered += [_function(one, None) for one in _offerable([tool], body)]
    return offered


def _offerable(
    tools: Sequence[FlatTool | CustomTool | HostedTool], body: AnswerBody
) -> list[FlatTool | CustomTool]:
    """Return the tools that the client runs, and note the others."""
    offerable: list[FlatTool | CustomTool] = []
    for tool in tools:
        if isinstance(tool, HostedTool):
            body.leave_out(f"tool {tool.type}")
        else:
            offerable.append(tool)
    return offerable


def _function(tool: FlatTool | CustomTool, namespace: str | None) -> dict[str, Any]:
    name = flat_name(tool.name, namespace)
    if isinstance(tool, FlatTool):
        values = tool.model_dump(include=set(Function.model_fields))
        return function(**{**values, "name": name})
    return function(
        name=name,
        description=custom_tools.description(tool.description, tool.format),
        parameters=custom_tools.parameters(),
    )


def chosen(choice: FlatNamedTool) -> dict[str, Any]:
    """Return a tool that a choice names, as a chat names it."""
    return function(name=flat_name(choice.name, choice.namespace))


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
