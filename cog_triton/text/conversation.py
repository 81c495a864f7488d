"""Fit a conversation to what a model's chat template accepts.

Clients send conversations that many templates refuse or, worse, cut short without a word: system turns
in the middle, two user turns in a row, a user's text behind a tool's result. Each template is asked once,
by small conversations, what it accepts. What it does not accept is written in the nearest way that it does.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Turn = dict[str, Any]
# Renders turns by the template, or returns None where the template refuses them.
Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
WriteCall = Callable[[str, Any], str]  # takes the name and the arguments of a call

PARAGRAPH = "\n\n"
_NINE_CHARACTERS = re.compile(r"[a-zA-Z0-9]{9}")

# Texts that a template has no reason to write by itself.
_SYSTEM = "The text of a system turn."
_LATER = "The text of a later system turn."
_QUESTION = "The text of a question."
_ANSWER = "The text of an answer."
_RESULT = "The result of a call."
_ARGUMENT = "The argument of a call."
_FUNCTION = "function_of_a_call"
_SHORT_ID = "abcdefgh1"
_OTHER_ID = "abcdefgh2"
_LONG_ID = "call_0123456789abcdef"
_MORE = "The text of one more question."


@dataclass(frozen=True)
class CallTraits:
    """What a chat template makes of calls of tools."""

    turns: bool = True  # it shows an assistant's calls
    results: bool = True  # and turns of role tool
    several: bool = True  # and several calls in a turn
    user_behind: bool = True  # and a user's turn behind a result, without an answer between them
    long_ids: bool = True  # it takes other ids than those of nine letters and digits


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template accepts and renders whole."""

    system_turn: bool = True  # a system turn at the beginning
    developer_turn: bool = True  # a developer's at the beginning, and behind a system turn
    several_system_turns: bool = True  # one behind another at the beginning
    later_system_turns: bool = True  # between other turns
    repeated_users: bool = True  # a user's turn behind a user's
    repeated_assistants: bool = True
    assistant_first: bool = True
    calls: CallTraits = CallTraits()


def probe(render: Render) -> TemplateTraits:
    """Find out what a template accepts, by small conversations."""

    def keeps(turns: Sequence[Mapping[str, Any]], *texts: str) -> bool:
        prompt = render(turns)
        return prompt is not None and all(text in prompt for text in texts)

    system = _turn("system", _SYSTEM)
    later = _turn("system", _LATER)
    developer = _turn("developer", _LATER)
    question = _turn("user", _QUESTION)
    answer = _turn("assistant", _ANSWER)
    more = _turn("user", _MORE)
    if not keeps([question], _QUESTION):
        return TemplateTraits()  # it needs what only a real request has
    calls = _call_traits(render, question, answer)
    return TemplateTraits(
        system_turn=keeps([system, question], _SYSTEM),
        developer_turn=(
            keeps([developer, question], _LATER)
            and keeps([system, developer, question], _SYSTEM, _LATER)
        ),
        several_system_turns=keeps([system, later, question], _SYSTEM, _LATER),
        later_system_turns=(
            keeps([system, question, answer, later, more], _SYSTEM, _LATER)
            and keeps([question, later], _LATER)
        ),
        repeated_users=keeps([question, more], _QUESTION, _MORE),
        repeated_assistants=keeps([question, answer, _turn("assistant", _MORE)], _ANSWER, _MORE),
        assistant_first=keeps([answer, question], _ANSWER),
        calls=calls,
    )


