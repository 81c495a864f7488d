"""One request, as its metrics, log line and trace have it. It is found by the context."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from cog_triton.errors import CogTritonError
from cog_triton.faces.openai.keys import ANYBODY, Key
from cog_triton.generation import Chunk
from cog_triton.request.admission import Tenant
from cog_triton.request.request import Request

EXPECTED_TOKENS = 256
"""Of an answer that may be longer, before its length is known."""
CHARACTERS_PER_TOKEN = 4


@dataclass
class Call:
    """The middleware's record of a request.

    Attributes:
        began: in seconds of ``time.monotonic``; first_token is counted from there.
        model: as the client names it; "" before it has named one that is served.
        queued: seconds that the longest of its answers waited in the queue.
        finish_reasons: of its answers.
        error: code of the error that ended it; "" if there was none, or none with a code.
        gap: called with the seconds between two pieces of an answer.
        large: its body is so large that it is prepared in a thread.
        names: see ``Body.names``.
    """

    id: str
    path: str
    key: Key = ANYBODY
    began: float = field(default_factory=time.monotonic)
    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    queued: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""
    status: int = 0
    gap: Callable[[float], object] = lambda _: None
    large: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tenant(self, request: Request) -> Tenant:
        """Return the tenant of a request to the engine, with the tokens that it may take."""
        prompt = len(request.prompt_ids) or len(request.prompt) // CHARACTERS_PER_TOKEN
        expected = prompt + min(request.max_tokens, EXPECTED_TOKENS)
        return Tenant(self.key.name, self.key.weight, float(expected), request.priority)


CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)


def current() -> Call:
    """Return the request that is being answered."""
    return CURRENT.get() or Call("", "")


async def observed(chunks: AsyncGenerator[Chunk, None], call: Call) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of one answer, and note them in the call."""
    last, chunk, reason = 0.0, None, "abort"
    try:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.ids or chunk.text:
                    now = time.monotonic()
                    if last:
                        call.gap(now - last)
                    elif call.first_token is None:
                        call.first_token = now - call.began
                    last = now
                reason = chunk.finish_reason or reason
                yield chunk
    except Exception as error:
        reason = "error"
        call.error = error.code if isinstance(error, CogTritonError) else "internal"
        raise
    finally:
        call.finish_reasons.append(reason)
        if chunk is not None:
            call.output_tokens += chunk.output_tokens
            call.input_tokens += chunk.input_tokens or 0
            call.queued = max(call.queued, chunk.queued)
