"""The parser of an answer that is a Python list of calls, without marks around it."""

import re

from cog_triton.api.openai.tool_calls.blocks import Parser, Pieces
from cog_triton.api.openai.tool_calls.python_calls import python_calls

# The beginning of a list of calls, or what may become one. Bounded, because it is looked at again.
_PYTHON_START = re.compile(r"\s*(\[\s{0,8}([A-Za-z_][\w.]{0,255}\s{0,8}(?P<call>\()?)?)?")


class PythonCallParser(Parser):
    """Reads an answer that is a Python list of calls.

        [weather(city="Paris", days=2), time()]

    A text that begins so is held until its end, since only Python's parser can say where a value ends.
    """

    def _read(self) -> Pieces:
        # Wait until the text is certain to begin a list of calls, or to be something else.
        while not self._ended:
            start = _PYTHON_START.match(self._held)
            if start is None or start["call"] or start.end() < len(self._held):
                break
            yield None
        start = _PYTHON_START.match(self._held)
        parts: list[str] = []
        if start is not None and start["call"]:
            while not self._ended:
                parts.append(self._take(len(self._held)))
                yield None
            self._held = "".join([*parts, self._held])
            calls = python_calls(self._held, self._start.schemas, one_list=True)
            if calls is not None:
                self._held = ""
                yield from self._whole_calls(calls)
        yield from self._read_text()
