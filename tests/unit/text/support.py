from collections.abc import Sequence
from typing import TypeVar

Items = TypeVar("Items", str, Sequence[int])


def split(items: Items, sizes: Sequence[int]) -> list[Items]:
    """Cut into pieces of these sizes, over and over."""
    pieces, start, turn = [], 0, 0
    while start < len(items):
        size = sizes[turn % len(sizes)]
        pieces.append(items[start : start + size])
        start, turn = start + size, turn + 1
    return pieces
