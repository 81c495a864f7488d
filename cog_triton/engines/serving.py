"""Between a serving model and its engine: limits, stop words, streaming, and delivery.

One thread delivers. It sends whatever a sequence has ready in one response: at low load that is one
token, under load as many as were made while the last responses were sent. The cost of serving is per
response, and nothing waits to fill one.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from cog_triton.engines.base import Engine, EngineError, GenerationRequest, Step, TokenLogProb
from cog_triton.text.detokenizer import CONTEXT_TOKENS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Times:
    """Times of a sequence, in nanoseconds of the monotonic clock; 0 is not yet."""

    arrival: int = 0  # from Triton
    first_token: int = 0  # from the engine, as the last
    last_token: int = 0


@dataclass(frozen=True)
class Output:
    """One response of one sequence.

    Attributes:
        ids: new token ids; in the only response of a sequence that does not stream, behind the prompt's if
            that was asked for.
        log_probs: one per generated id if asked for, else empty.
        cum_log_prob: sum of the log probabilities of the sequence so far.
        context_ids: up to CONTEXT_TOKENS ids of this sequence before ``ids``.
        generated: number of tokens of the sequence so far.
        error: why the sequence failed; it is final then.
        refused: the error is the request's fault.
        prompt_log_probs: of the first response, if asked for; see ``Step``.
    """

    ids: list[int]
    log_probs: list[TokenLogProb]
    cum_log_prob: float
    context_ids: list[int]
    generated: int
    final: bool
    error: str | None = None
    times: Times = field(default=Times(), compare=False)
    refused: bool = False
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


Send = Callable[[Output], None]


@dataclass
class _Sequence:
    """A sequence on its way from the engine to Triton. ``lock`` guards what both threads touch."""

    request: GenerationRequest
    request_id: str
    send: Send
    streaming: bool
    prompt_first: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    ids: list[int] = field(default_factory=list)
    sent: int = 0  # of the ids
    log_probs: list[TokenLogProb] = field(default_factory=list)  # not sent yet, as the next
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    cum_log_prob: float = 0.0
    ended: bool = False
    error: str | None = None
    refused: bool = False
    queued: bool = False
    arrival: int = field(default_factory=time.monotonic_ns)
    first_token: int = 0
    last_token: int = 0

    def add(self, step: Step) -> bool:
        """Add a step; return True if it completed a stop word, which ends the sequence."""
        before = len(self.ids)
        self.ids += step.ids
        stop = self._stop_word_end(before)
        if stop is not None:
            del self.ids[stop:]
        self.log_probs += step.log_probs[: len(self.ids) - before]
        self.prompt_log_probs += step.prompt_log_probs
        if step.ids:
            self.last_token = time.monotonic_ns()
            self.first_token = self.first_token or self.last_token
        self.error, self.refused = step.error, step.refused
        self.ended = step.finished or stop is not None
        return stop is not None

    def take(self, limit: int) -> Output:
        """Take what is ready as one response: of a stream at most ``limit`` ids, unless 0."""
        begin, size = self.sent, limit if limit and self.streaming else len(self.ids)
        ids = self.ids[begin : begin + size]
        log_probs, self.log_probs = self.log_probs[:size], self.log_probs[size:]
        prompt_log_probs, self.prompt_log_probs = self.prompt_log_probs, []
        self.sent += len(ids)
        self.cum_log_prob += sum(token.log_prob for token in log_probs)
        final = self.ended and self.sent == len(self.ids)
        return Output(
            self.request.input_ids + ids if self.prompt_first else ids,
            log_probs,
            self.cum_log_prob,
            self.ids[max(0, begin - CONTEXT_TOKENS) : begin],
            self.sent,
            final,
            self.error if final else None,
            Times(self.arrival, self.first_token, self.last_token if final else 0),
            self.refused,
            prompt_log_probs,
        )

    def _stop_word_end(self, before: int) -> int | None:
        """Return the number of ids up to the end of the first stop word that ends after ``before``."""
        words = self.request.stop_words
        for end in range(before + 1, len(self.ids) + 1) if words else ():
            for word in words:
                begin = max(0, end - len(word))
                if word[-1] == self.ids[end - 1] and word == tuple(self.ids[begin:end]):
                    return end
        return None


class Serving:
    """Run requests on an engine and deliver their outputs. Thread-safe."""

    def __init__(self, engine: Engine, tokens_per_response: int = 0) -> None:
        """Start the delivery thread.

        Args:
            tokens_per_response: most new ids in one response of a stream, 0 for no limit; 1 is what
                TensorRT-LLM's C++ backend does.
        """
        self.engine = engine
        self._limit = tokens_per_response
        # Tokens that the engine made and Triton got, and sequences by their end.
        self.counters = dict.fromkeys(("generated", "served", "finished", "stopped", "failed"), 0)
        self._keys = itertools.count()
        self._running: dict[str, _Sequence] = {}  # by the engine's key
        self._ready: queue.SimpleQueue[_Sequence | None] = queue.SimpleQueue()
        self._delivery = threading.Thread(target=self._deliver, name="delivery", daemon=True)
        self._delivery.start()

    def start(
        self,
        request_id: str,
        request: GenerationRequest,
        send: Send,
        *,
        streaming: bool,
        prompt_in_output: bool = False,
    ) -> Callable[[], object]:
        """Start one sequence; return the function that stops it.

        ``send`` gets its outputs from the delivery thread, in order.

        Args:
            request_id: what ``stop`` finds it by; several sequences may share one.
            request: its key is replaced by a unique one, its max_tokens by what fits the context.
            streaming: send tokens as they are made, not all in one output at the end.
            prompt_in_output: begin that one output with the prompt. A stream never does.

        Raises:
            EngineError: the prompt is empty or leaves no room for a token.
        """
        length, limit = len(request.input_ids), self.engine.context_length
        if not length:
            raise EngineError("the prompt has no tokens")
        if length >= limit:
            # TensorRT-LLM's wording, which clients know. One token of room is the least.
            raise EngineError(
                f"Prompt length ({length}) exceeds maximum input length ({limit - 1})."
            )
        if request.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, not {request.max_tokens}")
        key = f"{request_id}#{next(self._keys)}"
        request = replace(request, key=key, max_tokens=min(request.max_tokens, limit - length))
        sequence = _Sequence(
            request, request_id, send, streaming, prompt_first=prompt_in_output and not streaming
        )
        self._running[key] = sequence
        try:
            self.engine.submit(request, partial(self._on_step, sequence))
        except BaseException:
            del self._running[key]
            raise
        return partial(self._stop, sequence)

    def stop(self, request_id: str) -> int:
        """End the sequences of a request, delivering what they have; return their number."""
        running = list(self._running.values())
        return sum(self._stop(each) for each in running if each.request_id == request_id)

    def active(self) -> int:
        """Return the number of sequences that hold a slot of the engine or wait for one."""
        return self.engine.active()

    def close(self) -> None:
        """End the engine and the delivery thread."""
        self.engine.close()
        self._ready.put(None)
        self._delivery.join()

    def _stop(self, sequence: _Sequence, error: str | None = None) -> bool:
        with sequence.lock:
            if sequence.ended:
                return False
            sequence.ended, sequence.error = True, error
            self.counters["failed" if error else "stopped"] += 1
            self._queue(sequence)
        self.engine.abort(sequence.request.key)
        return True

    def _on_step(self, sequence: _Sequence, step: Step) -> None:
        self.counters["generated"] += len(step.ids)
        with sequence.lock:
            if sequence.ended:
                return
            stop_word = sequence.add(step)
            if sequence.ended:
                self.counters["finished" if sequence.error is None else "failed"] += 1
            if sequence.streaming or sequence.ended:
                self._queue(sequence)
        if stop_word:
            self.engine.abort(sequence.request.key)

    def _queue(self, sequence: _Sequence) -> None:
        if not sequence.queued:
            sequence.queued = True
            self._ready.put(sequence)

    def _deliver(self) -> None:
        for sequence in iter(self._ready.get, None):
            with sequence.lock:
                sequence.queued = False
                output = sequence.take(self._limit)
                if sequence.sent < len(sequence.ids):  # behind the others that have something ready
                    self._queue(sequence)
            try:
                sequence.send(output)
            except Exception:
                # One client's broken stream must not end the others'.
                logger.exception("a response could not be delivered")
                # Its last response may get through, and must not look like the end of an answer.
                self._stop(sequence, "a response could not be delivered")
            else:
                new = len(output.ids) if sequence.streaming else output.generated
                self.counters["served"] += new
            if output.final:
                self._running.pop(sequence.request.key, None)


def words_from_list(word_list: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the words of a TensorRT-LLM word list. Offsets that do not rise make no word.

    Args:
        word_list: shape [2, N]: the flat token ids, and the cumulative end offsets padded with -1.
    """
    flat, offsets = (list(map(int, row)) for row in word_list)
    ends = [end for end in offsets if end > 0]
    words = (tuple(flat[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    return tuple(word for word in words if word)
