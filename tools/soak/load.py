"""The load of a soak: streams that ask for one case after another, and what came of it."""

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random

from cog_triton.errors import CogTritonError
from tools.benchmark.load import WORDS
from tools.benchmark.targets import Inputs, Target, TritonGrpc
from tools.server_sent_events import CANCELED, AnswerError

MOST_TOKENS = 160
RETRYABLE = ("E2105", "E2106")
LEFT_SHARE = 0.2  # of the requests, which their client cancels or leaves
LATEST_DEPARTURE = 3.0  # seconds
SILENCE_SECONDS = 120.0  # after which a stream counts as hung
ATTEMPTS = 6
FIRST_PAUSE = 1.0  # seconds before the second attempt, and twice as many before each further one
NOTE_LENGTH = 2_000
ID_PREFIX = f"soak{os.getpid()}x"

Targets = Mapping[Target, Sequence[str]]


@dataclass
class Answer:
    """An answer, or as much of it as has come; ``ids`` only from targets that have them."""

    text: str = ""
    tokens: int = 0
    ids: list[int] = field(default_factory=list)


@dataclass
class Tally:
    """Outcomes of the requests of a server.

    Counted are ``requests``; those that were ``whole``, ``left`` by their client, ``broken`` with the
    process that answered, or ``failed``; ``tokens``, and those ``lost`` and ``wrong``.
    """

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # in the end, by code
    retries: Counter[str] = field(default_factory=Counter)  # after which a request was sent again
    servers: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)  # on requests that failed or differ
    rate: Counter[int] = field(default_factory=Counter)  # tokens, by the second in which they came
    last_token: float = 0.0


def pool(count: int, seed: int, *, guided: bool = False) -> list[Inputs]:
    """Return cases of random lengths, every second one sampled; the same for the same seed.

    With ``guided``, one in four is held to a regular expression.
    """
    random = Random(seed)
    cases: list[Inputs] = []
    for key in range(count):
        tokens = random.randint(1, MOST_TOKENS)
        # The number keeps the prompts apart, and with them the simulated engine's answers.
        prompt = f"{key} {' '.join(random.choices(WORDS, k=random.randint(1, 60)))}"
        inputs = {"prompt": prompt, "seed": random.getrandbits(31), "temperature": 1.0 - key % 2}
        inputs |= {"max_tokens": tokens, "min_tokens": random.randint(0, tokens)}
        inputs |= {"top_p": 0.95, "presence_penalty": 0.2}
        if guided and key % 4 > 2:
            inputs |= {"regex": f"[a-z ]{{1,{3 * tokens}}}", "min_tokens": 0}
        cases.append(inputs)
    return cases


def difference(expected: Answer, came: Answer, *, whole: bool) -> tuple[int, int]:
    """Count the lost and wrong token ids of an answer, or its characters if the API returns no ids.

    An answer that is not ``whole`` has to be a beginning of what is expected.
    """
    a: Sequence[object] = expected.ids if came.ids else expected.text
    b: Sequence[object] = came.ids if came.ids else came.text
    equal = min(len(a), len(b))  # how many are equal from the beginning on
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            equal = place
            break
    wrong = len(b) - equal
    lost = max(0, len(a) - len(b)) if whole else 0
    if whole and not (came.ids or lost or wrong):
        lost = abs(expected.tokens - came.tokens)
    return lost, wrong


