"""Between a serving model and its engine: limits, stop words, streaming, and delivery.

One thread delivers, and what is known of a sequence belongs to it. It reads the new steps of all sequences
of a reader and sends what they make in one response: at low load that is one token, under load as many as
were made since the last turn. The cost of serving is per response, and nothing waits to fill one. Another
thread sends what only ends a request, for which no client waits.
"""

import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakValueDictionary

from cog_triton import wire
from cog_triton.engines.base import Engine, GenerationRequest, Step, TokenLogProb
from cog_triton.errors import EngineError, EngineUnavailable
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.stop_words import StopWordSearch

logger = logging.getLogger(__name__)


@dataclass
class Output(Step):
    """One response of one sequence: its steps since the last one."""

    cum_log_prob: float = 0.0  # sum of the sequence so far
    context_ids: list[int] = field(default_factory=list)  # up to CONTEXT_TOKENS before ``ids``
    generated: int = 0  # tokens of the sequence so far
    # Of the arrival, the first token and the last: nanoseconds of the monotonic clock, 0 is not yet.
    times: tuple[int, int, int] = field(default=(0, 0, 0), compare=False)
    input_tokens: int = field(default=0, compare=False)
    channel: int = field(default=0, compare=False)  # see ``wire.CHANNEL``
    has_end_token: bool = field(default=False, compare=False)  # whether it is the last of ``ids``
    # Of the last response, those of its text that stand behind the stop word that ended the sequence.
    characters_behind: int = 0


_STOP = Step(finished=True)  # the client's
_STOP_WORD = Step(finished=True)


