"""Several answers to a chat or to prompts."""

from collections.abc import Sequence

from cog_triton.api.openai.body_route import off_loop
from cog_triton.api.openai.chats.completions import repeated
from cog_triton.api.openai.chats.token_ids import with_ids
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.completions import CompletionBody
from cog_triton.api.openai.served import Served
from cog_triton.request.request import Request


async def requests_for_answers(
    body: ChatBody | CompletionBody, served: Served, prompts: Sequence[Request]
) -> list[Request]:
    """Return the requests for ``n`` answers to each prompt."""
    prompts = [await with_ids(prompt, body, served) for prompt in prompts]
    return await off_loop(repeated, prompts, body.n or 1, served)
