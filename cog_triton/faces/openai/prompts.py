"""Messages to a prompt, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cog_triton.faces.openai.fields import Message, Tool
from cog_triton.faces.openai.served import Backend
from cog_triton.text.chat import render_chat
from cog_triton.text.tokenizer import Tokenizer


def chat_prompt(
    backend: Backend,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    options: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
) -> str:
    """The text that the model sees; see ``render_chat``."""
    return render_chat(
        backend.tokenizer,
        [message.model_dump(exclude_none=True) for message in messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=add_generation_prompt is not False,
        kwargs=options,
        limits=backend.limits,
    )


def template_text(tokenizer: Tokenizer) -> str:
    """The model's chat template, all of them if it has several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
