#!/usr/bin/env python3
"""Record a streamed answer that survives ``kill -9`` of tritonserver, and draw it as an animated SVG.

    python -m docs.images.recording record   a real run: two files in docs/images/recovery, then the SVG
    python -m docs.images.recording draw     the SVG alone, from the files that are there

The files are asciicasts (version 2), one for each terminal, so ``asciinema play`` shows them too. Their
clock is the run's. The SVG shortens waits, and shows the real time in its corner.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.support import ROOT

DIRECTORY = Path(__file__).parent / "recovery"
PICTURE = Path(__file__).parent / "recovery.svg"

MODEL = "smollm2"
INPUTS = {"prompt": "How do vaccines work?", "max_tokens": 63, "seed": 5}
PIECES_BEFORE_THE_KILL = 25
COLUMNS = 88


@dataclass
class Terminal:
    """What one terminal showed, and when: pairs of seconds since the start and text."""

    title: str
    events: list[tuple[float, str]] = field(default_factory=list)

    def write_cast(self, path: Path) -> None:
        header = {"version": 2, "width": COLUMNS, "height": 12, "title": self.title}
        lines = [json.dumps(header)]
        lines += [json.dumps([round(seconds, 3), "o", text]) for seconds, text in self.events]
        path.write_text("\n".join(lines) + "\n")

    @classmethod
    def read_cast(cls, path: Path) -> "Terminal":
        header, *events = (json.loads(line) for line in path.read_text().splitlines())
        return cls(header["title"], [(seconds, text) for seconds, _, text in events])


class Recorder:
    """Runs the server and a client, and notes what both print."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.client = Terminal("client")
        self.server = Terminal("server")
        self._start: float | None = None
        self._pieces = 0
        self._ready = threading.Event()

    def record(self) -> None:
        environment = {
            **os.environ,
            "LOG_FORMAT": "text",
            "TRITON_HTTP_PORT": "0",
            "TRITON_GRPC_PORT": "0",
            "TRITON_METRICS_PORT": "0",
        }
        server = subprocess.Popen(
            ["make", "serve", f"MODEL={MODEL}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read_server, args=(server,))
        reader.start()
        try:
            if not self._ready.wait(300) or server.poll() is not None:
                raise SystemExit("the server did not start")
            self._play(server.pid)
        finally:
            os.killpg(server.pid, signal.SIGINT)
            server.wait(60)
            reader.join(60)

    def _play(self, server: int) -> None:
        ask = f"python3 {ROOT}/examples/client/client.py stream {shlex.quote(json.dumps(INPUTS))}"
        self._run(f"{ask} > uninterrupted.txt")

        tritonserver = next(
            process.pid
            for process in psutil.Process(server).children(recursive=True)
            if process.name() == "tritonserver"
        )
        self._start = time.monotonic()
        self._note(self.server, f"$ make serve MODEL={MODEL} &\n")

        def kill_once(text: str) -> None:
            self._note(self.client, text)
            self._pieces += 1
            if self._pieces == PIECES_BEFORE_THE_KILL:
                self._note(self.server, f"$ kill -9 {tritonserver}  # tritonserver\n")
                os.kill(tritonserver, signal.SIGKILL)

        shown = ask.replace(f"{ROOT}/", "")
        self._note(self.client, f"$ {shown} | tee killed.txt\n")
        self._run(f"{ask} | tee killed.txt", kill_once)
        self._note(self.client, "$ diff -s uninterrupted.txt killed.txt\n")
        self._run(
            "diff -s uninterrupted.txt killed.txt", lambda text: self._note(self.client, text)
        )
        self._start = None

    def _run(self, command: str, show: Callable[[str], None] | None = None) -> None:
        """Run a command of the client's terminal, which must succeed."""
        process = subprocess.Popen(
            ["bash", "-c", f"set -eo pipefail; {command}"],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"},
        )
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 4096):
            if show is not None:
                show(data.decode())
        if process.wait() != 0:
            raise SystemExit(f"failed: {command}")

    def _read_server(self, server: "subprocess.Popen[bytes]") -> None:
        assert server.stdout is not None
        for line in server.stdout:
            text = line.decode()
            sys.stderr.write(text)
            if text.startswith("ready: "):
                self._ready.set()
            self._note(self.server, text)
        self._ready.set()

    def _note(self, terminal: Terminal, text: str) -> None:
        """Add what a terminal shows now; before and after the recording, nothing."""
        if self._start is not None:
            terminal.events.append((time.monotonic() - self._start, text))


# The picture. Text that has been printed stays, so each piece only has to appear at its time.
LONGEST_WAIT = 1.5
LAST_FRAME = 6.0
CHARACTER, LINE, MARGIN = 8.43, 20, 16
STYLE = """
text { font: 14px ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #e6e6e6 }
.title { fill: #8b93a1 } .prompt { fill: #7ee787 } .kill { fill: #ff7b72 } .same { fill: #79c0ff }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } .clock { opacity: 0 } }
"""


@dataclass(frozen=True)
class Run:
    """Text in one line of the picture that appears at one time."""

    seconds: float
    row: int
    column: int
    text: str
    style: str


def layout(terminal: Terminal) -> list[Run]:
    """Break what a terminal showed into lines of its width."""
    runs: list[Run] = []
    row = column = 0
    style = ""
    for seconds, text in terminal.events:
        for part in re.split(r"(\n)", text.replace("\r", "")):
            if part == "\n":
                row, column, style = row + 1, 0, ""
                continue
            if column == 0 and part:
                style = line_style(part)
            while part:
                space = COLUMNS - column
                if space == 0:
                    row, column = row + 1, 0
                    continue
                runs.append(Run(seconds, row, column, part[:space], style))
                column += len(part[:space])
                part = part[space:]
    return runs


def line_style(line: str) -> str:
    if line.startswith("$ kill"):
        return "kill"
    if line.startswith("$ "):
        return "prompt"
    return "same" if line.endswith("are identical") else ""


def shortened(moments: list[float]) -> dict[float, float]:
    """Map each moment of the run to one of the picture, in which no wait is long."""
    shown: dict[float, float] = {}
    before = now = 0.0
    for moment in sorted(set(moments)):
        now += min(moment - before, LONGEST_WAIT)
        before = moment
        shown[moment] = now
    return shown


def draw(terminals: list[Terminal]) -> str:
    """Draw terminals, one below the other, as an SVG that repeats."""
    panes = [layout(terminal) for terminal in terminals]
    times = shortened([run.seconds for pane in panes for run in pane])
    length = max(times.values()) + LAST_FRAME
    keyframes: dict[str, str] = {}

    def appearing(moment: float) -> str:
        """Return the name of an animation that shows something from a moment on."""
        percent = f"{100 * times[moment] / length:.2f}"
        name = "at" + percent.replace(".", "-")
        keyframes[name] = (
            f"@keyframes {name} {{ 0% {{ opacity: 0 }} {percent}%, 100% {{ opacity: 1 }} }}"
        )
        return name

    body: list[str] = []
    top = 0
    for terminal, pane in zip(terminals, panes, strict=True):
        rows = 1 + max(run.row for run in pane)
        height = LINE * (rows + 1) + 2 * MARGIN
        body.append(f'<rect y="{top}" width="100%" height="{height}" rx="8" fill="#1b1e24"/>')
        body.append(
            f'<text class="title" x="{MARGIN}" y="{top + MARGIN + 8}">{terminal.title}</text>'
        )
        for run in pane:
            x = MARGIN + CHARACTER * run.column
            y = top + MARGIN + LINE * (run.row + 1) + 12
            width = CHARACTER * len(run.text)
            body.append(
                f'<text class="{run.style}" x="{x:.1f}" y="{y}" textLength="{width:.1f}" '
                f'xml:space="preserve" style="animation-name: {appearing(run.seconds)}">'
                f"{escape(run.text)}</text>"
            )
        top += height + 8
    width = round(CHARACTER * COLUMNS + 2 * MARGIN)
    body += clock(times, length, width, keyframes)
    timing = f"animation: none {length:.2f}s step-end infinite"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top - 8}" '
            f'width="{width}" height="{top - 8}" role="img">',
            "<title>A streamed answer goes on after kill -9 of tritonserver</title>",
            f"<style>{STYLE}text[style] {{ {timing} }}",
            *keyframes.values(),
            "</style>",
            *body,
            "</svg>\n",
        ]
    )


