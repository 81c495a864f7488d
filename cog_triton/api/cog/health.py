"""What the routes /health/live and /health/ready answer."""

import time

from cog_triton.api.cog.cog_server import CogServer
from cog_triton.api.cog.predictions import Predictions

_SILENT = "Cog's server is not responding"


class Health:
    """Judges Cog's server, its worker and the predictions that run."""

    def __init__(
        self, cog_server: CogServer, predictions: Predictions, *, busy_timeout: float
    ) -> None:
        """Begin with a worker that lives.

        Args:
            busy_timeout: seconds without progress, with all slots taken, after which no more requests
                should come.
        """
        self.worker_ended = False
        self._cog_server = cog_server
        self._predictions = predictions
        self._busy_timeout = busy_timeout
        self._busy_since: float | None = None

    async def status(self) -> str | None:
        """Ask Cog's server for its status, and note since when it has been busy."""
        status = await self._cog_server.status()
        if status != "BUSY":
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = time.monotonic()
        return status

    def problem_with_life(self, status: str | None) -> str:
        """Return why the server should be started again; empty if it lives."""
        if self.worker_ended:
            return "the predictor's process has ended"
        # After a SIGINT, Cog's server takes no connection while it ends.
        if status == "DEFUNCT" or (status is None and not self._predictions.draining):
            return _SILENT
        return ""

    def problem_with_readiness(self, status: str | None) -> str:
        """Return why requests should go elsewhere; empty if they may come."""
        if self._predictions.draining:
            return "the server is stopping"
        if status is None:
            return _SILENT
        if status not in ("READY", "BUSY"):
            return "Cog's server is not ready"
        seconds = self._seconds_without_progress()
        if status == "BUSY" and seconds > self._busy_timeout:
            return f"all slots have been busy for {seconds:.0f} s without any progress"
        return ""

    def _seconds_without_progress(self) -> float:
        """Return for how long all slots have been busy without any progress; 0 if one is free."""
        if self._busy_since is None:
            return 0.0
        return time.monotonic() - max(self._busy_since, self._predictions.progress)
