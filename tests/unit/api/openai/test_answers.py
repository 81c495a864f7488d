"""Answers as clients get them, whole and in events."""

import itertools
import secrets
import time
from typing import Any

import pytest

from tests.unit.api.openai.cases_answers import CASES, AnswerCase
from tests.unit.api.openai.support import events, post, talkative


@pytest.fixture(autouse=True)
def same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "token_hex", lambda _: str(next(numbers)))
    monkeypatch.setattr(time, "time", lambda: 1.0)


def reply_to(case: AnswerCase, **stream_fields: Any) -> Any:
    return post(talkative(*case.chunks), case.path, **case.fields, **stream_fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_answer(case: AnswerCase) -> None:
    assert reply_to(case).json() == case.answer


STREAMED = [case for case in CASES if case.events is not None]


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: case.name)
def test_its_events(case: AnswerCase) -> None:
    reply = reply_to(case, stream=True, **case.stream_fields)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(reply)
    numbers = [event.pop("sequence_number", number) for number, event in enumerate(found)]
    assert numbers == list(range(len(found)))
    assert found == case.events
