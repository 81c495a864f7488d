"""What `make serve` and `make predict` show, without a server."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cog_triton.terminal.serving import CLEAR_LINE, LogReader, Report, Serving, line_of
from tests.support import ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def coglet(message: str, level: str = "INFO", **fields: str) -> str:
    line = {"timestamp": "2026-01-01T00:00:00.5Z", "level": level, "target": "coglet::setup"}
    return json.dumps({**line, "fields": {"message": message, **fields}})


def printed(message: str) -> str:
    return coglet(message, source="Stderr")


def read(reader: LogReader, raw: str) -> tuple[str, str, str]:
    line = reader.read(raw)
    return line["level"], line["target"], line["fields"]["message"]


def test_a_line_that_was_logged_has_its_level_and_name() -> None:
    reader = LogReader()
    raw = printed("WARNING cog_triton.weights: no space")
    assert read(reader, raw) == ("WARN", "cog_triton.weights", "no space")
    # What follows without a level is of the same.
    assert read(reader, printed("  at all")) == ("WARN", "", "  at all")
    # After setup they come by another name.
    user = coglet("ERROR tritonserver: it died").replace("coglet::setup", "coglet::user")
    assert read(reader, user) == ("ERROR", "tritonserver", "it died")
    seed = user.replace("ERROR tritonserver: it died", "Random seed used: 1")
    assert read(reader, seed)[0] == "INFO"
    # Lines of Cog's server are not of the worker.
    assert read(reader, coglet("Setup complete"))[0] == "INFO"
    reader.read(printed("INFO cog_triton.deployment: warmed up"))
    assert read(reader, printed("Loading weights: 100%"))[:2] == ("INFO", "coglet::setup")


@pytest.mark.parametrize("raw", ["Traceback", "[1]", "{}", '{"fields": 1}', "null", ""])
def test_a_line_that_is_no_object_of_coglets(raw: str) -> None:
    assert read(LogReader(), raw) == ("INFO", "python", raw)


def test_json_has_what_coglet_wrote_and_what_was_logged() -> None:
    deprecated = coglet("predict() is deprecated; use run() instead", "WARN")
    assert LogReader().read(deprecated)["level"] == "INFO"
    raw = coglet("Starting prediction", prediction_id="p", name="n", time="t")
    assert LogReader().read(raw) == json.loads(raw)
    own = line_of("CRITICAL", "cog_triton.serve", "ä\nb")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", own.pop("timestamp"))
    assert own == {"level": "ERROR", "fields": {"message": "ä\nb"}, "target": "cog_triton.serve"}


def shown(level: str, name: str, text: str, at: str = "info", to: Any = io.StringIO) -> str:
    stream: io.StringIO = to()
    report = Report(stream, {})
    report.setLevel(at.upper())
    report.add(line_of(level, name, text))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("level", "target", "text", "shown_at"),
    [
        pytest.param(
            "ERROR", "tritonserver", "x", ["debug", "info", "warning", "error"], id="error"
        ),
        pytest.param("WARN", "anything", "x", ["debug", "info", "warning"], id="warning"),
        pytest.param("INFO", "cog_triton.deployment", "x", ["debug", "info"], id="the package"),
        pytest.param("INFO", "cog_tritonish", "x", ["debug"], id="another package"),
        pytest.param("INFO", "tritonserver", "x", ["debug"], id="Triton"),
        pytest.param("INFO", "coglet::a", "x", ["debug"], id="Cog's server"),
        pytest.param(
            "ERROR",
            "tritonserver",
            "ERROR: Failed to create instance: no",
            ["debug"],
            id="instance, which the error at the end repeats",
        ),
        pytest.param(
            "ERROR",
            "tritonserver",
            "failed to load 'a' version 1: no",
            ["debug"],
            id="model, which the error at the end repeats",
        ),
        pytest.param(
            "ERROR",
            "tritonserver",
            "Invalid argument: ensemble 'e' depends on 'a' which has no loaded version. no",
            ["debug"],
            id="ensemble, which the error at the end repeats",
        ),
    ],
)
def test_what_a_person_is_shown(level: str, target: str, text: str, shown_at: list[str]) -> None:
    levels = ("debug", "info", "warning", "error")
    assert [at for at in levels if shown(level, target, text, at)] == shown_at


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(r'a_b.cc:12] "no\n\nAt: x"', id="place, quotes and traceback"),
        pytest.param('"no"', id="quotes"),
        pytest.param("no", id="bare"),
        pytest.param(r"a_b.cc:12] no\nAt", id="place and traceback"),
        pytest.param(r'"no\nAt"', id="quotes and traceback"),
    ],
)
def test_a_warning_of_triton(text: str) -> None:
    assert shown("WARN", "tritonserver", text) == "warning: no\n"
    assert shown("WARN", "tritonserver", text, "debug") == f"WARN  tritonserver: {text}\n"


def test_lines_for_a_person_have_colour_on_terminals_that_want_it() -> None:
    assert shown("ERROR", "x", "no", to=Terminal) == "\x1b[31merror:\x1b[0m no\n"
    assert shown("ERROR", "", "  more", to=Terminal) == "  more\n"
    assert shown("INFO", "cog_triton.x", "yes", to=Terminal) == "\x1b[2myes\x1b[0m\n"
    for stream, environ, painted in (
        (Terminal(), {"NO_COLOR": ""}, "\x1b[1mx\x1b[0m"),
        (Terminal(), {"NO_COLOR": "1"}, "x"),
        (Terminal(), {"TERM": "dumb"}, "x"),
        (io.StringIO(), {}, "x"),
    ):
        assert Report(stream, environ).paint(1, "x") == painted


@pytest.mark.parametrize("machine", [True, False])
def test_a_stream_that_nobody_reads_any_more_ends_nothing(machine: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    Report(os.fdopen(writer, "w"), {}, machine=machine).say("x")


def test_nothing_follows_a_second_ctrl_c_not_even_what_the_first_one_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's line may be read after both."""
    stream = Terminal()
    serving = Serving(Report(stream, {"TERM": "dumb"}), "", stop_seconds=1.0)
    serving._stage = "stopping"
    monkeypatch.setattr(serving, "_end_at_once", lambda: None)
    monkeypatch.setattr(serving, "_end_after", lambda _: None)
    waits = line_of("INFO", "cog_triton.api.cog.front", "waiting for 2 predictions")
    waits["fields"]["stops_within"] = 34.0
    serving._note(waits)
    serving._signalled(signal.SIGINT)
    serving._note(waits)
    shown = stream.getvalue().replace(CLEAR_LINE, "").splitlines()
    assert shown == ["waiting for 2 predictions; Ctrl-C again stops at once", "stopped at once"]


