"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, on the same chats."""

from fastapi import APIRouter

from cog_triton.api.openai.body_route import BodyRoute, off_loop
from cog_triton.api.openai.chats.from_messages import chat_body, use_served_model
from cog_triton.api.openai.chats.prompt import chat_prompt
from cog_triton.api.openai.chats.token_ids import token_ids
from cog_triton.api.openai.chats.turn import chat_turn
from cog_triton.api.openai.protocol.answering import Answering
from cog_triton.api.openai.protocol.messages import MessageWriter
from cog_triton.api.openai.protocol.openapi import STREAMED
from cog_triton.api.openai.schemas.messages import CountBody, MessagesBody
from cog_triton.api.openai.served import FromApp

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesBody, served: FromApp) -> Answering:
    requested_model = body.model
    use_served_model(body, served)
    turn = await off_loop(lambda: chat_turn(chat_body(body, served), served))
    return Answering(served, body, MessageWriter(requested_model, turn), [turn.request])


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, served: FromApp) -> dict[str, int]:
    """Count the tokens of messages as the model sees them."""
    use_served_model(body, served)
    prompt = await off_loop(lambda: chat_prompt(chat_body(body, served), served))
    return {"input_tokens": len(await token_ids(served, prompt, special=False))}
