"""generate() on both transports: the texts, the streams, and what happens in the engine."""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.stream import TritonClient
from cog_triton.generation import Chunk, generate
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import Triton, engine_counters
from tests.support import Server, metrics, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]


def with_client(
    transport: str, server: Triton | Server, use: Callable[[TritonClient], Awaitable[Any]]
) -> Any:
    kind = {"grpc": GrpcClient, "http": HttpClient}[transport]
    address = getattr(server.endpoints, transport)

    async def main() -> Any:
        async with contextlib.aclosing(kind(address, response_timeout=60)) as client:
            return await use(client)

    return asyncio.run(main())


def greedy(prompt: str, **values: Any) -> Request:
    return Request(prompt=prompt, seed=0, temperature=0.0, **values)


async def collect(request: Request, client: TritonClient, tokenizer: Tokenizer) -> list[Chunk]:
    return [chunk async for chunk in generate(request, client, tokenizer)]


def ask(
    request: Request, server: Triton | Server, tokenizer: Tokenizer, transport: str
) -> list[Chunk]:
    return list(with_client(transport, server, lambda c: collect(request, c, tokenizer)))


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_both_transports_give_the_same_sampled_text(triton: Triton, tokenizer: Tokenizer) -> None:
    request = Request(prompt=QUESTION, seed=2**64 - 1, temperature=1000.0, top_p=1.0, max_tokens=60)
    texts = {text(ask(request, triton, tokenizer, transport)) for transport in ("grpc", "http")}
    assert len(texts) == 1
    assert texts != {ANSWER}
    guided = Request(prompt=QUESTION, seed=1, guide=Guide(GuideKind.REGEX, "[a-c]{9}"))
    for transport in ("grpc", "http"):
        assert re.fullmatch("[a-c]{9}", text(ask(guided, triton, tokenizer, transport)))


def test_the_last_chunk_counts_and_says_why_it_ended(
    transport: str, triton: Triton, tokenizer: Tokenizer
) -> None:
    *_, whole = ask(greedy(QUESTION), triton, tokenizer, transport)
    *_, cut = ask(greedy(QUESTION, max_tokens=7), triton, tokenizer, transport)
    answer_tokens = len(tokenizer(ANSWER, add_special_tokens=False).input_ids) + 1
    assert (whole.finish_reason, whole.output_tokens) == ("stop", answer_tokens)
    assert (cut.finish_reason, cut.output_tokens) == ("length", 7)
    assert whole.input_tokens == len(tokenizer(QUESTION).input_ids)


def test_a_stop_sequence_ends_the_text_and_the_engine(
    transport: str, paced_triton: Triton, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(paced_triton)
    stopped, generated = engine["stopped"], engine["generated"]
    free = text(ask(greedy(QUESTION, max_tokens=60), paced_triton, tokenizer, transport))
    stop = free[40:48]  # begins and ends anywhere in tokens
    request = greedy(QUESTION, max_tokens=2000, stop_sequences=("never there", stop))
    ended = ask(request, paced_triton, tokenizer, transport)
    assert text(ended) == free[: free.index(stop)]
    assert ended[-1].finish_reason == "stop"
    wait_until(lambda: engine["stopped"] == stopped + 1, 60, "the stop")
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")
    assert engine["generated"] - generated < 60 + 500, "far from the 2000 tokens asked for"


def test_closing_the_generator_stops_the_engine_and_leaves_nothing_in_triton(
    transport: str, paced_triton: Triton, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(paced_triton)

    async def use(client: TritonClient) -> None:
        chunks = generate(greedy(QUESTION, max_tokens=2000), client, tokenizer)
        await anext(chunks)
        wait_until(lambda: engine["active"] == 1, 60, "the start")
        await chunks.aclose()

    with_client(transport, paced_triton, use)
    wait_until(lambda: engine["active"] == 0, 60, "the stop")
    generated = engine["generated"]
    pending = 'nv_inference_pending_request_count{model="ensemble_ids",version="1"}'
    assert metrics(paced_triton.endpoints.metrics).get(pending, 0) == 0
    # The engine's pace would show: a later request finds the same count plus its own tokens.
    *_, last = ask(greedy(QUESTION, max_tokens=5), paced_triton, tokenizer, transport)
    assert last.output_tokens == 5
    wait_until(lambda: engine["generated"] == generated + 5, 60, "the count")


def test_max_tokens_is_cut_to_the_context(
    transport: str, triton: Triton, tokenizer: Tokenizer, demo_model: Any
) -> None:
    context = json.loads((demo_model / "config.json").read_text())["max_position_embeddings"]
    ids = tuple(tokenizer("word " * context).input_ids[: context - 20])
    request = greedy("", prompt_ids=ids, max_tokens=100_000, min_tokens=100_000)
    *_, last = ask(request, triton, tokenizer, transport)
    assert (last.input_tokens, last.output_tokens) == (context - 20, 20)
    assert last.finish_reason == "length"
