"""The progress bar of a download."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from urllib.parse import unquote

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]


def progress_bar(shown: str, done: int, total: int | None, wanted: bool) -> tqdm:
    # In a log file each refresh is a line of its own.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        desc=f"Downloading {unquote(PurePosixPath(shown).name)}",
        initial=done,
        total=total,
        unit="B",
        unit_scale=True,
        mininterval=interval,
        disable=not wanted,
    )


def counted(chunks: Iterable[bytes], bar: tqdm) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        bar.update(len(chunk))
