"""The routes of Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering, new_id
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.messages.fields import IGNORED, REFUSED, CountBody, MessagesBody
from cog_triton.faces.openai.messages.inputs import chat_body
from cog_triton.faces.openai.messages.writer import MessageWriter
from cog_triton.faces.openai.sampling import check_fields
from cog_triton.faces.openai.served import FromApp, RequestId
from cog_triton.faces.openai.tokens import token_ids
from cog_triton.faces.openai.turns import body_prompt, chat_turn

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesBody, served: FromApp, request_id: RequestId) -> Answering:
    served.adapter(body.model)
    headers = check_fields(body, REFUSED, IGNORED)
    turn = await off_loop(lambda: chat_turn(chat_body(body), served))
    reader = turn.reader(lambda: new_id("toolu_"))
    writer = MessageWriter(body.model, reader, enforced=turn.enforced)
    stream = bool(body.stream)
    return Answering(served, writer, [turn.request], request_id, headers, stream=stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, served: FromApp) -> dict[str, int]:
    """How many tokens messages are, as the model sees them."""
    served.adapter(body.model)
    prompt = await off_loop(lambda: body_prompt(chat_body(body), served))
    return {"input_tokens": len(await token_ids(served, prompt, special=False))}
