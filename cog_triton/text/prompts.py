"""Fills prompt templates.

Templates are written for ``str.format``, but come with requests, so ``str.format`` must not see
them: ``{prompt.__class__}`` would read attributes and ``{prompt:>9999999999}`` would take the memory.
"""

from __future__ import annotations

import re
from collections import Counter

from cog_triton.errors import (
    SHOWN_CHARACTERS,
    BadPromptTemplate,
    PromptRequired,
    PromptTemplateError,
)
from cog_triton.request.limits import TEMPLATE_BRACES, TEMPLATE_CHARACTERS, TextLimits

_LITERALS = {"{{": "{", "}}": "}"}
_FIELDS = {"{prompt}", "{system_prompt}", *_LITERALS}
# From the left, and doubled braces before single ones, as str.format reads them: "{{{prompt}}}" is
# a literal brace, a placeholder and a literal brace.
_BRACES = re.compile(r"\{(?:\{|[^{}]*\})?|\}\}?")
_SHOWN_PLACEHOLDERS = 3
_LIMITS = TextLimits()


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
            raise PromptTemplateError(
                f"The prompt template has {number} {what}; {most} are the most."
            )
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
