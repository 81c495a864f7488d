#!/usr/bin/env python3
"""Write the tables of docs/configuration.md from the code they describe.

Examples:
  python3 scripts/make_docs.py
  python3 scripts/make_docs.py --check
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence

from _checkout import ROOT

from cog_triton.repository.variables import TABLES, VARIABLES, Variable

PAGE = ROOT / "docs" / "configuration.md"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 when --check finds the page out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if out of date")
    arguments = parser.parse_args(argv)
    current = PAGE.read_text(encoding="utf-8")
    wanted = filled(current)
    if arguments.check:
        if current != wanted:
            print(f"{PAGE} is out of date: run scripts/make_docs.py", file=sys.stderr)
        return int(current != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


def filled(page: str) -> str:
    """The page with every table as the code has it now.

    Raises:
        ValueError: a pair of markers is missing.
    """
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, begins, rest = page.partition(begin)
        _, ends, after = rest.partition(end)
        if not (begins and ends):
            raise ValueError(f"{PAGE} lacks {begin.strip()} … {end}")
        page = before + begin + make() + end + after
    return page


def variables() -> str:
    """A heading and a table for each model."""
    return "\n".join(
        f"### {model}\n\n"
        + table(
            ["Variable", "Type", "Default", "Description"],
            (
                [f"`{name}`", type_of(v), default_of(v), v.description]
                for name, v in model_variables.items()
            ),
        )
        for model, model_variables in VARIABLES.items()
    )


def old_names() -> str:
    """Return a table of the names of older templates."""
    rows = [
        [model, f"`{old}`", f"read as `{new}`"]
        for model, names in TABLES.renamed.items()
        for old, new in names.items()
    ]
    rows += [
        [model, f"`{name}` `{old}`", f"read as `{new}`"]
        for model, names in TABLES.renamed_values.items()
        for name, values in names.items()
        for old, new in values.items()
    ]
    rows += [
        [model, f"`{name}`", f"no effect: {variable.description}"]
        for model, ignored in TABLES.ignored.items()
        for name, variable in ignored.items()
    ]
    return table(["Model", "Old name or value", "What happens"], rows)


def settings() -> str:
    """The environment variables."""
    from cog_triton.settings import describe

    return table(
        ["Variable", "Type", "Default", "Description"],
        (
            [
                f"`{name}`",
                kind,
                f"`{default.removeprefix(f'{ROOT}/')}`" if default else "unset",
                description,
            ]
            for name, kind, default, description in describe()
        ),
    )


def type_of(variable: Variable) -> str:
    """The type column: the kind, and what limits it."""
    if variable.choices:
        return " or ".join(f"`{choice}`" for choice in variable.choices)
    kind = "boolean" if variable.kind == "switch" else variable.kind
    if variable.maximum is not None:
        return f"{kind}, {variable.minimum:g} to {variable.maximum:g}"
    return kind if variable.minimum is None else f"{kind}, ≥ {variable.minimum:g}"


def default_of(variable: Variable) -> str:
    """The default column."""
    if variable.required:
        return "**required**"
    text = variable.render()
    return "unset" if text is None else f"`{text}`" if text else "empty"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


SECTIONS: dict[str, Callable[[], str]] = {
    "variables": variables,
    "old-names": old_names,
    "settings": settings,
}

if __name__ == "__main__":
    sys.exit(main())
