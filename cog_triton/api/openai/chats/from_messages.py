"""Anthropic's /v1/messages to a chat.

What Anthropic's API accepts and this server cannot do is passed over and named in a Warning header:
an error would end the session of an agent, which sends the same conversation again with each request.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

from cog_triton.api.openai.chats import contents
from cog_triton.api.openai.chats.prompt import (
    THINKING_SWITCH,
    effort_switches,
    takes_tools,
    template_text,
)
from cog_triton.api.openai.chats.tool_use import function
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.base import AnswerBody
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.messages import (
    AnthropicTool,
    ClientTool,
    ContentBlock,
    CountBody,
    MessagesBody,
    MessageTurn,
    ToolChoice,
)
from cog_triton.api.openai.schemas.values import Effort
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.validation import valid

# Claude Code's first system block. It changes between requests, says nothing to the model, and would keep
# the engine from sharing the prefix of the prompts of a session.
BILLING_LINE = "x-anthropic-billing-header:"
THINKING_TYPES = ("enabled", "disabled", "adaptive")
ANTHROPIC_MODELS = "claude-"  # begins the names of Anthropic's models

AnyMessagesBody = CountBody | MessagesBody


def use_served_model(body: AnyMessagesBody, served: Served) -> None:
    """Let the served model answer for Anthropic's models, or raise ApiError for an unknown name.

    Claude Code asks for several of them by itself: for titles, for summaries and for its helpers.
    """
    if body.model.startswith(ANTHROPIC_MODELS) and body.model not in served.names:
        _leave_out(body, f"model {body.model}")
        body.model = served.models[0]
    served.adapter(body.model)


def chat_body(body: AnyMessagesBody, served: Served | None = None) -> ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    messages = chat_messages(body)
    continued = body.messages[-1].role == "assistant"
    if continued and (messages[-1].get("tool_calls") or not messages[-1]["content"].strip()):
        text = "messages: the last one has no text that an answer could continue"
        raise invalid(text, "messages")
    if body.context_management and body.context_management.edits:
        _leave_out(body, "context_management")
    chat = body.model_dump(include={*AnswerBody.model_fields, "max_tokens"})
    chat |= {"messages": messages, "continue_final_message": continued}
    chat["chat_template_kwargs"] = _thinking_switches(body) | (body.chat_template_kwargs or {})
    chat["reasoning_effort"] = _effort(body, served)
    chat["tools"] = _functions(body)
    if chat["tools"] and served is not None and not takes_tools(served):
        _leave_out(body, "tools, since the chat template does not support them")
        chat["tools"] = []
    choice = body.tool_choice
    if choice and _names_left_out_tool(body, choice):
        _leave_out(body, f"tool_choice {choice.name}")
    # A choice of tools that were all left out forces nothing. A choice without any tools is passed on, and
    # refused there.
    elif choice and (chat["tools"] or not body.tools):
        names = {"any": "required", "tool": function(name=choice.name or "")}
        chat["tool_choice"] = names.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    chat["response_format"] = _response_format(body)
    if isinstance(body, MessagesBody):
        chat["stop"] = body.stop_sequences
    return valid(ChatBody, chat)


def _thinking_switches(body: AnyMessagesBody) -> dict[str, Any]:
    """Return what the chat template takes for the wish to think, or not to."""
    thinking = body.thinking
    if thinking is None:
        return {}
    if thinking.budget_tokens is not None:
        _leave_out(body, "thinking.budget_tokens")
    if thinking.type not in THINKING_TYPES:
        _leave_out(body, f"thinking of type {thinking.type}")
        return {}
    return {THINKING_SWITCH: thinking.type != "disabled"}


def _effort(body: AnyMessagesBody, served: Served | None) -> str | None:
    """Return the effort of reasoning, if the chat template takes one."""
    effort = body.output_config.effort if body.output_config else None
    if effort is None or served is None:
        return None
    template = template_text(served.backend.tokenizer)
    if effort in get_args(Effort) and effort_switches(effort, template):
        return effort
    _leave_out(body, "output_config.effort")
    return None


def _response_format(body: AnyMessagesBody) -> dict[str, Any] | None:
    """Return the form of the answer, as a chat asks for it."""
    wanted = body.output_config.format if body.output_config else None
    wanted = wanted or body.output_format
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema_ is None:
        _leave_out(body, f"output format of type {wanted.type}")
        return None
    return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def _functions(body: AnyMessagesBody) -> list[dict[str, Any]]:
    """Return the tools that the client runs, as functions."""
    functions = []
    for tool in body.tools or []:
        if isinstance(tool, ClientTool):
            functions.append(
                function(name=tool.name, description=tool.description, parameters=tool.input_schema)
            )
        else:
            _leave_out(body, f"tool {tool.type}")
    return functions


def _names_left_out_tool(body: AnyMessagesBody, choice: ToolChoice) -> bool:
    """Return whether a choice forces a tool that only Anthropic can run."""
    hosted = [tool.name for tool in body.tools or [] if isinstance(tool, AnthropicTool)]
    return choice.type == "tool" and choice.name in hosted


def _leave_out(body: AnyMessagesBody, what: str) -> None:
    if isinstance(body, MessagesBody):  # a count has no answer that would miss it
        body.leave_out(what)


def chat_messages(body: AnyMessagesBody) -> list[dict[str, Any]]:
    """Return the messages of a chat: the system's text, and those of the turns, which may make several."""
    messages: list[dict[str, Any]] = []
    system = _system_text(body)
    if system:
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(_combined(body.messages)):
        messages += _messages(body, turn.role, _blocks(turn.content), f"messages[{number}].content")
    return messages


