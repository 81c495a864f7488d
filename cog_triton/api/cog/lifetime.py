"""The ends of a server: its worker ends, or it is told to stop."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from cog_triton.api.cog.predictions import Predictions
from cog_triton.settings import Settings

# For what comes after DRAIN_SECONDS, with the end of Cog's server.
_END_SECONDS = 4.0
# For what was told to stop, and then for the worker to take in that its calls were cancelled.
_STOP_SECONDS = 1.0
_CANCEL_SECONDS = 0.3


async def worker_end() -> None:
    """Wait for the end of this process's only child, the worker in which the predictor runs."""
    has_started = False
    while True:
        await asyncio.sleep(0.1)
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # Cog's server has not started it, or has waited for it.
            if has_started:
                return
        else:
            has_started = True
            if ended is not None:
                return


async def drain(predictions: Predictions, settings: Settings) -> None:
    """Refuse new predictions, and let those that run end, for a bounded time."""
    predictions.draining = True
    predictions.send("drain")
    seconds = settings.drain_seconds
    stop_seconds = settings.stop_timeout
    left = predictions.left()
    if left:
        text = f"waiting for {left}, at most {seconds:g} s (DRAIN_SECONDS)"
        log("INFO", text, stops_within=seconds + _END_SECONDS)
    else:
        text = f"waiting for Triton to stop, at most {stop_seconds:g} s (TRITON_STOP_TIMEOUT)"
        log("INFO", text, stops_within=stop_seconds)
    left = await within(seconds, predictions.left)
    if not left:
        return
    log("WARN", f"{left} did not finish within {seconds:g} s (DRAIN_SECONDS): stopping now")
    predictions.send("stop")
    if await within(_STOP_SECONDS, predictions.left):
        predictions.cancel_relays()
        await asyncio.sleep(_CANCEL_SECONDS)


async def within(seconds: float, left: Callable[[], Any]) -> Any:
    """Wait until nothing is left, for a bounded time; return what is still left then."""
    deadline = time.monotonic() + seconds
    while True:
        found = left()
        if not found or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(0.01)


def log(level: str, text: str, **fields: Any) -> None:
    """Log in the form of Cog's server."""
    line = {
        "timestamp": now(),
        "level": level,
        "fields": {"message": text, **fields},
        "target": "cog_triton.api.cog.front",
    }
    # The reader may have ended.
    with contextlib.suppress(OSError):
        print(json.dumps(line), file=sys.stderr, flush=True)


def now() -> str:
    """Return the time as Cog's server and Replicate write it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
