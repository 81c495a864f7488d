"""A process that tries guides out before an engine compiles them.

llguidance bounds what a guide may cost once it runs, but not its compiler: a schema of 59 patterns that
must all match kept it busy for more than three minutes, and nothing ends that but the end of its process.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import select
import subprocess
import sys
import time
from typing import Any

import llguidance

from cog_triton.engines.vllm_processes import python
from cog_triton.processes import end_with_parent

SECONDS = 2  # of a processor; the longest guides that are known to be used take a third of one
PATIENCE = 20.0  # seconds, on a busy machine
MEMORY = 2 << 30

# Of one guide, so that nobody's holds up the others: fuel burns at 50,000 units a millisecond while a guide
# is compiled, and at 14,000 for a mask.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False
)


class GuideCheck:
    """Compiles guides in another process. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def problem(self, grammar: str) -> str:
        """Return the reason why llguidance cannot compile a grammar; empty if it can."""
        if self._process is None:
            # Ends with this process, and with what is written to it.
            self._process = subprocess.Popen(
                [python(), "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="ascii",
            )
            self._ask(self._process, "", seconds=60)  # while it starts
        answer = self._ask(self._process, grammar, PATIENCE)
        if answer is None:
            self.close()
            return f"it takes more than {SECONDS} s to compile, or too much memory"
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, process: subprocess.Popen[str], grammar: str, seconds: float) -> str | None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], seconds)[0]:
                return str(json.loads(process.stdout.readline()))
        return None


class _Bytes:
    """A tokenizer whose tokens are the bytes: what is wrong with a guide does not depend on it."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"</s>")

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def main() -> None:
    """Answer each line, a grammar as JSON, with the problem of that grammar."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    for line in sys.stdin:
        grammar, problem = json.loads(line), ""
        if grammar:
            spent = math.ceil(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, resource.RLIM_INFINITY))
            matcher = llguidance.LLMatcher(tokenizer, grammar, limits=LIMITS, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
            problem = matcher.get_error()
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()
