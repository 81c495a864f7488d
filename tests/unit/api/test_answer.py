"""Texts of the predictor in a stream of events from Cog's server: any order, any cut, any loss."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.api.cog.answer import Answer

EVENTS = [(b"accept", b"text/event-stream")]


def event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


START = event("start", {})
COMPLETED = event("completed", {"status": "succeeded"})


@dataclass(frozen=True)
class Shown:
    """A text from the predictor."""

    place: int
    text: str


def output(text: str) -> bytes:
    """An event of Cog's server, whose index counts its texts and not ours."""
    return event("output", {"chunk": text, "index": 7})


Step = Shown | bytes


@dataclass
class Received:
    """What a client got."""

    names: list[str] = field(default_factory=list)  # of events
    texts: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    rest: bytes = b""  # that is no event


def receive(steps: Iterable[Step], headers: list[tuple[bytes, bytes]] = EVENTS) -> Received:
    async def read() -> bytes:
        answer = Answer(1 << 30, headers)
        for step in steps:
            if isinstance(step, Shown):
                answer.show(step.place, step.text)
            else:
                answer.feed_data(step)
        answer.feed_eof()
        answer.show(0, "late")
        answer.feed_eof()
        return await answer.read()

    received = Received()
    *events, received.rest = asyncio.run(read()).split(b"\n\n")
    for each in events:
        head, _, data = each.decode().partition("\ndata: ")
        name = head.removeprefix("event: ")
        received.names.append(name)
        if name == "output":
            fields = json.loads(data)
            received.texts.append(fields["chunk"])
            received.indices.append(fields["index"])
    return received


@st.composite
def steps_of(draw: st.DrawFn) -> tuple[str, list[Step]]:
    """A text, and what comes of it: the predictor's pieces in any order, some lost, and Cog's bytes."""
    text = draw(st.text("aé\u2028\n𝄞", max_size=12))
    shown = [Shown(place, piece) for place, piece in pieces(draw, text)]
    shown = draw(st.permutations(shown))
    shown = [each for each in shown if draw(st.booleans())]
    events = START + b"".join(output(piece) for _, piece in pieces(draw, text)) + COMPLETED
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=6)))
    steps: list[Step] = [events[begin:end] for begin, end in pairwise([0, *cuts, len(events)])]
    for each in shown:
        steps.insert(draw(st.integers(0, len(steps))), each)
    return text, steps


def pieces(draw: st.DrawFn, text: str) -> list[tuple[int, str]]:
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=4)) | {0, len(text)})
    return [(begin, text[begin:end]) for begin, end in pairwise(cuts)]


@given(steps_of())
def test_each_character_comes_once_in_order_whatever_is_late_or_lost(
    case: tuple[str, list[Step]],
) -> None:
    text, steps = case
    received = receive(steps)
    assert "".join(received.texts) == text
    assert received.indices == list(range(len(received.texts)))
    assert received.names[0] == "start"
    assert received.names[-1] == "completed"
    assert received.rest == b""


@given(steps_of(), st.data())
def test_what_is_cut_off_is_the_beginning_of_the_text(
    case: tuple[str, list[Step]], data: st.DataObject
) -> None:
    text, steps = case
    received = receive(steps[: data.draw(st.integers(0, len(steps)))])
    assert text.startswith("".join(received.texts))


CASES: dict[str, tuple[list[Step], list[str]]] = {
    "a text comes at once and once": (
        [START, Shown(0, "a"), Shown(1, "bc"), output("abc"), Shown(3, "d"), output("d")],
        ["a", "bc", "d"],
    ),
    "a text before the beginning waits for it": (
        [Shown(0, "a"), Shown(1, "b"), START],
        ["a", "b"],
    ),
    "texts in another order": (
        [START, Shown(1, "b"), Shown(2, "c"), Shown(0, "a")],
        ["a", "b", "c"],
    ),
    "Cog's server has what was lost": (
        [START, Shown(0, "a"), Shown(2, "c"), output("ab"), Shown(3, "d"), output("cd")],
        ["a", "b", "c", "d"],
    ),
    "Cog's server may be ahead within a text": (
        [START, output("ab"), Shown(0, "a"), Shown(1, "bcd"), output("cd")],
        ["ab", "cd"],
    ),
    "a lost text that nobody else has keeps back what follows": (
        [START, Shown(0, "a"), Shown(2, "c")],
        ["a"],
    ),
}


@pytest.mark.parametrize(("steps", "texts"), CASES.values(), ids=CASES)
def test_texts_go_out_as_soon_as_anybody_has_them(steps: list[Step], texts: list[str]) -> None:
    assert receive(steps).texts == texts


def test_other_events_keep_their_place_between_texts() -> None:
    steps: list[Step] = [START, Shown(0, "a"), event("log", {}), output("ab"), COMPLETED]
    assert receive(steps).names == ["start", "output", "log", "output", "completed"]


def test_a_body_that_is_no_event_comes_whole() -> None:
    received = receive([b'{"detail":', b'"no"}'])
    assert received == Received(rest=b'{"detail":"no"}')


def test_a_request_for_no_events_gets_the_bytes_as_they_come() -> None:
    received = receive([b"{", Shown(0, "a"), b"}"], headers=[(b"accept", b"application/json")])
    assert received == Received(rest=b"{}")
