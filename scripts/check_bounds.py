#!/usr/bin/env python3
"""Says how large the code is, a line for each bound, and fails if one is not kept.

    python scripts/check_bounds.py

Lines are all lines of .py files: blank ones, comments and docstrings too. A function's lines go from its
``def`` to its end, with the functions inside it; Cog's ``predict`` is left out, whose arguments are the
API. The product is the package, the tools, the scripts, the two Cog entries and Triton's models; what
serves is the part of it that runs in a container. Statements are Python's, without docstrings.
"""

from __future__ import annotations

import argparse
import ast
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _checkout import ROOT

SERVES = ("cog_triton", "predict.py", "triton_model_repo")
PRODUCT = (*SERVES, "tools", "scripts", "train.py")
TESTS = ("tests",)
NOT_BOUNDED = ("predict.py:predict",)

LONGEST_FUNCTION, MEDIAN, NINETIETH = 60, 8, 25
LONGEST_FILE = 400
# A ratchet: what the code is today, to be brought down to 12,000 and 7,000.
PRODUCT_LINES, SERVING_LINES = 40_850, 25_850


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        path: relative to the root.
    """

    path: Path
    lines: int
    tree: ast.Module


@dataclass(frozen=True)
class Bound:
    """What was measured, and what it may be.

    Attributes:
        misses: what is beyond the bound, largest first, where that can be named.
    """

    name: str
    figure: float
    kept: bool
    limit: str
    misses: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "ok    " if self.kept else "MISSED"
        where = f": {', '.join(self.misses)}" if self.misses else ""
        return f"{verdict} {self.name}: {self.figure:,.10g} ({self.limit}){where}"


def main(argv: list[str] | None = None) -> int:
    """Prints the bounds; returns 1 if one is not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="default: this checkout")
    root = parser.parse_args(argv).root
    bounds = check(sources(root, PRODUCT), sources(root, SERVES), sources(root, TESTS))
    print(*bounds, sep="\n")
    return 0 if all(bound.kept for bound in bounds) else 1


def sources(root: Path, names: Iterable[str]) -> list[Source]:
    """The Python files of these files and directories."""
    places = [root / name for name in names]
    files = [file for place in places for file in ([place] if place.is_file() else _below(place))]
    return [_source(root, file) for file in files]


def check(product: list[Source], serving: list[Source], tests: list[Source]) -> list[Bound]:
    """Every bound of the code."""
    functions = {name: lines for source in product for name, lines in function_lines(source)}
    lengths = sorted(functions.values())
    files = {str(source.path): source.lines for source in product}
    code, tested = (sum(map(statements, part)) for part in (product, tests))
    return [
        longest("longest function, lines", functions, LONGEST_FUNCTION),
        at_most("median function, lines", statistics.median(lengths), MEDIAN),
        at_most("90th percentile of functions, lines", percentile(lengths, 0.9), NINETIETH),
        longest("longest file, lines", files, LONGEST_FILE),
        at_most("product, lines", sum(files.values()), PRODUCT_LINES),
        at_most("of it what serves, lines", sum(s.lines for s in serving), SERVING_LINES),
        Bound("tests, statements", tested, tested >= code, f"at least the product's {code:,}"),
    ]


def at_most(name: str, figure: float, limit: int) -> Bound:
    return Bound(name, figure, figure <= limit, f"at most {limit:,}")


def longest(name: str, sizes: dict[str, int], limit: int) -> Bound:
    """The bound on the largest of some sizes, which names all that are beyond it."""
    beyond = sorted((item for item in sizes.items() if item[1] > limit), key=lambda item: -item[1])
    figure = max(sizes.values(), default=0)
    misses = tuple(f"{path} {size}" for path, size in beyond)
    return Bound(name, figure, not beyond, f"at most {limit}", misses)


def percentile(lengths: Sequence[int], share: float) -> int:
    """The smallest length that so large a share does not exceed; the lengths are sorted."""
    return lengths[math.ceil(share * len(lengths)) - 1]


def function_lines(source: Source) -> list[tuple[str, int]]:
    """The place of each function, and its lines."""
    return [
        (f"{source.path}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and f"{source.path}:{node.name}" not in NOT_BOUNDED
    ]


def statements(source: Source) -> int:
    """How many statements a file has, without docstrings."""
    return sum(
        isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(source.tree)
    )


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _below(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.py"))


def _source(root: Path, file: Path) -> Source:
    text = file.read_text(encoding="utf-8")
    return Source(file.relative_to(root), len(text.splitlines()), ast.parse(text))


if __name__ == "__main__":
    sys.exit(main())
