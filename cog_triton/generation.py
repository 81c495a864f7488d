"""The one path of a request: a Request in, chunks of text out.

What belongs to one request lives in the locals of ``generate``: its detokenizer, its stop matcher, its
counts. Closing the generator early stops the request in the engine.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Literal

from cog_triton.client.resume import Streams
from cog_triton.client.stream import Response
from cog_triton.request.admission import Admission, Place, Share
from cog_triton.request.request import Request, effective_end_id, request_parameters, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.stop_sequences import StopSequences
from cog_triton.text.tokenizer import Tokenizer, text_limits
from cog_triton.wire import TokenLogProb

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer.

    Attributes:
        text: may be empty: a chunk without text says how far the request has come.
        output_tokens: tokens received so far.
        input_tokens: tokens of the prompt, if the engine says.
        finish_reason: set on the last chunk alone: ``stop`` for an end token or a stop sequence,
            ``length`` for max_tokens or the end of the context.
        queued: seconds that the request waited for its turn; set on the last chunk alone.
        ids: the tokens since the chunk before. The text may lag behind them: it may end within a
            character, or with what could become a stop sequence.
        log_probs: one per id if they were asked for, else empty.
        prompt_log_probs: on the first chunk, one per token of the prompt if they were asked for.
        stop_sequence: on the last chunk, the one that ended the answer; None if none did.
        stop_token: on the last chunk, the one of the request's stop_token_ids that ended the answer. It is
            counted, and among the ids, as an end token is.
    """

    text: str
    output_tokens: int
    input_tokens: int | None
    finish_reason: FinishReason | None = None
    queued: float = 0.0
    ids: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProb, ...] = ()
    stop_sequence: str | None = None
    stop_token: int | None = None
    prompt_log_probs: tuple[TokenLogProb, ...] = ()


async def generate(
    request: Request,
    client: Streams,
    tokenizer: Tokenizer,
    *,
    admission: Admission | None = None,
    context_length: int | None = None,
    request_id: str | None = None,
    share: Share | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Streams the answer to a request.

    Args:
        admission: gives it its turn; None lets it pass.
        context_length: the most tokens that prompt and output may have together; None if only the engine
            knows.
        request_id: its name in Triton, of no other request that runs; None for a random one.
        share: whose it is, at the admission.

    Raises:
        CogTritonError: by what went wrong; see ``cog_triton.errors``.
    """
    text_limits(tokenizer, context_length).check("the prompt", len(request.prompt))
    detokenizer, stops = new_detokenizer(request, tokenizer), StopSequences(request.stop_sequences)
    stop_ids, stop_token = frozenset(request.stop_token_ids), None
    end_id = effective_end_id(request, tokenizer.eos_token_id)
    ids: list[int] = []  # of the whole output
    input_tokens, keeps_end_token = None, True
    inputs, parameters = triton_inputs(request), request_parameters(request)
    stream = client.stream(request_id or secrets.token_hex(8), inputs, parameters=parameters)
    async with turn(admission, share) as place, stream as responses:
        async for arrived in responses:
            response, stop_token = until_token(arrived, stop_ids)
            new_ids = shown_ids(request, response.ids, stop_token, end_id)
            text = stops.feed(detokenizer.decode(new_ids))
            if stops.matched is not None:
                response = first_tokens(response, tokens_to_stop(request, tokenizer, ids, new_ids))
            ids += response.ids
            input_tokens = response.input_tokens or input_tokens
            place.used = len(ids) + (input_tokens or 0)
            keeps_end_token = keeps_end_token and response.keeps_end_token
            told = chunk_of(response, text, len(ids), input_tokens)
            if response.final or stops.matched is not None or stop_token is not None:
                break
            yield told
    # Here the request has been stopped in the engine if a stop sequence or a stop token ended it.
    if stops.matched is None:
        text += stops.feed(detokenizer.flush()) + stops.flush()
    full = len(ids) >= request.max_tokens or (
        context_length is not None and (input_tokens or 0) + len(ids) >= context_length
    )
    # Where the engine leaves the end token out, an answer that was not cut off ended with it.
    by_end_token = ids[-1:] == [end_id] if keeps_end_token else not full
    stop_token = stop_token if stops.matched is None else None
    if request.include_stop:
        text += stops.matched or ""
    ended = stops.matched is not None or stop_token is not None or by_end_token
    reason: FinishReason = "stop" if ended else "length"
    told = replace(told, text=text, queued=place.waited, stop_sequence=stops.matched)
    yield replace(told, finish_reason=reason, stop_token=stop_token)


def chunk_of(response: Response, text: str, output_tokens: int, input_tokens: int | None) -> Chunk:
    """What a response brings."""
    return Chunk(
        text,
        output_tokens,
        input_tokens,
        ids=tuple(response.ids),
        log_probs=tuple(response.log_probs),
        prompt_log_probs=tuple(response.prompt_log_probs),
    )


def new_detokenizer(request: Request, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
    )


def until_token(response: Response, stops: frozenset[int]) -> tuple[Response, int | None]:
    """Truncate a response behind its first stop token. Returns the response and that token, or None."""
    if stops.isdisjoint(response.ids):
        return response, None
    count = next(count for count, token in enumerate(response.ids, 1) if token in stops)
    return first_tokens(response, count), response.ids[count - 1]


def first_tokens(response: Response, count: int) -> Response:
    return replace(response, ids=response.ids[:count], log_probs=response.log_probs[:count])


def shown_ids(request: Request, ids: list[int], stop_token: int | None, end_id: int) -> list[int]:
    """The ids whose text is in the output: without the token that ended it, unless that is wanted."""
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


def turn(admission: Admission | None, share: Share | None) -> AbstractAsyncContextManager[Place]:
    """A request's place; without an admission it has one at once."""
    if admission is None:
        return contextlib.nullcontext(Place())
    return admission.place(share=share or Share())
