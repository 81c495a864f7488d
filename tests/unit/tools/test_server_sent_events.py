import pytest

from tools.server_sent_events import EventParser

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
