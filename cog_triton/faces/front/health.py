"""What the health routes say. No I/O."""

from __future__ import annotations

from typing import Any


def busy_since(status: str, now: float, before: float | None, progress: float) -> float | None:
    """Since when all slots have been taken without anything coming of it; None if some are free.

    Args:
        status: what Cog's server says of itself.
        now: seconds of a clock, as the others.
        before: what this was when Cog's server was asked last.
        progress: when a prediction last began, sent something or ended.
    """
    if status != "BUSY":
        return None
    return max(now if before is None else before, progress)


def ready(
    status: str | None, busy_for: float, busy_limit: float, draining: bool
) -> tuple[int, dict[str, Any]]:
    """Whether predictions may be sent here: the HTTP status, and the body.

    Args:
        status: what Cog's server says of itself; None if it does not answer.
        busy_for: seconds for which all slots have been taken without anything coming of it.
        busy_limit: longer than that is no work any more.
    """
    said = {"status": status or "UNKNOWN"}
    if draining:
        return 503, {**said, "detail": "the server is stopping"}
    if status is None:
        return 503, {**said, "detail": "Cog's server does not answer"}
    if status == "BUSY" and busy_for > busy_limit:
        detail = f"all slots have been taken for {busy_for:.0f} s, and nothing comes of it"
        return 503, {**said, "detail": detail}
    if status not in ("READY", "BUSY"):
        return 503, {**said, "detail": "Cog's server is not ready"}
    return 200, said


def live(status: str | None, worker_ended: bool, draining: bool) -> tuple[int, dict[str, Any]]:
    """Whether this process is of use, now or when it has started; arguments as above."""
    said = {"status": status or "UNKNOWN"}
    if worker_ended:
        return 503, {**said, "detail": "the predictor's process has ended"}
    # After a SIGINT, Cog's server takes no connection while it ends.
    if (status is None and not draining) or status == "DEFUNCT":
        return 503, {**said, "detail": "Cog's server does not answer"}
    return 200, said
