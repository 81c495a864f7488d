"""POST /tokenize and /detokenize, vLLM's."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.responses import Response

from cog_triton.api.openai.body_route import BodyRoute, off_loop
from cog_triton.api.openai.chats.prompt import chat_prompt
from cog_triton.api.openai.chats.token_ids import token_ids
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.protocol.events import dumps
from cog_triton.api.openai.schemas.tokens import DetokenizeBody, TokenizeBody
from cog_triton.api.openai.served import FromApp, Served

router = APIRouter(route_class=BodyRoute)
# Tokens that are decoded where a context has fewer. Decoding holds the lock of Python's threads.
DETOKENIZED = 2**16


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, served: FromApp) -> Response:
    """The token ids of a prompt, or of messages as the model sees them."""
    served.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages must be given", "prompt")
    if body.prompt is not None:
        text = body.prompt
        special = body.add_special_tokens is not False
    else:  # the template of a chat has the tokens that begin a text
        text = await off_loop(chat_prompt, body, served)
        special = bool(body.add_special_tokens)
    tokens = await token_ids(served, text, special=special)
    content = await off_loop(_tokens_as_json, body, served, tokens)
    return Response(content, media_type="application/json")


def _tokens_as_json(body: TokenizeBody, served: Served, tokens: Sequence[int]) -> bytes:
    names = None
    if body.return_token_strs:
        limit = _decoded_at_most(served)
        if len(tokens) > limit:
            text = f"return_token_strs supports at most {limit} tokens, not {len(tokens)}"
            raise invalid(text, "return_token_strs")
        names = served.backend.tokenizer.convert_ids_to_tokens(tokens)
    return dumps(
        {
            "count": len(tokens),
            "max_model_len": served.backend.context_length,
            "tokens": tokens,
            "token_strs": names,
        }
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, served: FromApp) -> Response:
    """The text of token ids, special ones included."""
    served.adapter(body.model)
    content = await off_loop(_text_as_json, body, served)
    return Response(content, media_type="application/json")


def _text_as_json(body: DetokenizeBody, served: Served) -> bytes:
    tokens = body.tokens
    limit = _decoded_at_most(served)
    if len(tokens) > limit:
        raise invalid(f"tokens must have at most {limit} items", "tokens")
    size = len(served.backend.tokenizer)
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        raise invalid(f"tokens must be between 0 and {size - 1}", "tokens")
    return dumps({"prompt": served.backend.tokenizer.decode(tokens)})


def _decoded_at_most(served: Served) -> int:
    return max(served.backend.context_length or 0, DETOKENIZED)
