"""POST /v1/chat/completions."""

import time

from fastapi import APIRouter

from cog_triton.api.openai.body_route import BodyRoute, off_loop
from cog_triton.api.openai.chats.turn import chat_turn
from cog_triton.api.openai.protocol.answering import Answering
from cog_triton.api.openai.protocol.chat import ChatChoice, ChatWriter
from cog_triton.api.openai.protocol.openapi import STREAMED
from cog_triton.api.openai.routes.answers import requests_for_answers
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.served import FromApp

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatBody, served: FromApp) -> Answering:
    """Answers messages, in one body or as events."""
    turn = await off_loop(chat_turn, body, served)
    requests = await requests_for_answers(body, served, [turn.request])
    choices = [
        ChatChoice(turn, number, request, body, served) for number, request in enumerate(requests)
    ]
    writer = ChatWriter(body, int(time.time()), choices)
    return Answering(served, body, writer, requests)
