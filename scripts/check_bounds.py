#!/usr/bin/env python3
"""Check the size of the code: files, functions, and the budget of each room in ``budgets.yaml``.

Lines are all lines of .py files, blank ones and docstrings included. A function's lines include the
functions inside it; Cog's ``predict``, whose arguments are the API, is left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from _checkout import ROOT

PRODUCT = ("cog_triton", "predict.py", "train.py", "triton_model_repo", "tools", "scripts")
LONGEST_FUNCTION = 60
LONGEST_FILE = 400


def main(root: Path = ROOT, budgets: Path = ROOT / "scripts" / "budgets.yaml") -> int:
    """Print a line for each bound that is exceeded; return 1 if there is one."""
    misses = [miss for place in PRODUCT for file in texts(root, place) for miss in beyond(*file)]
    for room, budget in yaml.safe_load(budgets.read_text(encoding="utf-8")).items():
        lines = sum(len(text.splitlines()) for _, text in texts(root, room))
        if lines > budget:
            misses.append(f"{room}: {lines:,} lines, of {budget:,}")
        elif not lines:
            misses.append(f"{room}: has a budget and no code")
    print(*misses or ["the code is within its bounds"], sep="\n")
    return 1 if misses else 0


def texts(root: Path, place: str) -> Iterator[tuple[Path, str]]:
    """Yield each file of Python at a place, by its path below the root, and its text."""
    files = sorted((root / place).rglob("*.py")) or [root / place]
    return (
        (file.relative_to(root), file.read_text(encoding="utf-8"))
        for file in files
        if file.is_file()
    )


def beyond(path: Path, text: str) -> Iterator[str]:
    if (lines := len(text.splitlines())) > LONGEST_FILE:
        yield f"{path}: {lines} lines, of {LONGEST_FILE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONGEST_FUNCTION and f"{path}:{node.name}" != "predict.py:predict":
                yield f"{path}:{node.lineno} {node.name}: {lines} lines, of {LONGEST_FUNCTION}"


if __name__ == "__main__":
    sys.exit(main())
