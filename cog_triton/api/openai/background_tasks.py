"""Tasks that run beside requests, none of which fails without anybody noticing."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that are expected to run until they are stopped, or to end without an error.

    The failure of one is logged with its traceback at once, and makes the server not ready: ``problem``
    names it.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to them
        self._problem: str | None = None

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine; ``name`` says what it does, for the log."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def problem(self) -> str | None:
        """Return which task has failed, and how; None if none has."""
        return self._problem

    async def stop(self) -> None:
        """Cancel the tasks that still run, and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            name = task.get_name()
            logger.error("the background task '%s' failed", name, exc_info=error)
            self._problem = f"the background task '{name}' failed: {type(error).__name__}"
