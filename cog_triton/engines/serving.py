"""Between a serving model and its engine: limits, stop words, streaming, and delivery.

The engine's threads hand in steps, and one delivery thread sends them. It gives the readers turns: in a
turn it reads the new steps of all the reader's sequences and sends what they make in one response. At low
load that is one token; under load it is as many as were made since the last turn. The cost of serving is
per response, and nothing waits to fill one.

A reader is in the queue of turns at most once: a step first joins the reader's waiting sequences, and then
queues the reader if its turn is free. The delivery thread frees the turn after it has sent, and then looks
for steps that came meanwhile, so none is left behind and no two threads send for one reader.

A second thread sends what only ends a request, for which no client waits.
"""

import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from cog_triton.engines.base import Engine, GenerationRequest, Step, TokenLogProb
from cog_triton.errors import EngineError, EngineUnavailable
from cog_triton.protocol.frames import FrameAddress
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.stop_words import StopWordSearch

logger = logging.getLogger(__name__)


class Times(NamedTuple):
    """Nanoseconds of the monotonic clock; 0 for what has not happened yet."""

    arrival: int = 0
    first_token: int = 0
    last_token: int = 0


@dataclass
class Output(Step):
    """One response of one sequence: its steps since the last one."""

    # The sum of the sequence so far.
    cum_log_prob: float = 0.0
    # Up to CONTEXT_TOKENS ids before ``ids``.
    context_ids: list[int] = field(default_factory=list)
    # The number of tokens of the sequence so far.
    generated: int = 0
    times: Times = field(default=Times(), compare=False)
    input_tokens: int = field(default=0, compare=False)
    # The number that the client gave to the sequence; 0 if it did not ask for frames.
    sequence: int = field(default=0, compare=False)
    # Whether the last of ``ids`` is an end token.
    has_end_token: bool = field(default=False, compare=False)
    # In the last response: how many characters of its text stand behind the stop word that ended it.
    characters_behind: int = 0


_CLIENT_STOP = Step(finished=True)
_STOP_WORD = Step(finished=True)


