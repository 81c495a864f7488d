"""When a tritonserver is started again after its end, and when no more."""

import errno
import math
import re
import time
from collections.abc import Callable

from cog_triton.errors import TritonPortTaken
from cog_triton.server.guard import GIVEN_UP
from cog_triton.settings import Settings

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
FULL_DISK_PAUSE = 5.0
STARTS_AT_ONCE = 3
LEAST_START_TIMEOUT = 60.0
# How a start on a busy machine fails: Triton's stubs wait too briefly for their lock or for a processor.
STARVED = re.compile(f"interprocess::lock_exception|{GIVEN_UP}")


class RestartPolicy:
    """The rules by which the supervisor starts servers.

    - A server that ran and ended is followed by the next one at once.
    - A failed start is followed by a pause: FIRST_PAUSE, and twice as long after each further one in a row,
      up to LONGEST_PAUSE. While the disk is full, the limit is FULL_DISK_PAUSE.
    - A start that found its port taken, or got too little of a busy machine, is repeated at once, without
      being counted: STARTS_AT_ONCE starts in a row are made before one fails for such a reason.
    - Every end counts, and so does every failed start, unless the disk was full: that is not the server's
      fault, and over when there is space. More than TRITON_RESTARTS within TRITON_RESTART_WINDOW seconds
      are too many, and then no server is started any more.
    - The first start gets TRITON_START_TIMEOUT. A later one gets at most ten times as long as the longest
      that succeeded.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        # The times of ends and failed starts within the window.
        self._counted: list[float] = []
        self._starts_at_once = 1
        # The seconds that a start took which succeeded; 0 before the first.
        self.longest_start = 0.0
        # Seconds before the next start.
        self.pause = 0.0

    @property
    def has_started(self) -> bool:
        """Whether a start has succeeded."""
        return self.longest_start > 0

    def start_timeout(self) -> float:
        """Return the limit of the next start, in seconds."""
        expected = 10 * self.longest_start if self.has_started else math.inf
        return min(self._settings.start_timeout, max(LEAST_START_TIMEOUT, expected))

    def on_started(self, seconds: float) -> None:
        """Note that a server is running, after so many seconds."""
        self.longest_start = max(self.longest_start, seconds)
        self.pause = 0.0
        self._starts_at_once = 1

    def on_end(self) -> None:
        """Note that a server which ran has ended."""
        self._count()

    def on_failed_start(self, error: Exception) -> None:
        """Note that a start failed, which is not to be repeated at once."""
        is_disk_full = getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        longest = FULL_DISK_PAUSE if is_disk_full else LONGEST_PAUSE
        self.pause = min(2 * self.pause or FIRST_PAUSE, longest)
        if is_disk_full:
            self._forget_old()
        else:
            self._count()

    def repeats_at_once(self, error: Exception) -> bool:
        """Return whether a start that failed in this way is made again now, and count that."""
        if not isinstance(error, TritonPortTaken) and STARVED.search(str(error)) is None:
            return False
        if self._starts_at_once == STARTS_AT_ONCE:
            return False
        # If a fixed port is still taken, the next start fails with an error that names the setting.
        self._starts_at_once += 1
        return True

    @property
    def recent(self) -> int:
        """How many ends and failed starts count now."""
        return len(self._counted)

    @property
    def gives_up(self) -> bool:
        """Whether no server is to be started any more."""
        return self.recent > self._settings.restarts

    def _count(self) -> None:
        self._forget_old()
        self._counted.append(self._clock())

    def _forget_old(self) -> None:
        begin = self._clock() - self._settings.restart_window
        self._counted = [moment for moment in self._counted if moment >= begin]
