"""The limits of API keys: how much each has used of them."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.keys import Key

MINUTE = 60.0
Kind = Literal["requests", "tokens"]


@dataclass(frozen=True)
class Bucket:
    """A limit per minute. It is full at first, is filled evenly, and may be below 0.

    Attributes:
        size: what it holds.
        level: what it held at ``at``.
        at: on the monotonic clock.
    """

    size: float
    level: float
    at: float

    def filled(self, now: float, size: float) -> "Bucket":
        """Return the bucket at a later time, with a size that may have changed."""
        level = self.level + (now - self.at) * size / MINUTE
        return Bucket(size, min(size, level), now)

    def seconds_until(self, level: float) -> float:
        """Return how long it takes until the bucket has a level."""
        return max(0.0, (level - self.level) * MINUTE / self.size)


class Quotas:
    """What keys have used of their limits; each of several processes has an equal part of a limit."""

    def __init__(self, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._buckets: dict[tuple[str, Kind], Bucket] = {}

    def enter(self, key: Key) -> None:
        """Count a request that begins, or raise 429, with the time to try again."""
        if key.max_running is not None:
            limit = math.ceil(key.max_running / self._processes)
            if self._running[key.name] >= limit:
                raise _refusal("requests", f"{limit} running requests", 1.0)
        for kind, bucket in self._current(key).items():
            if bucket.level < 1:
                text = f"{bucket.size:g} {kind} per minute"
                raise _refusal(kind, text, bucket.seconds_until(1))
        self._running[key.name] += 1
        self._take(key, "requests", 1)

    def leave(self, key: Key, tokens: int) -> None:
        """Count the end of a request that was let in, and the tokens that it took."""
        self._running[key.name] -= 1
        self._take(key, "tokens", tokens)

    def spend(self, key: Key, tokens: int) -> float:
        """Count tokens of a key's batches; return the seconds until it may have more."""
        self._take(key, "tokens", tokens)
        bucket = self._current(key).get("tokens")
        return 0.0 if bucket is None else bucket.seconds_until(1)

    def headers(self, key: Key) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers of a key's limits; none if it has no limit."""
        headers = {}
        for kind, bucket in self._current(key).items():
            remaining = max(0, math.floor(bucket.level))
            seconds = bucket.seconds_until(bucket.size)
            headers[f"x-ratelimit-limit-{kind}"] = f"{bucket.size:.0f}"
            headers[f"x-ratelimit-remaining-{kind}"] = str(remaining)
            headers[f"x-ratelimit-reset-{kind}"] = f"{seconds:.3f}s"
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def _current(self, key: Key) -> dict[Kind, Bucket]:
        """Return a key's buckets as they are now, by their kinds."""
        limits: dict[Kind, float | None] = {
            "requests": key.requests_per_minute,
            "tokens": key.tokens_per_minute,
        }
        now = self._clock()
        buckets: dict[Kind, Bucket] = {}
        for kind, limit in limits.items():
            if limit is None:
                continue
            size = max(1.0, limit / self._processes)
            bucket = self._buckets.get((key.name, kind), Bucket(size, size, now))
            buckets[kind] = bucket.filled(now, size)
        return buckets

    def _take(self, key: Key, kind: Kind, amount: float) -> None:
        bucket = self._current(key).get(kind)
        if bucket is not None:
            level = bucket.level - amount
            self._buckets[key.name, kind] = Bucket(bucket.size, level, bucket.at)


def _refusal(kind: Kind, limit: str, seconds: float) -> ApiError:
    retry = max(1, math.ceil(seconds))
    text = f"Rate limit reached for this API key: the limit is {limit}; try again in {retry} s"
    headers = {"Retry-After": str(retry)}
    return ApiError(429, text, kind, code="rate_limit_exceeded", headers=headers)
