"""Answers as clients get them, whole and in events: answers.yaml."""

import itertools
import secrets
import time
from typing import Any

import pytest
from pydantic import TypeAdapter

from cog_triton.generation import Chunk
from tests.support import load_cases
from tests.unit.api.openai.support import events, post, talkative

CASES = load_cases(__file__, "answers.yaml")["cases"]
CHUNKS = TypeAdapter(list[Chunk])


@pytest.fixture(autouse=True)
def same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "token_hex", lambda _: str(next(numbers)))
    monkeypatch.setattr(time, "time", lambda: 1.0)


def reply_to(case: dict[str, Any], **streamed: Any) -> Any:
    chunks = CHUNKS.validate_python([{"input_tokens": 3, **chunk} for chunk in case["chunks"]])
    return post(talkative(*chunks), case["path"], **case.get("fields", {}), **streamed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["case"]))
def test_an_answer(case: dict[str, Any]) -> None:
    assert reply_to(case).json() == case["answer"]


STREAMED = [case for case in CASES if "events" in case]


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: str(case["case"]))
def test_its_events(case: dict[str, Any]) -> None:
    reply = reply_to(case, stream=True, **case.get("streamed", {}))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(reply)
    numbers = [event.pop("sequence_number", number) for number, event in enumerate(found)]
    assert numbers == list(range(len(found)))
    assert found == case["events"]
