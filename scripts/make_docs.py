#!/usr/bin/env python3
"""Write the tables of the pages that PAGES names from the code that they describe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import _access
import _clients
from _checkout import ROOT

from cog_triton.repository.variables import TABLES, VARIABLES, Variable
from cog_triton.settings import Settings

HEADER = ("Variable", "Type", "Default", "Description")
PAGES = (
    ROOT / "docs" / "configuration.md",
    ROOT / "docs" / "openai" / "agents.md",
    ROOT / "docs" / "operations.md",
    ROOT / "triton_model_repo" / "README.md",
)


def filled(page: str) -> str:
    """Return the page with each table between its markers as the code has it now."""
    tables = {
        "settings": settings,
        "variables": variables,
        "old-names": old,
        "access": access,
        "clients": clients,
    }
    marked = re.compile(r"(<!-- ([\w-]+):begin -->\n).*(<!-- \2:end -->)", re.DOTALL)
    return marked.sub(lambda found: found[1] + tables[found[2]]() + found[3], page)


def settings() -> str:
    rows = []
    for field in Settings.model_fields.values():
        default = str("" if field.default in (None, ()) else field.default).removeprefix(f"{ROOT}/")
        shown = f"`{default}`" if default else "unset"
        rows.append([f"`{field.alias}`", kind_of(field.annotation), shown, field.description or ""])
    return table(HEADER, rows)


def access() -> str:
    return table(_access.HEADER, _access.table_rows())


def clients() -> str:
    return table(_clients.HEADER, _clients.table_rows())


def kind_of(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return one_of(get_args(annotation))
    options = [a for a in get_args(annotation) if a is not type(None)] or [annotation]
    names = {"int": "integer", "Path": "path", "float": "number", "bool": "boolean"}
    return names.get(options[0].__name__, "text")


def variables() -> str:
    """Return a heading and a table for each model."""
    tables = []
    for model, named in VARIABLES.items():
        rows = [[f"`{n}`", type_of(v), default_of(v), v.description] for n, v in named.items()]
        tables.append(f"## {model}\n\n{table(HEADER, rows)}")
    return "\n".join(tables)


def old() -> str:
    """Return a table of the names and values of older templates."""
    rows: list[list[str]] = []
    for model, names in TABLES.renamed.items():
        for old_name, new_name in names.items():
            rows.append([model, f"`{old_name}`", f"read as `{new_name}`"])
    for model, variables_with_values in TABLES.renamed_values.items():
        for name, values in variables_with_values.items():
            for old_value, new_value in values.items():
                rows.append([model, f"`{name}` `{old_value}`", f"read as `{new_value}`"])
    for model, ignored in TABLES.ignored.items():
        for name, variable in ignored.items():
            rows.append([model, f"`{name}`", f"no effect: {variable.description}"])
    return table(["Model", "Old name or value", "What happens"], rows)


def type_of(variable: Variable) -> str:
    if variable.choices:
        return one_of(variable.choices)
    kind = "boolean" if variable.kind == "switch" else variable.kind
    if variable.maximum is not None:
        return f"{kind}, {variable.minimum:g} to {variable.maximum:g}"
    return kind if variable.minimum is None else f"{kind}, ≥ {variable.minimum:g}"


def one_of(choices: Sequence[str]) -> str:
    *others, last = (f"`{choice}`" for choice in choices)
    return f"{', '.join(others)} or {last}"


def default_of(variable: Variable) -> str:
    if variable.required:
        return "**required**"
    text = variable.render()
    return "unset" if text is None else f"`{text}`" if text else "empty"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
