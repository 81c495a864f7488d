"""The one path of a request: a Request in, chunks of text out."""

import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cog_triton.client.stream import Streams
from cog_triton.client.tracing import Steps
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.admission import Admission, Slot, Tenant
from cog_triton.request.request import Request, request_parameters, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.end_tokens import EndTokens
from cog_triton.text.tokenizer import Tokenizer, text_limits

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer."""

    # It lags behind the ids: it may end within a character, or before what could become a stop sequence.
    text: str
    output_tokens: int  # received so far
    input_tokens: int | None  # of the prompt, if the engine says
    # Of the last chunk: stop for an end token or a stop sequence, length for max_tokens or a full context.
    finish_reason: FinishReason | None = None
    queued: float = 0.0  # of the last chunk, seconds in the queue
    ids: tuple[int, ...] = ()  # since the chunk before
    log_probs: tuple[TokenLogProb, ...] = ()  # one per id if they were asked for
    stop_sequence: str | None = None  # of the last chunk, the one that ended the answer
    # Of the last chunk, the one of stop_token_ids that ended the answer; counted, and among the ids.
    stop_token: int | None = None
    prompt_log_probs: tuple[TokenLogProb, ...] = ()  # of the first chunk, if they were asked for


class StopSequences:
    """Passes a text through up to its first stop sequence, then ``matched``, compared by code points.

    The first is the one that is *complete* first, the longest if several are at the same character: with
    the stops "abcd" and "bc", "abcd" ends at "a".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._first_characters = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be delivered now, without an end that may begin a stop."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        text, self._held = self._held + text, ""
        if complete := {stop: text.index(stop) + len(stop) for stop in self._stops if stop in text}:
            self.matched = min(complete, key=complete.__getitem__)
            return text[: complete[self.matched] - len(self.matched)]
        for start in range(max(0, len(text) - len(self._stops[0]) + 1), len(text)):
            end = text[start:]
            if end[0] in self._first_characters and any(s.startswith(end) for s in self._stops):
                self._held = end
                return text[:start]
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of the text; nothing after a match."""
        held, self._held = self._held, ""
        return held


async def generate(
    request: Request,
    client: Streams,
    tokenizer: Tokenizer,
    *,
    admission: Admission | None = None,
    context_length: int | None = None,
    request_id: str | None = None,
    tenant: Tenant | None = None,
    end_tokens: EndTokens | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Stream the answer to a request, or raise a CogTritonError. Closing it early stops the request.

    Args:
        context_length: the most tokens of prompt and output together; None if only the engine knows.
        request_id: a name in Triton that no other running request has; None for a random one.
        end_tokens: those of the model; the tokenizer's alone if None.
    """
    text_limits(tokenizer, context_length).check("the prompt", len(request.prompt))
    if end_tokens is None:
        own = tokenizer.eos_token_id
        end_tokens = EndTokens() if own is None else EndTokens((own,))
    output = _Output(request, tokenizer, end_tokens)
    input_tokens = None
    keeps_end_token = True
    inputs = triton_inputs(request)
    if end_tokens.named_in_requests and request.sent_end_id is None:
        inputs["end_id"] = np.array([[end_tokens.first]], np.int32)
    parameters = request_parameters(request)
    stream = client.stream(request_id or secrets.token_hex(8), inputs, parameters=parameters)
    place = admission.acquire(tenant) if admission else contextlib.nullcontext(Slot())
    async with Steps("admission") as trace, place as slot, contextlib.aclosing(stream):
        parameters |= trace.begin("triton")
        async for response in stream:
            begins = not output.ids
            keeps_end_token = keeps_end_token and response.keeps_end_token
            text, count = output.add(response.ids, keeps_end_token=response.keeps_end_token)
            if count and begins:
                trace.event("first token")
            input_tokens = response.input_tokens or input_tokens
            slot.used = len(output.ids) + (input_tokens or 0)
            chunk = Chunk(
                *(text, len(output.ids), input_tokens),
                ids=tuple(response.ids[:count]),
                log_probs=tuple(response.log_probs[:count]),
                prompt_log_probs=tuple(response.prompt_log_probs),
            )
            if response.final or output.ended:
                break
            yield chunk
    # Here the request has been stopped in the engine, if it did not end there by itself.
    text += output.rest()
    room = min(request.max_tokens, (context_length or math.inf) - (input_tokens or 0))
    # Where the engine leaves the end token out, an answer that was not cut off ended with it.
    ended = output.ended or (not keeps_end_token and len(output.ids) < room)
    reason: FinishReason = "stop" if ended else "length"
    stop_sequence = output.stops.matched
    yield replace(
        chunk,
        text=text,
        queued=slot.waited,
        finish_reason=reason,
        stop_sequence=stop_sequence,
        stop_token=None if stop_sequence is not None else output.stop_token,
    )


class _Output:
    """The output of one request: its ids, up to what ends it, and their text."""

    def __init__(self, request: Request, tokenizer: Tokenizer, end_tokens: EndTokens) -> None:
        self._request = request
        self._end_ids = frozenset(end_tokens.for_request(request.sent_end_id))
        self._stop_ids = frozenset(request.stop_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
        )
        self.stops = StopSequences(request.stop_sequences)
        self.stop_token: int | None = None  # the one of stop_token_ids that ended it
        self.by_end_token = False
        self.ids: list[int] = []
        self.add(list(request.continued_ids), keeps_end_token=True)  # their text has been delivered

    @property
    def ended(self) -> bool:
        return self.by_end_token or self.stop_token is not None or self.stops.matched is not None

    def add(self, ids: list[int], *, keeps_end_token: bool) -> tuple[str, int]:
        """Add ids up to what ends the output; return their text, and how many of them count.

        An end token counts where it is part of every output, and not with TensorRT-LLM's C++ backend: that
        leaves out one end token, and the others, which are stop words to it, are left out here.
        """
        may_end_here = not (self._end_ids.isdisjoint(ids) and self._stop_ids.isdisjoint(ids))
        if not self._request.stop_sequences and not may_end_here:
            self.ids += ids
            return self._detokenizer.decode(ids), len(ids)
        text = ""
        count = 0
        for token in ids:
            is_stop = token in self._stop_ids
            # An engine makes none before min_tokens. One that does not know that it is one may.
            is_end = token in self._end_ids and len(self.ids) >= self._request.min_tokens
            if not (is_stop or is_end) or self._request.include_stop:
                text += self.stops.feed(self._detokenizer.decode([token]))
            if is_stop:
                self.stop_token = token
            elif is_end:
                self.by_end_token = True
            if not is_end or is_stop or keeps_end_token:
                self.ids.append(token)
                count += 1
            if self.ended:
                break
        return text, count

    def rest(self) -> str:
        """Return the text that was held back, at the end of the output."""
        text = ""
        if self.stops.matched is None:
            text = self.stops.feed(self._detokenizer.flush()) + self.stops.flush()
        if self._request.include_stop:
            text += self.stops.matched or ""
        return text
