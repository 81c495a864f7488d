"""The side under test: prompts completed by an engine, through what serves it.

Decoding is greedy, because that alone can be compared token by token.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cog_triton.client.stream import TritonClient
from cog_triton.errors import TritonMalformedJSON, TritonUnavailable, TritonUnknownError
from cog_triton.request.request import Request, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import Tokenizer
from tools.accuracy.metrics import until_end

REQUEST_SECONDS = 600.0

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Answer:
    """One side's output for a prompt.

    Attributes:
        ids: token ids before the end token.
    """

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Answers:
    """All of a side's answers, and the seconds that they took together."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(answer.ids) for answer in self.answers)


class Completer(ABC):
    """Completes prompts. To be used from one event loop."""

    @abstractmethod
    async def complete(self, prompt: str) -> Answer:
        """The greedy completion of a prompt; raises CogTritonError."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes the connections."""


class TritonEngine(Completer):
    """An engine behind Triton: the ids are its own, and the text is made of them as the predictor does."""

    def __init__(
        self, client: TritonClient, tokenizer: Tokenizer, *, max_tokens: int, end_id: int | None
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._end_id = end_id

    async def complete(self, prompt: str) -> Answer:
        request = greedy_request(prompt, self._max_tokens, self._end_id)
        ids: list[int] = []
        async with self._client.stream(secrets.token_hex(8), triton_inputs(request)) as responses:
            async for response in responses:
                ids += response.ids
        kept = until_end(ids, self._end_id)
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        return Answer(kept, detokenizer.decode(list(kept)) + detokenizer.flush())

    async def aclose(self) -> None:
        await self._client.aclose()


class CogEngine(Completer):
    """An engine behind Cog's HTTP API, which gives no ids: they are those of the text, encoded again."""

    def __init__(self, url: str, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._client = httpx.AsyncClient(
            base_url=url, timeout=REQUEST_SECONDS, limits=httpx.Limits(max_connections=None)
        )

    async def complete(self, prompt: str) -> Answer:
        text = _output(await self._post(cog_inputs(prompt, self._max_tokens)))
        return Answer(text_ids(text, self._tokenizer), text)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _post(self, inputs: dict[str, Any]) -> httpx.Response:
        try:
            return await self._client.post("/predictions", json={"input": inputs})
        except httpx.TransportError as error:
            raise TritonUnavailable(
                f"{self._client.base_url} cannot be reached: {error!r}"
            ) from None


async def answers(
    engine: Completer, prompts: Sequence[str], batch_size: int, progress: Progress = lambda _: None
) -> Answers:
    """Completes the prompts, ``batch_size`` at once; the first one before that, to warm up.

    Raises:
        CogTritonError: of the first request that failed.
    """
    done: list[Answer] = []
    seconds = 0.0
    try:
        await engine.complete(prompts[0])
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            began = time.perf_counter()
            done += await asyncio.gather(*map(engine.complete, batch))
            seconds += time.perf_counter() - began
            progress(len(batch))
    finally:
        await engine.aclose()
    return Answers(tuple(done), seconds)


def greedy_request(prompt: str, max_tokens: int, end_id: int | None) -> Request:
    """The request for a prompt's most likely completion."""
    return Request(
        prompt=prompt, seed=0, max_tokens=max_tokens, temperature=0.0, top_p=1.0, end_id=end_id
    )


def cog_inputs(prompt: str, max_tokens: int) -> dict[str, Any]:
    """The same as the inputs of a prediction; a server's defaults must not change the prompt."""
    return {
        "prompt": prompt,
        "prompt_template": "{prompt}",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "stop_sequences": "",
        "seed": 0,
    }


def text_ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of a text by itself, without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def _output(reply: httpx.Response) -> str:
    try:
        body = reply.json()
    except ValueError:
        raise TritonMalformedJSON(f"HTTP {reply.status_code}: {reply.text[:200]}") from None
    if reply.is_error or body.get("status") != "succeeded":
        reason = body.get("error") or body.get("detail") or body
        raise TritonUnknownError(f"HTTP {reply.status_code}: {reason}")
    return "".join(body["output"])