class Streams:
    """Streams on the targets of one server, until ``stopping`` is set.

    With each target come the codes of errors that end an answer with the process that gave it.
    """

    def __init__(self, targets: Targets, cases: Sequence[Inputs], seed: int) -> None:
        self.tally, self.stopping = Tally(), asyncio.Event()
        self._targets, self._cases, self._random = targets, cases, Random(seed)
        self.expected: list[Answer] = []

    async def expect(self) -> None:
        """Take the answers of the server, which nothing disturbs yet, as what is expected."""
        few = asyncio.Semaphore(8)
        first, *others = self._targets

        async def answer(case: Inputs) -> Answer:
            expected, with_ids = Answer(), Answer()
            async with few:
                await self._read(first, case, new_id(), expected)
                for target in others:
                    if isinstance(target, TritonGrpc):
                        await self._read(target, case, new_id(), with_ids)
            return replace(expected, ids=with_ids.ids)

        self.expected = await asyncio.gather(*map(answer, self._cases))
        self.tally = Tally()

    async def run(self, count: int) -> None:
        """Run so many streams until ``stopping`` is set, and their last requests to the end."""

        async def stream() -> None:
            while not self.stopping.is_set():
                number = self._random.randrange(len(self._cases))
                await self.request(self._random.choice([*self._targets]), number)

        await asyncio.gather(*(stream() for _ in range(count)))

    async def request(self, target: Target, number: int) -> None:
        """Ask for a case until an answer has come, or no further attempt is left."""
        leaves = self._random.random() < LEFT_SHARE
        leave_after = self._random.random() * LATEST_DEPARTURE if leaves else None
        for attempt in range(ATTEMPTS):
            name, answer, code, note = new_id(), Answer(), "", ""
            try:
                end = await self._ask(target, self._cases[number], name, answer, leave_after)
            except (AnswerError, CogTritonError) as error:
                end, code, note = "failed", error.code, str(error)
                if code in self._targets[target]:
                    end = "broken"
                    await asyncio.sleep(FIRST_PAUSE)
                elif code in RETRYABLE and attempt + 1 < ATTEMPTS:
                    self.tally.retries[code] += 1
                    await asyncio.sleep(FIRST_PAUSE * 2**attempt)
                    continue
            except Exception as error:  # whatever it is, it is what came of the request
                end, code, note = "failed", type(error).__name__, repr(error)
            break
        tally, expected = self.tally, self.expected[number]
        lost, wrong = difference(expected, answer, whole=end == "whole")
        tally.counts.update({"requests": 1, end: 1, "lost": lost, "wrong": wrong})
        tally.counts["tokens"] += answer.tokens
        tally.servers[target.name] += 1
        if end == "failed":
            tally.errors[code] += 1
        if end == "failed" or lost or wrong:
            came = {"expected": asdict(expected), "came": asdict(answer)} if lost or wrong else ""
            text = f"{target.name} {name} {end} {code} {note} {came} {self._cases[number]}"
            tally.notes.append(text[:NOTE_LENGTH])

    async def _ask(
        self, target: Target, case: Inputs, name: str, answer: Answer, leave_after: float | None
    ) -> str:
        """Read an answer, or as much of it as is wanted; return how it ended."""
        reading = asyncio.create_task(self._read(target, case, name, answer))
        try:
            if leave_after is not None:
                await asyncio.wait([reading], timeout=leave_after)
                cancels = self._random.random() < 0.5
                if not reading.done() and not (cancels and await target.cancel(name)):
                    return "left"
            await reading
            return "whole"
        except AnswerError as error:
            if error.code == CANCELED:
                return "left"
            raise
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, target: Target, case: Inputs, name: str, answer: Answer) -> None:
        async with contextlib.aclosing(target.ask(case, name)) as parts:
            while True:
                try:
                    part = await asyncio.wait_for(anext(parts), SILENCE_SECONDS)
                except StopAsyncIteration:
                    return
                except asyncio.TimeoutError:
                    raise AnswerError(f"nothing for {SILENCE_SECONDS:g} s", "hung") from None
                if part.text or part.ids:
                    self.tally.last_token = time.time()
                self.tally.rate[int(time.time())] += max(0, part.tokens - answer.tokens)
                answer.text += part.text
                answer.ids += part.ids
                answer.tokens = part.tokens or answer.tokens


def new_id() -> str:
    """Return a request's id, with this process in it: Cog's server names directories with ids."""
    return f"{ID_PREFIX}{secrets.token_hex(6)}"
