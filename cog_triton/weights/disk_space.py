"""A full disk: how it is noticed, and what is said about it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.weights.fetch_errors import NoSpace


def is_full(error: OSError) -> bool:
    """Whether the disk, or its user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space_problem(shown: str, cache: Path, needed: int | None, free: int) -> str:
    """The message for a full disk; sizes in bytes."""
    wanted = f"about {size_text(needed)}" if needed is not None else f"more than {size_text(free)}"
    return (
        f"no space left for {shown}: it needs {wanted} in {cache} while it is unpacked, and "
        f"{size_text(free)} is free; free some, or move the cache"
    )


@contextmanager
def full_disk(needed: Callable[[], int | None]) -> Iterator[None]:
    """Maps the error of a full disk to NoSpace, with the bytes ``needed``."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise NoSpace(needed()) from None


def size_text(count: int) -> str:
    """A number of bytes, for people."""
    return str(tqdm.format_sizeof(count, "B"))
