"""Runs many short streams, and compares the token ids of each with those of an undisturbed one."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cog_triton.client.stream import Streams
from cog_triton.errors import CogTritonError
from cog_triton.request.request import Request, triton_inputs


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


async def expected_ids(streams: Streams, requests: Mapping[int, Request]) -> dict[int, list[int]]:
    """The undisturbed answers, by the requests' numbers.

    Raises:
        CogTritonError: one failed.
    """
    answers = await asyncio.gather(*(_run(streams, request, []) for request in requests.values()))
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
            ids: list[int] = []
            try:
                await _run(streams, requests[key], ids)
            except CogTritonError as error:
                if ids == expected[key][: len(ids)]:
                    outcome.errors[error.code] += 1
                    outcome.examples[error.code] = error.message
                    continue
            if ids == expected[key]:
                outcome.right += 1
            else:
                outcome.wrong.append(number)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return outcome


async def _run(streams: Streams, request: Request, ids: list[int]) -> list[int]:
    """Adds the ids to a list as they come, and returns it."""
    async with streams.stream(secrets.token_hex(8), triton_inputs(request)) as responses:
        async for response in responses:
            ids += response.ids
    return ids
