from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cog_triton.engines.base import (
    Engine,
    EngineError,
    GenerationRequest,
    Sink,
    Step,
    TokenLogProb,
)
from cog_triton.engines.serving import (
    Output,
    Serving,
    words_from_list,
)
from cog_triton.text.detokenizer import CONTEXT_TOKENS

TIMEOUT = 20


def told(ids: Sequence[int], log_probs: Sequence[float]) -> list[TokenLogProb]:
    return list(map(TokenLogProb, ids, log_probs))


class ScriptedEngine(Engine):
    """Says what a test tells it to say, on the test's thread."""

    context_length = 100

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.sinks: list[Sink] = []
        self.aborted: list[str] = []
        self.refusal: str | None = None
        self.closed = False

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        if self.refusal is not None:
            raise EngineError(self.refusal)
        self.requests.append(request)
        self.sinks.append(sink)

    def abort(self, key: str) -> None:
        self.aborted.append(key)

    def active(self) -> int:
        return len(self.sinks)

    def close(self) -> None:
        self.closed = True

    def say(
        self, *ids: int, to: int = -1, log_probs: list[float] | None = None, **values: Any
    ) -> None:
        self.sinks[to](Step(list(ids), told(ids, log_probs or []), **values))


class Client:
    """Keeps the outputs of one sequence. It may block, or fail, when it gets one."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.called = threading.Semaphore(0)
        self.may_return = threading.Event()
        self.may_return.set()
        self.failures = 0

    def __call__(self, output: Output) -> None:
        self.called.release()
        assert self.may_return.wait(TIMEOUT)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the stream is broken")
        self._outputs.put(output)

    def next(self) -> Output:
        return self._outputs.get(timeout=TIMEOUT)

    def rest(self) -> list[Output]:
        found = []
        while not self._outputs.empty():
            found.append(self._outputs.get())
        return found


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def serving(engine: ScriptedEngine) -> Iterator[Serving]:
    made = Serving(engine)
    yield made
    made.close()


Start = Callable[..., Client]


@pytest.fixture
def start(serving: Serving) -> Start:
    """Starts a sequence; the client has its ``stop``."""

    def start(
        request_id: str = "r",
        *,
        streaming: bool = True,
        prompt_in_output: bool = False,
        **values: Any,
    ) -> Client:
        client = Client()
        fields = {"input_ids": [1, 2, 3], "max_tokens": 50, **values}
        client.stop = serving.start(  # type: ignore[attr-defined]
            request_id,
            GenerationRequest(key="", **fields),
            client,
            streaming=streaming,
            prompt_in_output=prompt_in_output,
        )
        return client

    return start


def delivered(start: Start, engine: ScriptedEngine) -> None:
    """Waits until all that was said has been delivered, by one more sequence behind the others."""
    marker = start("marker")
    engine.say(finished=True)
    assert marker.next().final


# Streaming and one response


def test_a_stream_has_one_output_per_token(start: Start, engine: ScriptedEngine) -> None:
    client = start()
    outputs = []
    for token in (11, 12, 13):
        engine.say(token)
        outputs.append(client.next())
    engine.say(14, finished=True)
    outputs.append(client.next())

    assert [output.ids for output in outputs] == [[11], [12], [13], [14]]
    assert [output.final for output in outputs] == [False, False, False, True]
    assert [output.generated for output in outputs] == [1, 2, 3, 4]
    assert [output.context_ids for output in outputs] == [[], [11], [11, 12], [11, 12, 13]]
    assert all(output.error is None for output in outputs)
    assert client.rest() == []


def test_the_end_may_come_without_a_token(start: Start, engine: ScriptedEngine) -> None:
    client = start()
    engine.say(11)
    client.next()
    engine.say(finished=True)
    last = client.next()
    assert (last.ids, last.final, last.generated, last.context_ids) == ([], True, 1, [11])


def test_without_streaming_there_is_one_output(start: Start, engine: ScriptedEngine) -> None:
    client = start(streaming=False)
    engine.say(11, 12, log_probs=[-0.5, -0.25])
    engine.say(13, log_probs=[-1.0])
    delivered(start, engine)
    assert client.rest() == []

    engine.say(14, log_probs=[-2.0], to=0, finished=True)

    assert client.next() == Output(
        ids=[11, 12, 13, 14],
        log_probs=told([11, 12, 13, 14], [-0.5, -0.25, -1.0, -2.0]),
        cum_log_prob=-3.75,
        context_ids=[],
        generated=4,
        final=True,
    )


@pytest.mark.parametrize("streaming", [True, False])
def test_the_prompt_comes_first_when_asked_for_and_never_in_a_stream(
    start: Start, engine: ScriptedEngine, streaming: bool
) -> None:
    client = start(streaming=streaming, prompt_in_output=True)
    engine.say(11, 12, log_probs=[-1.0, -1.0], finished=True)
    output = client.next()

    assert output.ids == ([11, 12] if streaming else [1, 2, 3, 11, 12])
    assert output.generated == len(output.log_probs) == 2


def test_log_probs_add_up(start: Start, engine: ScriptedEngine) -> None:
    client = start()
    sums = []
    for value in (-0.5, -0.25, -1.0):
        engine.say(11, log_probs=[value])
        output = client.next()
        assert output.log_probs == told([11], [value])
        sums.append(output.cum_log_prob)
    assert sums == [-0.5, -0.75, -1.75]


def test_what_piles_up_while_a_response_is_sent_comes_in_one(
    start: Start, engine: ScriptedEngine
) -> None:
    client = start()
    client.may_return.clear()
    engine.say(11)
    assert client.called.acquire(timeout=TIMEOUT)
    for token in (12, 13, 14):
        engine.say(token)
    client.may_return.set()

    assert client.next().ids == [11]
    together = client.next()
    assert together.ids == [12, 13, 14]
    assert (together.context_ids, together.generated, together.final) == ([11], 4, False)
    engine.say(15, finished=True)
    assert client.next().ids == [15]


def test_the_end_joins_what_piles_up(start: Start, engine: ScriptedEngine) -> None:
    client = start()
    client.may_return.clear()
    engine.say(11)
    assert client.called.acquire(timeout=TIMEOUT)
    engine.say(12)
    engine.say(13, finished=True)
    client.may_return.set()

    assert client.next().ids == [11]
    last = client.next()
    assert (last.ids, last.final) == ([12, 13], True)


def test_others_come_in_turn_while_one_piles_up(start: Start, engine: ScriptedEngine) -> None:
    one, other = start("a"), start("b")
    one.may_return.clear()
    engine.say(11, to=0)
    assert one.called.acquire(timeout=TIMEOUT)
    for token in (21, 22):
        engine.say(token, to=1)
        engine.say(token - 9, to=0)
    one.may_return.set()

    assert one.next().ids == [11]
    assert other.next().ids == [21, 22]
    assert one.next().ids == [12, 13]


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_context_is_the_last_ids_before(start: Start, engine: ScriptedEngine, size: int) -> None:
    client = start()
    ids = list(range(200, 240))
    for begin in range(0, len(ids), size):
        engine.say(*ids[begin : begin + size])
        output = client.next()
        assert output.context_ids == ids[:begin][-CONTEXT_TOKENS:]
        assert output.ids == ids[begin : begin + size]
    engine.say(finished=True)
    assert client.next().context_ids == ids[-CONTEXT_TOKENS:]


# What is refused, and what is changed


def test_a_prompt_that_leaves_no_room(start: Start, engine: ScriptedEngine) -> None:
    for length in (100, 101, 5000):
        with pytest.raises(EngineError) as raised:
            start(input_ids=[1] * length)
        assert str(raised.value) == f"Prompt length ({length}) exceeds maximum input length (99)."
    start(input_ids=[1] * 99)
    assert len(engine.requests) == 1


def test_what_else_is_refused(start: Start, engine: ScriptedEngine) -> None:
    with pytest.raises(EngineError, match="the prompt has no tokens"):
        start(input_ids=[])
    for max_tokens in (0, -1):
        with pytest.raises(EngineError, match="max_tokens must be at least 1, not"):
            start(max_tokens=max_tokens)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("length", "max_tokens", "given"), [(3, 50, 50), (3, 97, 97), (3, 98, 97), (99, 500, 1)]
)
def test_max_tokens_is_cut_to_the_context(
    start: Start, engine: ScriptedEngine, length: int, max_tokens: int, given: int
) -> None:
    start(input_ids=[1] * length, max_tokens=max_tokens)
    assert engine.requests[0].max_tokens == given


def test_what_the_engine_refuses_is_forgotten(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    engine.refusal = "not this one"
    with pytest.raises(EngineError, match="not this one"):
        start()
    assert serving.stop("r") == 0
    assert serving._running == {}


def test_keys_are_unique(start: Start, engine: ScriptedEngine) -> None:
    for request_id in ("a", "a", "b", ""):
        start(request_id)
    assert len({request.key for request in engine.requests}) == 4


# Stops


def test_a_stop_delivers_what_there_is(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    client = start(streaming=False)
    engine.say(11, 12)

    assert serving.stop("r") == 1

    output = client.next()
    assert (output.ids, output.final, output.error) == ([11, 12], True, None)
    assert engine.aborted == [engine.requests[0].key]


def test_a_stop_before_the_first_token(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    client = start()

    assert serving.stop("r") == 1

    output = client.next()
    assert (output.ids, output.final, output.generated) == ([], True, 0)
    assert engine.aborted == [engine.requests[0].key]


def test_what_comes_after_a_stop_is_dropped(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    client = start()
    engine.say(11)
    assert client.next().ids == [11]
    serving.stop("r")
    engine.say(12)
    engine.say(13, finished=True)
    delivered(start, engine)

    assert [(output.ids, output.final) for output in client.rest()] == [([], True)]


def test_a_stop_of_what_is_not_there(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    client = start()
    assert serving.stop("unknown") == 0
    engine.say(11, finished=True)
    assert client.next().final
    delivered(start, engine)
    assert serving.stop("r") == 0
    assert engine.aborted == []
    assert serving._running == {}


def test_a_stop_ends_all_sequences_of_the_request(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    first, second, other = start("a"), start("a"), start("b")
    engine.say(11, to=1)

    assert serving.stop("a") == 2
    assert serving.stop("a") == 0

    assert first.next().final
    outputs = [second.next()]
    while not outputs[-1].final:
        outputs.append(second.next())
    assert [token for output in outputs for token in output.ids] == [11]
    assert set(engine.aborted) == {request.key for request in engine.requests[:2]}
    engine.say(12, to=2)
    assert other.next().ids == [12]


def test_one_sequence_of_a_request_can_be_stopped(
    serving: Serving, start: Start, engine: ScriptedEngine
) -> None:
    first, second = start("a"), start("a")

    assert first.stop() is True  # type: ignore[attr-defined]
    assert first.stop() is False  # type: ignore[attr-defined]

    assert first.next().final
    engine.say(11, to=1)
    assert second.next().ids == [11]
    assert serving.stop("a") == 1


def test_an_output_says_which_sequence_it_is_of(start: Start, engine: ScriptedEngine) -> None:
    clients = [start("same") for _ in range(3)]
    for i in (2, 0, 1):
        engine.say(30 + i, to=i, finished=True)
    assert [client.next().ids for client in clients] == [[30], [31], [32]]


# Stop words


@pytest.mark.parametrize(
    ("words", "said", "kept"),
    [
        ([(12,)], [[11, 12, 13, 14]], [11, 12]),
        ([(12,)], [[12]], [12]),
        ([(12,)], [[11], [13], [12], [14]], [11, 13, 12]),
        ([(12, 13)], [[11, 12], [13, 14]], [11, 12, 13]),  # cut across two batches
        ([(12, 13, 14)], [[11, 12], [13], [14, 15]], [11, 12, 13, 14]),
        ([(12, 12, 13)], [[12], [12], [12, 13, 14]], [12, 12, 12, 13]),
        ([(13, 14), (12,)], [[11, 13], [12, 13, 14]], [11, 13, 12]),  # the first to be complete
        ([(11, 12, 13), (12,)], [[11, 12, 13]], [11, 12]),
        ([(99,), (12, 13)], [[12, 11, 12], [11, 13], [12, 13]], [12, 11, 12, 11, 13, 12, 13]),
        ([(1, 11), (2, 3)], [[11, 12], [12]], None),  # the prompt does not count
        ([(12, 14)], [[11, 12], [13, 14]], None),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_stop_words(
    serving: Serving,
    start: Start,
    engine: ScriptedEngine,
    words: list[tuple[int, ...]],
    said: list[list[int]],
    kept: list[int] | None,
    streaming: bool,
) -> None:
    client = start(stop_words=tuple(words), streaming=streaming)
    for ids in said:
        engine.say(*ids, log_probs=[-1.0] * len(ids), to=0)
    delivered(start, engine)
    outputs = client.rest()
    ids = [token for output in outputs for token in output.ids]

    if kept is None:
        assert engine.aborted == []
        assert not any(output.final for output in outputs)
        assert ids == ([token for one in said for token in one] if streaming else [])
        return
    assert ids == kept
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].generated == len(kept)
    assert outputs[-1].cum_log_prob == -len(kept)
    assert sum(len(output.log_probs) for output in outputs) == len(kept)
    assert engine.aborted == [engine.requests[0].key]
    assert serving.counters["finished"] == 2  # with the marker
    assert serving.counters["stopped"] == 0


def test_nothing_more_comes_after_a_stop_word(start: Start, engine: ScriptedEngine) -> None:
    client = start(stop_words=((12,),))
    engine.say(12)
    engine.say(13, to=0)
    engine.say(14, to=0, finished=True)
    delivered(start, engine)
    assert [(output.ids, output.final) for output in client.rest()] == [([12], True)]


# Failures


def test_an_engines_error_is_handed_on(start: Start, engine: ScriptedEngine) -> None:
    client = start(streaming=False)
    engine.say(11)
    engine.say(finished=True, error="out of memory")
    output = client.next()
    assert (output.ids, output.final, output.error) == ([11], True, "out of memory")


def test_a_broken_stream_ends_that_sequence_alone(
    serving: Serving, start: Start, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = start("a"), start("b")
    broken.failures = 100
    engine.say(11, to=0)
    engine.say(21, to=1)
    assert other.next().ids == [21]
    delivered(start, engine)

    assert engine.aborted == [engine.requests[0].key]
    assert "could not be delivered" in caplog.text
    assert "the stream is broken" in caplog.text
    engine.say(12, to=0)
    engine.say(22, to=1, finished=True)
    assert other.next().ids == [22]
    assert serving.stop("a") == 0
    assert serving.counters["served"] == 2


def test_a_stream_that_works_again_is_told_that_something_is_missing(
    start: Start, engine: ScriptedEngine
) -> None:
    client = start()
    client.failures = 1
    client.may_return.clear()
    engine.say(11)
    assert client.called.acquire(timeout=TIMEOUT)
    engine.say(12)  # must not look like all of the answer
    client.may_return.set()

    output = client.next()
    assert (output.final, output.error) == (True, "a response could not be delivered")


# Counters, and the end


def test_counters(serving: Serving, start: Start, engine: ScriptedEngine) -> None:
    start("a")
    stopped, failed, whole = start("b"), start("c"), start(streaming=False)
    engine.say(11, 12, to=0)
    engine.say(13, to=0, finished=True)
    engine.say(21, to=1)
    stopped.next()
    serving.stop("b")
    engine.say(22, 23, to=1)  # made, but not served
    engine.say(31, to=2)
    engine.say(to=2, finished=True, error="no")
    engine.say(41, 42, to=3)
    engine.say(43, to=3, finished=True)
    assert whole.next().final
    while not failed.next().final:
        pass
    delivered(start, engine)

    assert serving.counters == {
        "generated": 3 + 3 + 1 + 3,
        "served": 3 + 1 + 1 + 3,
        "finished": 3,  # with the marker
        "stopped": 1,
        "failed": 1,
    }
    assert serving.active() == engine.active()


def test_a_limit_of_tokens_splits_a_stream_and_nothing_else(engine: ScriptedEngine) -> None:
    serving = Serving(engine, tokens_per_response=2)
    streaming, whole = Client(), Client()
    try:
        for client in (streaming, whole):
            request = GenerationRequest(key="", input_ids=[1], max_tokens=9, return_log_probs=True)
            serving.start("r", request, client, streaming=client is streaming)
        for sequence in (0, 1):
            probs = [-1.0, -2.0, -3.0, -4.0, -5.0]
            engine.say(11, 12, 13, 14, 15, log_probs=probs, to=sequence, finished=True)
        parts = [streaming.next() for _ in range(3)]
        assert whole.next().ids == [11, 12, 13, 14, 15]
    finally:
        serving.close()
    assert [part.ids for part in parts] == [[11, 12], [13, 14], [15]]
    assert [[token.log_prob for token in part.log_probs] for part in parts] == [
        [-1.0, -2.0],
        [-3.0, -4.0],
        [-5.0],
    ]
    assert [part.cum_log_prob for part in parts] == [-3.0, -10.0, -15.0]
    assert [part.generated for part in parts] == [2, 4, 5]
    assert [part.context_ids for part in parts] == [[], [11, 12], [11, 12, 13, 14]]
    assert [part.final for part in parts] == [False, False, True]


def test_an_error_comes_after_what_was_made_before_it(engine: ScriptedEngine) -> None:
    serving = Serving(engine, tokens_per_response=1)
    client = Client()
    try:
        request = GenerationRequest(key="", input_ids=[1], max_tokens=9)
        serving.start("r", request, client, streaming=True)
        engine.say(11, 12, error="broken", finished=True)
        parts = [client.next(), client.next()]
    finally:
        serving.close()
    assert [(part.ids, part.final, part.error) for part in parts] == [
        ([11], False, None),
        ([12], True, "broken"),
    ]


def test_closing_delivers_what_is_ready_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    engine = ScriptedEngine()
    serving = Serving(engine)
    client = Client()
    client.may_return.clear()
    request = GenerationRequest(key="", input_ids=[1], max_tokens=5)
    serving.start("r", request, client, streaming=True)
    engine.say(11)
    assert client.called.acquire(timeout=TIMEOUT)
    engine.say(12, finished=True)
    closing = threading.Thread(target=serving.close)
    closing.start()
    client.may_return.set()
    closing.join(TIMEOUT)

    assert not closing.is_alive()
    assert engine.closed
    assert [output.ids for output in client.rest()] == [[11], [12]]
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("word_list", "words"),
    [
        ([[5, 6, 7], [2, 3, -1]], ((5, 6), (7,))),  # the contract's example
        ([[5], [1]], ((5,),)),
        ([[5, 6, 7, 0, 0], [3, -1, -1, -1, -1]], ((5, 6, 7),)),
        ([[], []], ()),
        ([[0], [-1]], ()),
        ([[5, 6], [2, 2]], ((5, 6),)),  # an empty word would end everything at once
        ([[5, 6], [2, 1]], ((5, 6),)),
    ],
)
def test_word_lists(word_list: list[list[int]], words: tuple[tuple[int, ...], ...]) -> None:
    assert words_from_list(word_list) == words


def test_log_probabilities_go_with_their_ids() -> None:
    engine, client = ScriptedEngine(), Client()
    serving = Serving(engine, tokens_per_response=2)
    request = GenerationRequest("a", [5], 8, stop_words=((4,),))
    serving.start("a", request, client, streaming=True)
    tokens = [TokenLogProb(i, -0.5, ((i, -0.5),)) for i in range(1, 6)]
    engine.sinks[-1](Step([1, 2, 3, 4, 5], tokens))

    first, last = client.next(), client.next()

    assert (first.ids, first.log_probs) == ([1, 2], tokens[:2])
    assert (last.ids, last.log_probs) == ([3, 4], tokens[2:4])  # none behind the stop word
    serving.close()
