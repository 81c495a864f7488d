"""Requests to which Triton sends nothing for too long."""

import asyncio
from typing import Any

from cog_triton import errors
from cog_triton.client.arrivals import Arrivals

_LONGEST_PERIOD = 1.0


class SilenceWatch:
    """Fails running requests that have received nothing for too long. One timer serves all of them.

    - A request fails with TritonTimeout after ``response_timeout`` seconds of silence.
    - After its first response, it fails with TritonMalformedEvent after ``stall_timeout`` seconds, if other
      requests have received something meanwhile. An engine that pauses is silent on all requests.
    """

    def __init__(self, response_timeout: float, stall_timeout: float) -> None:
        """Watch nothing yet."""
        self.running: set[Arrivals[Any]] = set()
        self._response_timeout = response_timeout
        self._stall_timeout = min(stall_timeout, response_timeout)
        self._period = min(self._stall_timeout / 20, _LONGEST_PERIOD)
        self._timer: asyncio.TimerHandle | None = None
        # The last response of all requests that run no more.
        self._last_of_ended = 0.0

    def add(self, arrivals: Arrivals[Any]) -> None:
        self.running.add(arrivals)
        if self._timer is None:
            self._check()

    def remove(self, arrivals: Arrivals[Any]) -> None:
        self.running.discard(arrivals)
        self._last_of_ended = max(self._last_of_ended, arrivals.last_arrival)

    def seconds(self) -> float:
        """Return the seconds since any response, or since the oldest request's start; 0 if none runs."""
        if not self.running:
            return 0.0
        oldest_start = min(arrivals.started for arrivals in self.running)
        since = max(self._last_response(), oldest_start)
        return asyncio.get_running_loop().time() - since

    def _last_response(self) -> float:
        times = [arrivals.last_arrival for arrivals in self.running]
        return max([self._last_of_ended, *times])

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        last_of_all = self._last_response()
        for arrivals in self.running:
            since = arrivals.last_arrival or arrivals.started
            silent_seconds = loop.time() - since
            has_begun = arrivals.last_arrival > 0
            # A response shortly after this request's last one does not show that the engine goes on.
            others_go_on = last_of_all > since + self._stall_timeout / 2
            if has_begun and others_go_on and silent_seconds >= self._stall_timeout:
                text = f"Triton sent nothing for {self._stall_timeout:g} s"
                # Without a stall timeout of its own, this is as any other silence.
                is_stall = self._stall_timeout < self._response_timeout
                kind = errors.TritonMalformedEvent if is_stall else errors.TritonTimeout
                arrivals.fail(kind(text))
            elif silent_seconds >= self._response_timeout:
                text = f"Triton sent nothing for {self._response_timeout:g} s"
                arrivals.fail(errors.TritonTimeout(text))
        self._timer = None
        if self.running:
            self._timer = loop.call_later(self._period, self._check)
