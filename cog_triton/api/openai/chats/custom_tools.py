"""Custom tools, whose input is a text: a model is offered a function of one text in the place of each."""

from collections.abc import Mapping
from typing import Any

import orjson

INPUT = "input"  # the argument that has the text


def parameters() -> dict[str, Any]:
    """Return the schema of the function that stands for a custom tool."""
    return {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


def description(text: str | None, form: Mapping[str, Any] | None) -> str:
    """Return a custom tool's description, with the grammar of its input if there is one.

    ``form`` is the tool's format, whose grammar is an object in it in Chat Completions.
    """
    described = text or ""
    grammar = form or {}
    if isinstance(grammar.get("grammar"), Mapping):
        grammar = grammar["grammar"]
    definition = grammar.get("definition")
    if isinstance(definition, str):
        syntax = grammar.get("syntax", "grammar")
        described += f"\n\nThe input must follow this {syntax} grammar:\n{definition}"
    return described.strip()


def text_of(arguments: str) -> str:
    """Return the text of a custom tool's call; all that the model wrote where it is not of the form."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """Return the arguments of a function's call that stands for a custom tool's."""
    return orjson.dumps({INPUT: text}).decode()