def _call_traits(render: Render, question: Turn, answer: Turn) -> CallTraits:
    """Find out what a template makes of calls and their results."""

    def keeps(turns: Sequence[Mapping[str, Any]], *texts: str) -> bool:
        prompt = render([question, *turns])
        return prompt is not None and all(text in prompt for text in texts)

    as_text = not keeps([*_called(_SHORT_ID, as_text=False), answer], _RESULT)
    call, result = _called(_SHORT_ID, as_text=as_text)
    prompt = render([question, call, result, answer])
    if prompt is None:
        return CallTraits(turns=False, results=False)
    shows_results = _RESULT in prompt
    shows_arguments = _ARGUMENT in prompt
    other, other_result = _called(_OTHER_ID, argument=_MORE, as_text=as_text)
    both = {**call, "tool_calls": [*call["tool_calls"], *other["tool_calls"]]}
    return CallTraits(
        turns=shows_arguments or _FUNCTION in prompt,
        results=shows_results,
        several=not shows_arguments
        or keeps([both, result, other_result, answer], _ARGUMENT, _MORE),
        user_behind=not shows_results
        or keeps([call, result, _turn("user", _MORE)], _RESULT, _MORE),
        long_ids=not shows_results or keeps([*_called(_LONG_ID, as_text=as_text), answer], _RESULT),
    )


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _called(identifier: str, *, argument: str = _ARGUMENT, as_text: bool) -> list[Turn]:
    """Return an assistant's call of a tool, and its result."""
    arguments: Any = {"place": argument}
    if as_text:
        arguments = json.dumps(arguments)
    function = {"name": _FUNCTION, "arguments": arguments}
    call = {"id": identifier, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identifier, "name": _FUNCTION, "content": _RESULT},
    ]


def call_as_json(name: str, arguments: Any) -> str:
    """Return a call as most models write it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def fitted(
    turns: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    write_call: WriteCall = call_as_json,
) -> list[Turn]:
    """Return a conversation as a template with these traits takes it; no text of it is lost.

    Contents must be texts. The turns that come back are new; those that were handed in stay as they are.

    Args:
        write_call: writes a call as the model does, for a template that shows none.
    """
    result = [_without_empty_calls(turn) for turn in turns]
    if not traits.developer_turn:
        result = [_with_system_role(turn) for turn in result]
    if not traits.calls.turns:
        result = [_with_calls_in_text(turn, write_call) for turn in result]
    elif not traits.calls.several:
        result = _with_single_calls(result)
    if not traits.calls.results:
        result = [_with_result_of_user(turn) for turn in result]
    if not traits.several_system_turns:
        result = _with_one_system_turn(result)
    if not traits.later_system_turns:
        result = _without_later_system_turns(result)
    if not traits.system_turn:
        result = without_system_turns(result)
    if not traits.calls.user_behind:
        result = _with_texts_in_results(result)
    if not traits.repeated_users:
        result = _joined_turns(result, "user")
    if not traits.repeated_assistants:
        result = _joined_turns(result, "assistant")
    if not traits.assistant_first:
        result = _beginning_with_user(result)
    if not traits.calls.long_ids:
        result = [_with_short_ids(turn) for turn in result]
    return result


def without_system_turns(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Put the system turns at the beginning into the first user turn behind them."""
    leading, rest = _leading_system_turns(turns)
    if not leading:
        return rest
    text = PARAGRAPH.join(turn["content"] for turn in leading)
    user = next((turn for turn in rest if turn["role"] == "user"), None)
    if user is None:
        return [_turn("user", text), *rest]
    user["content"] = _paragraphs(text, user["content"])
    return rest


def _leading_system_turns(turns: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[Turn]]:
    copies = [dict(turn) for turn in turns]
    leading = list(itertools.takewhile(_is_system, copies))
    return leading, copies[len(leading) :]


def _is_system(turn: Mapping[str, Any]) -> bool:
    return turn["role"] in ("system", "developer")


def _without_empty_calls(turn: Mapping[str, Any]) -> Turn:
    """Leave out ``tool_calls`` without a call: templates ask whether the field is there."""
    copy = dict(turn)
    if not copy.get("tool_calls"):
        copy.pop("tool_calls", None)
    return copy


def _with_system_role(turn: Mapping[str, Any]) -> Turn:
    return {**turn, "role": "system"} if turn["role"] == "developer" else dict(turn)


def _with_calls_in_text(turn: Mapping[str, Any], write_call: WriteCall) -> Turn:
    """Put the calls of a turn behind its text."""
    copy = dict(turn)
    calls = [_function_of(call) for call in copy.pop("tool_calls", ())]
    texts = [
        write_call(call["name"], call.get("arguments") or {}) for call in calls if "name" in call
    ]
    copy["content"] = "\n".join(text for text in (copy["content"], *texts) if text)
    return copy


