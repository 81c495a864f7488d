"""Kills parts of a server at random moments, and tells what a kill had for a consequence."""

from __future__ import annotations

import os
import signal
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tools.soak.watch import FACE, GUARD, MOMENT, Part

VICTIMS = ("tritonserver", "stub", GUARD, FACE)
HASTY_SHARE = 0.15  # of the kills, which do not wait until the server is back from the last one
LONGEST_HASTE = 10.0  # seconds after the last kill


@dataclass(frozen=True)
class Kill:
    """A part that was killed.

    Attributes:
        life: the start of the server's guard, which names the life that ended; of a process of the OpenAI
            face, its own.
    """

    at: float
    role: str
    pid: int
    life: float


@dataclass(frozen=True)
class Recovery:
    """Seconds from a kill to each event after it; None for an event not seen.

    Attributes:
        started: the next server's guard, or the next process of the OpenAI face.
        healthy: the first answer to the question for health that says yes.
        token: the first token of any stream from a later server.
        hasty: whether another part was killed before.
    """

    role: str
    at: float
    started: float | None
    healthy: float | None
    token: float | None
    hasty: bool = False


@dataclass
class Killer:
    """Decides when what is killed.

    Attributes:
        pause: most seconds from the moment that a server is back to the next kill.
    """

    random: Random
    pause: float
    kills: list[Kill] = field(default_factory=list)
    _next: float | None = None

    def due(self, now: float, *, back: bool) -> bool:
        """Return whether to kill something now.

        Args:
            back: whether streams run again after the last kill.
        """
        if self._next is None and back:
            self._next = now + self.random.random() * self.pause
        return self._next is not None and now >= self._next

    def kill(self, now: float, parts: Sequence[Part]) -> Kill | None:
        """Kills a part of these, if there is one to kill: each kind of part is as likely."""
        self._next = None
        victim = choose(parts, self.random)
        guards = [part for part in parts if part.role == GUARD]
        if victim is None or not guards:
            return None
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        life = max(part.started for part in ([victim] if victim.role == FACE else guards))
        kill = Kill(now, victim.role, victim.pid, life)
        self.kills.append(kill)
        if self.random.random() < HASTY_SHARE:
            self._next = now + self.random.random() * LONGEST_HASTE
        return kill


def choose(parts: Sequence[Part], random: Random) -> Part | None:
    """One of the parts; of several stubs any one."""
    kinds = [
        [part for part in parts if kind in (part.role, "stub" * part.stub)] for kind in VICTIMS
    ]
    there = [kind for kind in kinds if kind]
    return random.choice(random.choice(there)) if there else None


def recovery(
    kills: Sequence[Kill],
    index: int,
    births: Sequence[float],
    tokens: Sequence[float],
    polls: Sequence[tuple[float, float, bool]],
) -> Recovery:
    """Return the events after a kill.

    What comes before the next of its kind has started, or a moment after, is from the one that was
    killed: tokens are under way for as long as nobody reads them.

    Args:
        births: the starts of all guards, or processes of the OpenAI face, in order.
        tokens: when tokens came, in order.
        polls: of the health: when asked, when answered, and the answer; in order.
    """
    kill = kills[index]
    nothing = Recovery(kill.role, kill.at, None, None, None)
    place = bisect_left(births, kill.at)
    if place == len(births):
        return nothing
    birth = births[place]
    token = bisect_left(tokens, birth + MOMENT)
    healthy = next((end for begin, end, yes in polls if yes and begin >= birth), None)
    first = tokens[token] if token < len(tokens) else None
    then = kills[index + 1].at if index + 1 < len(kills) else None
    return Recovery(
        kill.role,
        kill.at,
        birth - kill.at,
        None if healthy is None else healthy - kill.at,
        None if first is None else first - kill.at,
        hasty=then is not None and (first is None or then < first),
    )


def crashes(lives: Sequence[tuple[float, float | None]], kills: Sequence[Kill]) -> list[float]:
    """Return the ends of servers of which nobody had killed a part.

    Args:
        lives: the start and the end of each; None for one that was there until it was stopped.
    """
    killed = {kill.life for kill in kills}
    return [end for start, end in lives if end is not None and start not in killed]
