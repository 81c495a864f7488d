"""Prompts of messages, by the model's own chat template, and of a text, by PROMPT_TEMPLATE.

Transformers renders chat templates in a sandbox. Prompt templates are written for ``str.format``, but come
with requests, so ``str.format`` must not see them: ``{prompt.__class__}`` would read attributes and
``{prompt:>9999999999}`` would take the memory.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from cog_triton.errors import (
    SHOWN_CHARACTERS,
    BadPromptTemplate,
    ChatTemplateError,
    ConfigurationError,
    InvalidParameter,
    PromptRequired,
    PromptTemplateError,
    shown,
)
from cog_triton.request.limits import (
    MESSAGES,
    TEMPLATE_BRACES,
    TEMPLATE_CHARACTERS,
    TextLimits,
    parse_object,
)
from cog_triton.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_LIMITS = TextLimits()
_PROBE = "The text of a system message"
_LITERALS = {"{{": "{", "}}": "}"}
_FIELDS = {"{prompt}", "{system_prompt}", *_LITERALS}
# From the left, and doubled braces before single ones, as str.format reads them: "{{{prompt}}}" is
# a literal brace, a placeholder and a literal brace.
_BRACES = re.compile(r"\{(?:\{|[^{}]*\})?|\}\}?")
_SHOWN_PLACEHOLDERS = 3


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    limits: TextLimits = _LIMITS,
) -> str:
    """Render messages to a prompt, with the tokens that begin a text: the tokenizer must add none.

    System messages at the beginning go into the first user's where the template has no place for them.

    Args:
        messages: each with a role and, mostly, a content: a text, or a list of parts of type text.
        tools: functions that the model may call, in OpenAI's form.
        continue_final_message: end within the last message, which the model continues.
        kwargs: the template's own switches.

    Raises:
        PromptRequired: there are no messages.
        PromptTooLong: they have, or the prompt has, more characters than the limits allow.
        InvalidParameter: messages, tools or kwargs are not of that form.
        ChatTemplateError: there is no template, or it refuses them; with its words.
    """
    template = _template(tokenizer, tools=bool(tools))
    if not messages:
        raise PromptRequired("messages must have at least one message")
    if len(messages) > MESSAGES or len(tools) > MESSAGES:
        raise InvalidParameter(f"messages and tools must be at most {MESSAGES} each")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidParameter("tools must be objects")
    switches = dict(kwargs or {})
    if switches:
        # Not the arguments of apply_chat_template: a user's own template is one of them.
        taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
        if own := sorted(taken & switches.keys()):
            raise InvalidParameter(f"chat_template_kwargs must not have {', '.join(own)}")
    limits.check("the chat", _characters([messages, tools, switches]))
    turns = [_turn(f"messages[{place}]", message) for place, message in enumerate(messages)]
    if "developer" not in template:
        for turn in turns:
            turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
    if turns[0]["role"] == "system" and not _has_system_role(tokenizer, template):
        turns = merged_system(turns)
    options = {**switches, "tools": list(tools) or None}
    options["add_generation_prompt"] = add_generation_prompt and not continue_final_message
    if continue_final_message:
        options["continue_final_message"] = True
    try:
        prompt = _rendered(tokenizer, template, turns, options)
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template refuses the messages: {error}") from None
    if not prompt:
        raise PromptRequired("the chat template makes an empty prompt of the messages")
    limits.check("the prompt in its chat template", len(prompt))
    return prompt


def set_chat_template(tokenizer: Tokenizer, setting: str) -> None:
    """Give a tokenizer the template that CHAT_TEMPLATE is or names, in place of its own.

    Raises:
        ConfigurationError: the file cannot be read, or is not in Jinja's language.
    """
    template = setting
    if "{" not in setting:
        try:
            template = Path(setting).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"CHAT_TEMPLATE={setting} cannot be read: {error}") from None
    tokenizer.chat_template = template
    try:
        _rendered(tokenizer, template, [{"role": "user", "content": _PROBE}], {})
    except TemplateSyntaxError as error:
        raise ConfigurationError(f"CHAT_TEMPLATE, line {error.lineno}: {error}") from None
    except Exception:
        return  # a template may refuse any messages; this was about its form


def merged_system(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Put the system messages at the beginning into the first user message after them."""
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    texts, rest = [m["content"] for m in messages[:first]], [dict(m) for m in messages[first:]]
    for turn in rest:
        if turn["role"] == "user":
            turn["content"] = "\n\n".join([*texts, turn["content"]])
            return rest
    return [{"role": "user", "content": "\n\n".join(texts)}, *rest]