def _with_result_of_user(turn: Mapping[str, Any]) -> Turn:
    """Make a user turn of a tool's result."""
    return _turn("user", turn["content"]) if turn["role"] in ("tool", "function") else dict(turn)


def _function_of(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _with_single_calls(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Make a turn of each call, with its result behind it."""
    result: list[Turn] = []
    waiting = [dict(turn) for turn in turns]
    while waiting:
        turn = waiting.pop(0)
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            result.append(turn)
            continue
        results = list(itertools.takewhile(lambda other: other["role"] == "tool", waiting))
        del waiting[: len(results)]
        for place, call in enumerate(calls):
            content = turn["content"] if place == 0 else ""
            result.append({**turn, "content": content, "tool_calls": [call]})
            mine = [other for other in results if _answers(other, call)]
            result += mine
            results = [other for other in results if other not in mine]
        result += results
    return result


def _answers(turn: Mapping[str, Any], call: Any) -> bool:
    identifier = call.get("id") if isinstance(call, Mapping) else None
    return identifier is not None and turn.get("tool_call_id") == identifier


def _with_one_system_turn(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    leading, rest = _leading_system_turns(turns)
    if len(leading) < 2:
        return [*leading, *rest]
    text = PARAGRAPH.join(turn["content"] for turn in leading)
    return [{**leading[0], "content": text}, *rest]


def _without_later_system_turns(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Put a later system turn's text into a user turn beside it, or make it one."""
    leading, rest = _leading_system_turns(turns)
    result: list[Turn] = []
    waiting: list[str] = []  # texts for the user turn that comes next
    for place, turn in enumerate(rest):
        if _is_system(turn):
            follower = next((other for other in rest[place:] if not _is_system(other)), None)
            if follower is not None and follower["role"] == "user":
                waiting.append(turn["content"])
            elif result and result[-1]["role"] == "user":
                result[-1]["content"] = _paragraphs(result[-1]["content"], turn["content"])
            else:
                result.append(_turn("user", turn["content"]))
        else:
            if waiting:
                turn["content"] = _paragraphs(*waiting, turn["content"])
                waiting = []
            result.append(turn)
    return [*leading, *result]


def _with_texts_in_results(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Put a user's text that stands right behind a tool's result into that result."""
    result: list[Turn] = []
    for turn in turns:
        if turn["role"] == "user" and result and result[-1]["role"] == "tool":
            result[-1]["content"] = _paragraphs(result[-1]["content"], turn["content"])
        else:
            result.append(dict(turn))
    return result


def _joined_turns(turns: Sequence[Mapping[str, Any]], role: str) -> list[Turn]:
    """Make one turn of those of a role that follow one another."""
    result: list[Turn] = []
    for turn in turns:
        if turn["role"] != role or not result or result[-1]["role"] != role:
            result.append(dict(turn))
            continue
        last = result[-1]
        calls = [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]
        content = _paragraphs(last["content"], turn["content"])
        result[-1] = {**last, **turn, "content": content}
        if calls:
            result[-1]["tool_calls"] = calls
    return result


def _beginning_with_user(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Put an empty user turn in front of an assistant's that would begin the conversation."""
    leading, rest = _leading_system_turns(turns)
    if rest and rest[0]["role"] == "assistant":
        rest.insert(0, _turn("user", ""))
    return [*leading, *rest]


def _with_short_ids(turn: Mapping[str, Any]) -> Turn:
    """Give calls and their results ids of nine characters; the same id becomes the same one."""
    copy = dict(turn)
    if isinstance(copy.get("tool_call_id"), str):
        copy["tool_call_id"] = _short_id(copy["tool_call_id"])
    calls = copy.get("tool_calls")
    if isinstance(calls, list):
        copy["tool_calls"] = [_with_short_id(call) for call in calls]
    return copy


def _with_short_id(call: Any) -> Any:
    if isinstance(call, Mapping) and isinstance(call.get("id"), str):
        return {**call, "id": _short_id(call["id"])}
    return call


def _short_id(identifier: str) -> str:
    if _NINE_CHARACTERS.fullmatch(identifier):
        return identifier
    return hashlib.sha256(identifier.encode(errors="replace")).hexdigest()[:9]


def _paragraphs(*texts: str) -> str:
    return PARAGRAPH.join(text for text in texts if text)