FLOODED = """
import asyncio, os, sys
from cog_triton.terminal.serving import Report, Serving
report = Report(sys.stderr, os.environ)
report.setLevel("DEBUG")
sys.exit(asyncio.run(Serving(report, "", 1.0).run(["yes", "a line"], os.environ)))
"""


BESIDE_ABANDONED = """
import asyncio, os, sys
from pathlib import Path
from cog_triton.server import guard
from cog_triton.terminal.serving import Report, Serving
directory, form, *command = sys.argv[1:]
guard.SHARED_MEMORY = Path(directory)
report = Report(sys.stderr, os.environ, machine=form == "json")
sys.exit(asyncio.run(Serving(report, "", 1.0).run(command, os.environ)))
"""
LOCK = "cog_triton_1_1_abandoned_lock"


def beside_abandoned(directory: Path, form: str, *command: str) -> subprocess.Popen[str]:
    """Serve, in place of Cog's server by a command, on a machine where another server was killed."""
    (directory / LOCK).touch()
    arguments = [sys.executable, "-c", BESIDE_ABANDONED, str(directory), form, *command]
    return subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_another_server_left_is_removed_before_the_reason_of_the_end(
    form: str, tmp_path: Path
) -> None:
    with beside_abandoned(tmp_path, form, "false") as process:
        _, shown = process.communicate()
    lines = shown.splitlines()
    if form == "json":
        written = [json.loads(line) for line in lines]
        lines = [f"{line['level']} {line['fields']['message']}" for line in written]
        labels = ("WARN", "ERROR")
    else:
        labels = ("warning:", "error:")
    assert lines == [
        f"{labels[0]} cleaning up after a killed server ({LOCK})",
        f"{labels[1]} Cog's server ended with exit status 1",
    ]
    assert process.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_what_another_server_left_is_removed_silently_after_the_last_line(tmp_path: Path) -> None:
    with beside_abandoned(tmp_path, "json", "sh", "-c", "echo runs; exec sleep 3600") as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["fields"]["message"] == "runs"
        process.send_signal(signal.SIGINT)
        (last,) = process.stderr
        assert json.loads(last)["fields"]["message"] == "stopped before it was ready"
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_the_last_line_says_that_it_was_stopped_however_much_was_logged() -> None:
    command = [sys.executable, "-c", FLOODED]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("a line\n")
        process.send_signal(signal.SIGINT)
        *_, last = process.stderr
    assert (process.returncode, last) == (130, "stopped before it was ready\n")
