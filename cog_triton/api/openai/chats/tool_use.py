"""Which tools the model is offered, and whether it has to call one."""

from dataclasses import dataclass
from typing import Any

from cog_triton.api.openai.chats import custom_tools
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.base import AnswerBody
from cog_triton.api.openai.schemas.chat import ChatBody, TemplateFields
from cog_triton.api.openai.schemas.tools import (
    AllowedTools,
    Custom,
    CustomTool,
    Function,
    HostedTool,
    NamedCustomTool,
    NamedTool,
    Tool,
)
from cog_triton.errors import shown


@dataclass(frozen=True)
class ToolUse:
    """The use of tools that a chat asks for."""

    offered: list[Tool]
    named: Tool | None = None  # the only one that may be called
    enforced: bool = False  # the answer has to be a call
    custom: frozenset[str] = frozenset()  # the names of those that are custom tools for the client

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the tools' parameters, by the names of the tools."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.offered}


def function(**values: Any) -> dict[str, Any]:
    """Return a function as chats have it: that of a tool, of a choice, or of a call."""
    return {"type": "function", "function": values}


def tool_use(body: ChatBody) -> ToolUse:
    """Return the use of tools that ``tools`` and ``tool_choice`` ask for; what cannot run is noted."""
    tools = offered_functions(body)
    custom = custom_names(body)
    choice = body.tool_choice
    if isinstance(choice, HostedTool):
        _leave_out_hosted_choice(choice, body)
        return ToolUse(tools, custom=custom)
    if choice is None or choice == "auto":
        return ToolUse(tools, custom=custom)
    if choice == "none":
        return ToolUse([])
    if not body.tools:
        raise invalid("tool_choice is only allowed when tools are given", "tool_choice")
    if choice == "required":
        if not tools:
            body.leave_out("tool_choice required")  # all tools were left out
        return ToolUse(tools, enforced=bool(tools), custom=custom)
    names = _names_in_choice(choice, body)
    for name in names:
        if all(tool.function.name != name for tool in tools):
            raise invalid(f"tool_choice names an unknown tool: {name}", "tool_choice")
    chosen = [tool for tool in tools if tool.function.name in names]
    if not isinstance(choice, AllowedTools):
        return ToolUse(tools, chosen[0], enforced=True, custom=custom)
    is_required = choice.allowed_tools.mode == "required" and bool(chosen)
    return ToolUse(chosen, enforced=is_required, custom=custom)


def _leave_out_hosted_choice(choice: HostedTool, body: ChatBody) -> None:
    if all(tool.type != choice.type for tool in body.tools or []):
        text = f"tool_choice names no tool: {shown(choice.type)}"
        raise invalid(text, "tool_choice", "invalid_value")
    body.leave_out(f"tool_choice {choice.type}")


def _names_in_choice(
    choice: NamedTool | NamedCustomTool | AllowedTools, body: ChatBody
) -> list[str]:
    """Return the names of the functions that a choice allows; tools that cannot run are noted."""
    allowed = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
    names = []
    for tool in allowed:
        if isinstance(tool, HostedTool):
            body.leave_out(f"tool_choice {tool.type}")
        elif isinstance(tool, NamedTool):
            names.append(tool.function.name)
        else:
            names.append(tool.custom.name)
    return names


def offered_functions(body: TemplateFields) -> list[Tool]:
    """Return the tools that a model can be offered, as functions; the others are noted."""
    functions = []
    for tool in body.tools or []:
        if isinstance(tool, Tool):
            functions.append(tool)
        elif isinstance(tool, CustomTool):
            functions.append(_function_of_custom(tool.custom))
        elif isinstance(body, AnswerBody):
            body.leave_out(f"tool {tool.type}")
    return functions


def _function_of_custom(custom: Custom) -> Tool:
    """Return the function that stands for a custom tool."""
    standing = Function(
        name=custom.name,
        description=custom_tools.description(custom.description, custom.format),
        parameters=custom_tools.parameters(),
    )
    return Tool(type="function", function=standing)


def custom_names(body: TemplateFields) -> frozenset[str]:
    """Return the names of the custom tools."""
    tools = body.tools or []
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomTool))
