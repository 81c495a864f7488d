"""Messages to a prompt, by the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import Message, Tool
from cog_triton.faces.openai.served import Backend
from cog_triton.text.chat import render_chat
from cog_triton.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""OpenAI's; a template may name others."""
THINKING_SWITCH = "enable_thinking"
"""The name that most templates have for it."""


def chat_prompt(
    backend: Backend,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    options: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None = None,
) -> str:
    """Render the text that the model sees; see ``render_chat``.

    Raises:
        ApiError: a message has a role that nobody knows, or lacks what its role must have; or an answer
            cannot both be begun and be continued.
    """
    if continue_final_message and add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt contradict; give one of them",
            "continue_final_message",
        )
    template = template_text(backend.tokenizer)
    return render_chat(
        backend.tokenizer,
        [_plain(message, f"messages[{n}]", template) for n, message in enumerate(messages)],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        kwargs=options,
        limits=backend.limits,
    )


def effort_switches(effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a chat template takes for an effort of reasoning; nothing where it knows of none."""
    template = template_text(tokenizer)
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    for switch in (THINKING_SWITCH, "thinking"):
        if re.search(
            rf"\b{switch} is (not )?(defined|false|true)|\bif (not )?{switch}\b", template
        ):
            return {switch: effort != "none"}
    return {}


def _plain(message: Message, place: str, template: str) -> dict[str, Any]:
    """A message as templates know it: a refusal is text."""
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
    """The model's chat template, all of them if it has several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
