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
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import load_tokenizer, text_limits
from cog_triton.wire import Parameters, TokenLogProb


class Client:
    """Answers with the same responses, whatever the request is."""

    def __init__(self, *responses: Response) -> None:
        self._responses = responses
        self.asked = 0

    @asynccontextmanager
    async def stream(self, *_: Any, parameters: Parameters) -> AsyncIterator[Any]:
        self.asked += 1
        self.parameters = parameters

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
    limit = text_limits(tokenizer, 10).characters
    client = Client(Response([5], 2, True))
    run(tokenizer, client, prompt="x" * limit, context_length=10)
    assert client.asked == 1
    with pytest.raises(PromptTooLong, match=f"{limit + 1} characters; {limit} are the most"):
        run(tokenizer, client, prompt="x" * (limit + 1), context_length=10)
    assert client.asked == 1


@pytest.mark.parametrize("stop", ["", "one"])
def test_the_first_chunk_has_the_prompts_log_probabilities(tokenizer: Any, stop: str) -> None:
    ids = tokenizer("one two", add_special_tokens=False).input_ids
    told = [TokenLogProb(3, 0.0), TokenLogProb(4, -1.0)]
    client = Client(
        Response(ids[:2], 2, False, prompt_log_probs=told), Response(ids[2:], None, True)
    )
    stops = (stop,) if stop else ()
    chunks = run(tokenizer, client, context_length=100, log_probs=0, stop_sequences=stops)
    assert list(chunks[0].prompt_log_probs) == told
    assert not any(chunk.prompt_log_probs for chunk in chunks[1:])


def test_chunks_have_the_ids_and_their_log_probabilities(tokenizer: Any) -> None:
    ids = tokenizer("one two", add_special_tokens=False).input_ids
    likely = [TokenLogProb(token, -1.0, ((9, -0.5),)) for token in ids]
    client = Client(
        Response(ids[:2], 2, False, log_probs=likely[:2]),
        Response(ids[2:], None, True, log_probs=likely[2:]),
    )
    chunks = run(tokenizer, client, context_length=100, log_probs=1)
    assert [list(chunk.ids) for chunk in chunks] == [ids[:2], ids[2:]]
    assert [token for chunk in chunks for token in chunk.log_probs] == likely
    assert chunks[-1].stop_sequence is None


def test_the_last_chunk_names_the_stop_sequence(tokenizer: Any) -> None:
    ids = tokenizer("one two three", add_special_tokens=False).input_ids
    client = Client(*(Response([token], 2, False) for token in ids), Response([], None, True))
    stops = ("four", " two")
    chunks = run(tokenizer, client, context_length=100, stop_sequences=stops)
    assert "".join(chunk.text for chunk in chunks) == "one"
    assert [chunk.stop_sequence for chunk in chunks] == [None] * (len(chunks) - 1) + [" two"]
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize("together", [True, False])
def test_a_stop_token_ends_the_answer_and_is_no_part_of_its_text(
    tokenizer: Any, together: bool
) -> None:
    ids = tokenizer("one two three", add_special_tokens=False).input_ids
    likely = [TokenLogProb(token, -1.0, ()) for token in ids]
    responses = [
        Response([token], 2, False, True, [told]) for token, told in zip(ids, likely, strict=True)
    ]
    if together:
        responses = [Response(ids, 2, False, True, likely)]
    end = next(
        place for place, token in enumerate(ids) if "two" in tokenizer.decode(ids[: place + 1])
    )
    client = Client(*responses, Response([], None, True))
    chunks = run(
        tokenizer, client, context_length=100, stop_token_ids=(ids[end], 10**9), log_probs=0
    )
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(ids[:end])
    assert [token for chunk in chunks for token in chunk.ids] == ids[: end + 1]
    assert [token for chunk in chunks for token in chunk.log_probs] == likely[: end + 1]
    assert [chunk.stop_token for chunk in chunks] == [None] * (len(chunks) - 1) + [ids[end]]
    assert (chunks[-1].finish_reason, chunks[-1].output_tokens) == ("stop", end + 1)


