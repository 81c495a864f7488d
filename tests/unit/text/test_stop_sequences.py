from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import InvalidParameter
from cog_triton.request.limits import parse_stop_sequences
from cog_triton.text.stop_sequences import StopSequences
from tests.support import split


def reference(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """Read a character at a time, stop as soon as a stop sequence is at the end."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if stop and text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def longest_pending(stops: Sequence[str], text: str) -> int:
    """The length of the longest end of the text that begins a stop sequence."""
    ends = (text[start:] for start in range(len(text)))
    return next((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), 0)


def stream(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    search = StopSequences(stops)
    return "".join(search.feed(piece) for piece in pieces) + search.flush(), search.matched


STOPS = st.lists(st.text(alphabet="ab", max_size=6), max_size=5) | st.lists(
    st.text(max_size=3), max_size=4
)
TEXT = st.text(alphabet="abc", max_size=40) | st.text(max_size=30)


@given(stops=STOPS, text=TEXT, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_the_result_is_the_reference_and_no_more_is_held_back_than_may_begin_a_stop(
    stops: list[str], text: str, sizes: list[int]
) -> None:
    assert stream(stops, split(text, sizes)) == reference(stops, text)
    search, delivered = StopSequences(stops), ""
    for end, character in enumerate(text, start=1):
        delivered += search.feed(character)
        if search.matched is not None:
            break
        assert delivered == text[: end - longest_pending(stops, text[:end])]


@pytest.mark.parametrize(
    ("stops", "text", "delivered", "matched"),
    [
        pytest.param(["", ""], "abc", "abc", None, id="empty ones"),
        pytest.param(["###"], "one### two###", "one", "###", id="two matches"),
        pytest.param(["###"], "one## two", "one## two", None, id="beginnings only"),
        pytest.param(
            ["b", "abcd"], "xabcd", "xa", "b", id="the first to be complete, though it begins later"
        ),
        pytest.param(
            ["bcd", "abcd"],
            "xabcd",
            "x",
            "abcd",
            id="the longest of two that are complete together",
        ),
        pytest.param(["abcd", "bcd"], "xabcd", "x", "abcd", id="the same in the other order"),
        pytest.param(["aab"], "aaab", "a", "aab", id="begun twice"),
        pytest.param(["abab!", "ba?"], "ababa?", "aba", "ba?", id="begun within another"),
        pytest.param(["🎉🎉"], "a🎉b🎉🎉", "a🎉b", "🎉🎉", id="emoji"),
        pytest.param(["É"], "é", "é", None, id="another case"),
    ],
)
def test_the_first_match(stops: list[str], text: str, delivered: str, matched: str | None) -> None:
    for size in (1, 2, 3, len(text)):
        assert stream(stops, split(text, [size])) == (delivered, matched)


def test_held_text_is_delivered_once_it_cannot_begin_a_stop() -> None:
    search = StopSequences(["abac"])
    assert [search.feed(piece) for piece in "abab"] == ["", "", "", "ab"]
    assert [search.flush(), search.flush()] == ["ab", ""]
    assert search.feed("ac") == "ac"  # a new text: what was flushed does not count
    assert search.matched is None


@pytest.mark.parametrize("size", [1, 7, 4_000])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["y"], "x" * 4_000),
        (["x" * n + "y" for n in range(1, 60)], "x" * 4_000),
        (["ab" * 200 + "c", "b" * 99], "ab" * 2_000),
    ],
    ids=["none begins", "many begin", "long"],
)
def test_work_is_linear_in_the_text(stops: list[str], text: str, size: int) -> None:
    compared: list[int] = []

    class Stop(str):
        def startswith(self, *arguments: Any) -> bool:
            compared.append(len(arguments[0]))
            return super().startswith(*arguments)

    search = StopSequences([Stop(stop) for stop in stops])
    longest, delivered = max(map(len, stops)), ""
    for end, piece in zip(count(size, size), split(text, [size]), strict=False):
        delivered += search.feed(piece)
        # So no more than that is searched again with the next piece.
        assert len(text[:end]) - len(delivered) < longest
    assert delivered + search.flush() == text
    assert bool(compared) == (text[0] in {stop[0] for stop in stops})
    assert len(compared) <= 4 * len(text)
    assert all(length < longest for length in compared)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        pytest.param(None, [], id="none"),
        pytest.param(",", [], id="comma"),
        pytest.param("###,\nUser:", ["###", "\nUser:"], id="two"),
        pytest.param("a,,b,", ["a", "b"], id="empty ones"),
        pytest.param(" User, Bot ", [" User", " Bot "], id="spaces"),
        pytest.param(r"a\,b", ["a,b"], id="comma that is escaped"),
        pytest.param(r"a\\,b", ["a\\", "b"], id="backslash that is escaped"),
        pytest.param(r"a\\\,b", [r"a\,b"], id="backslash and comma that are escaped"),
        pytest.param(r"\n,\t", [r"\n", r"\t"], id="other letters behind backslashes"),
        pytest.param("a\\", ["a\\"], id="backslash at the end"),
    ],
)
def test_a_list_of_stop_sequences(text: str | None, stops: list[str]) -> None:
    assert parse_stop_sequences(text) == tuple(stops)


@given(stops=st.lists(st.text(alphabet="ab, \\\n", min_size=1)))
def test_any_stops_can_be_written(stops: list[str]) -> None:
    escaped = (stop.replace("\\", "\\\\").replace(",", "\\,") for stop in stops)
    assert parse_stop_sequences(",".join(escaped)) == tuple(stops)


def test_a_list_that_is_too_long_is_not_taken_apart() -> None:
    assert parse_stop_sequences(",".join(["\\," * 256] * 64)) == ("," * 256,) * 64
    with pytest.raises(InvalidParameter, match="at most 32832 characters, not 32833"):
        parse_stop_sequences("x" * 32_833)
