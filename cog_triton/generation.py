"""The one path of a request: a Request in, chunks of text out."""

import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cog_triton.client.stream import Streams
from cog_triton.client.tracing import Steps
from cog_triton.request.admission import Admission, Slot, Tenant
from cog_triton.request.request import Request, request_parameters, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import Tokenizer, text_limits
from cog_triton.wire import TokenLogProb

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
) -> AsyncGenerator[Chunk, None]:
    """Stream the answer to a request, or raise a CogTritonError. Closing it early stops the request.

    Args:
        context_length: the most tokens of prompt and output together; None if only the engine knows.
        request_id: a name in Triton that no other running request has; None for a random one.
    """
    text_limits(tokenizer, context_length).check("the prompt", len(request.prompt))
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
    )
    stops, stop_token, input_tokens = StopSequences(request.stop_sequences), None, None
    end_id = request.effective_end_id(tokenizer.eos_token_id)
    # Without a special token's mark, the detokenizer would show it.
    hidden = None if request.include_stop else end_id
    ids = [*request.continued_ids]  # of the whole output
    _decoded(request, ids, detokenizer, stops, hidden)  # whose text has been delivered
    keeps_end_token, inputs, parameters = True, triton_inputs(request), request_parameters(request)
    stream = client.stream(request_id or secrets.token_hex(8), inputs, parameters=parameters)
    place = admission.acquire(tenant) if admission else contextlib.nullcontext(Slot())
    async with Steps("admission") as trace, place as slot, contextlib.aclosing(stream):
        parameters |= trace.begin("triton")
        async for response in stream:
            text, count, stop_token = _decoded(request, response.ids, detokenizer, stops, hidden)
            if count and not ids:
                trace.event("first token")
            ids += response.ids[:count]
            input_tokens = response.input_tokens or input_tokens
            slot.used = len(ids) + (input_tokens or 0)
            keeps_end_token = keeps_end_token and response.keeps_end_token
            chunk = Chunk(
                *(text, len(ids), input_tokens),
                ids=tuple(response.ids[:count]),
                log_probs=tuple(response.log_probs[:count]),
                prompt_log_probs=tuple(response.prompt_log_probs),
            )
            if response.final or stops.matched is not None or stop_token is not None:
                break
            yield chunk
    # Here the request has been stopped in the engine if a stop sequence or a stop token ended it.
    if stops.matched is None:
        text += stops.feed(detokenizer.flush()) + stops.flush()
    if request.include_stop:
        text += stops.matched or ""
    room = min(request.max_tokens, (context_length or math.inf) - (input_tokens or 0))
    # Where the engine leaves the end token out, an answer that was not cut off ended with it.
    by_end_token = ids[-1:] == [end_id] if keeps_end_token else len(ids) < room
    ended = stops.matched is not None or stop_token is not None or by_end_token
    reason: FinishReason = "stop" if ended else "length"
    chunk = replace(chunk, text=text, queued=slot.waited, stop_sequence=stops.matched)
    stop_token = None if stops.matched is not None else stop_token
    yield replace(chunk, finish_reason=reason, stop_token=stop_token)


def _decoded(
    request: Request,
    ids: list[int],
    detokenizer: IncrementalDetokenizer,
    stops: StopSequences,
    hidden: int | None,  # the end token, where it is not part of the text
) -> tuple[str, int, int | None]:
    """Decode ids up to what ends the output. Returns (text, number of ids, stop token or None)."""
    if not request.stop_sequences and not request.stop_token_ids:
        return detokenizer.decode(ids[:-1] if ids[-1:] == [hidden] else ids), len(ids), None
    text = ""
    for count, token in enumerate(ids, 1):
        stop_token = token if token in request.stop_token_ids else None
        if token != hidden and (stop_token is None or request.include_stop):
            text += stops.feed(detokenizer.decode([token]))
        if stop_token is not None or stops.matched is not None:
            return text, count, stop_token
    return text, len(ids), None
