"""The recording on the README: it is drawn from a real run, in which an answer went on after a kill."""

from docs.images.recording import recorded


def test_the_recorded_answer_goes_on_after_the_kill() -> None:
    client, server = recorded()
    (killed,) = [seconds for seconds, text in server.events if text.startswith("$ kill -9 ")]
    before = [text for seconds, text in client.events[1:] if seconds < killed]
    after = [text for seconds, text in client.events if seconds > killed]
    assert len(before) > 10
    assert len(after) > 10
    assert after[-1] == "Files uninterrupted.txt and killed.txt are identical\n"
