"""Fills prompt templates.

Templates are written for ``str.format``, but come with requests, so ``str.format`` must not see
them: ``{prompt.__class__}`` would read attributes and ``{prompt:>9999999999}`` would take the
memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from cog_triton.errors import BadPromptTemplate, PromptRequired, PromptTemplateError

_PLACEHOLDERS = frozenset({"{prompt}", "{system_prompt}"})
_LITERALS = {"{{": "{", "}}": "}"}
# From the left, and doubled braces before single ones, as str.format reads them: "{{{prompt}}}" is
# a literal brace, a placeholder and a literal brace.
_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_SHOWN_LENGTH = 60


def format_prompt(template: str, prompt: str | None, system_prompt: str = "") -> str:
    """Return the template with ``{prompt}`` and ``{system_prompt}`` filled in.

    ``{{`` and ``}}`` become single braces. What is filled in stays as it is, braces included. A
    system prompt for which the template has no place is left out.

    Raises:
        PromptRequired: the prompt is empty or None. One of whitespace only is a prompt.
        PromptTemplateError, BadPromptTemplate: see `validate_template`.
    """
    if not prompt:
        raise PromptRequired("A prompt is required, and it must not be empty.")
    validate_template(template)
    fillings = {**_LITERALS, "{prompt}": prompt, "{system_prompt}": system_prompt}
    return _BRACES.sub(lambda match: fillings[match[0]], template)


def validate_template(template: str) -> None:
    """Raise the error that `format_prompt` would raise with this template, whatever the prompt.

    Raises:
        PromptTemplateError: it has other placeholders, or single braces. Reported first, as they
            often are what should have been ``{prompt}``.
        BadPromptTemplate: it has no ``{prompt}``.
    """
    fields = list(dict.fromkeys(match[0] for match in _BRACES.finditer(template)))
    unusable = [text for text in fields if text not in _PLACEHOLDERS and text not in _LITERALS]
    if unusable:
        raise PromptTemplateError(_describe(unusable))
    if "{prompt}" not in fields:
        raise BadPromptTemplate(
            "The prompt template has no place for the prompt: put {prompt} where it should go."
        )


def _describe(unusable: Iterable[str]) -> str:
    unknown = [_shorten(text) for text in unusable if len(text) > 1]
    single = [text for text in unusable if len(text) == 1]
    problems = []
    if unknown:
        problems.append("unknown placeholders: " + ", ".join(unknown))
    if single:
        problems.append("unbalanced braces: " + " and ".join(map(repr, single)))
    return (
        f"The prompt template has {' and '.join(problems)}. Only {{prompt}} and {{system_prompt}} "
        "are filled in; to have a brace in the text, double it: {{ for {, }} for }."
    )


def _shorten(placeholder: str) -> str:
    if len(placeholder) > _SHOWN_LENGTH:
        placeholder = placeholder[: _SHOWN_LENGTH - 4] + "...}"
    return repr(placeholder)
