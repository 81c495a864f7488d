#!/usr/bin/env python3
"""Check the size of the code: files, functions, and the budget of each room.

    python scripts/check_bounds.py

Lines are all lines of .py files, blank ones and docstrings included. A function's lines include the
functions inside it; Cog's ``predict``, whose arguments are the API, is left out. The budgets are in
``budgets.yaml``: lines of a file, or of a directory with all below it. A budget may fall and never rises.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from _checkout import ROOT

PRODUCT = ("cog_triton", "predict.py", "train.py", "triton_model_repo", "tools", "scripts")
NOT_BOUNDED = ("predict.py:predict",)
LONGEST_FUNCTION = 60
LONGEST_FILE = 400
BUDGETS = Path(__file__).with_name("budgets.yaml")


def main(argv: list[str] | None = None) -> int:
    """Print a line for each bound that is exceeded; return 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="default: this checkout")
    parser.add_argument("--budgets", type=Path, default=BUDGETS, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    budgets = yaml.safe_load(arguments.budgets.read_text(encoding="utf-8"))
    misses = [*sizes_exceeded(arguments.root), *budgets_exceeded(arguments.root, budgets)]
    print(*misses or ["the code is within its bounds"], sep="\n")
    return 1 if misses else 0


def sizes_exceeded(root: Path) -> Iterator[str]:
    """Yield the files and the functions that are too long."""
    for file in (file for place in PRODUCT for file in python_files(root / place)):
        path, text = file.relative_to(root), file.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > LONGEST_FILE:
            yield f"{path}: {lines} lines, of {LONGEST_FILE}"
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONGEST_FUNCTION and f"{path}:{node.name}" not in NOT_BOUNDED:
                yield f"{path}:{node.lineno} {node.name}: {lines} lines, of {LONGEST_FUNCTION}"


def budgets_exceeded(root: Path, budgets: dict[str, int]) -> Iterator[str]:
    """Yield the rooms that are larger than their budget, and budgets of rooms that are gone."""
    for room, budget in budgets.items():
        lines = sum(
            len(file.read_text(encoding="utf-8").splitlines()) for file in python_files(root / room)
        )
        if lines > budget:
            yield f"{room}: {lines:,} lines, of {budget:,}"
        elif not lines:
            yield f"{room}: has a budget and no code"


def python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
