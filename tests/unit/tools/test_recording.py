"""The recording on the README: it is drawn from a real run, in which an answer went on after a kill."""

from xml.etree import ElementTree

from docs.images.recording import COLUMNS, PICTURE, Terminal, draw, layout, recorded, shortened


def test_the_picture_is_drawn_from_the_recording() -> None:
    assert PICTURE.read_text() == draw(recorded())


def test_the_recorded_answer_goes_on_after_the_kill() -> None:
    client, server = recorded()
    (killed,) = [seconds for seconds, text in server.events if text.startswith("$ kill -9 ")]
    before = [text for seconds, text in client.events[1:] if seconds < killed]
    after = [text for seconds, text in client.events if seconds > killed]
    assert len(before) > 10
    assert len(after) > 10
    assert after[-1] == "Files undisturbed.txt and killed.txt are identical\n"


def test_long_lines_continue_in_the_next_row() -> None:
    runs = layout(Terminal("", [(0, "x" * (COLUMNS - 1)), (1, "yz\n"), (2, "end")]))
    assert [(run.row, run.column, run.text) for run in runs] == [
        (0, 0, "x" * (COLUMNS - 1)),
        (0, COLUMNS - 1, "y"),
        (1, 0, "z"),
        (2, 0, "end"),
    ]


def test_long_waits_are_shortened_and_short_ones_are_not() -> None:
    assert shortened([1.0, 1.25, 61.25]) == {1.0: 1.0, 1.25: 1.25, 61.25: 2.75}


def test_text_cannot_become_markup() -> None:
    drawn = ElementTree.fromstring(draw([Terminal("client", [(0, "<script>&")])]))
    assert "<script>&" in [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
