"""What the proxy does to a connection, and how streams through it are judged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from cog_triton.client.stream import Inputs, Response
from cog_triton.errors import TritonUnavailable
from cog_triton.wire import NO_PARAMETERS, Parameters
from tests.comparison import Outcome, compare, short_request
from tests.faulty_proxy import HEAD, Faults, FaultyProxy, Plan, plan

PIECE = bytes(range(256)) * 4


def plans(faults: Faults, *, answer: bool = True) -> list[Plan]:
    random = Random(1)
    return [plan(PIECE, faults, random, answer=answer) for _ in range(200)]


def test_without_faults_all_passes_as_it_is() -> None:
    assert set(plans(Faults())) == {Plan((PIECE,))}


def test_what_is_split_is_all_there() -> None:
    split = plans(Faults(split=1.0))
    assert {b"".join(steps.parts) for steps in split} == {PIECE}
    assert min(len(steps.parts) for steps in split) > 1
    requests = plans(Faults(split=1.0), answer=False)
    assert {b"".join(steps.parts) for steps in requests} == {PIECE}
    assert min(len(steps.parts[0]) for steps in requests) > HEAD


def test_what_is_dropped_is_a_range_of_an_answer() -> None:
    dropped = plans(Faults(drop=1.0))
    for steps in dropped:
        (kept,) = steps.parts
        assert steps.dropped == len(PIECE) - len(kept)
        assert any(
            kept == PIECE[:start] + PIECE[start + steps.dropped :] for start in range(len(kept) + 1)
        )
    assert any(steps.parts == (b"",) for steps in dropped)
    assert any(0 < len(steps.parts[0]) < len(PIECE) for steps in dropped)
    assert set(plans(Faults(drop=1.0), answer=False)) == {Plan((PIECE,))}


def test_cuts_are_of_both_kinds_and_delays_have_a_limit() -> None:
    cuts = plans(Faults(cut=1.0))
    assert {steps.cut for steps in cuts} == {"reset", "close"}
    assert not any(steps.parts for steps in cuts)
    delays = [steps.delay for steps in plans(Faults(delay=1.0, longest_delay=0.5))]
    assert 0 < min(delays) < max(delays) <= 0.5


def test_the_same_seed_does_the_same() -> None:
    faults = Faults(split=0.5, delay=0.5, cut=0.1, drop=0.5)
    assert plans(faults) == plans(faults)


def test_bytes_pass_both_ways_and_a_cut_ends_the_connection() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    async def answer(faults: Faults) -> tuple[bytes, Counter[str]]:
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with FaultyProxy(f"127.0.0.1:{port}", faults, 1).running() as proxy:
                host, _, port = proxy.address.partition(":")
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"hello")
                try:
                    return await reader.read(5), proxy.counts
                except ConnectionResetError:
                    return b"reset", proxy.counts
                finally:
                    writer.close()

    text, counts = asyncio.run(answer(Faults()))
    assert text == b"HELLO"
    assert +counts == Counter(connections=1, pieces=2)
    text, counts = asyncio.run(answer(Faults(cut=1.0)))
    assert text in (b"", b"reset")
    assert counts["cut"] == 1


class Answers:
    """Gives each prompt an answer of its own; some are wrong, short, or fail."""

    @asynccontextmanager
    async def stream(
        self,
        _request_id: str,
        inputs: Inputs,
        *,
        parameters: Parameters = NO_PARAMETERS,  # noqa: ARG002
    ) -> AsyncIterator[AsyncIterator[Response]]:
        prompt = inputs["text_input"].flat[0].decode()

        async def responses() -> AsyncIterator[Response]:
            number = int(prompt.split()[-1])
            yield Response([number, 7 if number == 3 else 5], None, final=False)
            if number == 1:
                raise TritonUnavailable("cut")
            yield Response([] if number == 2 else [6], None, final=True)

        yield responses()


def test_streams_are_judged_by_their_ids() -> None:
    requests = {number: short_request(number) for number in range(4)}
    expected = {number: [number, 5, 6] for number in requests}
    outcome = asyncio.run(compare(Answers(), requests, expected, range(8), at_once=3))
    assert sorted(outcome.wrong) == [2, 3, 6, 7]
    outcome.wrong.clear()
    assert outcome == Outcome(2, Counter(E2105=2), [], {"E2105": "cut"})
    assert outcome.total == 4
