"""The parser of gpt-oss's messages, each of which has a channel.

An answer with thoughts and a call:

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary
    to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
"""

import re

from cog_triton.api.openai.tool_calls.blocks import (
    Kind,
    Parser,
    Pieces,
    begun_size,
    first_mark,
)
from cog_triton.api.openai.tool_calls.json_calls import named_call

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,128})")
_HEADER_STARTS = ("<|channel|>", "<|start|>", "assistant", "to=functions.")
_MESSAGE = "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class ChannelParser(Parser):
    """Reads gpt-oss's messages: the channel ``analysis`` is thoughts, a message to a function is its call.

    All other messages are text.
    """

    def _read(self) -> Pieces:
        while not (self._ended and not self._held):
            if not self._held or self._is_header_begun():
                if not self._ended:
                    yield None
                    continue
                if not self._held.lstrip().startswith("<|"):
                    yield self._piece("text", self._held)
                self._held = ""  # the answer was cut off in a header, which says nothing
                return
            header, mark, rest = self._held.partition(_MESSAGE)
            if not mark or not header.lstrip().startswith(_HEADER_STARTS):
                yield from self._until("text", ("<|channel|>", "<|start|>"))
                continue
            self._held = rest
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            if recipient:
                yield from self._read_call(recipient[1])
            else:
                is_analysis = channel is not None and channel[1] == "analysis"
                kind: Kind = "thoughts" if is_analysis else "text"
                yield from self._until(kind, (*_MESSAGE_ENDS, "<|start|>", "<|channel|>"))
            yield from self._skip_end()

    def _is_header_begun(self) -> bool:
        """Return whether what is held may be the beginning of a header."""
        start = self._held.lstrip()
        if _MESSAGE in start:
            return False
        return start.startswith(_HEADER_STARTS) or any(
            mark.startswith(start) for mark in _HEADER_STARTS
        )

    def _read_call(self, name: str) -> Pieces:
        parts: list[str] = []
        ends = (*_MESSAGE_ENDS, "<|start|>")
        while True:
            place, mark = first_mark(self._held, ends)
            if mark or self._ended:
                break
            parts.append(self._take(len(self._held) - begun_size(self._held, ends)))
            yield None
        written = "".join([*parts, self._take(place)])
        call = None  # a message that was cut off is no call
        if mark or not self._cut:
            call = named_call(name, written)
        if call is not None:
            yield from self._whole_calls([call])
        elif written:
            yield self._piece("text", written)

    def _skip_end(self) -> Pieces:
        """Pass over the mark of a message's end."""
        # Wait while all that is held may be the beginning of a mark.
        while (
            not self._ended
            and self._held
            and begun_size(self._held, _MESSAGE_ENDS) == len(self._held)
        ):
            if self._held in _MESSAGE_ENDS:
                break
            yield None
        for mark in _MESSAGE_ENDS:
            if self._held.startswith(mark):
                self._take(len(mark))
                return
