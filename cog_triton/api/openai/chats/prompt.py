"""Messages and tools to the text that the model sees, by the model's chat template."""

import re
from typing import Any

from cog_triton.api.openai.chats.history import plain_messages
from cog_triton.api.openai.chats.tool_use import offered_functions, tool_use
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.tokens import TokenizeBody
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.tool_calls.formats import format_of
from cog_triton.text.chat import render_chat
from cog_triton.text.conversation import call_as_json
from cog_triton.text.tokenizer import Tokenizer

THINKING_SWITCH = "enable_thinking"  # what most chat templates call it


def chat_prompt(body: ChatBody | TokenizeBody, served: Served) -> str:
    """Render the text that the model sees of a chat."""
    if body.continue_final_message and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt cannot both be true"
        raise invalid(text, "continue_final_message")
    tools = offered_functions(body)
    options = body.chat_template_kwargs or {}
    template = template_text(served.backend.tokenizer)
    if isinstance(body, ChatBody):
        tools = tool_use(body).offered
        options = effort_switches(body.reasoning_effort, template) | options
    known = format_of(template)
    return render_chat(
        served.backend.tokenizer,
        plain_messages(body, template),
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        kwargs=options,
        limits=served.backend.limits,
        write_call=known.written_call if known else call_as_json,
    )


def template_text(tokenizer: Tokenizer) -> str:
    """Return the model's chat template, all of them if it has several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def takes_tools(served: Served) -> bool:
    """Return whether the model's chat template has a place for tools."""
    return format_of(template_text(served.backend.tokenizer)) is not None


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
