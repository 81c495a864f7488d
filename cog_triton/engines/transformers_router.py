"""The way of tokens from transformers' batches to the sinks of their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from cog_triton.adapters.layers import LoadedAdapter
from cog_triton.engines.base import Sink, Tokens, TopLogProbs, stopped_text
from cog_triton.engines.transformers_rows import Row


@dataclass
class Reader:
    """The sink of a request, and the number of tokens that it has had."""

    row: Row
    sink: Sink
    had: int = 0

    def next_tokens(self, output: GenerationOutput) -> Tokens:
        """Return the new tokens of an output, which holds all tokens so far."""
        if self.row.error is not None:
            return Tokens([], finished=True, error=self.row.error, refused=True)
        # Transformers fails no request alone, but all of them when its loop ends.
        error = stopped_text(output.error) if output.status == RequestStatus.FAILED else None
        had, self.had = self.had, len(output.generated_tokens)
        top, self.row.top_log_probs = self.row.top_log_probs, []
        prompt: list[TopLogProbs] = []
        if not had:
            prompt, self.row.prompt_log_probs = self.row.prompt_log_probs, []
        return Tokens(
            output.generated_tokens[had:],
            output.logprobs[had:] if self.row.request.return_log_probs else [],
            output.is_finished(),
            error,
            top_log_probs=top,
            prompt_log_probs=prompt,
        )


class Router(OutputRouter):
    """Pass each request's new tokens to its sink, on the generation thread."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self._cancel = cancel
        self.on_end: Callable[[], None] = lambda: None  # of a request that had an adapter
        self._readers: dict[str, Reader] = {}
        self._readers_lock = threading.Lock()

    def open(self, row: Row, sink: Sink) -> None:
        with self._readers_lock:
            self._readers[row.request.key] = Reader(row, sink)

    def knows(self, key: str) -> bool:
        return key in self._readers

    def row(self, key: str) -> Row | None:
        reader = self._readers.get(key)
        return None if reader is None else reader.row

    def adapters(self) -> set[LoadedAdapter]:
        """Those that requests have."""
        with self._readers_lock:
            rows = [reader.row for reader in self._readers.values()]
        return {row.adapter for row in rows if row.adapter is not None}

    def forget(self, key: str) -> bool:
        return self._close(key) is not None

    def _close(self, key: str) -> Reader | None:
        with self._readers_lock:
            reader = self._readers.pop(key, None)
        if reader is not None and reader.row.adapter is not None:
            self.on_end()
        return reader

    def active(self) -> int:
        return len(self._readers)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)

    def deliver(self, output: GenerationOutput) -> None:
        key, finished = output.request_id, output.is_finished()
        reader = self._close(key) if finished else self._readers.get(key)
        if reader is not None:
            tokens = reader.next_tokens(output)
            if tokens.finished and not finished and self.forget(key):
                self._cancel(key)
            reader.sink(tokens)
        elif not finished:
            # Transformers drops a cancellation that overtakes its request, so it is repeated.
            self._cancel(key)