def _template(tokenizer: Tokenizer, *, tools: bool) -> str:
    # Some models have another one for tools.
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        names = ["tool_use", "default"] if tools else ["default"]
        template = next((template[name] for name in names if name in template), None)
    if not template:
        raise ChatTemplateError(
            "the model has no chat template, so it takes no messages: send a prompt, or set CHAT_TEMPLATE "
            "to a template, or to a file with one"
        )
    return str(template)


def _characters(value: Any) -> int:
    """Count those of all texts in a JSON value, however deep it is."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            waiting += item
    return count


def _turn(name: str, message: Any) -> dict[str, Any]:
    """Return a message as templates know it: a content of text, and arguments of calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidParameter(f"{name} must be an object with a role")
    content = "" if message.get("content") is None else message["content"]
    if not isinstance(content, str | list):
        raise InvalidParameter(f"{name}.content must be a text or a list of parts")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InvalidParameter(
                    f"{name}.content must be of parts of type text, which have a text; "
                    f"{shown(kind)} is not supported"
                )
        content = "\n".join(part["text"] for part in content)
    turn = {**message, "content": content}
    if isinstance(calls := message.get("tool_calls"), list):
        turn["tool_calls"] = [_call(call) for call in calls]
    return turn


def _call(call: Any) -> Any:
    # OpenAI's API has arguments as the text of a JSON object. A text that a model wrote and that is not
    # one, or was cut off, stays a text.
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_object("arguments", function["arguments"] or "{}")
    except InvalidParameter:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


@lru_cache(maxsize=8)
def _has_system_role(tokenizer: Tokenizer, template: str) -> bool:
    turns = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
    try:
        return _PROBE in _rendered(tokenizer, template, turns, {"add_generation_prompt": True})
    except (TemplateError, TypeError, ValueError, KeyError):
        return False


def _rendered(
    tokenizer: Tokenizer, template: str, turns: list[dict[str, Any]], options: Mapping[str, Any]
) -> str:
    rendered = tokenizer.apply_chat_template(
        turns, chat_template=template, tokenize=False, **options
    )
    return str(rendered)


def format_prompt(
    template: str, prompt: str | None, system_prompt: str = "", limits: TextLimits = _LIMITS
) -> str:
    """Return the template with ``{prompt}`` and ``{system_prompt}`` filled in.

    ``{{`` and ``}}`` become single braces. What is filled in stays as it is, braces included. A
    system prompt for which the template has no place is left out.

    Raises:
        PromptRequired: the prompt is empty or None. One of whitespace only is a prompt.
        PromptTooLong: the prompt, the system prompt or the result has too many characters.
        PromptTemplateError, BadPromptTemplate: see `validate_template`.
    """
    if not prompt:
        raise PromptRequired("A prompt is required, and it must not be empty.")
    limits.check("the prompt", len(prompt))
    limits.check("the system prompt", len(system_prompt))
    fields = validate_template(template)
    fillings = {**_LITERALS, "{prompt}": prompt, "{system_prompt}": system_prompt}
    # Counted before there is a result.
    grown = sum((len(fillings[text]) - len(text)) * count for text, count in fields.items())
    limits.check("the prompt in its template", len(template) + grown)
    return _BRACES.sub(lambda match: fillings[match[0]], template)


def validate_template(template: str) -> Counter[str]:
    """Count the placeholders and literal braces of a template.

    Raises:
        PromptTemplateError: it has other placeholders, or single braces; or it is too long. Reported
            first, as they often are what should have been ``{prompt}``.
        BadPromptTemplate: it has no ``{prompt}``.
    """
    braces = template.count("{") + template.count("}")
    for what, number, most in (
        ("characters", len(template), TEMPLATE_CHARACTERS),
        ("braces", braces, TEMPLATE_BRACES),
    ):
        if number > most:
            text = f"The prompt template has {number} {what}; {most} are the most."
            raise PromptTemplateError(text)
    fields = Counter(match[0] for match in _BRACES.finditer(template))
    unusable = [text for text in fields if text not in _FIELDS]
    unknown = [
        repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 4] + "...}")
        for text in unusable
        if len(text) > 1
    ]
    if (more := len(unknown) - _SHOWN_PLACEHOLDERS) > 0:
        unknown[_SHOWN_PLACEHOLDERS:] = [f"and {more} more"]
    problems = ["unknown placeholders: " + ", ".join(unknown)] if unknown else []
    if single := [repr(text) for text in unusable if len(text) == 1]:
        problems.append("unbalanced braces: " + " and ".join(single))
    if problems:
        raise PromptTemplateError(
            f"The prompt template has {' and '.join(problems)}. Only {{prompt}} and {{system_prompt}} "
            "are filled in; to have a brace in the text, double it: {{ for {, }} for }."
        )
    if "{prompt}" not in fields:
        raise BadPromptTemplate(
            "The prompt template has no place for the prompt: put {prompt} where it should go."
        )
    return fields
