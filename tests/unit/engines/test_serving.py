import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cog_triton.engines.base import Engine, EngineError, GenerationRequest, Sink, Step, TokenLogProb
from cog_triton.engines.serving import Output, Serving
from cog_triton.protocol.frames import FrameAddress
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.stop_words import StopWordSearch
from tests.tokenizers import words as word_tokenizer

TIMEOUT = 60


class ScriptedEngine(Engine):
    """Makes the steps that a test gives it, on the test's thread."""

    context_length = 100

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.sinks: list[Sink] = []
        self.aborted: list[str] = []
        self.closed = False

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        self.requests.append(request)
        self.sinks.append(sink)

    def abort(self, key: str) -> None:
        self.aborted.append(key)

    def close(self) -> None:
        self.closed = True

    def make(self, *ids: int, to: int = -1, **values: Any) -> None:
        """The next step of a sequence; a token's log probability is a hundredth of its id."""
        log_probs = [TokenLogProb(token, -token / 100) for token in ids]
        self.sinks[to](Step(list(ids), log_probs, **values))


class Client:
    """Keeps the outputs of one sequence. It may block, or fail, when it gets one."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.stop: Callable[[], None]
        self.called = threading.Semaphore(0)
        self.may_return = threading.Event()
        self.may_return.set()
        self.failures = 0

    def __call__(self, *outputs: Output) -> None:
        self.called.release()
        assert self.may_return.wait(TIMEOUT)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the stream is broken")
        for output in outputs:
            self._outputs.put(output)

    def next(self) -> Output:
        return self._outputs.get(timeout=TIMEOUT)

    def rest(self) -> list[Output]:
        return [self._outputs.get() for _ in range(self._outputs.qsize())]


class Bench:
    """A ``Serving`` on a scripted engine."""

    def __init__(self, tokens_per_response: int = 0) -> None:
        self.engine = ScriptedEngine()
        self.serving = Serving(self.engine, tokens_per_response)
        self.make = self.engine.make

    def start(
        self, name: str = "r", *, streaming: bool = True, with_prompt: bool = False, **values: Any
    ) -> Client:
        """Start a sequence, for frames if it has a ``number``."""
        client, number = Client(), values.pop("number", None)
        search = values.pop("search", None)
        request = GenerationRequest("", **{"input_ids": [1, 2, 3], "max_tokens": 50, **values})
        client.stop = self.serving.start(
            name,
            request,
            client,
            streaming=streaming,
            prompt_in_output=with_prompt,
            address=FrameAddress("0" * 32, number) if number else None,
            search=search,
        )
        return client

    def blocked(self, name: str = "r") -> Client:
        """A client that has been called with the id 11, and does not return."""
        client = self.start(name)
        client.may_return.clear()
        self.make(11)
        assert client.called.acquire(timeout=TIMEOUT)
        return client

    def drain(self) -> None:
        """Waits until all that was made has been delivered, by one more sequence behind the others."""
        marker = self.start("marker")
        self.make(finished=True)
        assert marker.next().finished


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.serving.close()


# Streaming and one response


def test_a_stream_has_one_output_per_token(bench: Bench) -> None:
    client, outputs = bench.start(with_prompt=True), []  # which no stream has
    for token in (11, 12, 13):
        bench.make(token)
        outputs.append(client.next())
    bench.make(finished=True)  # the end may come without a token
    outputs.append(client.next())

    assert [output.ids for output in outputs] == [[11], [12], [13], []]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert [output.generated for output in outputs] == [1, 2, 3, 3]
    assert [output.context_ids for output in outputs] == [[], [11], [11, 12], [11, 12, 13]]
    sums = [output.cum_log_prob for output in outputs]
    assert sums == pytest.approx([-0.11, -0.23, -0.36, -0.36])
    assert all(output.error is None for output in outputs)
    assert [output.times[2] > 0 for output in outputs] == [False, False, False, True]
    arrival, first, last = outputs[-1].times
    assert 0 < arrival <= first == outputs[0].times[1] <= last
    assert client.rest() == []


def test_context_is_the_last_ids_before(bench: Bench) -> None:
    client, ids = bench.start(), list(range(CONTEXT_TOKENS + 20))
    for begin in range(0, len(ids), 7):
        bench.make(*ids[begin : begin + 7])
        assert client.next().context_ids == ids[:begin][-CONTEXT_TOKENS:]


@pytest.mark.parametrize("with_prompt", [True, False])
def test_without_streaming_there_is_one_output(bench: Bench, with_prompt: bool) -> None:
    client = bench.start(streaming=False, with_prompt=with_prompt)
    bench.make(11, 12)
    bench.drain()
    assert client.rest() == []
    bench.make(13, to=0, finished=True)
    output = client.next()
    assert output.ids == [1, 2, 3, 11, 12, 13][0 if with_prompt else 3 :]
    assert [token.id for token in output.log_probs] == [11, 12, 13]
    assert (output.generated, output.finished, output.context_ids) == (3, True, [])
    assert output.cum_log_prob == pytest.approx(-0.36)


def test_what_piles_up_while_a_response_is_sent_comes_in_one_and_in_turn(bench: Bench) -> None:
    one = bench.blocked()
    other = bench.start()
    for token in (21, 22):
        bench.make(token)
        bench.make(token - 9, to=0)
    bench.make(14, to=0, finished=True)
    one.may_return.set()

    assert one.next().ids == [11]
    assert other.next().ids == [21, 22]
    last = one.next()
    assert (last.ids, last.context_ids, last.generated) == ([12, 13, 14], [11], 4)
    assert last.finished


def test_sequences_of_a_reader_leave_together_with_the_end_of_one(bench: Bench) -> None:
    before, one, two, first, last = bench.blocked(), *(bench.start(number=n) for n in (5, 7, 8, 9))
    for to in (1, 2, 3, 4):
        bench.make(to * 10, to=to)
    for to in (3, 4):
        bench.make(to * 10 + 1, to=to, finished=True)
    before.may_return.set()
    bench.drain()
    sent = [(o.sequence, o.input_tokens, o.ids, o.finished) for o in first.rest()]
    ends = [(8, 3, [30, 31], True), (9, 3, [40, 41], True)]
    assert sent == [*ends, (5, 3, [10], False), (7, 3, [20], False)]
    o = last.next()
    assert (o.sequence, o.ids, o.generated, o.input_tokens, o.finished) == (9, [], 2, 3, True)
    assert bench.serving.counters["finished"] == 3  # with the marker
    one.failures = 1
    bench.make(11, to=1)
    assert str(one.next().error) == "a response could not be delivered"
    bench.make(21, to=2)
    assert two.next().ids == [21]


@pytest.mark.parametrize("ends", [False, True])
def test_a_broken_stream_ends_all_whose_tokens_it_had(bench: Bench, ends: bool) -> None:
    before, one, two = bench.blocked(), bench.start(number=5), bench.start(number=7)
    (two if ends else one).failures = 1
    bench.make(11, to=1)
    bench.make(21, to=2, finished=ends)
    before.may_return.set()
    for client in (one, two):
        assert str(client.next().error) == "a response could not be delivered"


def test_a_limit_of_tokens_splits_a_stream_and_nothing_else() -> None:
    bench = Bench(tokens_per_response=2)
    cut, failed = bench.start(stop_words=((15,),)), bench.start()
    whole = bench.start(streaming=False)
    for sequence, end in enumerate(({}, {"error": EngineError("no")}, {})):
        bench.make(11, 12, 13, 14, 15, 16, to=sequence, finished=True, **end)
    parts = [cut.next() for _ in range(3)]
    # An error comes after what was made before it.
    assert [str(failed.next().error) for _ in range(3)] == ["None", "None", "no"]
    assert whole.next().ids == [11, 12, 13, 14, 15, 16]
    bench.serving.close()
    assert [part.ids for part in parts] == [[11, 12], [13, 14], [15]]  # up to the stop word
    assert [[token.id for token in part.log_probs] for part in parts] == [p.ids for p in parts]
    assert [part.generated for part in parts] == [2, 4, 5]
    assert [part.context_ids for part in parts] == [[], [11, 12], [11, 12, 13, 14]]
    assert [part.finished for part in parts] == [False, False, True]


# What is refused, and what is changed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": [1] * 100}, r"^Prompt length \(100\) exceeds .* input length \(99\)\.$"),
        ({"input_ids": []}, "the prompt has no tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ],
)
def test_what_is_refused(bench: Bench, values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        bench.start(**values)
    assert bench.engine.requests == []
    bench.start(input_ids=[1] * 99, max_tokens=500)
    assert bench.engine.requests[0].max_tokens == 1  # the rest of the context


# Stops


@pytest.mark.parametrize("made", [(), (11, 12)])
def test_a_stop_delivers_what_there_is_and_drops_what_comes(bench: Bench, made: Any) -> None:
    client = bench.start(streaming=False)
    bench.make(*made)
    bench.serving.stop("r")
    bench.make(13, to=0, finished=True)
    bench.drain()
    bench.serving.stop("r")
    (output,) = client.rest()
    assert (output.ids, output.finished, output.error) == ([*made], True, None)
    assert bench.engine.aborted == [bench.engine.requests[0].key]


def test_a_stop_ends_all_sequences_of_its_request(bench: Bench) -> None:
    clients = [bench.start("a"), bench.start("a"), bench.start("b"), bench.start("b")]
    assert len({request.key for request in bench.engine.requests}) == 4
    bench.serving.stop("unknown")
    bench.serving.stop("a")
    assert [client.next().finished for client in clients[:2]] == [True, True]
    clients[2].stop()
    assert clients[2].next().finished
    assert bench.engine.aborted == [request.key for request in bench.engine.requests[:3]]
    bench.make(11)
    assert clients[3].next().ids == [11]


# Stop words


@pytest.mark.parametrize(
    ("words", "made", "kept"),
    [
        pytest.param(((12,),), [[11, 12, 13, 14]], [11, 12], id="within a step"),
        pytest.param(((12,),), [[11], [13], [12], [14]], [11, 13, 12], id="a step of its own"),
        pytest.param(((12, 13),), [[11, 12], [13, 14]], [11, 12, 13], id="cut across two steps"),
        pytest.param(
            ((12, 13, 14),),
            [[11, 12], [13], [14, 15]],
            [11, 12, 13, 14],
            id="cut across three steps",
        ),
        pytest.param(
            ((12, 12, 13),), [[12], [12], [12, 13, 14]], [12, 12, 12, 13], id="begun twice"
        ),
        pytest.param(
            ((13, 14), (12,)),
            [[11, 13], [12, 13, 14]],
            [11, 13, 12],
            id="two words, the first to be complete",
        ),
        pytest.param(
            ((11, 12, 13), (12,)),
            [[11, 12, 13]],
            [11, 12],
            id="two words, the shorter within the longer",
        ),
        pytest.param(
            ((99,), (12, 13)),
            [[12, 11, 12], [11, 13], [12, 13]],
            [12, 11, 12, 11, 13, 12, 13],
            id="two words, of which neither is complete",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_stop_words(
    bench: Bench,
    words: tuple[tuple[int, ...], ...],
    made: list[list[int]],
    kept: list[int],
    streaming: bool,
) -> None:
    client = bench.start(stop_words=words, streaming=streaming)
    for ids in made:
        bench.make(*ids, to=0)
    bench.drain()
    outputs = client.rest()
    ids = [token for output in outputs for token in output.ids]

    assert ids == kept
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [token.id for output in outputs for token in output.log_probs] == kept
    assert bench.engine.aborted == [bench.engine.requests[0].key]
    assert bench.serving.counters["finished"] == 2  # with the marker


@pytest.mark.parametrize("words", [((1, 11), (2, 3)), ((11, 13),)])
def test_what_are_no_stop_words(bench: Bench, words: tuple[tuple[int, ...], ...]) -> None:
    client = bench.start(stop_words=words)  # of the output: the prompt does not count
    bench.make(11, 12)
    assert (client.next().finished, bench.engine.aborted) == (False, [])


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("written", "text", "behind"),
    [
        (["a", "\n\n", "b"], "a\n", 1),
        (["a", "\n", "b"], "a\n", 0),
        (["a", "b", "End!"], "abEnd", 1),
        (["a", "xE", "ndy", "b"], "axEnd", 1),
    ],
    ids=["within a token", "a token", "with a neighbour", "over two tokens"],
)
def test_stop_words_in_the_text(
    bench: Bench, written: list[str], text: str, behind: int, streaming: bool
) -> None:
    tokens = ["<pad>", "a", "b", "\n", "\n\n", "End!", "xE", "ndy"]
    search = StopWordSearch(word_tokenizer(tokens), ["\n", "End"])
    client = bench.start(streaming=streaming, search=search)
    ids = [tokens.index(token) for token in written]
    bench.make(*ids[:1], to=0)
    bench.make(*ids[1:], to=0)
    bench.drain()
    outputs = client.rest()
    kept = "".join(tokens[token] for output in outputs for token in output.ids)
    assert kept[: len(kept) - behind] == text
    assert [output.characters_behind for output in outputs][-1] == behind
    assert not any(output.characters_behind for output in outputs[:-1])
    assert bench.engine.aborted == [bench.engine.requests[0].key]


# Failures, counters and the end


def test_a_broken_stream_ends_its_sequence(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    broken, other = bench.start("a"), bench.start("b")
    broken.failures = 100
    bench.make(11, to=0)
    bench.make(21, to=1)
    assert other.next().ids == [21]
    bench.drain()

    assert bench.engine.aborted == [bench.engine.requests[0].key]
    assert "could not be delivered" in caplog.text
    assert "the stream is broken" in caplog.text
    bench.make(12, to=0)
    bench.make(22, to=1, finished=True)
    assert other.next().ids == [22]
    assert bench.serving.counters["served"] == 2


def test_a_stream_that_works_again_is_told_that_something_is_missing(bench: Bench) -> None:
    client = bench.blocked()
    client.failures = 1
    bench.make(12)  # must not look like all of the answer
    client.may_return.set()
    output = client.next()
    assert (output.finished, str(output.error)) == (True, "a response could not be delivered")


def test_counters(bench: Bench) -> None:
    bench.start("a")
    stopped, failed = bench.start("b"), bench.start("c")
    bench.make(11, 12, to=0)
    bench.make(13, to=0, finished=True)
    bench.make(21, to=1)
    stopped.next()
    bench.serving.stop("b")
    bench.make(22, 23, to=1)  # made, but not served
    bench.make(31, to=2)
    bench.make(to=2, finished=True, error=EngineError("out of memory"))
    bench.drain()
    assert str(failed.rest()[-1].error) == "out of memory"
    tokens = {"generated": 3 + 3 + 1, "served": 3 + 1 + 1}
    ends = {"finished": 2, "stopped": 1, "failed": 1}  # with the marker
    assert bench.serving.counters == {**tokens, **ends}


def test_closing_delivers_what_is_ready_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    bench = Bench()
    client = bench.blocked()
    bench.make(12, finished=True)
    closing = threading.Thread(target=bench.serving.close)
    closing.start()
    client.may_return.set()
    closing.join(TIMEOUT)

    assert not closing.is_alive()
    assert bench.engine.closed
    assert [output.ids for output in client.rest()] == [[11], [12]]
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("cause", ["a broken stream", "steps that cannot be read", "a stop"])
def test_an_engine_that_cannot_abort_ends_no_delivery(
    bench: Bench, cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def abort(key: str) -> None:
        raise RuntimeError(f"{key} cannot be aborted")

    monkeypatch.setattr(bench.engine, "abort", abort)
    failing = bench.start("a")
    other = bench.start("b")
    if cause == "a broken stream":
        failing.failures = 1
        bench.make(11, to=0)
    elif cause == "a stop":
        bench.serving.stop("a")
    else:
        bench.engine.sinks[0](Step([11], None))  # type: ignore[arg-type]
    last = failing.next()
    assert last.finished
    assert (last.error is None) == (cause == "a stop")
    assert "cannot be aborted" in caplog.text
    bench.make(21, to=1)
    assert other.next().ids == [21]


def test_a_turn_that_fails_ends_its_sequences_and_no_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = bench.start("a", number=5)
    neighbour = bench.start("a", number=7)
    other = bench.start("b")
    send = bench.serving._send
    broken = [True]

    def send_or_fail(outputs: Any) -> None:
        if broken and outputs[0][1].sequence:
            broken.clear()
            raise MemoryError("no room")
        send(outputs)

    monkeypatch.setattr(bench.serving, "_send", send_or_fail)
    bench.make(11, to=0, finished=True)
    text = "the engine failed a request: its outputs could not be sent: MemoryError: no room"
    assert str(failing.next().error) == text
    bench.make(12, to=1)
    bench.make(21, to=2)
    assert neighbour.next().ids == [12]
    assert other.next().ids == [21]


def test_the_second_half_of_an_answer_that_cannot_be_sent_ends_with_an_error() -> None:
    bench = Bench(tokens_per_response=2)
    client = bench.start()
    readable = [TokenLogProb(token, -1.0) for token in (11, 12)]
    broken: Any = [*readable, None]
    bench.engine.sinks[0](Step([11, 12, 13], broken, finished=True))
    assert client.next().ids == [11, 12]
    assert "its steps could not be read: AttributeError" in str(client.next().error)
    bench.serving.close()
