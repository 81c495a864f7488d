"""Runs many short streams, and compares the token ids of each with those of an undisturbed one."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cog_triton.client.resume import Streams
from cog_triton.errors import CogTritonError
from cog_triton.request import Request, triton_inputs


@dataclass
class Outcome:
    """How many streams ended in which way.

    Attributes:
        right: with the ids of the undisturbed stream.
        errors: with an error, by its code, after ids that were right as far as they went.
        wrong: the numbers of those whose ids were others, or too few, or too many: silent errors.
        examples: an error of each code.
    """

    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All streams."""
        return self.right + self.errors.total() + len(self.wrong)


def short_request(number: int, *, max_tokens: int = 40) -> Request:
    """One of as many different requests as there are numbers."""
    return Request(prompt=f"Prompt number {number}", seed=number, max_tokens=max_tokens)


async def token_ids(streams: Streams, request: Request) -> list[int]:
    """The token ids of an answer.

    Raises:
        CogTritonError: it failed.
    """
    ids, error = await _run(streams, request)
    if error is not None:
        raise error
    return ids


async def expected_ids(
    streams: Streams, requests: Mapping[int, Request], *, at_once: int = 16
) -> dict[int, list[int]]:
    """The undisturbed answers, by the requests' numbers."""
    limit = asyncio.Semaphore(at_once)

    async def answer(request: Request) -> list[int]:
        async with limit:
            return await token_ids(streams, request)

    answers = await asyncio.gather(*map(answer, requests.values()))
    return dict(zip(requests, answers, strict=True))


async def compare(
    streams: Streams,
    requests: Mapping[int, Request],
    expected: Mapping[int, list[int]],
    numbers: Iterable[int],
    *,
    at_once: int = 64,
) -> Outcome:
    """Runs the request of each number, so many at once.

    Args:
        numbers: may be many more than there are requests: each takes the next request.
    """
    outcome, rest = Outcome(), iter(numbers)

    async def worker() -> None:
        for number in rest:
            key = number % len(requests)
            ids, error = await _run(streams, requests[key])
            _judge(outcome, number, ids, expected[key], error)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return outcome


def _judge(
    outcome: Outcome, number: int, ids: list[int], expected: list[int], error: CogTritonError | None
) -> None:
    if error is None and ids == expected:
        outcome.right += 1
    elif error is not None and ids == expected[: len(ids)]:
        outcome.errors[error.code] += 1
        outcome.examples[error.code] = error.message
    else:
        outcome.wrong.append(number)


async def _run(streams: Streams, request: Request) -> tuple[list[int], CogTritonError | None]:
    """The ids that came, and the error that the stream ended with."""
    ids: list[int] = []
    try:
        async with streams.stream(secrets.token_hex(8), triton_inputs(request)) as responses:
            async for response in responses:
                ids += response.ids
    except CogTritonError as error:
        return ids, error
    return ids, None
