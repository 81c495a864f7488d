"""A chat as every API here asks for it: its prompt, tools and request, and the reader of its answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import (
    UNKNOWN_CONTEXT,
    AllowedTools,
    ChatBody,
    Message,
    NamedTool,
    TokenizeBody,
    Tool,
    guides,
    sampling,
)
from cog_triton.faces.openai.parsing import (
    CallStart,
    Event,
    Format,
    Parser,
    ReasoningParser,
    format_of,
)
from cog_triton.faces.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.chat import render_chat
from cog_triton.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""OpenAI's; a template may name others."""
THINKING_SWITCH = "enable_thinking"
"""The name that most templates have for it."""


@dataclass(frozen=True)
class Turn:
    """One chat to be answered.

    Attributes:
        request: of the first answer.
        known: format of the model's calls; None if it is offered no tools.
        enforced: the answer has to be a call.
        named: the answer has to be a call of one function.
        thinks: the answer may begin with thoughts.
    """

    request: Request
    known: Format | None
    enforced: bool
    named: bool
    thinks: bool

    def reader(self, id_prefix: str = "call_") -> Reader:
        """Return the reader of one answer, whose calls have ids with a prefix."""
        parser = Parser()
        if self.known is not None:
            parser = self.known.parser(partial(self.known.new_id, id_prefix), guided=self.enforced)
        return Reader(ReasoningParser(self.request.prompt, parser) if self.thinks else parser)


class Reader:
    """Reads the chunks of one answer.

    Attributes:
        plain: all of the text is for the reader.
        called: there has been a call.
    """

    def __init__(self, parser: Parser) -> None:
        self.plain = type(parser) is Parser
        self.called = False
        self._parser = parser

    def read(self, chunk: Chunk) -> list[Event]:
        """Return the events that are certain with this chunk."""
        events = self._parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            events += self._parser.flush()
        self.called = self.called or any(isinstance(event, CallStart) for event in events)
        return events


def chat_turn(body: ChatBody, served: Served) -> Turn:
    """Return what a body asks for.

    Raises:
        ApiError, UserError: it asks for what cannot be had.
    """
    template = template_text(served.backend.tokenizer)
    use = tool_use(body)
    known = format_of(template) if use.offered else None
    if use.offered and known is None:
        raise invalid("tools: the chat template of this model takes none", "tools")
    values = sampling(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if known and use.enforced:
        # A response_format is that of a text, of which there will be none.
        for name in guides(body):
            raise invalid(f"tool_choice and {name} contradict", "tool_choice")
        values["guide"] = call_guide(use, known, parallel=body.parallel_tool_calls is not False)
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = Request(
        prompt=chat_prompt(body, served),
        add_special_tokens=bool(body.add_special_tokens),
        adapter=served.adapter(body.model),
        max_tokens=served.backend.context_length or UNKNOWN_CONTEXT if given is None else given,
        shown_tokens=known.marks if known else (),
        **served.token_ids(),
        **values,
    )
    thinks = ReasoningParser.CLOSING in template and request.guide is None
    return Turn(request, known, use.enforced, use.named, thinks)


def chat_prompt(body: ChatBody | TokenizeBody, served: Served) -> str:
    """Render the text that the model sees of a chat.

    Raises:
        ApiError: a message has a role that nobody knows, or lacks what its role must have; or an answer
            cannot both be begun and be continued.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt contradict; give one of them",
            "continue_final_message",
        )
    tools, options = body.tools or [], body.chat_template_kwargs or {}
    template = template_text(served.backend.tokenizer)
    if isinstance(body, ChatBody):
        tools = tool_use(body).offered
        options = effort_switches(body.reasoning_effort, template) | options
    return render_chat(
        served.backend.tokenizer,
        [
            _plain(message, f"messages[{n}]", template)
            for n, message in enumerate(body.messages or [])
        ],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        kwargs=options,
        limits=served.backend.limits,
    )


def effort_switches(effort: str | None, template: str) -> dict[str, Any]:
    """Return what a chat template takes for an effort of reasoning; nothing where it knows of none."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    for name in (THINKING_SWITCH, "thinking"):
        if re.search(rf"\b{name} is (not )?(defined|false|true)|\bif (not )?{name}\b", template):
            return {name: effort != "none"}
    return {}


def _plain(message: Message, place: str, template: str) -> dict[str, Any]:
    """Return a message as templates know it: a refusal is text."""
    role = message.role
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        text = f"{place}.role must be one of {', '.join(sorted(ROLES))}, not {shown(role)}"
        raise invalid(text, f"{place}.role", "invalid_value")
    if role == "tool" and not message.tool_call_id:
        where = f"{place}.tool_call_id"
        raise invalid(f"you must provide {where}", where, "missing_required_parameter")
    plain = message.model_dump(exclude_none=True, exclude={"refusal"})
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in content
        ]
    elif not content and message.refusal:
        plain["content"] = message.refusal
    return plain


def template_text(tokenizer: Tokenizer) -> str:
    """Return the model's chat template, all of them if it has several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


@dataclass(frozen=True)
class ToolUse:
    """The tools that are offered to the model, and those that it may call; see ``Turn``."""

    offered: list[Tool]
    allowed: list[Tool]
    enforced: bool = False
    named: bool = False


def tool_use(body: ChatBody) -> ToolUse:
    """Return the use of tools that ``tools`` and ``tool_choice`` ask for.

    Raises:
        ApiError: a tool may be called, and there is none of that name, or none at all.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice is None or choice == "auto":
        return ToolUse(tools, tools)
    if choice == "none":
        return ToolUse([], [])
    if not tools:
        raise invalid("tool_choice is only allowed when tools are given", "tool_choice")
    if choice == "required":
        return ToolUse(tools, tools, enforced=True)
    named = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
    names = [tool.function.name for tool in named]
    for name in names:
        if all(tool.function.name != name for tool in tools):
            raise invalid(f"tool_choice names no tool: {name}", "tool_choice")
    chosen = [tool for tool in tools if tool.function.name in names]
    if isinstance(choice, NamedTool):
        return ToolUse(tools, chosen, enforced=True, named=True)
    return ToolUse(chosen, chosen, enforced=choice.allowed_tools.mode == "required")


def call_guide(use: ToolUse, known: Format, *, parallel: bool) -> Guide:
    """Return the JSON schema of the calls: a list of them, or one call of a named tool.

    Raises:
        ApiError: the schema of a tool's parameters is nested too deep.
    """
    definitions: dict[str, Any] = {}
    try:
        calls = [_call_schema(tool, known.arguments, definitions) for tool in use.allowed]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if not use.named:
            most = {} if parallel else {"maxItems": 1}
            schema = {"type": "array", "items": schema, "minItems": 1, **most}
        text = json.dumps({**schema, "$defs": definitions} if definitions else schema)
    except RecursionError:
        raise invalid("tools: the parameters' schema is nested too deep", "tools") from None
    return Guide(GuideKind.JSON_SCHEMA, text)


def _call_schema(tool: Tool, arguments: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's call; one whose parts refer to each other moves to ``definitions``."""
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    name = f"tool{len(definitions)}"
    moved = _rebased(parameters, f"#/$defs/{name}")
    if moved != parameters:
        definitions[name], parameters = moved, {"$ref": f"#/$defs/{name}"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _rebased(schema: Any, root: str) -> Any:
    """Return a schema whose references to parts of itself begin at ``root``, where it now is."""
    if isinstance(schema, list):
        return [_rebased(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + part[1:]
        if key == "$ref" and isinstance(part, str) and part[:2] in ("#", "#/")
        else _rebased(part, root)
        for key, part in schema.items()
    }
