"""The inputs of ``cog-triton predict``: NAME=VALUE, checked as Cog's server checks a request's inputs."""

import argparse
import contextlib
import inspect
import math
import typing
from collections.abc import Sequence
from typing import Any

from cog_triton.cli.parser import similar
from cog_triton.errors import ConfigurationError, shown

DEFAULT_PROMPT = "What is machine learning?"
LARGEST_INTEGER = 2**64 - 1  # of Cog's server
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_KINDS = {bool: "true or false", int: "an integer", float: "a number"}


def assignment(text: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=VALUE, such as max_tokens=512"
        )
    return name, value


def inputs_of(
    function: Any, prompt: str | None, assignments: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return the inputs of ``predict``: its defaults, the prompt and the assignments.

    Raises:
        ConfigurationError: an input does not exist, or a value is not of its type or outside its bounds.
    """
    # The default of an input is Cog's Input(…), which has the input's own default.
    fields = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if hasattr(parameter.default, "default")
    }
    hints = typing.get_type_hints(function)
    values = {name: field.default for name, field in fields.items()}
    values["prompt"] = prompt or None
    for name, text in assignments:
        if name not in fields:
            suggestion = similar(name, fields)
            advice = (
                f"did you mean {suggestion}?"
                if suggestion
                else f"the inputs are {', '.join(fields)}"
            )
            raise ConfigurationError(f"unknown input {name!r}; {advice}")
        values[name] = converted(name, text, hints[name])
        check_bounds(name, text, values[name], fields[name])
    if values["prompt"] is None and values["messages"] is None:
        values["prompt"] = DEFAULT_PROMPT
    return values


def converted(name: str, text: str, hint: Any) -> Any:
    """Return a value of an input's type, or raise ConfigurationError."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    kind = kinds[0] if kinds else hint
    if kind is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
    else:
        with contextlib.suppress(ValueError):
            return kind(text)
    raise ConfigurationError(f"{name}={shown(text)} is not {_KINDS.get(kind, kind.__name__)}")


def check_bounds(name: str, text: str, value: Any, field: Any) -> None:
    """Raise ConfigurationError if a value is outside its input's bounds."""
    problem = None
    if isinstance(value, float) and not math.isfinite(value):
        problem = "not a finite number"
    elif field.ge is not None and value < bound(field.ge):
        problem = f"too small: the minimum is {bound(field.ge)}"
    elif field.le is not None and value > bound(field.le):
        problem = f"too large: the maximum is {bound(field.le)}"
    elif field.choices and value not in field.choices:
        problem = f"not one of {', '.join(map(str, field.choices))}"
    if problem is not None:
        raise ConfigurationError(f"{name}={shown(text)} is {problem}")


def bound(value: float) -> float:
    """Return a bound as an integer if it is one.

    Cog makes a float of it, which rounds the largest integer of its server up.
    """
    if not float(value).is_integer():
        return value
    return min(int(value), LARGEST_INTEGER)
