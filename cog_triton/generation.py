"""The one path of a request: a Request in, chunks of text out."""

import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cog_triton.client.responses import Response
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
        context_length: maximum number of tokens of prompt and output together; None if only the engine
            knows.
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
    # It is admitted once it has a slot.
    place = admission.acquire(tenant) if admission else contextlib.nullcontext(Slot())
    async with Steps("admission") as trace, place as slot:
        # Then its answer is streamed.
        parameters |= trace.begin("triton")
        stream = client.stream(request_id, inputs, parameters=parameters)
        async with contextlib.aclosing(stream):
            async for response in stream:
                had_ids = bool(output.ids)
                chunk = output.add(response)
                if chunk.ids and not had_ids:
                    trace.event("first token")
                slot.used = output.all_tokens
                if response.final or output.ended:
                    break
                yield chunk
    # Here the request has been stopped in the engine, if it did not end there by itself.
    yield output.last(chunk, context_length=context_length, queued=slot.waited)


def _end_tokens_of(tokenizer: Tokenizer) -> EndTokens:
    end_id = tokenizer.eos_token_id
    return EndTokens() if end_id is None else EndTokens((end_id,))


class _Output:
    """The output of one request: its ids, up to what ends it, and their text."""

    def __init__(self, request: Request, tokenizer: Tokenizer, end_tokens: EndTokens) -> None:
        """Begin with what another deployment or start has delivered."""
        self.ids: list[int] = []
        self._request = request
        self._input_tokens: int | None = None
        # Whether an end token would be among the ids.
        self._keeps_end_token = True
        self._end_ids = frozenset(end_tokens.for_request(request.sent_end_id))
        self._stop_ids = frozenset(request.stop_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
        )
        self._stops = StopSequences(request.stop_sequences)
        # What ended it: one of the request's stop_token_ids, or an end token.
        self._stop_token: int | None = None
        self._by_end_token = False
        self._add_ids(list(request.continued_ids), keeps_end_token=True)

    @property
    def ended(self) -> bool:
        by_stop_token = self._stop_token is not None
        return self._by_end_token or by_stop_token or self._stops.matched is not None

    @property
    def all_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.ids) + (self._input_tokens or 0)

    def add(self, response: Response) -> Chunk:
        """Add the ids of a response, up to what ends the output; return what is new."""
        keeps_end_token = response.keeps_end_token
        self._keeps_end_token = self._keeps_end_token and keeps_end_token
        self._input_tokens = response.input_tokens or self._input_tokens
        text, count = self._add_ids(response.ids, keeps_end_token=keeps_end_token)
        return Chunk(
            text=text,
            output_tokens=len(self.ids),
            input_tokens=self._input_tokens,
            ids=tuple(response.ids[:count]),
            log_probs=tuple(response.log_probs[:count]),
            prompt_log_probs=tuple(response.prompt_log_probs),
        )

    def last(self, chunk: Chunk, *, context_length: int | None, queued: float) -> Chunk:
        """Return the last chunk, with the text that was held back and the reason of the end.

        Args:
            chunk: the chunk of the last response.
            queued: seconds in the queue.
        """
        text = chunk.text + self._rest()
        limit = (context_length or math.inf) - (self._input_tokens or 0)
        was_cut_off = len(self.ids) >= min(self._request.max_tokens, limit)
        # Where the engine leaves the end token out, an answer that was not cut off ended with it.
        ended = self.ended or (not self._keeps_end_token and not was_cut_off)
        stop_sequence = self._stops.matched
        return replace(
            chunk,
            text=text,
            queued=queued,
            finish_reason="stop" if ended else "length",
            stop_sequence=stop_sequence,
            stop_token=None if stop_sequence is not None else self._stop_token,
        )

    def _add_ids(self, ids: list[int], *, keeps_end_token: bool) -> tuple[str, int]:
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
                text += self._stops.feed(self._detokenizer.decode([token]))
            if is_stop:
                self._stop_token = token
            elif is_end:
                self._by_end_token = True
            if not is_end or is_stop or keeps_end_token:
                self.ids.append(token)
                count += 1
            if self.ended:
                break
        return text, count

    def _rest(self) -> str:
        """Return the text that was held back, at the end of the output."""
        text = ""
        if self._stops.matched is None:
            text = self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        if self._request.include_stop:
            text += self._stops.matched or ""
        return text
