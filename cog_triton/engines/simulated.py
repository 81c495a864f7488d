"""An engine that makes tokens at a set pace without a model, for tests and for sizing a deployment.

One thread steps all running requests, as in-flight batching does: a request that arrives joins the
next step. Each request's first token comes ``prefill`` after its start and the others
``inter_token`` apart; with zero times a step gives every request a token as fast as Python can.
The tokens are those of a text, read from a place that depends on the prompt, so that two requests
with different prompts can be told apart and the same prompt always gives the same tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton.engines.base import Engine, EngineError, GenerationRequest, Sink, Tokens

DEFAULT_CONTEXT_LENGTH = 131_072

TEXT = (
    "A simulated engine needs no model and no GPU. It reads these sentences again and again, at the "
    "pace it was told, so that everything around an engine can be measured: the ensemble, the "
    "network, the predictor. Il sait même écrire en français, auf Deutsch mit ä, ö und ü, 和中文,"
    "日本語も、and with emoji 🚀🙂. "
)


@dataclass
class _Running:
    request: GenerationRequest
    sink: Sink
    start: int
    due: float
    made: int = 0


class SimulatedEngine(Engine):
    """See the module's docstring."""

    def __init__(
        self,
        token_ids: list[int],
        *,
        prefill: float = 0.0,
        prefill_per_token: float = 0.0,
        inter_token: float = 0.0,
        context_length: int = DEFAULT_CONTEXT_LENGTH,
    ) -> None:
        """Starts the stepping thread.

        Args:
            token_ids: what to generate, again and again.
            prefill: seconds from a request's start to its first token.
            prefill_per_token: seconds added for each token of the prompt.
            inter_token: seconds between two tokens of a request.
        """
        self._token_ids = token_ids
        self._prefill = prefill
        self._prefill_per_token = prefill_per_token
        self._inter_token = inter_token
        self._context_length = context_length
        self._running: dict[str, _Running] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="simulated-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> SimulatedEngine:
        """Built from the tensorrt_llm model's parameters."""
        rate = float(parameters.get("simulated_prefill_tokens_per_s", 0))
        return cls(
            _encode(parameters["tokenizer_dir"], TEXT),
            prefill=float(parameters.get("simulated_prefill_ms", 0)) / 1000,
            prefill_per_token=1 / rate if rate else 0.0,
            inter_token=float(parameters.get("simulated_inter_token_ms", 0)) / 1000,
            context_length=int(parameters.get("max_seq_len", DEFAULT_CONTEXT_LENGTH)),
        )

    @property
    def context_length(self) -> int:
        return self._context_length

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        wait = self._prefill + self._prefill_per_token * len(request.input_ids)
        running = _Running(
            request,
            sink,
            start=sum(request.input_ids) % len(self._token_ids),
            due=time.perf_counter() + wait,
        )
        with self._changed:
            if self._closed:
                raise EngineError("the engine has stopped: it was closed")
            self._running[request.key] = running
            self._changed.notify()

    def abort(self, key: str) -> None:
        with self._changed:
            self._running.pop(key, None)

    def active(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                if not self._wait_until_due():
                    continue
                running = list(self._running.values())
            now = time.perf_counter()
            for one in running:
                if one.due <= now:
                    self._step(one)

    def _wait_until_due(self) -> bool:
        """Waits for the next token to come due, or for a change; returns whether one is due."""
        if self._closed:  # since it was last asked, and nothing will notify any more
            return False
        if not self._running:
            self._changed.wait()
            return False
        wait = min(one.due for one in self._running.values()) - time.perf_counter()
        if wait > 0:
            self._changed.wait(wait)
            return False
        return True

    def _step(self, one: _Running) -> None:
        token = self._token_ids[(one.start + one.made) % len(self._token_ids)]
        one.made += 1
        one.due += self._inter_token
        finished = one.made >= one.request.max_tokens or token == one.request.end_id
        if finished:
            self.abort(one.request.key)
        log_probs = [0.0] if one.request.return_log_probs else []
        one.sink(Tokens([token], log_probs, finished))


def _encode(tokenizer_dir: str, text: str) -> list[int]:
    file = Path(tokenizer_dir) / "tokenizer.json"
    if file.is_file():
        # Far quicker to load than a transformers tokenizer, and the ids are the same.
        from tokenizers import Tokenizer

        return list(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)
    from cog_triton.tokenizer import load_tokenizer

    return list(load_tokenizer(tokenizer_dir)(text, add_special_tokens=False).input_ids)
