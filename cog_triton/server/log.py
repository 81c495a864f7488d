"""tritonserver's log: its levels, its ranks, and the reason of its end."""

import logging
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from cog_triton.errors import LISTENS, cause, shortened
from cog_triton.server.guard import RANK_ENDED, STUB_ENDED

progress = logging.getLogger("cog_triton.server")

GPU = Path("/dev/nvidiactl").exists()
TAIL_LINES = 60
LONGEST_LINE = 2000  # characters; a line may have a whole request in it
LONGEST_RECORD = 20_000  # with a trace
LONGEST_RAW = 4 * LONGEST_LINE  # bytes
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
# Triton's complaints on a machine without a GPU, at any level: nothing is wrong there.
_NO_GPU = re.compile(r"CUDA|Cuda|NVML|DCGM|pinned (system )?memory")
_LOG_LINE = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (.*)$")
# Triton's reports of a model that failed to load, at four places; ``ServerLog.reason`` has it once.
_FAILURE = re.compile(r"Failed to create instance|failed to load|loading failed with error")
_EVENT = re.compile(
    '"loading: (?P<loading>[^:"]+):\\d+"'
    "|successfully loaded '(?P<loaded>[^']+)'"
    "|failed to load '(?P<failed>[^']+)' version \\d+: (?P<why>.*)"
    # The last line of a traceback, as processes that vLLM starts log it: with their name before it.
    r"|^\([^)]* pid=\d+\)(?: [A-Z]+ [^]]*\])? (?P<child>(?:\w+\.)*\w*(?:Error|Exception)\b.*)$"
    f"|{STUB_ENDED.format(model='(?P<stub>.+)', status='(?P<stub_status>-?[0-9]+)')}"
    f"|{RANK_ENDED.format(rank='(?P<rank>[0-9]+)', status='(?P<rank_status>-?[0-9]+)')}"
    # Of the transformers engine: how far a checkpoint is loaded.
    r"|^(?P<progress>loading weights: \d+ of \d+ tensors)$"
    # mpirun's report of a rank whose guard was killed. The signal may be on the next line.
    r"|noticed that process rank (?P<killed>\d+) with PID"
)
_SEE_ABOVE = re.compile(r"root cause", re.IGNORECASE)  # of the process that started the failed one
_TAG = re.compile(r"\[[^][\n]*,(\d+)\](<std(?:out|err|diag)>):")


