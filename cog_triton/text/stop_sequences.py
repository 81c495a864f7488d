"""Stop sequences: where the text of an answer ends."""

from collections.abc import Sequence


class StopSequences:
    """Passes a text through up to its first stop sequence, then ``matched``, compared by code points.

    The first is the one that is *complete* first, the longest if several are at the same character: with
    the stops "abcd" and "bc", "abcd" ends at "a".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._first_characters = {stop[0] for stop in self._stops}
        # The end of the text so far, which may begin a stop sequence.
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be delivered now, without an end that may begin a stop."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        text = self._held + text
        self._held = ""
        ends = {stop: text.index(stop) + len(stop) for stop in self._stops if stop in text}
        if ends:
            self.matched = min(ends, key=ends.__getitem__)
            return text[: ends[self.matched] - len(self.matched)]
        longest = len(self._stops[0])
        for start in range(max(0, len(text) - longest + 1), len(text)):
            end = text[start:]
            if self._may_begin_stop(end):
                self._held = end
                return text[:start]
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of the text; nothing after a match."""
        held = self._held
        self._held = ""
        return held

    def _may_begin_stop(self, text: str) -> bool:
        # The first characters are looked at before, since few places of a text have one.
        return text[0] in self._first_characters and any(
            stop.startswith(text) for stop in self._stops
        )