class _Reader:
    """The sequences that one client reads by one stream, or a single sequence that is read alone."""

    def __init__(self) -> None:
        self._waiting: deque[_Sequence] = deque()
        # Held from when the reader is queued until its turn ends.
        self._turn = threading.Lock()

    def add(self, sequence: "_Sequence") -> None:
        """Note that a sequence has something to read or to send."""
        self._waiting.append(sequence)

    def begin_turn(self) -> bool:
        """Take the turn if sequences wait and nobody has it; return whether it was taken."""
        return bool(self._waiting) and self._turn.acquire(blocking=False)

    def drain(self) -> "list[_Sequence]":
        """Remove the waiting sequences; return each once, in the order in which they came."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return list(dict.fromkeys(waiting))

    def end_turn(self) -> None:
        self._turn.release()


@dataclass(eq=False)
class _Sequence:
    """One sequence that an engine generates; but for ``steps`` and times it is the delivery thread's."""

    request: GenerationRequest
    request_id: str
    send: Callable[..., None]
    streaming: bool
    # Ids that begin the only response of a sequence that is not streamed.
    prompt: list[int]
    reader: _Reader
    # The sequence of its address, or 0.
    number: int
    search: StopWordSearch | None
    # Steps from the engine that have not been read.
    steps: deque[Step] = field(default_factory=deque)
    ids: list[int] = field(default_factory=list)
    # The number of ids that were taken for a response.
    sent: int = 0
    # Whether there is something to send.
    unsent: bool = False
    log_probs: list[TokenLogProb] = field(default_factory=list)  # not sent yet
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)  # not sent yet
    cum_log_prob: float = 0.0
    end: Step | None = None
    # Whether its last output has been made.
    over: bool = False
    arrival: int = field(default_factory=time.monotonic_ns)
    first_token: int = 0
    last_token: int = 0
    # By their last ids.
    stop_words: dict[int, list[tuple[int, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_words = {}
        for word in self.request.stop_words:
            self.stop_words.setdefault(word[-1], []).append(word)

    def read(self) -> int:
        """Read the steps that have come; return their number of tokens."""
        before = len(self.ids)
        made = 0
        for _ in range(len(self.steps)):
            step = self.steps.popleft()
            made += len(step.ids)
            if self.end is None:
                self.ids += step.ids
                self.log_probs += step.log_probs
                self.prompt_log_probs += step.prompt_log_probs
                self.end = step if step.finished else None
                self.unsent = self.streaming or step.finished
        self._cut_behind_stop_word(before)
        return made

    @property
    def ends_with_end_token(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.request.end_ids

    def take(self, limit: int) -> Output:
        """Take what is ready as one response; a stream's has at most ``limit`` ids, unless that is 0."""
        begin = self.sent
        size = limit if limit and self.streaming else len(self.ids)
        ids = self.ids[begin : begin + size]
        log_probs = self.log_probs[:size]
        self.log_probs = self.log_probs[size:]
        prompt_log_probs = self.prompt_log_probs
        self.prompt_log_probs = []
        self.sent += len(ids)
        self.unsent = self.sent < len(self.ids)
        self.cum_log_prob += sum(token.log_prob for token in log_probs)
        end = None if self.unsent else self.end
        self.over = end is not None
        return Output(
            ids=self.prompt + ids,
            log_probs=log_probs,
            finished=self.over,
            error=None if end is None else end.error,
            prompt_log_probs=prompt_log_probs,
            cum_log_prob=self.cum_log_prob,
            context_ids=self.ids[max(0, begin - CONTEXT_TOKENS) : begin],
            generated=self.sent,
            times=Times(self.arrival, self.first_token, self.last_token if self.over else 0),
            input_tokens=len(self.request.input_ids),
            sequence=self.number,
            has_end_token=self.over and self.ends_with_end_token,
            characters_behind=self._characters_behind() if self.over else 0,
        )

    def _characters_behind(self) -> int:
        return 0 if self.search is None else self.search.characters_behind

    def _cut_behind_stop_word(self, before: int) -> None:
        """End behind the first stop word that ends after the place ``before``."""
        if not self.stop_words and self.search is None:
            return
        for end in range(before + 1, len(self.ids) + 1):
            if self._is_stop_word_complete(end):
                del self.ids[end:]
                del self.log_probs[end - self.sent :]
                self.end = _STOP_WORD
                self.unsent = True
                return

    def _is_stop_word_complete(self, end: int) -> bool:
        """Return whether the id before the place ``end`` completes a stop word; asked for each id once."""
        token = self.ids[end - 1]
        by_text = False
        if self.search is not None and token not in self.request.end_ids:
            by_text = self.search.feed(token)
        by_ids = any(
            word == tuple(self.ids[max(0, end - len(word)) : end])
            for word in self.stop_words.get(token, ())
        )
        return by_text or by_ids


class Serving:
    """Run requests on an engine and deliver their outputs. Thread-safe."""

    def __init__(self, engine: Engine, tokens_per_response: int = 0) -> None:
        """Serve with an engine.

        Args:
            tokens_per_response: the limit for a stream's responses, as TensorRT-LLM's is 1; 0 for none.
        """
        self.engine = engine
        self._limit = tokens_per_response
        # Tokens that the engine made and Triton got, and sequences by their end.
        self.counters = dict.fromkeys(("generated", "served", "finished", "stopped", "failed"), 0)
        self._keys = itertools.count()
        # By the engine's key.
        self._running: dict[str, _Sequence] = {}
        self._turns: queue.SimpleQueue[_Reader | None] = queue.SimpleQueue()
        self._readers: WeakValueDictionary[str, _Reader] = WeakValueDictionary()
        self._thread = threading.Thread(target=self._deliver, name="delivery", daemon=True)
        self._thread.start()
        # Sends the ends of requests whose last tokens have left in another request's response.
        self._ends = ThreadPoolExecutor(1, thread_name_prefix="ends")

    def start(
        self,
        request_id: str,
        request: GenerationRequest,
        send: Callable[..., None],
        *,
        streaming: bool,
        prompt_in_output: bool = False,
        address: FrameAddress | None = None,
        search: StopWordSearch | None = None,
    ) -> Callable[[], None]:
        """Start one sequence; return the function that stops it, or raise EngineError.

        Args:
            request_id: what ``stop`` finds it by; several sequences may share one.
            request: its key is replaced by a unique one, its max_tokens by what fits the context.
            send: gets the outputs in order, on the delivery thread; those of an address' reader together.
            streaming: send tokens as they are made, not all in one output at the end.
            prompt_in_output: begin that one output with the prompt's ids. A stream never does.
            address: where the outputs go as frames; without one, the sequence's outputs leave alone.
            search: of stop words in the output's text, beside those that the request has by their ids.
        """
        self._check(request)
        key = f"{request_id}#{os.getpid()}.{next(self._keys)}"
        room = self.engine.context_length - len(request.input_ids)
        request = replace(request, key=key, max_tokens=min(request.max_tokens, room))
        reader = _Reader()
        number = 0
        if address is not None:
            number = address.sequence
            reader = self._readers.setdefault(address.reader, reader)
        sequence = _Sequence(
            request=request,
            request_id=request_id,
            send=send,
            streaming=streaming,
            prompt=request.input_ids if prompt_in_output and not streaming else [],
            reader=reader,
            number=number,
            search=search,
        )
        self._running[key] = sequence
        try:
            self.engine.submit(request, partial(self._on_step, sequence))
        except BaseException:
            del self._running[key]
            raise
        return partial(self._stop, sequence)

    def stop(self, request_id: str) -> None:
        """End the sequences of a request, delivering what they have."""
        for sequence in list(self._running.values()):
            if sequence.request_id == request_id:
                self._stop(sequence)

    def close(self) -> None:
        """End the engine, and then the threads, when they have sent what is left."""
        try:
            self.engine.close()
        finally:
            self._turns.put(None)
            self._thread.join()
            self._ends.shutdown()

    def _check(self, request: GenerationRequest) -> None:
        """Raise EngineError for a request that has no room in the context."""
        length = len(request.input_ids)
        limit = self.engine.context_length
        if not length:
            raise EngineError("the prompt has no tokens")
        if length >= limit:
            # TensorRT-LLM's wording, which clients know. At least one token must have room.
            raise EngineError(
                f"Prompt length ({length}) exceeds maximum input length ({limit - 1})."
            )
        if request.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, not {request.max_tokens}")

    def _stop(self, sequence: _Sequence) -> None:
        self._abort(sequence)
        self._on_step(sequence, _CLIENT_STOP)

    def _abort(self, sequence: _Sequence) -> None:
        """Have the engine drop a sequence. A failure is only logged: it must not end the calling thread."""
        try:
            self.engine.abort(sequence.request.key)
        except Exception:
            logger.exception("request %s could not be aborted", sequence.request.key)

    def _on_step(self, sequence: _Sequence, step: Step) -> None:
        """Take a step from the engine, on any thread; never blocks."""
        if step.ids and sequence.end is None:
            sequence.last_token = time.monotonic_ns()
            sequence.first_token = sequence.first_token or sequence.last_token
        sequence.steps.append(step)
        sequence.reader.add(sequence)
        self._queue(sequence.reader)

    def _queue(self, reader: _Reader) -> None:
        """Queue a reader for a turn, unless it is queued or nothing of it waits."""
        if reader.begin_turn():
            self._turns.put(reader)

    # What follows runs on the delivery thread.

    def _deliver(self) -> None:
        """Give the readers their turns until the end, and then to those that still have something."""
        is_closing = False
        while not is_closing or not self._turns.empty():
            reader = self._turns.get()
            if reader is None:
                is_closing = True
                continue
            sequences = reader.drain()
            try:
                self._take_turn(sequences)
            except Exception as error:
                # Whatever it was, the other readers' sequences go on.
                logger.exception("the outputs of %d requests could not be sent", len(sequences))
                for sequence in sequences:
                    self._fail(sequence, _failure(error, "its outputs could not be sent"))
            for sequence in sequences:
                if sequence.unsent:
                    reader.add(sequence)
            reader.end_turn()
            # Behind the other readers that have something ready.
            self._queue(reader)

    def _take_turn(self, sequences: Sequence[_Sequence]) -> None:
        """Send what the sequences of one reader have: in one response, but for errors, which go alone."""
        outputs: list[tuple[_Sequence, Output]] = []
        failures: list[tuple[_Sequence, Output]] = []
        for sequence in sequences:
            output = self._next_output(sequence)
            if output is None:
                continue
            if output.error is None:
                outputs.append((sequence, output))
            else:
                failures.append((sequence, output))
        # The first one's request gets the response: one that ends needs no second for its end.
        outputs.sort(key=lambda each: not each[1].finished)
        if outputs:
            self._send(outputs)
        for failure in failures:
            self._send([failure])

    def _next_output(self, sequence: _Sequence) -> Output | None:
        """Read a sequence's new steps and take what can be sent; a sequence that cannot be read fails."""
        had_ended = sequence.end is not None
        was_over = sequence.over
        try:
            self.counters["generated"] += sequence.read()
            if sequence.end is _STOP_WORD and not had_ended:
                self._abort(sequence)
            return sequence.take(self._limit) if sequence.unsent else None
        except Exception as error:
            logger.exception("the steps of a request could not be read")
            if not was_over:
                self._fail(sequence, _failure(error, "its steps could not be read"))
            sequence.unsent = False
            sequence.over = True
            if was_over or sequence.end is None:
                return None
            return Output(finished=True, error=sequence.end.error)

    def _fail(self, sequence: _Sequence, error: EngineUnavailable) -> None:
        """End a sequence with an error, which is its next output, unless it has ended with one.

        Even if its last output was made: what its client has must not look like the whole answer.
        """
        sequence.unsent = sequence.end is None or sequence.end.error is None
        if sequence.unsent:
            sequence.end = Step(finished=True, error=error)
            sequence.over = False
            self._abort(sequence)

    def _send(self, outputs: list[tuple[_Sequence, Output]]) -> None:
        """Send outputs of one reader's sequences in one response, to the first one's request."""
        for sequence, output in outputs:
            if output.finished:
                self._count_end(sequence, output)
        first, _ = outputs[0]
        try:
            first.send(*(output for _, output in outputs))
        except Exception:
            # One client's broken stream must not end the others'.
            logger.exception("a response could not be delivered")
            for sequence, _ in outputs:
                self._fail(sequence, EngineUnavailable("a response could not be delivered"))
            return
        for sequence, output in outputs:
            self.counters["served"] += len(output.ids) - len(sequence.prompt)
            if output.finished and sequence is not first:
                # Not here: it takes 0.1 to 0.4 ms, for which the next step's tokens would wait.
                end = replace(output, ids=[], log_probs=[], prompt_log_probs=[])
                self._ends.submit(_send_end, sequence, end)

    def _count_end(self, sequence: _Sequence, output: Output) -> None:
        if self._running.pop(sequence.request.key, None) is None:
            return
        if sequence.end is _CLIENT_STOP:
            self.counters["stopped"] += 1
        elif output.error is None:
            self.counters["finished"] += 1
        else:
            self.counters["failed"] += 1


def _failure(error: Exception, what: str) -> EngineUnavailable:
    reason = f"{what}: {type(error).__name__}: {error}"
    return EngineUnavailable(f"the engine failed a request: {reason}")


def _send_end(sequence: _Sequence, output: Output) -> None:
    try:
        sequence.send(output)
    except Exception:
        logger.exception("the end of a request could not be delivered")