def log_to(level: str) -> None:
    """Log to standard error by a setting of LOG_LEVEL, unless the logging is set up."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(CuttingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if root.level > logging.DEBUG:
        for name in ("httpx", "tritonserver"):
            logging.getLogger(name).setLevel(max(root.level, logging.WARNING))


class CuttingFormatter(logging.Formatter):
    """Cuts lines at ``LONGEST_LINE``, and a record at ``LONGEST_RECORD``."""

    def format(self, record: logging.LogRecord) -> str:
        lines = shortened(super().format(record), LONGEST_RECORD).split("\n")
        return "\n".join(shortened(line, LONGEST_LINE) for line in lines)


class ServerLog:
    """The log of a server, or of each rank of a group; and from it, the reason of its end."""

    def __init__(self, world_size: int) -> None:
        self.listens = False  # on its ports, so that it loses none to another process
        self._world_size = world_size
        self._tails: dict[int | None, deque[str]] = defaultdict(partial(deque, maxlen=TAIL_LINES))
        self._loading: dict[str, float] = {}  # models, with the time since when
        self._failures: dict[str, str] = {}
        self._child_error: str | None = None
        self.last_error = ""  # which is why a server ends by itself
        self._stub: tuple[str, str] | None = None  # model and status, of the first that ended
        self._rank: tuple[int, str | None] | None = None  # and status, of the first that ended

    def read(self, stream: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """Read the merged output; yield the level and the text of each line."""
        levels: dict[int | None, int] = defaultdict(lambda: logging.INFO)
        # A line is cut before it is decoded if it is longer than any that is shown.
        cut = (raw if len(raw) <= LONGEST_RAW else raw[:LONGEST_RAW] + b"\n" for raw in stream)
        for rank, whole in lines_of_ranks(raw.decode(errors="replace") for raw in cut):
            if line := shortened(whole, LONGEST_LINE):
                levels[rank], text = parse_log_line(line, levels[rank])
                self._tails[rank].append(line)
                self.listens = self.listens or LISTENS in line
                if event := _EVENT.search(line):
                    self._note(event.groupdict(), f" on rank {rank}" if rank else "")
                if levels[rank] >= logging.ERROR and text != line:
                    self.last_error = cause(text.partition("] ")[2])
                yield levels[rank], text if rank is None else f"rank {rank}: {text}"

    def _note(self, event: dict[str, str], on_rank: str) -> None:
        if event["loading"]:
            self._loading[event["loading"] + on_rank] = time.monotonic()
        elif event["loaded"]:
            began = self._loading.pop(model := event["loaded"] + on_rank, None)
            if began is not None and not model.startswith("ensemble"):  # which loads nothing
                progress.info("%s loaded in %.1f s", model, time.monotonic() - began)
        elif event["progress"]:
            progress.info("%s", event["progress"] + on_rank)
        elif event["failed"]:
            elsewhere = self._child_error if _SEE_ABOVE.search(event["why"]) else None
            self._failures.setdefault(event["failed"] + on_rank, elsewhere or cause(event["why"]))
        elif event["child"]:
            if not _SEE_ABOVE.search(event["child"]):
                self._child_error = event["child"]
        elif self._rank is not None:
            return  # the others are stopped: Triton kills a stub then that takes too long
        elif event["stub"]:
            self._stub = self._stub or (event["stub"], event["stub_status"])
        else:
            self._rank = int(event["rank"] or event["killed"]), event["rank_status"]

    def reason(self, what: str, status: int | None = None) -> str:
        """Return what happened, and below it why. Without a status, the server runs."""
        first = what + self.end(status)
        # Copies, here and below: while the server runs, another thread adds to them.
        if failures := list(self._failures.items()):
            return "\n".join([first, *(f"model {name}: {reason}" for name, reason in failures)])
        if self._stub is not None:
            return first
        if status is None and (loading := ", ".join(list(self._loading))):
            return f"{first}\nstill loading: {loading}"
        if self._rank is None and status is not None and 0 < status < 128 and self.last_error:
            return f"{first}\n{self.last_error}"
        lines = [first]
        ranks = list(self._tails) if self._rank is None else [self._rank[0]]
        for rank in sorted(ranks, key=lambda rank: -1 if rank is None else rank):
            whose = "its" if rank is None else f"rank {rank}'s"
            lines += [f"the last lines of {whose} log:", *list(self._tails[rank])]
        return "\n".join(lines)

    def end(self, status: int | None) -> str:
        """Return what ended, and how, to go behind the server's name."""
        if self._stub is not None:
            return f": the process of model {self._stub[0]} ended {describe_status(self._stub[1])}"
        if self._rank is not None:
            ended = describe_status(self._rank[1] or status)
            return f": rank {self._rank[0]} of {self._world_size} ended {ended}"
        return "" if status is None else f", {describe_status(status)}"


def lines_of_ranks(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """Yield the lines of each rank, which mpirun merged and tagged; None is for mpirun's own.

    mpirun tags what it reads from a rank at once, which need not be a whole line: pieces of several
    ranks can share a line, and then each piece is tagged. (Open MPI 5 tags no piece that continues a
    line; there, such pieces go to the rank that began it.)
    """
    unfinished: defaultdict[tuple[int | None, str], str] = defaultdict(str)
    for line in lines:
        own, *tagged = _TAG.split(line)
        key: tuple[int | None, str] = (None, "")
        if own or not tagged:
            unfinished[key] += own
        for rank, stream, piece in zip(tagged[::3], tagged[1::3], tagged[2::3], strict=True):
            key = int(rank), stream
            # Open MPI 5 puts a space behind the tag, 4 does not.
            piece = piece if key in unfinished else re.sub(r"^ (?=\S)", "", piece)
            unfinished[key] += piece
        if line.endswith("\n"):
            yield key[0], unfinished.pop(key).rstrip()
    for (last_rank, _), rest in unfinished.items():
        yield last_rank, rest.rstrip()


def describe_status(status: int | str | None) -> str:
    """Describe an exit status, which is negative, or 128 more, for a signal."""
    if status is None:
        return "while the others ran"
    status = int(status)
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"by signal {number} ({signal.Signals(number).name})"
    return f"with exit status {status}"


def parse_log_line(line: str, previous: int, *, gpu: bool = GPU) -> tuple[int, str]:
    """Return a line's level and text; one without a level, as of a traceback, keeps the previous one."""
    match = _LOG_LINE.match(line)
    level, text = (_LEVELS[match[1]], match[2]) if match else (previous, line)
    if (not gpu and _NO_GPU.search(text)) or _FAILURE.search(text):
        return logging.DEBUG if match else previous, text
    return level, text
