"""tritonserver's log: its levels, its ranks, and the reason of its end."""

import logging
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cog_triton.errors import LISTENS, cause, shortened
from cog_triton.server.guard import RANK_ENDED, STUB_ENDED

progress = logging.getLogger("cog_triton.server")

GPU = Path("/dev/nvidiactl").exists()
TAIL_LINES = 60
# Characters. A line may have a whole request in it, and a record a trace.
LONGEST_LINE = 2000
LONGEST_RECORD = 20_000
# Bytes of a line, of which more are cut off before it is decoded.
LONGEST_RAW = 4 * LONGEST_LINE
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
# Said by the process that started the failed one.
_SEE_ABOVE = re.compile(r"root cause", re.IGNORECASE)
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


@dataclass(frozen=True)
class _End:
    """The end of a process, as the log reports it."""

    name: str
    status: str | None


class ServerLog:
    """The log of a server, or of each rank of a group; and from it, the reason of its end.

    Attributes:
        listens: whether the server listens on its ports, so that it loses none to another process.
        last_error: the last error, which is why a server ends by itself.
    """

    def __init__(self, world_size: int) -> None:
        self.listens = False
        self.last_error = ""
        self._world_size = world_size
        self._tails: dict[int | None, deque[str]] = defaultdict(partial(deque, maxlen=TAIL_LINES))
        # Models that are being loaded, and since when.
        self._loading: dict[str, float] = {}
        # Models that failed to load, and why.
        self._failures: dict[str, str] = {}
        # The last error of a process that an engine started.
        self._child_error: str | None = None
        # The first stub that ended, by its model, and the first rank.
        self._ended_stub: _End | None = None
        self._ended_rank: _End | None = None

    def read(self, stream: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """Read the merged output; yield the level and the text of each line."""
        levels: dict[int | None, int] = defaultdict(lambda: logging.INFO)
        for rank, whole in lines_of_ranks(_decoded(stream)):
            line = shortened(whole, LONGEST_LINE)
            if not line:
                continue
            level, text = parse_log_line(line, levels[rank])
            levels[rank] = level
            self._tails[rank].append(line)
            self.listens = self.listens or LISTENS in line
            event = _EVENT.search(line)
            if event is not None:
                self._note(event.groupdict(), f" on rank {rank}" if rank else "")
            has_level = text != line
            if level >= logging.ERROR and has_level:
                self.last_error = cause(text.partition("] ")[2])
            yield level, text if rank is None else f"rank {rank}: {text}"

    def _note(self, event: dict[str, str], on_rank: str) -> None:
        """Note what a line reports: the groups of ``_EVENT``, all but one of which are empty."""
        if event["loading"]:
            self._loading[event["loading"] + on_rank] = time.monotonic()
        elif event["loaded"]:
            self._note_loaded(event["loaded"] + on_rank)
        elif event["progress"]:
            progress.info("%s", event["progress"] + on_rank)
        elif event["failed"]:
            reason = cause(event["why"])
            if _SEE_ABOVE.search(event["why"]) and self._child_error:
                reason = self._child_error
            self._failures.setdefault(event["failed"] + on_rank, reason)
        elif event["child"]:
            if not _SEE_ABOVE.search(event["child"]):
                self._child_error = event["child"]
        elif self._ended_rank is not None:
            # The others are stopped: Triton kills a stub then that takes too long.
            return
        elif event["stub"]:
            if self._ended_stub is None:
                self._ended_stub = _End(event["stub"], event["stub_status"])
        else:
            self._ended_rank = _End(event["rank"] or event["killed"], event["rank_status"])

    def _note_loaded(self, model: str) -> None:
        began = self._loading.pop(model, None)
        # An ensemble loads nothing.
        if began is not None and not model.startswith("ensemble"):
            progress.info("%s loaded in %.1f s", model, time.monotonic() - began)

    def reason(self, what: str, status: int | None = None) -> str:
        """Return what happened, and below it why. Without a status, the server runs."""
        first = what + self.end(status)
        # Copies, here and below: while the server runs, another thread adds to them.
        failures = list(self._failures.items())
        if failures:
            # Triton ends by itself then, unless the guard is quicker: its status says nothing.
            first = what + self.end(None)
            return "\n".join([first, *(f"model {name}: {why}" for name, why in failures)])
        if self._ended_stub is not None:
            return first
        loading = list(self._loading)
        if status is None and loading:
            return f"{first}\nstill loading: {', '.join(loading)}"
        ended_by_itself = status is not None and 0 < status < 128
        if self._ended_rank is None and ended_by_itself and self.last_error:
            return f"{first}\n{self.last_error}"
        return "\n".join([first, *self._last_lines()])

    def _last_lines(self) -> Iterator[str]:
        """Yield the last lines of the rank that ended, or else of all of them."""
        ranks = list(self._tails)
        if self._ended_rank is not None:
            ranks = [int(self._ended_rank.name)]
        for rank in sorted(ranks, key=lambda rank: -1 if rank is None else rank):
            whose = "its" if rank is None else f"rank {rank}'s"
            yield f"the last lines of {whose} log:"
            yield from list(self._tails[rank])

    def end(self, status: int | None) -> str:
        """Return what ended, and how, to go behind the server's name."""
        stub = self._ended_stub
        if stub is not None:
            return f": the process of model {stub.name} ended {describe_status(stub.status)}"
        rank = self._ended_rank
        if rank is not None:
            how = describe_status(rank.status or status)
            return f": rank {rank.name} of {self._world_size} ended {how}"
        return "" if status is None else f", {describe_status(status)}"


def _decoded(stream: Iterable[bytes]) -> Iterator[str]:
    """Yield lines as texts. One that is longer than any that is shown is cut before it is decoded."""
    for raw in stream:
        line = raw if len(raw) <= LONGEST_RAW else raw[:LONGEST_RAW] + b"\n"
        yield line.decode(errors="replace")


def lines_of_ranks(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """Yield the lines of each rank, which mpirun merged and tagged; None is for mpirun's own.

    mpirun tags what it reads from a rank at once, which need not be a whole line: pieces of several
    ranks can share a line, and then each piece is tagged. (Open MPI 5 tags no piece that continues a
    line; there, such pieces go to the rank that began it.)
    """
    unfinished: defaultdict[tuple[int | None, str], str] = defaultdict(str)
    for line in lines:
        # What is before the first tag; and then for each tag its rank, its stream and the piece behind it.
        untagged, *tagged = _TAG.split(line)
        key: tuple[int | None, str] = (None, "")
        if untagged or not tagged:
            unfinished[key] += untagged
        for rank, stream, piece in zip(tagged[::3], tagged[1::3], tagged[2::3], strict=True):
            key = (int(rank), stream)
            # Open MPI 5 puts a space behind the tag, 4 does not.
            piece = piece if key in unfinished else re.sub(r"^ (?=\S)", "", piece)
            unfinished[key] += piece
        if line.endswith("\n"):
            yield key[0], unfinished.pop(key).rstrip()
    for (last_rank, _), rest in unfinished.items():
        yield last_rank, rest.rstrip()


def describe_status(status: int | str | None) -> str:
    """Describe an exit status. For a signal, it is the negative number, or 128 plus the number.

    None stands for a process that ended while the others ran.
    """
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
    level = _LEVELS[match[1]] if match else previous
    text = match[2] if match else line
    is_harmless = not gpu and _NO_GPU.search(text) is not None
    if is_harmless or _FAILURE.search(text):
        return logging.DEBUG if match else previous, text
    return level, text