def _system_text(body: AnyMessagesBody) -> str:
    if isinstance(body.system, str) or body.system is None:
        return body.system or ""
    lasting = [
        block for block in body.system if not (block.text or "").lstrip().startswith(BILLING_LINE)
    ]
    return contents.joined_text(lasting, ["text"], "system")


def _blocks(content: str | Sequence[ContentBlock]) -> list[ContentBlock]:
    if isinstance(content, str):
        return [ContentBlock(type="text", text=content)]
    return list(content)


def _combined(turns: Sequence[MessageTurn]) -> list[MessageTurn]:
    """Make one turn of those of one role that follow one another, as Anthropic's API does."""
    combined: list[MessageTurn] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        first, *others = group
        if others:
            content = [block for turn in (first, *others) for block in _blocks(turn.content)]
            combined.append(MessageTurn(role=role, content=content))
        else:
            combined.append(first)
    return combined


def _messages(
    body: AnyMessagesBody, role: str, blocks: Sequence[ContentBlock], place: str
) -> list[dict[str, Any]]:
    """Return the messages of a turn: the results of calls, and what else there is in it."""
    results = []
    texts = []
    thoughts = []
    calls = []
    for block in blocks:
        match role, block.type:
            case "user", "tool_result":
                if not block.tool_use_id:
                    raise invalid(f"{place}: a tool_result must have a tool_use_id")
                text = _result_text(body, block)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            case "assistant", "tool_use":
                arguments = json.dumps(block.input or {})
                call = function(name=block.name or "", arguments=arguments)
                calls.append({"id": block.id or "", **call})
            case "assistant", "thinking":
                thoughts.append(block.thinking or "")
            case "assistant", "redacted_thinking":
                pass
            case _:
                texts.append(_block_text(body, block))
    if results and not texts:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _result_text(body: AnyMessagesBody, block: ContentBlock) -> str:
    """Return the text of a tool's result, which may be a text, or blocks of any kind."""
    if isinstance(block.content, list):
        return "\n".join(_block_text(body, inner) for inner in block.content)
    if isinstance(block.content, dict):
        return json.dumps(block.content)
    return block.content or ""


def _block_text(body: AnyMessagesBody, block: ContentBlock) -> str:
    """Return the text of a block; in place of one that has none, words that say so."""
    if block.type == "text":
        return block.text or ""
    if block.type == "document" and isinstance(block.source, dict):
        data = block.source.get("data")
        if block.source.get("type") == "text" and isinstance(data, str):
            return f"{block.title}\n{data}" if block.title else data
    if block.type == "search_result" and isinstance(block.content, list):
        return "\n".join([block.title or "", *(_block_text(body, part) for part in block.content)])
    _leave_out(body, f"content of type {block.type}")
    return contents.left_out_text(block.type)
