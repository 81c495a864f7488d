"""The forms in which a chat template reads contents, thoughts and the arguments of calls.

Some templates print a content as a text, others go through its parts, and some do both. Some write the
arguments of a call as JSON by themselves, others join a text. Each reads earlier thoughts by a name of its
choice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cog_triton.text.template_probe import (
    ARGUMENT,
    Render,
    Turn,
    calling_turn,
    result_turn,
    shows,
    turn,
)

_TEXT = "The text of a content"
_VALUE = "value_of_an_argument"
_THOUGHT = "The text of a thought"
_RESULT = "Done"

# The name under which a turn comes with its thoughts.
THOUGHTS = "reasoning_content"
# The names by which chat templates read thoughts: Qwen's; Solar's; gpt-oss's; Apriel's.
_THOUGHT_NAMES = (THOUGHTS, "reasoning", "thinking", "thought")


@dataclass(frozen=True)
class ContentForms:
    """What a template reads of the contents of one role."""

    texts: bool = True
    parts: bool = False

    @property
    def any(self) -> bool:
        return self.texts or self.parts


@dataclass(frozen=True)
class TemplateForms:
    """All forms that a template reads.

    Attributes:
        arguments_as_text: the arguments of calls must be texts.
        arguments_as_object: the arguments of calls must be objects.
        thoughts: the names by which it reads thoughts; none if it shows no thoughts.
        text_beside_thoughts: it accepts a turn with thoughts, a text and calls.
    """

    system: ContentForms
    user: ContentForms
    assistant: ContentForms
    arguments_as_text: bool = False
    arguments_as_object: bool = False
    thoughts: tuple[str, ...] = ()
    text_beside_thoughts: bool = True

    def of_role(self, role: str) -> ContentForms:
        forms = {"system": self.system, "developer": self.system, "assistant": self.assistant}
        found = forms.get(role, self.user)
        return found if found.any else self.user


def find_forms(render: Render) -> TemplateForms:
    """Find out which forms a template reads."""
    user = _content_forms(render, lambda content: [turn("user", content)])
    question = turn("user", _content("Hello", user))
    thoughts = _thought_names(render, question)
    return TemplateForms(
        system=_content_forms(render, lambda content: [turn("system", content), question]),
        user=user if user.any else ContentForms(),
        assistant=_content_forms(
            render, lambda content: [question, turn("assistant", content), question]
        ),
        arguments_as_text=_reads_arguments_as_text(render, question),
        arguments_as_object=_reads_arguments_as_object(render, question),
        thoughts=thoughts,
        text_beside_thoughts=_takes_text_beside_thoughts(render, question, thoughts),
    )


def _content_forms(render: Render, conversation: Callable[[Any], list[Turn]]) -> ContentForms:
    as_parts = render(conversation([{"type": "text", "text": _TEXT}]))
    return ContentForms(
        texts=shows(render, conversation(_TEXT), _TEXT),
        parts=as_parts is not None and _TEXT in as_parts and not _prints_parts(as_parts),
    )


def _prints_parts(prompt: str) -> bool:
    """Return whether a template printed the list of parts as it prints a text."""
    return f"'text': '{_TEXT}'" in prompt or f'"text": "{_TEXT}"' in prompt


def _reads_arguments_as_text(render: Render, question: Turn) -> bool:
    """Return whether a call's arguments come out as JSON only if the template gets them as a text."""

    def keeps(*, as_text: bool) -> bool:
        prompt = render([question, calling_turn(_VALUE, as_text=as_text)])
        if prompt is None or _VALUE not in prompt:
            return False
        printed_object = f"{{'{ARGUMENT}': '{_VALUE}'}}" in prompt
        quoted_text = f'{{\\"{ARGUMENT}\\"' in prompt
        return not printed_object and not quoted_text

    return not keeps(as_text=False) and keeps(as_text=True)


def _reads_arguments_as_object(render: Render, question: Turn) -> bool:
    """Return whether a template fails, or loses a call's arguments, if they are a text."""
    from_object = render([question, calling_turn(_VALUE, as_text=False)])
    from_text = render([question, calling_turn(_VALUE, as_text=True)])
    if from_object is None:
        return False
    return from_text is None or (_VALUE in from_object and _VALUE not in from_text)


