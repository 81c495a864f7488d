"""The end of an answer whose client leaves."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from cog_triton.api.openai.errors import CLIENT_GONE
from cog_triton.api.openai.protocol.answering import Answering

pytestmark = pytest.mark.anyio


class Unanswered(Answering):
    """An answer that never begins."""

    async def _answer(self, *_: object) -> None:
        await asyncio.Event().wait()


async def test_a_client_that_leaves_before_its_answer_has_a_status_in_the_log() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    nothing: Any = None
    answer = Unanswered(nothing, nothing, nothing, [])
    await answer({"type": "http"}, receive, send)
    assert sent[0]["type"] == "http.response.start"
    assert sent[0]["status"] == CLIENT_GONE
