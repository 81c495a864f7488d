"""The parser of Functionary's messages, each of which has a recipient: a tool, or all."""

from cog_triton.api.openai.tool_calls.blocks import (
    AnswerStart,
    Kind,
    Parser,
    Piece,
    Pieces,
    any_begun,
    is_begun,
)
from cog_triton.api.openai.tool_calls.json_calls import named_call


class RecipientParser(Parser):
    """Reads Functionary's messages.

    Each begins with ``>>>`` and its recipient on a line: ``all`` for text, or a tool for its call.

        >>>all
        I will ask.>>>weather
        {"city": "Paris"}

    The template ends the prompt with the first mark, so that the answer begins behind it.
    """

    MARK = ">>>"
    ALL = "all"

    def __init__(self, start: AnswerStart) -> None:
        super().__init__(start)
        self._recipients = (self.ALL, *start.schemas)
        # The prompt has the first mark. It is put before the answer, and not shown if that is all text.
        self._has_added_mark = start.prompt.rstrip().endswith(self.MARK)
        if self._has_added_mark:
            self._held = self.MARK

    def _piece(self, kind: Kind, text: str) -> Piece:
        if self._has_added_mark and text.startswith(self.MARK):
            text = text.removeprefix(self.MARK)
        self._has_added_mark = False
        return super()._piece(kind, text)

    def _begins(self, _mark: str, rest: str) -> bool | None:
        return any_begun(is_begun(rest, recipient + "\n") for recipient in self._recipients)

    def _read(self) -> Pieces:
        while True:
            mark = yield from self._until("text", (self.MARK,))
            if mark is None:
                return
            head, _, rest = self._held.partition("\n")
            self._held = rest
            recipient = head.removeprefix(self.MARK)
            if recipient != self.ALL:
                yield from self._read_call(recipient, head + "\n")

    def _read_call(self, name: str, head: str) -> Pieces:
        parts: list[str] = []
        while True:
            place = self._held.find(self.MARK)
            if place >= 0 and self._begins(self.MARK, self._held[place + len(self.MARK) :]):
                break
            if self._ended:
                place = len(self._held)
                break
            # No text of JSON holds the mark for long, and one that does is looked at again.
            kept = len(self.MARK) - 1 if place < 0 else len(self._held) - place
            parts.append(self._take(max(len(self._held) - kept, 0)))
            yield None
        written = "".join([*parts, self._take(place)])
        is_cut = self._cut and not self._held
        call = None if is_cut else named_call(name, written)
        if call is None:
            yield self._piece("text", head + written)
        else:
            yield from self._whole_calls([call])
