"""The one path of a request: a Request in, chunks of text out."""

import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
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
from cog_triton.text.stop_sequences import StopSequences
from cog_triton.text.tokenizer import Tokenizer, text_limits

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer; some fields are set only in the first or in the last one."""

    # It lags behind the ids: it may end within a character, or before what could become a stop sequence.
    text: str
    # Number of tokens received so far.
    output_tokens: int
    # Number of the prompt's tokens, if the engine says.
    input_tokens: int | None
    # In the last chunk: "stop" for an end token or a stop sequence, "length" for max_tokens or a full
    # context.
    finish_reason: FinishReason | None = None
    # In the last chunk: seconds in the queue.
    queued: float = 0.0
    # New since the chunk before.
    ids: tuple[int, ...] = ()
    # One for each id, if the request wants them.
    log_probs: tuple[TokenLogProb, ...] = ()
    # In the last chunk: the one that ended the answer.
    stop_sequence: str | None = None
    # In the last chunk: the one of the request's stop_token_ids that ended the answer. It counts, and is
    # among the ids.
    stop_token: int | None = None
    # In the first chunk, if the request wants them.
    prompt_log_probs: tuple[TokenLogProb, ...] = ()


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
    # The request is built, and refused where no engine could honour it.
    text_limits(tokenizer, context_length).check("the prompt", len(request.prompt))
    if end_tokens is None:
        end_tokens = _end_tokens_of(tokenizer)
    output = _Output(request, tokenizer, end_tokens)
    inputs = triton_inputs(request)
    if end_tokens.named_in_requests and request.sent_end_id is None:
        inputs["end_id"] = np.array([[end_tokens.first]], np.int32)
    parameters = request_parameters(request)
    request_id = request_id or secrets.token_hex(8)
    input_tokens = None
    keeps_end_token = True
    # It is admitted once it has a slot.
    place = admission.acquire(tenant) if admission else contextlib.nullcontext(Slot())
    async with Steps("admission") as trace, place as slot:
        # Then its answer is streamed.
        parameters |= trace.begin("triton")
        stream = client.stream(request_id, inputs, parameters=parameters)
        async with contextlib.aclosing(stream):
            async for response in stream:
                begins = not output.ids
                keeps_end_token = keeps_end_token and response.keeps_end_token
                text, count = output.add(response.ids, keeps_end_token=response.keeps_end_token)
                if count and begins:
                    trace.event("first token")
                input_tokens = response.input_tokens or input_tokens
                slot.used = len(output.ids) + (input_tokens or 0)
                chunk = Chunk(
                    text=text,
                    output_tokens=len(output.ids),
                    input_tokens=input_tokens,
                    ids=tuple(response.ids[:count]),
                    log_probs=tuple(response.log_probs[:count]),
                    prompt_log_probs=tuple(response.prompt_log_probs),
                )
                if response.final or output.ended:
                    break
                yield chunk
    # Here the request has been stopped in the engine, if it did not end there by itself.
    rest = output.rest()
    room = min(request.max_tokens, (context_length or math.inf) - (input_tokens or 0))
    # Where the engine leaves the end token out, an answer that was not cut off ended with it.
    ended = output.ended or (not keeps_end_token and len(output.ids) < room)
    stop_sequence = output.stops.matched
    yield replace(
        chunk,
        text=text + rest,
        queued=slot.waited,
        finish_reason="stop" if ended else "length",
        stop_sequence=stop_sequence,
        stop_token=None if stop_sequence is not None else output.stop_token,
    )


def _end_tokens_of(tokenizer: Tokenizer) -> EndTokens:
    end_id = tokenizer.eos_token_id
    return EndTokens() if end_id is None else EndTokens((end_id,))


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
        # The one of stop_token_ids that ended the output.
        self.stop_token: int | None = None
        self.by_end_token = False
        self.ids: list[int] = []
        # Their text has been delivered.
        self.add(list(request.continued_ids), keeps_end_token=True)

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
