"""The one path of a request: a Request in, chunks of text out.

What belongs to one request lives in the locals of ``generate``: its detokenizer, its stop matcher, its
counts. Closing the generator early stops the request in the engine.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Literal

from cog_triton.client.stream import Response, Streams
from cog_triton.request.admission import Admission, Slot, Tenant
from cog_triton.request.request import Request, request_parameters, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.stop_sequences import StopSequences
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
    """Stream the answer to a request.

    Args:
        admission: the queue; None lets the request pass.
        context_length: the most tokens of prompt and output together; None if only the engine knows.
        request_id: a name in Triton that no other running request has; None for a random one.
        tenant: whose it is, in the queue.

    Raises:
        CogTritonError: see ``cog_triton.errors``.
    """
    text_limits(tokenizer, context_length).check("the prompt", len(request.prompt))
    detokenizer, stops = new_detokenizer(request, tokenizer), StopSequences(request.stop_sequences)
    stop_ids, stop_token = frozenset(request.stop_token_ids), None
    end_id = request.effective_end_id(tokenizer.eos_token_id)
    ids: list[int] = []  # of the whole output
    input_tokens, keeps_end_token = None, True
    inputs, parameters = triton_inputs(request), request_parameters(request)
    stream = client.stream(request_id or secrets.token_hex(8), inputs, parameters=parameters)
    place = admission.acquire(tenant) if admission else contextlib.nullcontext(Slot())
    async with place as slot, stream as responses:
        async for arrived in responses:
            response, stop_token = split_at_stop_token(arrived, stop_ids)
            new_ids = shown_ids(request, response.ids, stop_token, end_id)
            text = stops.feed(detokenizer.decode(new_ids))
            if stops.matched is not None:
                response = first_tokens(response, tokens_to_stop(request, tokenizer, ids, new_ids))
            ids += response.ids
            input_tokens = response.input_tokens or input_tokens
            slot.used = len(ids) + (input_tokens or 0)
            keeps_end_token = keeps_end_token and response.keeps_end_token
            chunk = _chunk(response, text, len(ids), input_tokens)
            if response.final or stops.matched is not None or stop_token is not None:
                break
            yield chunk
    # Here the request has been stopped in the engine if a stop sequence or a stop token ended it.
    if stops.matched is None:
        text += stops.feed(detokenizer.flush()) + stops.flush()
    if request.include_stop:
        text += stops.matched or ""
    stop_token = stop_token if stops.matched is None else None
    length = (input_tokens or 0) + len(ids)
    full = len(ids) >= request.max_tokens or length >= (context_length or math.inf)
    # Where the engine leaves the end token out, an answer that was not cut off ended with it.
    by_end_token = ids[-1:] == [end_id] if keeps_end_token else not full
    ended = stops.matched is not None or stop_token is not None or by_end_token
    reason: FinishReason = "stop" if ended else "length"
    chunk = replace(chunk, text=text, queued=slot.waited, stop_sequence=stops.matched)
    yield replace(chunk, finish_reason=reason, stop_token=stop_token)


def _chunk(response: Response, text: str, output_tokens: int, input_tokens: int | None) -> Chunk:
    ids, log_probs = tuple(response.ids), tuple(response.log_probs)
    prompt = tuple(response.prompt_log_probs)
    return Chunk(
        text, output_tokens, input_tokens, ids=ids, log_probs=log_probs, prompt_log_probs=prompt
    )


def new_detokenizer(request: Request, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
    )


def split_at_stop_token(response: Response, stops: frozenset[int]) -> tuple[Response, int | None]:
    """Truncate after the first stop token. Returns (response, stop token or None)."""
    for count, token in enumerate(response.ids, 1):
        if token in stops:
            return first_tokens(response, count), token
    return response, None


def first_tokens(response: Response, count: int) -> Response:
    return replace(response, ids=response.ids[:count], log_probs=response.log_probs[:count])


def shown_ids(request: Request, ids: list[int], stop_token: int | None, end_id: int) -> list[int]:
    """Return the ids whose text is in the output: without the token that ended it, unless wanted."""
    if not ids or request.include_stop:
        return ids
    ended = stop_token is not None or (not request.skip_special_tokens and ids[-1] == end_id)
    return ids[:-1] if ended else ids


def tokens_to_stop(
    request: Request, tokenizer: Tokenizer, before: list[int], new: list[int]
) -> int:
    """Count the new ids up to the one that completed a stop sequence, which all of them have.

    The engine ran on meanwhile, by as many tokens as it had time for.
    """
    if len(new) == 1:
        return 1
    detokenizer, stops = new_detokenizer(request, tokenizer), StopSequences(request.stop_sequences)
    stops.feed(detokenizer.decode(before))
    for count, token in enumerate(new, 1):
        stops.feed(detokenizer.decode([token]))
        if stops.matched is not None:
            return count
    return len(new)
