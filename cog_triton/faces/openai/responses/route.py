"""The route of /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.responses.fields import IGNORED, REFUSED, ResponsesBody
from cog_triton.faces.openai.responses.inputs import chat_body
from cog_triton.faces.openai.responses.writer import ResponseWriter
from cog_triton.faces.openai.sampling import check_fields
from cog_triton.faces.openai.served import FromApp, RequestId
from cog_triton.faces.openai.turns import chat_turn

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", responses=STREAMED)
async def responses(body: ResponsesBody, served: FromApp, request_id: RequestId) -> Answering:
    """Answers an input, in one body or as typed events. Nothing is stored."""
    headers = check_fields(body, REFUSED, IGNORED)
    turn = await off_loop(lambda: chat_turn(chat_body(body), served))
    writer = ResponseWriter(body, turn.reader(), served.backend.tokenizer, served.now())
    stream = bool(body.stream)
    return Answering(served, writer, [turn.request], request_id, headers, stream=stream)
