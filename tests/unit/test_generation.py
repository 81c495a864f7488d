"""generate() on responses as an engine sends them; on real servers it is in tests/integration."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cog_triton.client.responses import Inputs, Response
from cog_triton.errors import PromptTooLong
from cog_triton.generation import Chunk, generate
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.protocol.names import Parameters
from cog_triton.request.request import Request
from cog_triton.text.end_tokens import EndTokens
from cog_triton.text.tokenizer import text_limits

END = Response([], None, True)
EOS = 2  # the demo model's end token


class Client:
    """Answers with the same responses, whatever the request is."""

    def __init__(self, *responses: Response) -> None:
        self._responses = responses
        self.asked = 0

    async def stream(
        self, _: str, inputs: Inputs, *, parameters: Parameters
    ) -> AsyncGenerator[Response, None]:
        self.asked += 1
        self.inputs = inputs
        self.parameters = parameters
        for response in self._responses:
            yield response


def run(
    tokenizer: Any,
    client: Client,
    *,
    context_length: int | None = 100,
    end_ids: tuple[int, ...] = (EOS,),
    named_in_requests: bool = False,
    **values: Any,
) -> list[Chunk]:
    request = Request(**{"prompt": "Hi", "seed": 0, **values})

    async def chunks() -> list[Chunk]:
        client_: Any = client
        ends = EndTokens(end_ids, named_in_requests)
        stream = generate(
            request, client_, tokenizer, context_length=context_length, end_tokens=ends
        )
        return [chunk async for chunk in stream]

    return asyncio.run(chunks())


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def likely(ids: list[int]) -> list[TokenLogProb]:
    return [TokenLogProb(token, -1.0, ((9, -0.5),)) for token in ids]


def pieces(ids: list[int], size: int) -> Client:
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    return Client(*(Response(part, 2, False, True, likely(part)) for part in parts), END)


@pytest.mark.parametrize(
    ("ids", "keeps_end_token", "values", "reason"),
    [
        # TensorRT-LLM's C++ backend never sends an end token.
        pytest.param([5, 6, 7], False, {"max_tokens": 10}, "stop", id="by itself"),
        pytest.param(
            [5, 6, 7],
            False,
            {"max_tokens": 10, "context_length": None},
            "stop",
            id="by itself, in a context of unknown length",
        ),
        pytest.param([5, 6, 7], False, {"max_tokens": 3}, "length", id="of max_tokens"),
        pytest.param(
            [5, 6, 7],
            False,
            {"max_tokens": 10, "context_length": 5},
            "length",
            id="of the context, with the two tokens of the prompt",
        ),
        pytest.param(
            [5, 2],
            True,
            {"max_tokens": 2, "context_length": None},
            "stop",
            id="of an end token at max_tokens",
        ),
        pytest.param(
            [5, 2],
            True,
            {"max_tokens": 2, "ignore_eos": True},
            "length",
            id="of an end token that is ignored, at max_tokens",
        ),
        pytest.param(
            [5, 6],
            True,
            {"max_tokens": 10, "context_length": None},
            "length",
            id="of the context, which the engine knows",
        ),
    ],
)
def test_the_reason_of_the_end(
    tokenizer: Any, ids: list[int], keeps_end_token: bool, values: dict[str, Any], reason: str
) -> None:
    responses = [Response([token], 2, False, keeps_end_token) for token in ids]
    chunks = run(tokenizer, Client(*responses, END), **values)
    assert {chunk.finish_reason for chunk in chunks[:-1]} == {None}
    assert (chunks[-1].finish_reason, chunks[-1].output_tokens) == (reason, len(ids))


def test_a_prompt_of_too_many_characters_goes_nowhere(tokenizer: Any) -> None:
    limit = text_limits(tokenizer, 10).characters
    client = Client(Response([5], 2, True))
    run(tokenizer, client, prompt="x" * limit, context_length=10, min_p=0.25)
    assert client.parameters == {"min_p": "0.25"}
    with pytest.raises(PromptTooLong, match=f"{limit + 1} characters; the limit is {limit}"):
        run(tokenizer, client, prompt="x" * (limit + 1), context_length=10)
    assert client.asked == 1


@pytest.mark.parametrize("stops", [(), ("one",)])
def test_the_first_chunk_has_the_prompts_log_probabilities(
    tokenizer: Any, stops: tuple[str, ...]
) -> None:
    ids, prompt = encode(tokenizer, "one two"), [TokenLogProb(3, 0.0), TokenLogProb(4, -1.0)]
    client = Client(Response(ids, 2, False, prompt_log_probs=prompt), END)
    chunks = run(tokenizer, client, log_probs=0, stop_sequences=stops)
    assert list(chunks[0].prompt_log_probs) == prompt
    assert not any(chunk.prompt_log_probs for chunk in chunks[1:])


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("values", "before", "stop"),
    [({"stop_sequences": ("hr", "x")}, "one two t", "hr"), ({}, "one two", " three")],
)
def test_an_answer_ends_with_the_token_that_completed_the_stop(
    tokenizer: Any, size: int, include: bool, values: dict[str, Any], before: str, stop: str
) -> None:
    """However far the engine ran on, and however its responses were put together."""
    ids = encode(tokenizer, "one two three four five")
    (end,) = encode(tokenizer, " three")
    tokens = () if values else (end, 10**9)
    options = {**values, "stop_token_ids": tokens, "include_stop": include, "log_probs": 1}
    chunks = run(tokenizer, pieces(ids, size), **options)
    count = ids.index(end) + 1
    assert text(chunks) == before + stop * include
    assert [token for chunk in chunks for token in chunk.ids] == ids[:count]
    assert [token for chunk in chunks for token in chunk.log_probs] == likely(ids[:count])
    *others, last = [(c.stop_sequence, c.stop_token, c.finish_reason) for c in chunks]
    assert set(others) <= {(None, None, None)}
    assert last == (None if tokens else stop, end if tokens else None, "stop")
    assert chunks[-1].output_tokens == count


def test_a_stop_sequence_before_a_stop_token_is_what_ended_the_answer(tokenizer: Any) -> None:
    ids = encode(tokenizer, "one two three")
    (chunk,) = run(tokenizer, pieces(ids, 9), stop_token_ids=(ids[-1],), stop_sequences=("one",))
    assert (chunk.text, chunk.stop_sequence, chunk.stop_token) == ("", "one", None)


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("skips_special_tokens", [True, False])
@pytest.mark.parametrize("stops", [(), ("none of it",)], ids=["no stops", "stops"])
def test_a_requests_end_token_is_no_text_though_it_is_an_ordinary_token(
    tokenizer: Any, size: int, skips_special_tokens: bool, stops: tuple[str, ...]
) -> None:
    ids = encode(tokenizer, "one two three")
    values: dict[str, Any] = {"skip_special_tokens": skips_special_tokens, "stop_sequences": stops}
    chunks = run(tokenizer, pieces(ids, size), end_id=ids[-1], **values)
    assert text(chunks) == tokenizer.decode(ids[:-1])
    assert (chunks[-1].output_tokens, chunks[-1].finish_reason) == (len(ids), "stop")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("keeps_end_token", [True, False], ids=["kept", "left out"])
@pytest.mark.parametrize(
    ("values", "before", "reason"),
    [
        pytest.param({}, "one two", "stop", id="hidden"),
        pytest.param({"include_stop": True}, "one two three", "stop", id="shown"),
        pytest.param({"skip_special_tokens": False}, "one two", "stop", id="with special tokens"),
        pytest.param({"stop_sequences": ("x",)}, "one two", "stop", id="beside a stop sequence"),
        pytest.param({"ignore_eos": True}, "one two three four", "length", id="ignored"),
        pytest.param({"end_id": EOS}, "one two three four", "length", id="an end of its own"),
        pytest.param({"min_tokens": 4}, "one two three four", "length", id="before the minimum"),
    ],
)
def test_an_answer_ends_with_any_end_token(
    tokenizer: Any,
    size: int,
    keeps_end_token: bool,
    values: dict[str, Any],
    before: str,
    reason: str,
) -> None:
    """TensorRT-LLM's C++ backend leaves one end token out, and the others, as stop words, in."""
    ids = encode(tokenizer, "one two three four")
    (end,) = encode(tokenizer, " three")
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    client = Client(*(Response(part, 2, False, keeps_end_token) for part in parts), END)
    chunks = run(tokenizer, client, end_ids=(EOS, end), max_tokens=len(ids), **values)
    count = ids.index(end) + keeps_end_token if reason == "stop" else len(ids)
    assert text(chunks) == before
    assert (chunks[-1].finish_reason, chunks[-1].output_tokens) == (reason, count)
    assert [token for chunk in chunks for token in chunk.ids] == ids[:count]
    assert chunks[-1].stop_token is None


