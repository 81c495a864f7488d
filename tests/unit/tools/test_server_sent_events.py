import json
from typing import Any

import pytest

from tools.server_sent_events import AnswerError, EventParser, cog_part, http_error, openai_part

STREAM = (
    b'data: {"a": 1}\n\n'
    b": a comment\n\n"
    b"event: output\r\nid: 7\r\ndata:two\r\n\r\n"
    b"event: without data\n\n"
    b"data: \xc3\xa4\n\n"
    b"data: unfinished"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, len(STREAM)])
def test_events_are_the_same_however_they_are_split(size: int) -> None:
    parser = EventParser()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    assert [(name, data.strip()) for name, data in events] == [
        ("message", b'{"a": 1}'),
        ("output", b"two"),
        ("message", "ä".encode()),
    ]


@pytest.mark.parametrize(
    ("read", "event", "code"),
    [
        (cog_part, {"status": "failed", "error": "E2105 TritonUnavailable: gone"}, "E2105"),
        (cog_part, {"status": "canceled"}, "canceled"),
        (openai_part, {"error": {"message": "gone", "code": "E2105"}}, "E2105"),
        (openai_part, {"error": {"message": "full", "code": "rate_limit_exceeded"}}, "E2106"),
        (openai_part, "<html>", "failed"),
    ],
)
def test_an_event_is_an_error(read: Any, event: Any, code: str) -> None:
    with pytest.raises(AnswerError) as failed:
        read("completed", json.dumps(event).encode())
    assert failed.value.code == code


def test_a_body_is_an_error() -> None:
    error = http_error(b"Bad gateway", 502)
    assert (error.code, str(error)) == ("HTTP 502", "HTTP 502: not a JSON object: b'Bad gateway'")
    assert str(http_error(b'{"detail": "too long"}', 422)) == "HTTP 422: too long"