def test_a_stop_sequence_before_a_stop_token_is_what_ended_the_answer(tokenizer: Any) -> None:
    ids = tokenizer("one two three", add_special_tokens=False).input_ids
    client = Client(Response(ids, 2, True))
    (chunk,) = run(
        tokenizer, client, context_length=100, stop_token_ids=(ids[-1],), stop_sequences=("one",)
    )
    assert (chunk.text, chunk.stop_sequence, chunk.stop_token) == ("", "one", None)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_special_tokens_are_text_where_the_request_wants_them(tokenizer: Any, size: int) -> None:
    mark = tokenizer.eos_token
    before, behind = (tokenizer(text, add_special_tokens=False).input_ids for text in ("a b", "c"))
    ids = [*before, tokenizer.eos_token_id, *behind, tokenizer.eos_token_id, *behind]
    responses = [Response(ids[n : n + size], 2, False) for n in range(0, len(ids), size)]
    for shown, text in (((), "a bcc"), ((mark, "<no token>"), f"a b{mark}c{mark}c")):
        client = Client(*responses, Response([], None, True))
        chunks = run(
            tokenizer,
            client,
            context_length=100,
            max_tokens=20,
            ignore_eos=True,
            shown_tokens=shown,
        )
        assert "".join(chunk.text for chunk in chunks) == text


def test_without_an_end_token_an_answer_ends_at_its_limit(tokenizer: Any) -> None:
    client = Client(Response([5, tokenizer.eos_token_id], 2, True))
    chunks = run(tokenizer, client, context_length=100, max_tokens=2, ignore_eos=True)
    assert chunks[-1].finish_reason == "length"


def test_what_goes_beside_the_inputs(tokenizer: Any) -> None:
    client = Client(Response([5], 2, True))
    run(tokenizer, client, context_length=100, min_p=0.25)
    assert client.parameters == {"min_p": "0.25"}


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 100])
def test_an_answer_is_counted_up_to_the_token_that_completed_the_stop(
    tokenizer: Any, pieces: int
) -> None:
    """However far the engine ran on, and however its responses were put together."""
    ids = tokenizer("one two three four five six seven", add_special_tokens=False).input_ids
    likely = [TokenLogProb(token, -1.0, ()) for token in ids]
    client = Client(
        *(
            Response(ids[i : i + pieces], 2, False, True, likely[i : i + pieces])
            for i in range(0, len(ids), pieces)
        ),
        Response([], None, True),
    )
    chunks = run(tokenizer, client, context_length=None, log_probs=0, stop_sequences=("hr", "x"))
    texts = [tokenizer.decode(ids[: count + 1]) for count in range(len(ids))]
    expected = next(count for count, text in enumerate(texts, 1) if "hr" in text)
    assert "".join(chunk.text for chunk in chunks) == "one two t"
    assert chunks[-1].output_tokens == expected
    assert [token for chunk in chunks for token in chunk.ids] == ids[:expected]
    assert [token for chunk in chunks for token in chunk.log_probs] == likely[:expected]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_stop_is_part_of_the_text_on_request(
    tokenizer: Any, include: bool, together: bool
) -> None:
    ids = tokenizer("one two three", add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id

    def text(ids: list[int], **values: Any) -> str:
        pieces = [ids] if together else [[token] for token in ids]
        client = Client(*(Response(piece, 2, False) for piece in pieces), Response([], None, True))
        chunks = run(tokenizer, client, context_length=None, include_stop=include, **values)
        assert chunks[-1].finish_reason == "stop"
        return "".join(chunk.text for chunk in chunks)

    assert text(ids, stop_sequences=("two",)) == ("one two" if include else "one ")
    stop_id = ids[-1]
    whole = tokenizer.decode(ids if include else ids[:-1])
    assert text([*ids, end], stop_token_ids=(stop_id,)) == whole
    shown_end = tokenizer.decode([*ids, end]) if include else tokenizer.decode(ids)
    assert text([*ids, end], skip_special_tokens=False) == shown_end
    assert text([*ids, end]) == tokenizer.decode(ids)
