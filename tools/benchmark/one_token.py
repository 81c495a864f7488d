"""An engine that streams as TensorRT-LLM's C++ backend does: each token in a response of its own.

That is the tests' stand-in for that backend, where this is a checkout and the stand-in can be compiled: it
costs what a backend in C++ costs. Else it is the simulated engine with that limit, in Python.
"""

from __future__ import annotations

import importlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# One token makes one piece of text: no characters of several tokens, which come as one chunk.
TEXT = (
    "A simulated engine needs no model and no GPU. It reads these sentences again and again, at the "
    "pace it was told. "
)
SIMULATED = "server: {tensorrt_llm: {args: {max_tokens_per_response: 1}}}\n"
STREAMS = 256
# More than a benchmark's longest answer and its prompt have.
BUILD = {"max_seq_len": 8192, "max_input_len": 4096, "max_batch_size": STREAMS}


@contextmanager
def one_token_engine(
    environment: Mapping[str, str], pace_ms: float = 0
) -> Iterator[dict[str, str]]:
    """The environment of servers with such an engine.

    Args:
        pace_ms: milliseconds between the tokens of a request; 0 makes them at no cost.
    """
    common = {**environment, "COG_MAX_CONCURRENCY": str(STREAMS)}
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        stand_in = _stand_in(Path(directory))
        if stand_in is not None:
            yield {**common, **stand_in, "STAND_IN_INTER_TOKEN_MS": str(pace_ms)}
            return
        config = Path(directory) / "config.yaml"
        config.write_text(SIMULATED)
        yield {
            **common,
            "ENGINE": "simulated",
            "SIMULATED_TEXT": TEXT,
            "SIMULATED_INTER_TOKEN_MS": str(pace_ms),
            "COG_TRITON_CONFIG": str(config),
        }


def _stand_in(directory: Path) -> dict[str, str] | None:
    """The settings of a deployment with the stand-in; None where it cannot be had."""
    try:
        servers: Any = importlib.import_module("tests.stand_in.servers")
        settings: dict[str, str] = servers.environment(directory, **BUILD)
    except (ImportError, FileNotFoundError, subprocess.CalledProcessError):
        return None
    return settings
