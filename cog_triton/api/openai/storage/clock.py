"""The time by which rows expire."""

import time

FASTEST_CLOCK = 2.0  # seconds by which the journal's time may advance in one second


class SteadyClock:
    """The time in seconds since 1970 by which rows expire. It does not follow jumps of the machine's clock.

    It is never ahead of the machine's clock, and advances by at most two seconds in one second. A row to be
    kept for 30 days is kept for at least 15, whatever the machine's clock does. After a pause of the server
    it catches up within as much time as the pause took.
    """

    def __init__(self, seconds: float) -> None:
        """Begin with the time at which the housekeeping of the file last ran."""
        self._seconds = seconds
        self._read_at = time.monotonic()

    def now(self) -> float:
        read_at = time.monotonic()
        fastest = self._seconds + FASTEST_CLOCK * (read_at - self._read_at)
        self._seconds = min(time.time(), fastest)
        self._read_at = read_at
        return self._seconds
