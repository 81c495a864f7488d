"""What Triton's texts of errors say, without what it and its Python stubs put around that.

    Internal: ValueError: no such model\\n\\nAt:\\n  model.py(36): initialize    →  no such model
    in ensemble 'ensemble', Failed to process the request(s) for model instance 'preprocessing_0_0',
    message: no prompt                                                         →  no prompt

A traceback is one of the stub's, or of TensorRT-LLM's C++ with an address a line.
"""

from __future__ import annotations

import re

LONGEST = 500
LISTENS = "Started Metrics Service at"
"""What tritonserver says when it listens on all of its ports, of which that one is the last."""
IN_USE = "already in use"
"""What tritonserver says of a port, before it ends."""
ANSWERED = "Found 0 model versions that have in-flight inferences"
"""What tritonserver says when it was told to stop and has answered every request."""
NOT_CACHED = r"LoRA task \d+ not found in cache"
"""What TensorRT-LLM says of an adapter that it has not been given, or has evicted."""
READ = 20_000
"""Characters that are read of a text, which may have a whole request in it."""

_TRACEBACK = re.compile(r"\n+At:\n|\n+Traceback \(most recent call last\):|\n+\d+ +0x[0-9a-f]+ ")
_AROUND = re.compile(
    r"in ensemble '[^']*', *"
    r"|Failed to process the request\(s\) for model (?:instance )?'[^']*', message: *"
    r"|(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown)(?:: | - )"
    # What Python is told to raise with a text of its own, and this package's errors, which have one.
    r"|(?:EngineError|EngineUnavailable|OSError|RuntimeError|TritonModelException|ValueError): "
    r"|(?:\w+: )?E\d{4} \w+: "
)


_GONE = re.compile(r"Stub process '[^']*' is not healthy")
ENDED = "its process ended without a word, as one does that the kernel kills for want of memory"


def cause(text: str) -> str:
    """What went wrong, in one line of at most ``LONGEST`` characters."""
    text = text[:READ]
    if _GONE.search(text):
        return ENDED
    text = _TRACEBACK.split(text.replace("\\n", "\n").strip('" \n'))[0]
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    while around := _AROUND.match(paragraph):
        paragraph = paragraph[around.end() :]
    return paragraph if len(paragraph) <= LONGEST else f"{paragraph[: LONGEST - 1]}…"
