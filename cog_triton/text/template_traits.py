"""What a chat template accepts: which turns may follow one another, and what it makes of calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cog_triton.text.template_probe import Render, Turn, calling_turn, result_turn, shows, turn

_SYSTEM = "The text of a system turn."
_LATER = "The text of a later system turn."
_QUESTION = "The text of a question."
_MORE = "The text of one more question."
_ANSWER = "The text of an answer."
_RESULT = "The result of a call."
_VALUE = "The argument of a call."
_OTHER_VALUE = "The argument of another call."
_OTHER_ID = "abcdefgh2"
_LONG_ID = "call_0123456789abcdef"


@dataclass(frozen=True)
class CallTraits:
    """What a chat template makes of calls of tools.

    Attributes:
        turns: it shows an assistant's calls.
        results: it shows turns of the role tool.
        several: it shows several calls in one turn.
        user_behind: it shows a user's turn behind a result, without an answer between them.
        long_ids: it accepts ids other than those of nine letters and digits.
    """

    turns: bool = True
    results: bool = True
    several: bool = True
    user_behind: bool = True
    long_ids: bool = True


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template accepts and renders whole.

    Attributes:
        system_turn: a system turn at the beginning.
        developer_turn: a developer's turn at the beginning, and behind a system turn.
        several_system_turns: one behind another at the beginning.
        later_system_turns: between other turns.
        repeated_users: a user's turn behind a user's.
        repeated_assistants: an assistant's turn behind an assistant's.
        assistant_first: an assistant's turn at the beginning.
    """

    system_turn: bool = True
    developer_turn: bool = True
    several_system_turns: bool = True
    later_system_turns: bool = True
    repeated_users: bool = True
    repeated_assistants: bool = True
    assistant_first: bool = True
    calls: CallTraits = CallTraits()


def find_traits(render: Render) -> TemplateTraits:
    """Find out what a template accepts."""

    def keeps(turns: Sequence[Mapping[str, Any]], *texts: str) -> bool:
        return shows(render, turns, *texts)

    system = turn("system", _SYSTEM)
    later = turn("system", _LATER)
    developer = turn("developer", _LATER)
    question = turn("user", _QUESTION)
    answer = turn("assistant", _ANSWER)
    more = turn("user", _MORE)
    if not keeps([question], _QUESTION):
        # It needs what only a real request has.
        return TemplateTraits()
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
        repeated_assistants=keeps([question, answer, turn("assistant", _MORE)], _ANSWER, _MORE),
        assistant_first=keeps([answer, question], _ANSWER),
        calls=_call_traits(render, question, answer),
    )


def _call_traits(render: Render, question: Turn, answer: Turn) -> CallTraits:
    """Find out what a template makes of calls and their results."""

    def keeps(turns: Sequence[Mapping[str, Any]], *texts: str) -> bool:
        return shows(render, [question, *turns], *texts)

    result = result_turn(_RESULT)
    as_text = not keeps([calling_turn(_VALUE, as_text=False), result, answer], _RESULT)
    call = calling_turn(_VALUE, as_text=as_text)
    prompt = render([question, call, result, answer])
    if prompt is None:
        return CallTraits(turns=False, results=False)
    shows_results = _RESULT in prompt
    shows_arguments = _VALUE in prompt
    shows_names = call["tool_calls"][0]["function"]["name"] in prompt
    other_call = calling_turn(_OTHER_VALUE, as_text=as_text, call_id=_OTHER_ID)
    both = {**call, "tool_calls": [*call["tool_calls"], *other_call["tool_calls"]]}
    both_results = [result, result_turn(_RESULT, _OTHER_ID)]
    long_call = calling_turn(_VALUE, as_text=as_text, call_id=_LONG_ID)
    long_result = result_turn(_RESULT, _LONG_ID)
    return CallTraits(
        turns=shows_arguments or shows_names,
        results=shows_results,
        # Where arguments or results are not shown, nothing tells whether one of them is lost.
        several=(not shows_arguments or keeps([both, *both_results, answer], _VALUE, _OTHER_VALUE)),
        user_behind=not shows_results or keeps([call, result, turn("user", _MORE)], _RESULT, _MORE),
        long_ids=not shows_results or keeps([long_call, long_result, answer], _RESULT),
    )
