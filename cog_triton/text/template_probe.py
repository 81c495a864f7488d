"""How a chat template is probed: by small conversations, whose texts it leaves in the prompt, or does not.

No template says what it reads, so each is asked once. ``template_forms`` finds the forms in which it reads
contents, thoughts and calls, and ``template_traits`` the conversations that it accepts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
# Renders turns by the template, or returns None if the template refuses them.
Render = Callable[[Sequence[Mapping[str, Any]]], str | None]

# Texts that a template has no reason to write by itself.
FUNCTION = "function_of_a_call"
ARGUMENT = "name_of_an_argument"
# It has the length that Mistral's templates demand.
CALL_ID = "abcdefgh1"


def shows(render: Render, turns: Sequence[Mapping[str, Any]], *texts: str) -> bool:
    """Return whether a template accepts turns, and its prompt contains the texts."""
    prompt = render(turns)
    return prompt is not None and all(text in prompt for text in texts)


def turn(role: str, content: Any) -> Turn:
    return {"role": role, "content": content}


def calling_turn(
    value: str,
    *,
    as_text: bool,
    call_id: str = CALL_ID,
    content: str = "",
    thoughts: Mapping[str, str] | None = None,
) -> Turn:
    """Return an assistant's turn with one call.

    Args:
        value: of the call's only argument.
        as_text: the arguments are the text of a JSON object in place of an object.
        thoughts: by the names under which the turn has them.
    """
    arguments: Any = {ARGUMENT: value}
    if as_text:
        arguments = json.dumps(arguments)
    function = {"name": FUNCTION, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {**turn("assistant", content), **(thoughts or {}), "tool_calls": [call]}


def result_turn(content: str, call_id: str = CALL_ID) -> Turn:
    """Return the result of a call."""
    return {**turn("tool", content), "tool_call_id": call_id, "name": FUNCTION}
