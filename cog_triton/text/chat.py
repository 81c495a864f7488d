"""Prompts of messages, by the model's chat template, and of a text, by PROMPT_TEMPLATE.

Prompt templates come with requests, so ``str.format`` must not see them: ``{prompt.__class__}`` would read
attributes and ``{prompt:>9999999999}`` would take the memory.
"""

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from cog_triton import errors
from cog_triton.errors import InvalidParameter, PromptRequired, PromptTemplateError, shown
from cog_triton.request import limits as bounds
from cog_triton.request.limits import TextLimits, parse_json
from cog_triton.text.conversation import WriteCall, call_as_json, fitted
from cog_triton.text.template_forms import (
    TemplateForms,
    find_forms,
    in_its_forms,
    text_of,
    with_other_arguments,
)
from cog_triton.text.template_traits import TemplateTraits, find_traits
from cog_triton.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_LIMITS = TextLimits()
_PROBE = "The text of a system message"
_LITERALS = {"{{": "{", "}}": "}"}
# From the left, and doubled braces before single ones, as str.format reads them: "{{{prompt}}}" is
# a literal brace, a placeholder and a literal brace.
_BRACES = re.compile(r"\{(?:\{|[^{}]*\})?|\}\}?")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    limits: TextLimits = _LIMITS,
    write_call: WriteCall = call_as_json,
) -> str:
    """Render messages to a prompt, with the tokens that begin a text: the tokenizer must add none.

    What the template has no place for is written in the nearest way that it has: see ``conversation``.

    Args:
        messages: objects with a role and, mostly, a content: a text, or a list of parts of type text.
        tools: functions that the model may call, objects in OpenAI's form.
        continue_final_message: end within the last message, which the model continues.
        kwargs: the template's own switches.
        write_call: writes a call as the model does, for a template that shows none.

    Raises:
        PromptRequired, PromptTooLong: there are no messages, or too many characters.
        InvalidParameter: messages or kwargs are not of that form.
        ChatTemplateError: there is no template, or it refuses them; with its words.
    """
    template = _template(tokenizer, tools=bool(tools))
    switches = dict(kwargs or {})
    if not messages:
        raise PromptRequired("messages must contain at least one message")
    if len(messages) > bounds.MESSAGES or len(tools) > bounds.MESSAGES:
        raise InvalidParameter(f"messages and tools must each have at most {bounds.MESSAGES} items")
    _check_switches(tokenizer, switches)
    limits.check("the chat", _characters([messages, tools, switches]))
    turns = [_turn(f"messages[{place}]", message) for place, message in enumerate(messages)]
    probed = _probed(tokenizer, template)
    turns = _fitted_turns(turns, template, probed.traits, write_call)
    prompt = _rendered_in_any_way(
        tokenizer,
        template,
        turns,
        _ways(turns, tools, probed.forms),
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        **switches,
    )
    if not prompt:
        raise PromptRequired("the chat template renders the messages as an empty prompt")
    limits.check("the prompt in its chat template", len(prompt))
    return prompt


def _check_switches(tokenizer: Tokenizer, switches: Mapping[str, Any]) -> None:
    """Refuse the arguments of apply_chat_template as switches: a template is one of them."""
    if not switches:
        return
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    refused = sorted(taken & switches.keys())
    if refused:
        raise InvalidParameter(f"chat_template_kwargs must not contain {', '.join(refused)}")


