"""Fit a conversation to what a model's chat template accepts.

Clients send conversations that many templates refuse or, worse, cut short without a word: system turns
in the middle, two user turns in a row, a user's text behind a tool's result. What a template does not
accept (see ``template_traits``) is written in the nearest way that it does.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cog_triton.text.template_probe import Turn
from cog_triton.text.template_probe import turn as turn_of
from cog_triton.text.template_traits import TemplateTraits

# Takes the name and the arguments of a call.
WriteCall = Callable[[str, Any], str]

PARAGRAPH = "\n\n"
_NINE_CHARACTERS = re.compile(r"[a-zA-Z0-9]{9}")


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
        return [turn_of("user", text), *rest]
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
    return turn_of("user", turn["content"]) if turn["role"] in ("tool", "function") else dict(turn)


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
            answers = [other for other in results if _answers(other, call)]
            result += answers
            results = [other for other in results if other not in answers]
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
    # Texts for the next user turn.
    waiting: list[str] = []
    for place, turn in enumerate(rest):
        if _is_system(turn):
            follower = next((other for other in rest[place:] if not _is_system(other)), None)
            if follower is not None and follower["role"] == "user":
                waiting.append(turn["content"])
            elif result and result[-1]["role"] == "user":
                result[-1]["content"] = _paragraphs(result[-1]["content"], turn["content"])
            else:
                result.append(turn_of("user", turn["content"]))
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
        rest.insert(0, turn_of("user", ""))
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
