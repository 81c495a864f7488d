"""The one path of a request: a Request in, chunks of text out.

What belongs to one request lives in the locals of ``generate``: its detokenizer, its stop matcher, its
counts. Closing the generator early stops the request in the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from cog_triton.detokenizer import IncrementalDetokenizer
from cog_triton.sampling import Request, triton_inputs
from cog_triton.stop_sequences import StopSequences
from cog_triton.tokenizer import Tokenizer
from cog_triton.triton.client import TritonClient

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
    """

    text: str
    output_tokens: int
    input_tokens: int | None
    finish_reason: FinishReason | None = None


async def generate(
    request: Request, client: TritonClient, tokenizer: Tokenizer
) -> AsyncGenerator[Chunk, None]:
    """Streams the answer to a request.

    Raises:
        CogTritonError: by what went wrong; see ``cog_triton.errors``.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    stops = StopSequences(request.stop_sequences)
    end_id = tokenizer.eos_token_id if request.end_id is None else request.end_id
    output_tokens, last_id, input_tokens = 0, None, None
    async with client.stream(secrets.token_hex(8), triton_inputs(request)) as responses:
        async for response in responses:
            output_tokens += len(response.ids)
            input_tokens = response.input_tokens or input_tokens
            last_id = response.ids[-1] if response.ids else last_id
            text = stops.feed(detokenizer.decode(response.ids))
            if response.final or stops.matched is not None:
                break
            yield Chunk(text, output_tokens, input_tokens)
    # Here the request has been stopped in the engine if a stop sequence ended it.
    if stops.matched is None:
        text += stops.feed(detokenizer.flush()) + stops.flush()
    ended = stops.matched is not None or last_id == end_id
    yield Chunk(text, output_tokens, input_tokens, "stop" if ended else "length")
