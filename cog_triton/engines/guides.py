"""Structured output: the guides of requests, compiled for the model's tokens, and the tokens they allow.

``grammars`` translates a guide for llguidance, and ``grammar_trials`` finds the grammars whose compilation
would not end.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from cog_triton.engines.base import EngineError, GenerationRequest, failed_request
from cog_triton.engines.grammar_trials import LIMITS, GrammarTrials
from cog_triton.engines.grammars import grammar
from cog_triton.request.guide import Guide

# The tokens that are allowed next, [sequences, vocabulary].
Masks = npt.NDArray[np.bool_]
# How many compiled guides are kept. A guide of 64 KB takes about a megabyte.
COMPILED = 64


@dataclass(eq=False)
class Guided:
    """The state of one sequence in its guide.

    Attributes:
        matcher: llguidance's, at the place that the sequence has reached.
        end_ids: are allowed where the guide may end, and only there.
        tokens: the sequence so far, which the engine extends.
        consumed: the number of ``tokens`` that the matcher has seen.
        error: why the sequence cannot go on.
    """

    request: GenerationRequest
    matcher: Any
    end_ids: list[int]
    tokens: list[int]
    consumed: int
    error: EngineError | None = None

    def consume_new_tokens(self) -> None:
        self.matcher.consume_tokens(self.tokens[self.consumed :])
        self.consumed = len(self.tokens)


class _UnreadableTokenizer(Exception):
    """The reason, as a text, why the model's tokenizer cannot be used for guides."""


class Guides:
    """The guides of one engine. Methods may be called from any thread."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocabulary: int) -> None:
        """Start to read the tokenizer.

        Args:
            load_tokenizer: returns a fast tokenizer of transformers; called on a thread of its own.
            vocabulary: the number of the model's logits.
        """
        self._vocabulary = vocabulary
        # Reads the tokenizer, and then computes masks beside the model.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._tokenizer = self._thread.submit(_read_tokenizer, load_tokenizer, vocabulary)
        self._executor = LLExecutor()
        # Guards the next. Nothing is compiled while it is held.
        self._lock = threading.Lock()
        # The last used is at the end.
        self._compiled: OrderedDict[Guide, Future[Any]] = OrderedDict()
        self._trials = GrammarTrials()

    def begin(self, request: GenerationRequest, tokens: list[int]) -> Guided:
        """Return a sequence at the beginning of its request's guide, or raise EngineError.

        Args:
            tokens: the sequence so far, the prompt included; the engine extends this list.
        """
        if not request.end_ids:
            raise EngineError(
                "guided_decoding_guide needs an end token: it cannot be combined with ignore_eos or "
                "end_id -1"
            )
        assert request.guide is not None
        compiled = self._compiled_once(request.guide)
        if isinstance(compiled, str):
            raise EngineError(compiled)
        matcher = compiled.deep_copy()
        delivered = tokens[len(tokens) - request.continued :]
        if not matcher.consume_tokens(delivered):
            raise EngineError("guided_decoding_guide does not allow the output that is continued")
        return Guided(
            request=request,
            matcher=matcher,
            end_ids=list(request.end_ids),
            tokens=tokens,
            consumed=len(tokens),
        )

    def submit_masks(self, sequences: list[Guided]) -> "Future[Masks]":
        """Start to compute ``masks`` on the thread of the guides."""
        return self._thread.submit(self.masks, sequences)

    def masks(self, sequences: list[Guided]) -> Masks:
        """Return the tokens that may follow each sequence.

        A sequence that cannot go on in its guide gets an ``error``, and all tokens.
        """
        for each in sequences:
            try:
                each.consume_new_tokens()
            except Exception as error:
                each.error = failed_request(error, each.request)
        tokenizer = self._tokenizer.result()
        bits = allocate_token_bitmask(len(sequences), tokenizer.vocab_size)
        places = [(each.matcher, place) for place, each in enumerate(sequences)]
        fill_next_token_bitmask_par(self._executor, places, bits)
        masks = np.unpackbits(bits.view("u1"), axis=1, bitorder="little", count=self._vocabulary)
        # The model may have more ids than the tokenizer; those are not allowed.
        masks[:, tokenizer.vocab_size :] = 0
        masks[:, [token for token in tokenizer.eos_tokens if token < self._vocabulary]] = 0
        # The end tokens are the request's, and not the tokenizer's, which were just excluded.
        for each, allowed in zip(sequences, masks, strict=True):
            allowed[each.end_ids] = each.matcher.is_accepting()
            if each.error is None and (each.matcher.is_error() or not allowed.any()):
                reason = _one_line(each.matcher.get_error()) or "no token can follow"
                each.error = EngineError(f"guided_decoding_guide: {reason}")
            if each.error is not None:
                allowed[:] = 1
        return masks.view(np.bool_)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._trials.close()

    def _compiled_once(self, guide: Guide) -> Any:
        """Return ``_compile`` of a guide; requests with the same guide wait for one compilation.

        The first of them compiles. Requests with other guides do not wait.
        """
        with self._lock:
            future = self._compiled.get(guide)
            is_first = future is None
            if future is None:
                future = Future()
                self._compiled[guide] = future
            self._compiled.move_to_end(guide)
            while len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        if is_first:
            try:
                future.set_result(self._compile(guide))
            except BaseException as error:
                # The next request tries again.
                with self._lock:
                    self._compiled.pop(guide, None)
                future.set_exception(error)
        return future.result()

    def _compile(self, guide: Guide) -> Any:
        """Return a matcher at the guide's beginning, or a text that says why there is none."""
        try:
            tokenizer = self._tokenizer.result()
        except _UnreadableTokenizer as error:
            return f"guided_decoding_guide: {error}"
        try:
            compiled = grammar(guide)
            problem = self._trials.problem(compiled)
        except ValueError as error:
            problem = str(error)
        if not problem:
            matcher = LLMatcher(tokenizer, compiled, limits=LIMITS, log_level=0)
            if not matcher.is_error():
                return matcher
            problem = matcher.get_error()
        kind = guide.kind.value
        return f"guided_decoding_guide of type {kind} cannot be used: {_one_line(problem)}"


def _read_tokenizer(load_tokenizer: Callable[[], Any], vocabulary: int) -> Any:
    """Return llguidance's form of a tokenizer, or raise _UnreadableTokenizer."""
    # Here, because it imports transformers.
    from llguidance.hf import from_tokenizer

    try:
        tokenizer = load_tokenizer()
    except Exception as error:
        raise _UnreadableTokenizer(f"the model's tokenizer cannot be loaded: {error}") from None
    kind = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise _UnreadableTokenizer(
            f"guides need a fast tokenizer, one with a tokenizer.json; the model's is a {kind}"
        )
    try:
        return from_tokenizer(tokenizer, vocabulary)
    except Exception as error:
        reason = _one_line(str(error)) or type(error).__name__
        raise _UnreadableTokenizer(
            f"llguidance cannot read the model's tokenizer ({kind}): {reason}"
        ) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
