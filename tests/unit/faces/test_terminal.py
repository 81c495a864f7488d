"""What `make serve` and `make predict` show, without a server."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.faces.terminal.report import Line, LogReader, Report, Style, as_json, style_of
from cog_triton.faces.terminal.serving import WRAPPING

PLAIN = Style(terminal=False, colour=False)
COLOURED = Style(terminal=True, colour=True)


def coglet(message: str, level: str = "INFO", target: str = "coglet::setup", **fields: str) -> str:
    return json.dumps(
        {
            "timestamp": "2026-01-01T00:00:00.5Z",
            "level": level,
            "fields": {"message": message, **fields},
            "target": target,
        }
    )


def printed(message: str) -> str:
    return coglet(message, source="Stderr")


# Lines


def test_a_line_that_was_logged_has_its_level_and_name() -> None:
    reader = LogReader()
    line = reader.read(printed("WARNING cog_triton.weights: no space"))
    assert (line.levelno, line.name, line.msg) == (30, "cog_triton.weights", "no space")
    # What follows without a level is of the same.
    following = reader.read(printed("  at all"))
    assert (following.levelno, following.name, following.msg) == (30, "", "  at all")
    # Lines of Cog's server are not of the worker.
    assert reader.read(coglet("Setup complete")).levelno == logging.INFO
    reader.read(printed("INFO cog_triton.deployment: warmed up"))
    assert reader.read(printed("Loading weights: 100%")).name == "coglet::setup"


@pytest.mark.parametrize("raw", ["Traceback", "[1]", "{}", '{"fields": 1}', "null", ""])
def test_a_line_that_is_no_object_of_coglets(raw: str) -> None:
    line = LogReader().read(raw)
    assert (line.levelno, line.name, line.msg) == (20, "python", raw)


def test_the_old_name_of_run_is_no_warning() -> None:
    line = LogReader().read(coglet("predict() is deprecated; use run() instead", "WARN"))
    assert line.levelno == logging.INFO


def test_json_has_what_coglet_wrote_and_what_was_logged() -> None:
    raw = coglet("Starting prediction", prediction_id="p")
    assert json.loads(as_json(LogReader().read(raw))) == json.loads(raw)
    own = json.loads(as_json(Line(logging.ERROR, "cog_triton.serve", "ä\nb")))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", own.pop("timestamp"))
    assert own == {"level": "ERROR", "fields": {"message": "ä\nb"}, "target": "cog_triton.serve"}


def shown(
    level: int, name: str, text: str, style: Style | None = PLAIN, at: int = logging.INFO
) -> str:
    stream = io.StringIO()
    Report(stream, style, at).emit(Line(level, name, text))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("level", "target", "shown_at"),
    [
        (logging.ERROR, "tritonserver", {"debug", "info", "warning", "error"}),
        (logging.WARNING, "anything", {"debug", "info", "warning"}),
        (logging.INFO, "cog_triton.deployment", {"debug", "info"}),
        (logging.INFO, "cog_tritonish", {"debug"}),
        (logging.INFO, "tritonserver", {"debug"}),
        (logging.INFO, "coglet::setup", {"debug"}),
    ],
)
def test_what_a_person_is_shown(level: int, target: str, shown_at: set[str]) -> None:
    for name in ("debug", "info", "warning", "error"):
        text = shown(level, target, "x", at=getattr(logging, name.upper()))
        assert bool(text) == (name in shown_at)


def test_what_the_error_at_the_end_repeats_is_shown_once() -> None:
    for message in (
        "ERROR: Failed to create instance: no",
        "failed to load 'a' version 1: no",
        "Invalid argument: ensemble 'e' depends on 'a' which has no loaded version. no",
    ):
        assert not shown(logging.ERROR, "tritonserver", message)
        assert shown(logging.ERROR, "tritonserver", message, at=logging.DEBUG)


@pytest.mark.parametrize(
    "text", ['a_b.cc:12] "no\\n\\nAt: x"', '"no"', "no", "a_b.cc:12] no\\nAt", '"no\\nAt"']
)
def test_a_warning_of_triton(text: str) -> None:
    assert shown(logging.WARNING, "tritonserver", text) == "warning: no\n"
    verbose = shown(logging.WARNING, "tritonserver", text, at=logging.DEBUG)
    assert verbose == f"WARN  tritonserver: {text}\n"


def test_lines_for_a_person() -> None:
    assert shown(logging.ERROR, "x", "no", COLOURED) == "\x1b[31merror:\x1b[0m no\n"
    assert shown(logging.ERROR, "", "  more", COLOURED) == "  more\n"
    assert shown(logging.INFO, "cog_triton.x", "yes", COLOURED) == "\x1b[2myes\x1b[0m\n"


# Where they go


def test_colour_is_for_terminals_that_want_it() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert style_of(Terminal(), {}) == COLOURED
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert style_of(Terminal(), environ) == Style(terminal=True, colour=False)
    assert style_of(Terminal(), {"NO_COLOR": ""}).colour
    assert style_of(io.StringIO(), {}) == PLAIN


def test_a_report_of_its_own() -> None:
    for style, text in ((PLAIN, "error: no\n"), (COLOURED, "\r\x1b[K\x1b[31merror:\x1b[0m no\n")):
        stream = io.StringIO()
        Report(stream, style).say("no", logging.ERROR)
        assert stream.getvalue() == text
    stream = io.StringIO()
    report = Report(stream, None)
    report.emit(Line(logging.DEBUG, "x", "no"))
    report.say("yes")
    assert json.loads(stream.getvalue())["fields"] == {"message": "yes"}


def test_a_stream_that_nobody_reads_any_more_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    Report(stream, None).say("x")
    Report(stream, PLAIN).say("x")


def test_logging_passes_by_and_stays() -> None:
    stream = io.StringIO()
    handler = Report(stream, COLOURED, passing=True)
    for level, name, message in (
        (logging.INFO, "cog_triton.deployment", "first"),
        (logging.INFO, "httpx", "request"),
        (logging.WARNING, "httpx", "late"),
    ):
        handler.emit(logging.LogRecord(name, level, "", 0, message, None, None))
    assert not handler.clear()
    assert stream.getvalue() == (
        "\r\x1b[K\x1b[2mfirst\x1b[0m\r\x1b[K\x1b[33mwarning:\x1b[0m late\n"
    )
    elsewhere = io.StringIO()
    Report(elsewhere, PLAIN, passing=True).show("first")
    assert elsewhere.getvalue() == ""


# What is said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "worker setup failed: worker setup failed (slot d6-5): Setup failed: setup failed: "
            "ConfigurationError: E3001 ConfigurationError: no\nlast: x",
            "E3001 ConfigurationError: no\nlast: x",
        ),
        ("setup failed: the model: none", "the model: none"),
        ("worker crashed: x", "worker crashed: x"),
    ],
)
def test_why_setup_failed_without_cogs_wrapping(error: str, said: str) -> None:
    assert WRAPPING.sub("", error, 1) == said


class Server:
    """What a server would log, printed by a Python that ends with a status."""

    def __init__(self, *lines: str, status: int = 0) -> None:
        code = f"print({chr(10).join(lines)!r}, end='')\nraise SystemExit({status})"
        self.command = [sys.executable, "-c", code]


def life(server: Server, tmp_path: Path) -> tuple[int, list[str]]:
    """The exit status of serving it, and the messages, in a process of its own: signals are taken there."""
    code = (
        "import sys, asyncio, pathlib, json\n"
        "from cog_triton.faces.terminal.serving import Serving\n"
        "from cog_triton.faces.terminal.report import Report\n"
        "serving = Serving(Report(sys.stdout, None), 'url', 1.0)\n"
        "command, directory = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "sys.exit(asyncio.run(serving.run(command, {}, directory)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(server.command), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return done.returncode, [
        json.loads(line)["fields"]["message"] for line in done.stdout.splitlines()
    ]


def test_a_setup_that_failed_is_told_at_the_end(tmp_path: Path) -> None:
    failed = coglet("Worker initialization failed", "ERROR", error="x setup failed: E: no\nwhy")
    again = coglet("Setup failed", "ERROR")
    assert life(Server(failed, again, coglet("Shutting down")), tmp_path) == (
        1,
        ["Shutting down", "no\nwhy"],
    )


def test_a_server_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    said = ["Traceback", "OSError: no", "Cog's server ended with exit status 3: OSError: no"]
    assert life(Server(*said[:2], "", status=3), tmp_path) == (1, said)


def test_a_signal_ends_all_and_takes_away_what_they_named(tmp_path: Path) -> None:
    """In a process of its own, with a child that ignores SIGTERM and a grandchild."""
    code = (
        "import subprocess, sys, os, tempfile, signal\n"
        "from cog_triton.faces.terminal import end_at_once_on_signals\n"
        "from cog_triton.server.guard import process_name\n"
        "end_at_once_on_signals()\n"
        "child = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 600 & wait'])\n"
        "for pid in (os.getpid(), child.pid):\n"
        "    tempfile.mkdtemp(prefix=f'cog-triton-{process_name(pid)}-')\n"
        "    open(f'/dev/shm/cog_triton_{process_name(pid)}_x', 'w').close()\n"
        "    print(process_name(pid), flush=True)\n"
        "signal.pause()\n"
    )
    (tmp_path / "cog-triton-1_1-other").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    names = [process.stdout.readline().strip() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    # Both pipes end when the last descendant does.
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "stopped\n")
    assert [path.name for path in tmp_path.iterdir()] == ["cog-triton-1_1-other"]
    assert not [name for name in names if Path(f"/dev/shm/cog_triton_{name}_x").exists()]
