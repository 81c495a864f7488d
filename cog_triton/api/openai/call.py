"""The record of one request: what its log line, its figures and its span say."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from cog_triton.api.openai.keys import ANYBODY, Key
from cog_triton.errors import CogTritonError
from cog_triton.generation import Chunk
from cog_triton.request.admission import Tenant
from cog_triton.request.request import Request

Chunks = AsyncGenerator[Chunk, None]
# What an answer is expected to have before its length is known, if more is allowed.
EXPECTED_TOKENS = 256
CHARACTERS_PER_TOKEN = 4
BATCH_CALL = "cog_triton.batch_call"  # the key of a ``Call`` in the ASGI scope of a batch's line


@dataclass
class Call:
    """A request, from its first byte to its end.

    Attributes:
        began: when it came, on the monotonic clock.
        model: as the client names it, once it has named one that is served.
        first_token: seconds from the beginning to the first token of the answers.
        queued: the longest time in seconds that one of its answers waited in the queue.
        finish_reasons: one for each of its answers.
        error: the code of the error that ended it.
        on_gap: called with the seconds between two chunks of an answer.
        large: its body is so large that it is prepared in a thread.
        names: for errors, the names of fields in the body; see ``RequestBody.names``.
        batch: it is a line of a batch.
        anthropic: at a path that both APIs have, its client reads Anthropic's forms.
        reason: why it was refused, for the log.
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
    on_gap: Callable[[float], object] = lambda _: None
    large: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    batch: bool = False
    method: str = ""
    anthropic: bool = False
    reason: str = ""

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tenant(self, request: Request) -> Tenant:
        """Return the tenant of a request to the engine, with the tokens that it may take."""
        prompt = len(request.prompt_ids) or len(request.prompt) // CHARACTERS_PER_TOKEN
        expected = float(prompt + min(request.max_tokens, EXPECTED_TOKENS))
        return Tenant(self.key.name, self.key.weight, expected, request.priority, batch=self.batch)

    async def observed(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of one answer, and note them."""
        previous_at: float | None = None
        last_chunk: Chunk | None = None
        reason = "abort"
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    last_chunk = chunk
                    if chunk.ids or chunk.text:
                        previous_at = self._note_tokens(previous_at)
                    reason = chunk.finish_reason or reason
                    yield chunk
        except Exception as error:
            reason = "error"
            self.error = error.code if isinstance(error, CogTritonError) else "internal"
            raise
        finally:
            self.finish_reasons.append(reason)
            if last_chunk is not None:
                self.output_tokens += last_chunk.output_tokens
                self.input_tokens += last_chunk.input_tokens or 0
                self.queued = max(self.queued, last_chunk.queued)

    def _note_tokens(self, previous_at: float | None) -> float:
        """Note that tokens of an answer have come; return when."""
        now = time.monotonic()
        if previous_at is not None:
            self.on_gap(now - previous_at)
        elif self.first_token is None:
            self.first_token = now - self.began
        return now


CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)


def current() -> Call:
    """Return the request that is being answered."""
    return CURRENT.get() or Call("", "")
