"""Messages as chat templates know them."""

from typing import Any

from cog_triton.api.openai.chats import contents, custom_tools
from cog_triton.api.openai.chats.tool_use import function
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.chat import ChatBody, Message
from cog_triton.api.openai.schemas.tokens import TokenizeBody
from cog_triton.errors import shown

# OpenAI's; a template may name others.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Parts of an assistant's content that are thoughts.
_THOUGHT_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# Fields of a message that may have them.
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")


def plain_messages(body: ChatBody | TokenizeBody, template: str) -> list[dict[str, Any]]:
    """Return the messages as templates know them, and without what a model of text cannot read."""
    plain = []
    messages = body.messages or []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        turn = _plain(message, place, template)
        newest = number == len(messages) - 1 and message.role != "tool"
        if isinstance(turn.get("content"), list):
            turn["content"] = [
                _readable_part(part, f"{place}.content", body, newest=newest)
                for part in turn["content"]
            ]
        plain.append(turn)
    return plain


def _readable_part(part: Any, place: str, body: ChatBody | TokenizeBody, *, newest: bool) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in contents.UNREADABLE:
        return part  # the template's side refuses what it does not know
    if newest:
        raise contents.refusal(kind, place, place)
    return {"type": "text", "text": contents.left_out(kind, body)}


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
    if message.refusal and not plain.get("content"):
        plain["content"] = message.refusal
    if role == "assistant":
        _gather_thoughts(plain)
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    if isinstance(plain.get("content"), list):
        for part in plain["content"]:
            _show_refusal(part)
    return plain


def _show_refusal(part: Any) -> None:
    """Make text of a part that is a refusal."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        part["type"] = "text"
        part["text"] = part.pop("refusal", None)


def _plain_call(call: Any) -> Any:
    """Return an earlier call as templates know it; that of a custom tool is one of a function."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict) or "function" in call:
        return call
    name = custom.get("name")
    text = custom.get("input")
    arguments = custom_tools.arguments_of(text if isinstance(text, str) else "")
    kept = {field: value for field, value in call.items() if field not in ("type", "custom")}
    return {**kept, **function(name=name if isinstance(name, str) else "", arguments=arguments)}


def _gather_thoughts(plain: dict[str, Any]) -> None:
    """Give an assistant's message its thoughts under one name; a template gets them under those it reads.

    Some clients return them as ``reasoning``, as vLLM and OpenRouter name them, as ``thinking``, as Ollama
    does, or as parts of the content.
    """
    thoughts = [next((plain[name] for name in _THOUGHT_FIELDS if plain.get(name)), "")]
    content = plain.get("content")
    if isinstance(content, list):
        thoughts += [_thought_text(part) for part in content if _is_thought(part)]
        plain["content"] = [part for part in content if not _is_thought(part)]
    texts = [text for text in thoughts if isinstance(text, str) and text]
    if texts:
        plain["reasoning_content"] = "\n".join(texts)


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHT_PARTS


def _thought_text(part: dict[str, Any]) -> str:
    """Return the text of a part that is a thought; Mistral's has a list of parts in it."""
    value = part.get("thinking") or part.get("reasoning") or part.get("text")
    if isinstance(value, list):
        value = "".join(str(inner.get("text") or "") for inner in value if isinstance(inner, dict))
    return value if isinstance(value, str) else ""