def _thought_names(render: Render, question: Turn) -> tuple[str, ...]:
    """Return the names by which a template reads thoughts; of two for the same turns, the first one."""
    names: list[str] = []
    covered: set[int] = set()
    for name in _THOUGHT_NAMES:
        shown = _places_with_thoughts(render, question, name)
        if not shown <= covered:
            names.append(name)
            covered |= shown
    return tuple(names)


def _places_with_thoughts(render: Render, question: Turn, name: str) -> set[int]:
    """Return the numbers of the small conversations in which a template shows thoughts.

    The thoughts are those of a last turn, of an earlier one, and of a call: many templates leave some out.
    """
    thoughts = {name: _THOUGHT}
    answer = {**turn("assistant", _TEXT), **thoughts}
    conversations = [[question, answer], [question, answer, question]]
    for as_text in (False, True):
        call = calling_turn(_VALUE, as_text=as_text, thoughts=thoughts)
        conversations.append([question, call, result_turn(_RESULT)])
    return {
        place
        for place, conversation in enumerate(conversations)
        if shows(render, conversation, _THOUGHT)
    }


def _takes_text_beside_thoughts(render: Render, question: Turn, names: Sequence[str]) -> bool:
    """Return whether a template accepts thoughts in a turn of calls that has a text as well."""
    thoughts = dict.fromkeys(names, _THOUGHT)
    result = result_turn(_RESULT)
    for as_text in (False, True):
        alone = calling_turn(_VALUE, as_text=as_text, thoughts=thoughts)
        beside = calling_turn(_VALUE, as_text=as_text, thoughts=thoughts, content=_TEXT)
        if shows(render, [question, alone, result]) and not shows(
            render, [question, beside, result]
        ):
            return False
    return True


def in_its_forms(message: Mapping[str, Any], forms: TemplateForms) -> Turn:
    """Return a turn with its content, thoughts and calls in forms that the template reads."""
    message = _with_named_thoughts(message, forms)
    content = _content(message["content"], forms.of_role(message["role"]))
    result = {**message, "content": content}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and forms.arguments_as_text:
        result["tool_calls"] = [_with_text(call) for call in calls]
    elif isinstance(calls, list) and forms.arguments_as_object:
        result["tool_calls"] = [_with_object(call) for call in calls]
    return result


def _with_named_thoughts(message: Mapping[str, Any], forms: TemplateForms) -> Mapping[str, Any]:
    """Return a turn with its thoughts under the names that the template reads.

    A template may refuse a text beside them in a turn of calls, as gpt-oss's does. It then follows them.
    """
    thoughts = message.get(THOUGHTS)
    if not isinstance(thoughts, str) or not thoughts or not forms.thoughts:
        return message
    content = message["content"]
    if message.get("tool_calls") and not forms.text_beside_thoughts:
        thoughts = "\n\n".join(text for text in (thoughts, text_of(content)) if text)
        content = ""
    return {**message, "content": content, **dict.fromkeys(forms.thoughts, thoughts)}


def with_other_arguments(forms: TemplateForms) -> TemplateForms:
    """Return the forms with a call's arguments as a text in place of an object, or the other way round."""
    return replace(forms, arguments_as_text=not forms.arguments_as_text)


def text_of(content: Any) -> str:
    """Return a content of texts as one text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _content(content: Any, forms: ContentForms) -> Any:
    if isinstance(content, list):
        return content if forms.parts else text_of(content)
    if forms.texts or not forms.parts:
        return content
    return [{"type": "text", "text": content}] if content else []


def _with_text(call: Any) -> Any:
    """Return a call whose arguments are a text; without any, that of an empty object."""
    match call:
        case {"function": {"arguments": str()}}:
            return call
        case {"function": dict() as function}:
            text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
            return {**call, "function": {**function, "arguments": text}}
    return call


def _with_object(call: Any) -> Any:
    """Return a call whose arguments are an object. Any others become its only value, named ``arguments``.

    Agents send back what a model wrote, even if it was cut off and is not JSON.
    """
    match call:
        case {"function": {"arguments": dict()}}:
            return call
        case {"function": dict() as function}:
            arguments = function.get("arguments")
            value = {} if arguments is None else {"arguments": arguments}
            return {**call, "function": {**function, "arguments": value}}
    return call
