"""Says how far a checkpoint is loaded: lines in the log instead of transformers' progress bar."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from transformers.utils import logging

# The log of tritonserver recognizes this line: see cog_triton/server/log.py.
LOADING = "loading weights: {done} of {total} tensors"
PROGRESS_SECONDS = 5.0


class LoadingProgress:
    """An iterable over a checkpoint's tensors that prints a line now and then, and none if it is quick."""

    def __init__(self, items: Collection[Any], stream: TextIO | None = None) -> None:
        self._items = items
        self._stream = sys.stdout if stream is None else stream

    def __iter__(self) -> Iterator[Any]:
        last = time.monotonic()
        for done, item in enumerate(self._items):
            if time.monotonic() - last >= PROGRESS_SECONDS:
                last = time.monotonic()
                line = LOADING.format(done=done, total=len(self._items))
                print(line, file=self._stream, flush=True)
            yield item


def _replaced_bar(
    factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    if options.get("desc") == "Loading weights" and arguments:
        return LoadingProgress(arguments[0])
    return factory(*arguments, **options)


@contextmanager
def loading_progress() -> Iterator[None]:
    """Replace the bar that transformers shows while it loads weights."""
    previous = logging.set_tqdm_hook(_replaced_bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