def clock(
    times: dict[float, float], length: float, width: int, keyframes: dict[str, str]
) -> list[str]:
    """Draw the run's own time in the corner, a text for each of its seconds that is shown."""
    seconds: dict[int, float] = {}
    for moment, shown in times.items():
        seconds.setdefault(int(moment), shown)
    ends = [*list(seconds.values())[1:], length]
    texts = []
    for (second, start), end in zip(seconds.items(), ends, strict=True):
        name = f"second-{second}"
        first, last = 100 * start / length, 100 * end / length
        keyframes[name] = (
            f"@keyframes {name} {{ 0% {{ opacity: 0 }} {first:.2f}% {{ opacity: 1 }} "
            f"{last:.2f}%, 100% {{ opacity: 0 }} }}"
        )
        texts.append(
            f'<text class="title clock" x="{width - MARGIN}" y="{MARGIN + 8}" '
            f'text-anchor="end" style="animation-name: {name}">{second} s</text>'
        )
    return texts


def recorded() -> list[Terminal]:
    """Return the terminals of the recording that is in the repository."""
    return [Terminal.read_cast(DIRECTORY / f"{name}.cast") for name in ("client", "server")]


def main(action: str) -> None:
    if action == "record":
        with tempfile.TemporaryDirectory() as directory:
            recorder = Recorder(Path(directory))
            recorder.record()
        DIRECTORY.mkdir(exist_ok=True)
        for terminal in (recorder.client, recorder.server):
            terminal.write_cast(DIRECTORY / f"{terminal.title}.cast")
    PICTURE.write_text(draw(recorded()))


if __name__ == "__main__":
    main(sys.argv[1])
