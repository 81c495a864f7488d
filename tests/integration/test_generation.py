"""generate() on both transports: the texts, the streams, and what happens in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.stream import TritonClient
from cog_triton.errors import PromptTooLong, TritonTimeout, TritonUnavailable
from cog_triton.generation import Chunk, generate
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import PACE_MS, engine_counters
from tests.support import free_port, metrics, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
TRANSPORTS = ["grpc", "http"]


def connect(transport: str, server: TritonServer, response_timeout: float = 60) -> TritonClient:
    if transport == "grpc":
        return GrpcClient(server.endpoints.grpc, response_timeout=response_timeout)
    return HttpClient(server.endpoints.http, response_timeout=response_timeout)


def with_client(
    transport: str,
    server: TritonServer,
    use: Callable[[TritonClient], Awaitable[Any]],
    **options: Any,
) -> Any:
    async def main() -> Any:
        async with contextlib.aclosing(connect(transport, server, **options)) as client:
            return await use(client)

    return asyncio.run(main())


def greedy(prompt: str, **values: Any) -> Request:
    return Request(prompt=prompt, seed=0, temperature=0.0, **values)


async def collect(request: Request, client: TritonClient, tokenizer: Tokenizer) -> list[Chunk]:
    return [chunk async for chunk in generate(request, client, tokenizer)]


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sixteen_streams_at_once_do_not_mix(
    transport: str, triton: TritonServer, tokenizer: Tokenizer
) -> None:
    pairs = [pair for pair in PAIRS if not pair.answer.isascii()][:8]
    pairs += [pair for pair in PAIRS if pair.answer.isascii()][: 16 - len(pairs)]

    async def use(client: TritonClient) -> list[list[Chunk]]:
        requests = [greedy(pair.question) for pair in pairs]
        return await asyncio.gather(*(collect(r, client, tokenizer) for r in requests))

    answers = with_client(transport, triton, use)
    assert [text(chunks) for chunks in answers] == [pair.answer for pair in pairs]


def test_both_transports_give_the_same_sampled_text(
    triton: TritonServer, tokenizer: Tokenizer
) -> None:
    request = Request(prompt=QUESTION, seed=2**64 - 1, temperature=1000.0, top_p=1.0, max_tokens=60)
    texts = {
        text(with_client(t, triton, lambda c: collect(request, c, tokenizer))) for t in TRANSPORTS
    }
    assert len(texts) == 1
    assert texts != {ANSWER}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_last_chunk_counts_and_says_why_it_ended(
    transport: str, triton: TritonServer, tokenizer: Tokenizer
) -> None:
    async def use(client: TritonClient) -> list[Chunk]:
        limits = (greedy(QUESTION), greedy(QUESTION, max_tokens=7))
        return [(await collect(request, client, tokenizer))[-1] for request in limits]

    whole, cut = with_client(transport, triton, use)
    prompt_tokens = len(tokenizer(QUESTION).input_ids)
    answer_tokens = len(tokenizer(ANSWER, add_special_tokens=False).input_ids) + 1
    assert (whole.finish_reason, whole.output_tokens) == ("stop", answer_tokens)
    assert (cut.finish_reason, cut.output_tokens) == ("length", 7)
    assert whole.input_tokens == prompt_tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stop_sequence_ends_the_text_and_the_engine(
    transport: str, paced_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(paced_triton)
    stopped, generated = engine["stopped"], engine["generated"]

    async def use(client: TritonClient) -> tuple[list[Chunk], list[Chunk]]:
        free = await collect(greedy(QUESTION, max_tokens=60), client, tokenizer)
        stop = text(free)[40:48]  # begins and ends anywhere in tokens
        request = greedy(QUESTION, max_tokens=2000, stop_sequences=("never there", stop))
        return free, await collect(request, client, tokenizer)

    free, ended = with_client(transport, paced_triton, use)
    stop = text(free)[40:48]
    assert text(ended) == text(free)[: text(free).index(stop)]
    assert ended[-1].finish_reason == "stop"
    wait_until(lambda: engine["stopped"] == stopped + 1, 10, "the stop")
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")
    assert engine["generated"] - generated < 60 + 500, "far from the 2000 tokens asked for"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_the_generator_stops_the_engine_and_leaves_nothing_in_triton(
    transport: str, paced_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(paced_triton)

    async def use(client: TritonClient) -> None:
        chunks = generate(greedy(QUESTION, max_tokens=2000), client, tokenizer)
        await anext(chunks)
        wait_until(lambda: engine["active"] == 1, 10, "the start")
        await chunks.aclose()

    with_client(transport, paced_triton, use)
    wait_until(lambda: engine["active"] == 0, 10, "the stop")
    generated = engine["generated"]
    pending = 'nv_inference_pending_request_count{model="ensemble_ids",version="1"}'
    assert metrics(paced_triton.endpoints.metrics).get(pending, 0) == 0
    # The engine's pace would show: a later request finds the same count plus its own tokens.
    done = with_client(
        transport, paced_triton, lambda c: collect(greedy(QUESTION, max_tokens=5), c, tokenizer)
    )
    assert done[-1].output_tokens == 5
    wait_until(lambda: engine["generated"] == generated + 5, 10, "the count")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_cancelled_before_its_first_token_is_stopped_too(
    transport: str, paced_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    """The stop may overtake the request, which is still in preprocessing then."""
    engine = engine_counters(paced_triton)
    stopped = engine["stopped"]

    async def use(client: TritonClient) -> None:
        prompt = "A long prompt. " * 2000
        tasks = [
            asyncio.create_task(
                collect(greedy(prompt + str(i), max_tokens=3000), client, tokenizer)
            )
            for i in range(8)
        ]
        await asyncio.sleep(0)  # let them begin
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)

    with_client(transport, paced_triton, use)
    wait_until(lambda: engine["active"] == 0, 10, "the stop")
    assert engine["stopped"] <= stopped + 8


def test_a_request_does_not_wait_for_those_before_it(
    triton: TritonServer, tokenizer: Tokenizer
) -> None:
    """In-flight batching: it starts and ends while an earlier, longer one streams."""

    async def use(client: TritonClient) -> bool:
        long = generate(greedy(QUESTION, max_tokens=400, min_tokens=400), client, tokenizer)
        await anext(long)
        short = await collect(greedy(PAIRS[1].question), client, tokenizer)
        assert text(short) == PAIRS[1].answer
        later = [chunk async for chunk in long]
        return len(later) > 1

    assert with_client("grpc", triton, use)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_that_is_too_long(
    transport: str, triton: TritonServer, tokenizer: Tokenizer
) -> None:
    with pytest.raises(
        PromptTooLong, match=r"^E1002 PromptTooLong: .*Prompt length \(\d+\) exceeds"
    ):
        with_client(transport, triton, lambda c: collect(greedy("word " * 5000), c, tokenizer))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_max_tokens_is_cut_to_the_context(
    transport: str, triton: TritonServer, tokenizer: Tokenizer, demo_model: Any
) -> None:
    context = json.loads((demo_model / "config.json").read_text())["max_position_embeddings"]
    prompt = "word " * (context // 2)
    length = len(tokenizer(prompt).input_ids)
    prompt = (
        tokenizer.decode(tokenizer(prompt).input_ids[1 : context - 20])
        if length > context - 20
        else prompt
    )
    request = greedy(prompt, max_tokens=100_000, min_tokens=100_000)
    last = with_client(transport, triton, lambda c: collect(request, c, tokenizer))[-1]
    assert last.input_tokens + last.output_tokens == context
    assert last.finish_reason == "length"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_silence_is_bounded(
    transport: str, paced_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(paced_triton)
    timeout = PACE_MS / 1000 / 4
    with pytest.raises(TritonTimeout, match=r"^E2101"):
        with_client(
            transport,
            paced_triton,
            lambda c: collect(greedy(QUESTION, max_tokens=1000), c, tokenizer),
            response_timeout=timeout,
        )
    wait_until(lambda: engine["active"] == 0, 10, "the stop")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_not_there(
    transport: str, tokenizer: Tokenizer, unused_endpoints: Any
) -> None:
    with pytest.raises(TritonUnavailable, match=r"^E2105"):
        with_client(transport, unused_endpoints, lambda c: collect(greedy("Hi"), c, tokenizer))


@pytest.fixture
def unused_endpoints() -> Any:
    address = f"127.0.0.1:{free_port()}"
    return SimpleNamespace(endpoints=SimpleNamespace(grpc=address, http=address))


def test_curl_and_the_predictors_path_agree(triton: TritonServer, tokenizer: Tokenizer) -> None:
    chunks = with_client("grpc", triton, lambda c: collect(greedy(QUESTION), c, tokenizer))
    reply = httpx.post(
        f"http://{triton.endpoints.http}/v2/models/ensemble/generate",
        json={"text_input": QUESTION, "max_tokens": 512},
        trust_env=False,
    )
    assert reply.json()["text_output"] == text(chunks)
