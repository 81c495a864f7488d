"""Trials of grammars, each in a process that can be ended.

llguidance limits what a grammar may cost once it runs, but not its compiler: a schema of 59 patterns that
must all match kept it busy for more than three minutes, and nothing ends that but the end of its process.
So each grammar is compiled first in a process with limits, which is ``main`` here.
"""

import contextlib
import json
import math
import resource
import select
import sys
import threading
import time
from subprocess import DEVNULL, PIPE, Popen

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cog_triton.engines.interpreter import python
from cog_triton.processes import end_with_parent

# Processor time for one grammar; the longest that are known to be used take a third of a second.
SECONDS = 2
MEMORY_BYTES = 2 << 30
# Grammars that are tried at the same time.
TRIALS = 8
# How long an answer may take, on a busy machine and while the process starts.
ANSWER_SECONDS = 60.0

# The limits of one grammar, so that it cannot hold up the others: fuel burns at 50,000 units a millisecond
# while a grammar is compiled, and at 14,000 for a mask.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False)


class GrammarTrials:
    """Tries grammars in processes, one grammar at a time in each. Thread-safe.

    One idle process is kept for the next grammar; further ones are ended.
    """

    def __init__(self) -> None:
        # Guards the next two. Nothing waits while it is held.
        self._lock = threading.Lock()
        self._idle: list[Popen[str]] = []
        self._closed = False
        self._running = threading.BoundedSemaphore(TRIALS)

    def problem(self, grammar: str) -> str:
        """Return the reason why a grammar cannot be compiled; empty if it can."""
        with self._running:
            process = self._take_process()
            try:
                answer = _ask(process, grammar)
            except BaseException:
                _end(process)
                raise
            if answer is None:
                _end(process)
                return f"it takes more than {SECONDS} s to compile, or too much memory"
            self._keep_process(process)
            return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = self._idle
            self._idle = []
        for process in idle:
            _end(process)

    def _take_process(self) -> "Popen[str]":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        # The process ends with this one, or when its standard input closes.
        command = [python(), "-m", __name__]
        return Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, encoding="ascii")

    def _keep_process(self, process: "Popen[str]") -> None:
        with self._lock:
            is_kept = not self._closed and not self._idle
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            _end(process)


def _ask(process: "Popen[str]", grammar: str) -> str | None:
    """Return what a process says of a grammar; None if it has ended, or says nothing in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    # Raised if the process has ended.
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(json.dumps(grammar) + "\n")
        process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], ANSWER_SECONDS)
        if readable:
            return str(json.loads(process.stdout.readline()))
    return None


def _end(process: "Popen[str]") -> None:
    process.kill()
    process.communicate()


def _lower_limit(kind: int, amount: int) -> None:
    """Limit a resource of this process, within the hard limit that a cluster or a shell may have set."""
    _, hard = resource.getrlimit(kind)
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (soft, hard))


def main() -> None:
    """Answer each line of standard input, a grammar as JSON, with the problem of that grammar."""
    end_with_parent()
    _lower_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    # Whether a grammar compiles does not depend on the tokenizer: the tokens of this one are the bytes.
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        spent = math.ceil(time.process_time())
        _lower_limit(resource.RLIMIT_CPU, spent + SECONDS)
        matcher = LLMatcher(tokenizer, json.loads(line), limits=LIMITS, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main()
