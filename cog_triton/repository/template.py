"""One template: its variables, and its text with their values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cog_triton.errors import TemplateError
from cog_triton.repository.variables import Variable

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}", re.ASCII)
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | \$\{[^}\n]*\}
    | (?P<parameters>\bparameters\s*:?\s*\{)
    | (?P<open>\{)
    | (?P<close>\})""",
    re.VERBOSE,
)
_REST_OF_LINE = re.compile(r"[ \t]*,?[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {
    **{code: f"\\{code:03o}" for code in (*range(32), 127)},
    **{ord(char): f"\\{char}" for char in "\"'\\"},
    ord("\n"): "\\n",
}

Span = tuple[int, int]


@dataclass(frozen=True)
class _Use:
    """One place where a template uses a variable, and what goes when that is unset."""

    name: str
    span: Span
    quoted: bool
    scope: Span


def render(
    template: str, variables: Mapping[str, Variable], values: Mapping[str, object], *, source: str
) -> str:
    """Fills one template.

    Args:
        variables: every variable that the template may use.
        values: given values by name; defaults stand in for the others.
        source: what to call the template in messages.

    Raises:
        TemplateError: with one line for every value that is missing, unknown or not valid, and for
            every variable of the template that ``variables`` lacks.
    """
    filled, problems = filled_text(template, variables, values, source)
    raise_if(problems)
    return filled


def filled_text(
    template: str, variables: Mapping[str, Variable], values: Mapping[str, object], source: str
) -> tuple[str, list[str]]:
    """As ``render``, with the problems instead of an error; the text is empty if there are any."""
    uses = _uses(template)
    problems = _malformed(template, source)
    problems += [
        f"{source}: {name}: the template uses it, but there is no such variable"
        + suggest(name, variables)
        for name in sorted({use.name for use in uses} - variables.keys())
    ]
    problems += [
        f"{source}: {name}: unknown variable" + suggest(name, variables)
        for name in values
        if name not in variables
    ]
    texts: dict[str, str | None] = {}
    for name in dict.fromkeys(use.name for use in uses if use.name in variables):
        try:
            texts[name] = variables[name].render(values.get(name))
        except ValueError as error:
            problems.append(f"{source}: {name}: {error}")
    return ("", problems) if problems else (_substitute(template, uses, texts), [])


def _substitute(template: str, uses: list[_Use], texts: Mapping[str, str | None]) -> str:
    edits = []
    for use in uses:
        text = texts[use.name]
        if text is None:
            edits.append((use.scope, ""))
        else:
            edits.append((use.span, text.translate(_ESCAPES) if use.quoted else text))
    pieces, position = [], 0
    # By start, wider first: what lies inside of a dropped scope goes with it.
    for (start, end), text in sorted(edits, key=lambda edit: (edit[0][0], -edit[0][1])):
        if start >= position:
            pieces += [template[position:start], text]
            position = end
    return "".join(pieces) + template[position:]


def _uses(template: str) -> list[_Use]:
    strings, blocks = _strings_and_blocks(template)
    return [
        _Use(
            name=match.group(1),
            span=match.span(),
            quoted=any(start < match.start() < end for start, end in strings),
            scope=_scope(template, match.span(), blocks),
        )
        for match in _VARIABLE.finditer(template)
    ]


def _strings_and_blocks(template: str) -> tuple[list[Span], list[Span]]:
    """Where string literals are, and where ``parameters { … }`` blocks are, inner ones first."""
    strings, blocks = [], []
    opened: list[re.Match[str]] = []
    for token in _TOKEN.finditer(template):
        if token.lastgroup == "string":
            strings.append(token.span())
        elif token.lastgroup in ("open", "parameters"):
            opened.append(token)
        elif token.lastgroup == "close" and opened:
            opening = opened.pop()
            if opening.lastgroup == "parameters":
                blocks.append((opening.start(), token.end()))
    return strings, blocks


def _scope(template: str, use: Span, blocks: list[Span]) -> Span:
    """What to drop when the variable used at ``use`` is unset."""
    for start, end in blocks:
        if start < use[0] < end:
            return _whole_lines(template, start, end)
    start = template.rfind("\n", 0, use[0]) + 1
    end = template.find("\n", use[1])
    return _whole_lines(template, start, len(template) if end < 0 else end)


def _whole_lines(template: str, start: int, end: int) -> Span:
    """The span and the rest of its lines, if that is nothing but space, a comma or a comment."""
    line = template.rfind("\n", 0, start) + 1
    after = _REST_OF_LINE.match(template, end)
    if after and not template[line:start].strip():
        return line, after.end()
    return start, end


def _malformed(template: str, source: str) -> list[str]:
    return [
        f"{source}: line {template.count(chr(10), 0, match.start()) + 1}: "
        'a "${" that does not begin a variable'
        for match in re.finditer(r"\$\{", template)
        if not _VARIABLE.match(template, match.start())
    ]


def names_in(template: str) -> set[str]:
    """The variables that a template uses."""
    return set(_VARIABLE.findall(template))


def suggest(name: str, names: Iterable[str]) -> str:
    """What to add to a message about a name that is not known."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {join(names)}" if names else ""


def join(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(sorted(names))


def raise_if(problems: list[str]) -> None:
    """Raises a TemplateError with a line for every problem, if there are any."""
    if problems:
        raise TemplateError(
            "config templates cannot be filled:\n" + "\n".join(f"  {p}" for p in problems)
        )
