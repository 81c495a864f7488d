"""POST /v1/completions."""

import time

from fastapi import APIRouter

from cog_triton.api.openai.body_route import BodyRoute, off_loop
from cog_triton.api.openai.chats.completions import prompt_requests
from cog_triton.api.openai.protocol.answering import Answering
from cog_triton.api.openai.protocol.completions import CompletionWriter, TextChoice
from cog_triton.api.openai.protocol.openapi import STREAMED
from cog_triton.api.openai.routes.answers import requests_for_answers
from cog_triton.api.openai.schemas.completions import CompletionBody
from cog_triton.api.openai.served import FromApp

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, served: FromApp) -> Answering:
    """Completes prompts, in one body or as events."""
    prompts = await off_loop(prompt_requests, body, served)
    requests = await requests_for_answers(body, served, prompts)
    choices = [TextChoice(number, request, body, served) for number, request in enumerate(requests)]
    writer = CompletionWriter(body, int(time.time()), choices)
    return Answering(served, body, writer, requests)