class _Reader:
    """Sequences whose outputs may leave together: those of one reader, or one that is alone."""

    def __init__(self) -> None:
        self.waiting: deque[_Sequence] = deque()  # with something to read or send
        self.turn = threading.Lock()  # held while it is queued or read


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    request_id: str
    send: Callable[..., None]
    streaming: bool
    prompt: list[int]  # precedes the ids in the only response
    reader: _Reader
    channel: int
    search: StopWordSearch | None
    steps: deque[Step] = field(default_factory=deque)  # that have come, and are not read
    ids: list[int] = field(default_factory=list)
    sent: int = 0  # of the ids
    unsent: bool = False  # there is something to send
    log_probs: list[TokenLogProb] = field(default_factory=list)  # not sent yet, as the next
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    cum_log_prob: float = 0.0
    end: Step | None = None
    arrival: int = field(default_factory=time.monotonic_ns)
    first_token: int = 0
    last_token: int = 0
    stop_words: dict[int, list[tuple[int, ...]]] = field(init=False)  # by their last ids

    def __post_init__(self) -> None:
        self.stop_words = {}
        for word in self.request.stop_words:
            self.stop_words.setdefault(word[-1], []).append(word)

    def read(self) -> int:
        """Read the steps that have come; return their number of tokens."""
        before, made = len(self.ids), 0
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
        """Take what is ready as one response: of a stream at most ``limit`` ids, unless 0."""
        begin, size = self.sent, limit if limit and self.streaming else len(self.ids)
        ids = self.ids[begin : begin + size]
        log_probs, self.log_probs = self.log_probs[:size], self.log_probs[size:]
        prompt_log_probs, self.prompt_log_probs = self.prompt_log_probs, []
        self.sent += len(ids)
        self.unsent = self.sent < len(self.ids)
        self.cum_log_prob += sum(token.log_prob for token in log_probs)
        end = None if self.unsent else self.end
        has_end_token = end is not None and self.ends_with_end_token
        return Output(
            self.prompt + ids,
            log_probs,
            end is not None,
            end.error if end else None,
            prompt_log_probs,
            self.cum_log_prob,
            self.ids[max(0, begin - CONTEXT_TOKENS) : begin],
            self.sent,
            (self.arrival, self.first_token, self.last_token if end else 0),
            len(self.request.input_ids),
            self.channel,
            has_end_token,
            self.search.characters_behind if self.search is not None and end is not None else 0,
        )

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
        self.engine = engine
        self._limit = tokens_per_response  # of streams, 0 is none; 1 is what TensorRT-LLM has
        # Tokens that the engine made and Triton got, and sequences by their end.
        self.counters = dict.fromkeys(("generated", "served", "finished", "stopped", "failed"), 0)
        self._keys = itertools.count()
        self._running: dict[str, _Sequence] = {}  # by the engine's key
        self._turns: queue.SimpleQueue[_Reader | None] = queue.SimpleQueue()
        self._readers: WeakValueDictionary[str, _Reader] = WeakValueDictionary()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()
        self._ends = ThreadPoolExecutor(1)  # of requests whose last tokens have left with another's

    def start(
        self,
        request_id: str,
        request: GenerationRequest,
        send: Callable[..., None],
        *,
        streaming: bool,
        prompt_in_output: bool = False,
        channel: str = "",
        search: StopWordSearch | None = None,
    ) -> Callable[[], None]:
        """Start one sequence; return the function that stops it, or raise EngineError.

        Args:
            request_id: what ``stop`` finds it by; several sequences may share one.
            request: its key is replaced by a unique one, its max_tokens by what fits the context.
            send: gets the outputs in order, on the delivery thread; those of a channel's reader together.
            streaming: send tokens as they are made, not all in one output at the end.
            prompt_in_output: begin that one output with the prompt's ids. A stream never does.
            channel: as ``wire.CHANNEL``; without one, the sequence's outputs leave alone.
            search: of stop words in the output's text, beside those that the request has by their ids.
        """
        length, limit = len(request.input_ids), self.engine.context_length
        if not length:
            raise EngineError("the prompt has no tokens")
        if length >= limit:
            # TensorRT-LLM's wording, which clients know. One token of room is the least.
            text = f"Prompt length ({length}) exceeds maximum input length ({limit - 1})."
            raise EngineError(text)
        if request.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, not {request.max_tokens}")
        key = f"{request_id}#{os.getpid()}.{next(self._keys)}"
        request = replace(request, key=key, max_tokens=min(request.max_tokens, limit - length))
        prompt = request.input_ids if prompt_in_output and not streaming else []
        name, number = wire.reader_and_number(channel) if channel else ("", 0)
        reader = self._readers.setdefault(name, _Reader()) if name else _Reader()
        sequence = _Sequence(request, request_id, send, streaming, prompt, reader, number, search)
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
        self.engine.close()
        self._turns.put(None)
        self._thread.join()
        self._ends.shutdown()

    def _stop(self, sequence: _Sequence) -> None:
        self.engine.abort(sequence.request.key)
        self._on_step(sequence, _STOP)

    def _on_step(self, sequence: _Sequence, step: Step) -> None:
        if step.ids and sequence.end is None:
            sequence.last_token = time.monotonic_ns()
            sequence.first_token = sequence.first_token or sequence.last_token
        sequence.steps.append(step)
        sequence.reader.waiting.append(sequence)
        self._queue(sequence.reader)

    def _queue(self, reader: _Reader) -> None:
        if reader.turn.acquire(blocking=False):
            self._turns.put(reader)

    # What follows runs on the delivery thread.

    def _deliver(self) -> None:
        closing = False
        while not closing or not self._turns.empty():
            if (reader := self._turns.get()) is None:
                closing = True  # when what is left has been sent
                continue
            outputs: list[tuple[_Sequence, Output]] = []
            sequences = {reader.waiting.popleft(): None for _ in range(len(reader.waiting))}
            for sequence in sequences:
                output = self._next_output(sequence)
                if output is not None:
                    outputs.append((sequence, output))
            outputs.sort(key=lambda each: not each[1].finished)  # one goes to a request that ends
            self._send([each for each in outputs if not each[1].error])
            for each in outputs:
                if each[1].error:
                    self._send([each])
            reader.waiting.extend(sequence for sequence in sequences if sequence.unsent)
            reader.turn.release()
            if reader.waiting:  # behind the others that have something ready
                self._queue(reader)

    def _next_output(self, sequence: _Sequence) -> Output | None:
        """Read a sequence's new steps, and take what is to be sent; what fails ends it alone."""
        had_ended = sequence.end is not None
        try:
            self.counters["generated"] += sequence.read()
            if sequence.end is _STOP_WORD and not had_ended:
                self.engine.abort(sequence.request.key)
            return sequence.take(self._limit) if sequence.unsent else None
        except Exception as error:
            logger.exception("the steps of a request could not be read")
            reason = f"its steps could not be read: {type(error).__name__}: {error}"
            failure = EngineUnavailable(f"the engine failed a request: {reason}")
            sequence.end = Step(finished=True, error=failure)
            sequence.unsent = False
            self.engine.abort(sequence.request.key)
            return None if had_ended else Output(finished=True, error=failure)

    def _send(self, outputs: list[tuple[_Sequence, Output]]) -> None:
        """Send outputs of one reader's sequences in one response, to the first one's request."""
        for sequence, output in outputs:
            if output.finished and self._running.pop(sequence.request.key, None) is not None:
                end = "failed" if output.error else "finished"
                self.counters["stopped" if sequence.end is _STOP else end] += 1
        try:
            if outputs:
                outputs[0][0].send(*(output for _, output in outputs))
        except Exception:
            # One client's broken stream must not end the others'.
            logger.exception("a response could not be delivered")
            for sequence, _ in outputs:
                if sequence.end is None or not sequence.end.error:
                    # Its last response may get through, and must not look like the end of an answer.
                    error = EngineUnavailable("a response could not be delivered")
                    sequence.end, sequence.unsent = Step(finished=True, error=error), True
                    self.engine.abort(sequence.request.key)
        else:
            served = sum(len(output.ids) - len(sequence.prompt) for sequence, output in outputs)
            self.counters["served"] += served
            for sequence, output in outputs[1:]:
                if output.finished:  # 0.1 to 0.4 ms each, which the next step's tokens would wait
                    self._ends.submit(_end, sequence, replace(output, ids=[]))


def _end(sequence: _Sequence, output: Output) -> None:
    try:
        sequence.send(output)
    except Exception:
        logger.exception("the end of a request could not be delivered")
