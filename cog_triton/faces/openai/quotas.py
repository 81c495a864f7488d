"""What each key may have: requests at once, and requests and tokens a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.keys import Key

MINUTE = 60.0


@dataclass
class Bucket:
    """So many a minute: it is full at first, and fills evenly.

    Attributes:
        size: what it holds, which is what comes in a minute.
        level: what is in it; below 0 where more was taken than there was.
        seen: when the level was that, in seconds of a clock.
    """

    size: float
    level: float
    seen: float

    def fill(self, size: float, now: float) -> None:
        """Brings the level up to now; the size may have changed."""
        self.level = min(size, self.level + (now - self.seen) * size / MINUTE)
        self.size, self.seen = size, now

    def wait(self, amount: float) -> float:
        """Seconds until so much is in it."""
        return max(0.0, (amount - self.level) * MINUTE / self.size)


@dataclass
class _Use:
    running: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)


class Quotas:
    """What the keys have used. To be used from one event loop.

    Each of several processes counts for itself, and is given its part of the limits.
    """

    def __init__(self, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, key: Key) -> None:
        """Counts a request that begins.

        Raises:
            ApiError: 429, the key has used up what it may have; it says when to try again.
        """
        use = self._uses.setdefault(key.name, _Use())
        most = math.inf if key.max_running is None else math.ceil(key.max_running / self._processes)
        if use.running >= most:
            raise _refusal("requests", f"{most} running requests", 1.0)
        buckets = self._buckets(key, use)
        for kind, bucket in buckets.items():
            if seconds := bucket.wait(1.0):
                raise _refusal(kind, f"{bucket.size:g} {kind} a minute", seconds)
        if "requests" in buckets:
            buckets["requests"].level -= 1
        use.running += 1

    def leave(self, key: Key, tokens: int) -> None:
        """Counts the end of one that ``enter`` let in, and what it took."""
        use = self._uses[key.name]
        use.running -= 1
        if tokens and (bucket := self._buckets(key, use).get("tokens")):
            bucket.level -= tokens

    def headers(self, key: Key) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers of a key's limits; none where it has none."""
        use = self._uses.get(key.name, _Use())
        values = []
        for kind, bucket in self._buckets(key, use).items():
            values += [
                (f"limit-{kind}", f"{bucket.size:.0f}"),
                (f"remaining-{kind}", f"{max(0, math.floor(bucket.level))}"),
                (f"reset-{kind}", f"{bucket.wait(bucket.size):.3f}s"),
            ]
        return [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in values]

    def _buckets(self, key: Key, use: _Use) -> dict[str, Bucket]:
        """Those that a key has now, with what is in them now."""
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        sizes = {kind: max(1.0, limit / self._processes) for kind, limit in limits.items() if limit}
        now = self._clock()
        for kind, size in sizes.items():
            use.buckets.setdefault(kind, Bucket(size, size, now)).fill(size, now)
        return {kind: use.buckets[kind] for kind in sizes}


def _refusal(kind: str, limit: str, seconds: float) -> ApiError:
    retry = max(1, math.ceil(seconds))
    return ApiError(
        429,
        f"Rate limit reached for this API key: {limit} are the most; try again in {retry} s",
        kind,
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry)},
    )