def _fitted_turns(
    turns: list[dict[str, Any]], template: str, traits: TemplateTraits, write_call: WriteCall
) -> list[dict[str, Any]]:
    """Return the turns as a template accepts them; contents keep their parts if nothing has to change."""
    if "developer" not in template:
        turns = [
            {**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns
        ]
    texts = [{**turn, "content": text_of(turn["content"])} for turn in turns]
    fitting = fitted(texts, traits, write_call)
    return turns if fitting == texts else fitting


@dataclass(frozen=True)
class _Way:
    """One way to render a chat: the forms of its turns, and its tools."""

    forms: TemplateForms
    tools: Sequence[Mapping[str, Any]]


def _ways(
    turns: Sequence[Message], tools: Sequence[Mapping[str, Any]], forms: TemplateForms
) -> list[_Way]:
    """Return the ways to try, the usual one first."""
    ways = [_Way(forms, tools)]
    if any(turn.get("tool_calls") for turn in turns):
        ways.append(_Way(with_other_arguments(forms), tools))
    if tools:
        ways.append(_Way(forms, [_described(tool) for tool in tools]))
    return ways


def _rendered_in_any_way(
    tokenizer: Tokenizer,
    template: str,
    turns: Sequence[Message],
    ways: Sequence[_Way],
    **options: Any,
) -> str:
    """Return the prompt of the first way that the template accepts, or raise the first refusal."""
    refusals: list[Exception] = []
    for way in ways:
        try:
            return _rendered(
                tokenizer,
                template,
                [in_its_forms(turn, way.forms) for turn in turns],
                tools=way.tools,
                **options,
            )
        except Exception as error:
            # A template can raise any exception.
            refusals.append(error)
    raise errors.ChatTemplateError(_refusal(refusals[0])) from None


def _rendered(
    tokenizer: Tokenizer,
    template: str,
    turns: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> str:
    """Render turns in transformers' sandbox, or raise whatever the template raises.

    Without tools, templates mostly ask whether there are any, and some go through a list in any case.
    """

    def render(passed_tools: Sequence[Mapping[str, Any]] | None) -> str:
        prompt: str = tokenizer.apply_chat_template(
            turns, tools=passed_tools, chat_template=template, tokenize=False, **options
        )
        return prompt

    if tools:
        return render(list(tools))
    try:
        return render(None)
    except Exception as error:
        with suppress(Exception):
            return render([])
        raise error


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the descriptions, empty ones, that some templates need."""
    function = dict(tool.get("function") or {})
    function.setdefault("description", "")
    parameters = {"type": "object", **(function.get("parameters") or {})}
    properties = {
        name: {"description": "", **schema} if isinstance(schema, Mapping) else schema
        for name, schema in (parameters.get("properties") or {}).items()
    }
    function["parameters"] = {"required": [], **parameters, "properties": properties}
    return {**tool, "function": function}


def _refusal(error: Exception) -> str:
    """Return the text for a template's error; its class says what the error's text may not."""
    if isinstance(error, TemplateError):
        return f"the chat template refuses the messages: {error}"
    return f"the chat template cannot render the messages: {type(error).__name__}: {error}"


def set_chat_template(tokenizer: Tokenizer, setting: str) -> None:
    """Give a tokenizer the template that CHAT_TEMPLATE is or names, or raise ConfigurationError."""
    try:
        template = setting if "{" in setting else Path(setting).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        text = f"CHAT_TEMPLATE={setting} cannot be read: {error}"
        raise errors.ConfigurationError(text) from None
    tokenizer.chat_template = template
    try:
        messages = [{"role": "user", "content": _PROBE}]
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise errors.ConfigurationError(f"CHAT_TEMPLATE, line {error.lineno}: {error}") from None
    except Exception:
        # A template may refuse any messages. This checks its syntax.
        return


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Return whether the model takes messages."""
    return bool(_find_template(tokenizer, tools=False))


def _find_template(tokenizer: Tokenizer, *, tools: bool) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        # Some models have another template for tools.
        template = (tools and template.get("tool_use")) or template.get("default")
    return template or None


def _template(tokenizer: Tokenizer, *, tools: bool) -> str:
    template = _find_template(tokenizer, tools=tools)
    if not template:
        raise errors.ChatTemplateError(
            "the model has no chat template, so it does not accept messages; send a prompt, or set "
            "CHAT_TEMPLATE to a template or a file that contains one"
        )
    return str(template)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 0


def _turn(name: str, message: Message) -> dict[str, Any]:
    """Return a message with a content of text or parts of text, and arguments of calls as objects."""
    if not isinstance(message.get("role"), str):
        raise InvalidParameter(f"{name} must be an object with a role")
    content = "" if message.get("content") is None else message["content"]
    if not isinstance(content, str | list):
        raise InvalidParameter(f"{name}.content must be a string or a list of parts")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InvalidParameter(
                    f"{name}.content must be a string or a list of text parts; "
                    f"a part of type {shown(kind)} is not supported"
                )
    turn = {**message, "content": content}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        turn["tool_calls"] = [_with_object(call) for call in calls]
    return turn


def _with_object(call: Any) -> Any:
    # OpenAI's API has arguments as the text of a JSON object. A text that a model wrote and that is not
    # one, or was cut off, stays a text.
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with suppress(InvalidParameter):
                arguments = parse_json("arguments", text or "{}", dict)
                return {**call, "function": {**function, "arguments": arguments}}
    return call


@dataclass(frozen=True)
class _ProbedTemplate:
    """What a chat template reads and accepts."""

    forms: TemplateForms
    traits: TemplateTraits


@lru_cache(maxsize=8)
def _probed(tokenizer: Tokenizer, template: str) -> _ProbedTemplate:
    """Probe a template: first for its forms, and in these for the conversations that it accepts."""
    forms = find_forms(lambda turns: _rendered_or_none(tokenizer, template, turns))

    def render(turns: Sequence[Message]) -> str | None:
        in_forms = [in_its_forms(turn, forms) for turn in turns]
        return _rendered_or_none(tokenizer, template, in_forms)

    return _ProbedTemplate(forms, find_traits(render))


def _rendered_or_none(tokenizer: Tokenizer, template: str, turns: Sequence[Message]) -> str | None:
    try:
        return _rendered(tokenizer, template, turns, add_generation_prompt=True)
    except Exception:
        # A template may raise anything for what it does not expect.
        return None


def format_prompt(
    template: str, prompt: str | None, system_prompt: str = "", limits: TextLimits = _LIMITS
) -> str:
    """Fill ``{prompt}`` and ``{system_prompt}``, braces included; ``{{`` and ``}}`` become single braces.

    A system prompt for which the template has no place is left out. A prompt of whitespace only is one;
    without one PromptRequired is raised, and PromptTooLong before too long a result is made.
    """
    if not prompt:
        raise PromptRequired("A prompt is required, and it must not be empty.")
    limits.check("the prompt", len(prompt))
    limits.check("the system prompt", len(system_prompt))
    fillings = {**_LITERALS, "{prompt}": prompt, "{system_prompt}": system_prompt}
    fields = validate_template(template).items()
    growth = sum((len(fillings[field]) - len(field)) * count for field, count in fields)
    # Before the text is made.
    limits.check("the prompt in its template", len(template) + growth)
    return _BRACES.sub(lambda match: fillings[match[0]], template)


def validate_template(template: str) -> Counter[str]:
    """Count the placeholders and literal braces of a template, or raise what is wrong with it."""
    braces = template.count("{") + template.count("}")
    if braces > bounds.TEMPLATE_BRACES or len(template) > bounds.TEMPLATE_CHARACTERS:
        raise PromptTemplateError(
            f"The prompt template has {len(template)} characters and {braces} braces; "
            f"the limits are {bounds.TEMPLATE_CHARACTERS} and {bounds.TEMPLATE_BRACES}."
        )
    fields = Counter(match[0] for match in _BRACES.finditer(template))
    unusable = fields.keys() - {"{prompt}", "{system_prompt}", *_LITERALS}
    unknown = [repr(shown(field)) for field in fields if field in unusable and len(field) > 1]
    if len(unknown) > 3:
        unknown[3:] = [f"and {len(unknown) - 3} more"]
    single = [repr(brace) for brace in fields if brace in unusable and len(brace) == 1]
    problems = []
    if unknown:
        problems.append("unknown placeholders: " + ", ".join(unknown))
    if single:
        problems.append("unbalanced braces: " + " and ".join(single))
    if problems:
        raise PromptTemplateError(
            f"The prompt template has {' and '.join(problems)}. Only {{prompt}} and {{system_prompt}} are "
            "filled in; write any other brace twice: {{ for {, }} for }."
        )
    if "{prompt}" not in fields:
        text = "The prompt template does not contain {prompt}; put it where the prompt should go."
        raise errors.BadPromptTemplate(text)
    return fields
