"""Answers with many values beside other requests."""

import threading
from typing import Any

import pytest

from cog_triton.api.openai.protocol.answering import MAX_VALUES_ON_LOOP
from cog_triton.api.openai.protocol.choices import ChoiceWriter
from cog_triton.api.openai.protocol.log_probs import chat_log_probs
from cog_triton.api.openai.routes.tokens import DETOKENIZED
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from tests.unit.api.openai.support import TEXT, Backend, Tokenizer, post, talkative

TOP = tuple((97 + place, -1.0) for place in range(20))


@pytest.mark.parametrize(
    ("tokens", "on_loop"),
    [(1, True), (MAX_VALUES_ON_LOOP, False)],
    ids=["small", "large"],
)
def test_a_large_answer_is_made_off_the_event_loop(
    tokens: int, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    whole = ChoiceWriter.whole

    def noted(*given: Any) -> dict[str, Any]:
        made.append(threading.current_thread().name)
        return whole(*given)

    monkeypatch.setattr(ChoiceWriter, "whole", noted)
    token = TokenLogProb(97, -1.0, TOP)
    chunk = Chunk("a" * tokens, tokens, 3, "stop", ids=(97,) * tokens, log_probs=(token,) * tokens)
    reply = post(talkative(chunk), TEXT, logprobs=5)
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == tokens
    (name,) = made
    assert ("asyncio" not in name) == on_loop  # as threads of asyncio.to_thread are named


def test_the_text_of_a_token_is_made_once() -> None:
    asked: list[list[int]] = []

    class Counting(Tokenizer):
        def decode(self, ids: list[int], **_: Any) -> str:
            asked.append(ids)
            return super().decode(ids)

    tokenizer: Any = Counting("")
    entries = chat_log_probs(tokenizer, [TokenLogProb(97, -1.0, TOP)] * 3)
    assert [entry["token"] for entry in entries] == ["a"] * 3
    assert len(asked) == len(TOP)


@pytest.mark.parametrize(
    ("tokens", "status"), [(100, 200), (DETOKENIZED + 1, 400)], ids=["few", "many"]
)
def test_the_texts_of_tokens_are_had_of_so_many(tokens: int, status: int) -> None:
    backend = Backend(MAX_SEQUENCE_LENGTH="1000")
    asked = {"prompt": "a" * tokens, "add_special_tokens": False}
    assert post(backend, "/tokenize", **asked, return_token_strs=True).status_code == status
