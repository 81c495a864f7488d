"""Text tables that fit a terminal: what is too long for its column is wrapped."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 120  # characters


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], wrapped: Collection[int]
) -> str:
    """Columns side by side, in at most ``WIDTH`` characters.

    Args:
        rows: of as many cells as the header.
        wrapped: indexes of the columns that may be narrower than their cells.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        grid.add_column(Text(name), no_wrap=index not in wrapped, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_jupyter=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