def test_the_first_end_token_is_sent_where_the_server_does_not_know_it(tokenizer: Any) -> None:
    client = Client(Response([5, EOS], 2, True))
    run(tokenizer, client, end_ids=(7, EOS))
    assert "end_id" not in client.inputs
    (chunk,) = run(tokenizer, client, end_ids=(7, EOS), named_in_requests=True)
    assert client.inputs["end_id"].tolist() == [[7]]
    assert chunk.finish_reason == "stop"
    run(tokenizer, client, end_ids=(7, EOS), named_in_requests=True, ignore_eos=True)
    assert client.inputs["end_id"].tolist() == [[-1]]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("answer", "values", "expected"),
    [
        pytest.param("a b</s>c</s>c", {"ignore_eos": True}, "a bcc", id="left out"),
        pytest.param(
            "a b</s>c</s>c",
            {"ignore_eos": True, "shown_tokens": ["</s>", "<no token>"]},
            "a b</s>c</s>c",
            id="shown by name",
        ),
        pytest.param(
            "a b</s>c</s>c",
            {"ignore_eos": True, "skip_special_tokens": False},
            "a b</s>c</s>c",
            id="all shown",
        ),
        # The end token is text only as the stop of a request that wants it.
        pytest.param("one two</s>", {}, "one two", id="end token left out"),
        pytest.param(
            "one two</s>",
            {"include_stop": True},
            "one two",
            id="end token that is the stop, left out",
        ),
        pytest.param(
            "one two</s>",
            {"skip_special_tokens": False},
            "one two",
            id="end token left out where all are shown",
        ),
        pytest.param(
            "one two</s>",
            {"include_stop": True, "skip_special_tokens": False},
            "one two</s>",
            id="end token that is the stop, where all are shown",
        ),
    ],
)
def test_special_tokens_are_text_where_the_request_wants_them(
    tokenizer: Any, size: int, answer: str, values: dict[str, Any], expected: str
) -> None:
    ids = encode(tokenizer, answer)
    assert EOS in ids
    chunks = run(tokenizer, pieces(ids, size), **values)
    assert text(chunks) == expected
    assert chunks[-1].finish_reason == "stop" or "ignore_eos" in values
