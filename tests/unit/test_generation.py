"""generate() on responses as an engine sends them; on real servers it is in tests/integration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cog_triton.client.stream import Response
from cog_triton.errors import PromptTooLong
from cog_triton.generation import Chunk, generate
from cog_triton.request import Request
from cog_triton.text.tokenizer import load_tokenizer, max_characters


class Client:
    """Answers with the same responses, whatever the request is."""

    def __init__(self, *responses: Response) -> None:
        self._responses = responses
        self.asked = 0

    @asynccontextmanager
    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.asked += 1

        async def responses() -> AsyncIterator[Response]:
            for response in self._responses:
                yield response

        yield responses()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


def run(
    tokenizer: Any, client: Client, *, prompt: str = "Hi", context_length: int | None, **values: Any
) -> list[Chunk]:
    request = Request(prompt=prompt, seed=0, **values)

    async def chunks() -> list[Chunk]:
        client_: Any = client
        stream = generate(request, client_, tokenizer, context_length=context_length)
        return [chunk async for chunk in stream]

    return asyncio.run(chunks())


@pytest.mark.parametrize(
    ("max_tokens", "context_length", "reason"),
    [
        (10, 100, "stop"),
        (10, None, "stop"),  # the backend ended by itself, with an end token that it leaves out
        (3, 100, "length"),
        (10, 5, "length"),  # two of the prompt and three of the answer
    ],
)
def test_the_reason_does_not_need_an_end_token(
    tokenizer: Any, max_tokens: int, context_length: int | None, reason: str
) -> None:
    """TensorRT-LLM's C++ backend never sends one."""
    ids = tokenizer("a b c", add_special_tokens=False).input_ids[:3]
    responses = (Response([token], 2, False, keeps_end_token=False) for token in ids)
    client = Client(*responses, Response([], None, True))
    chunks = run(tokenizer, client, max_tokens=max_tokens, context_length=context_length)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == reason
    assert chunks[-1].output_tokens == 3


def test_without_an_end_token_that_would_be_there_the_answer_was_cut(tokenizer: Any) -> None:
    """At the end of the context, which only the engine knows."""
    client = Client(Response([5, 6], 2, False), Response([], None, True))
    chunks = run(tokenizer, client, max_tokens=10, context_length=None)
    assert chunks[-1].finish_reason == "length"


def test_an_end_token_at_the_limit_is_a_stop(tokenizer: Any) -> None:
    client = Client(Response([5, tokenizer.eos_token_id], 2, True))
    chunks = run(tokenizer, client, max_tokens=2, context_length=100)
    assert chunks[-1].finish_reason == "stop"


def test_a_prompt_of_too_many_characters_goes_nowhere(tokenizer: Any) -> None:
    limit = max_characters(tokenizer, 10)
    client = Client(Response([5], 2, True))
    run(tokenizer, client, prompt="x" * limit, context_length=10)
    assert client.asked == 1
    with pytest.raises(PromptTooLong, match=f"{limit + 1} characters; {limit} are the most"):
        run(tokenizer, client, prompt="x" * (limit + 1), context_length=10)
    assert client.asked == 1
