"""``make serve`` and ``make predict`` as somebody sees them: on a terminal, in a pipe, and at Ctrl-C."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from tests.support import (
    ROOT,
    SHARED_MEMORY,
    Event,
    _events,
    alive,
    children,
    free_port,
    processes,
    wait_until,
)
from tools.demo_model.corpus import PAIRS

SERVE = [sys.executable, str(ROOT / "scripts" / "serve.py")]
PREDICT = [sys.executable, str(ROOT / "scripts" / "run_prediction.py")]
QUESTION, ANSWER = PAIRS[0]
CTRL_C = b"\x03"
SECONDS = 60.0


class Terminal:
    """A process on a terminal of its own, which is read and typed at.

    Attributes:
        text: all that it has shown.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], tmp: Path) -> None:
        self._tmp = tmp / "tmp"
        self._tmp.mkdir()
        self._end, terminal = os.openpty()
        given = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**given, "TERM": "xterm", **environment, "TMPDIR": str(self._tmp)},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        for _round in range(2):  # the second ends it at once
            if self.process.poll() is None:
                self.process.terminate()
        self.process.wait(SECONDS)
        os.close(self._end)

    def wait_for(self, text: str) -> None:
        """Reads until the terminal shows the text."""
        while text not in self.text:
            assert self._read(), f"no {text!r} in:\n{self.text}"

    def ctrl_c(self) -> set[int]:
        """Types it; returns the processes there are at that moment."""
        there = {self.process.pid, *children(self.process.pid)}
        os.write(self._end, CTRL_C)
        return there

    def status(self) -> int:
        """Reads to the end; returns the exit status."""
        while self._read():
            pass
        return self.process.wait(SECONDS)

    def leaves_nothing(self, there: set[int]) -> None:
        """No process, no shared memory of those that were there, no temporary file."""
        mark = f"TMPDIR={self._tmp}".encode()
        assert [pid for pid in pids() if mark in environment_of(pid)] == []
        regions = [region.name for region in SHARED_MEMORY.iterdir()]
        assert not [name for name in regions for pid in there if f"cog_triton_{pid}_" in name]
        assert list(self._tmp.iterdir()) == []

    def _read(self) -> bool:
        assert select.select([self._end], [], [], SECONDS)[0], f"nothing more after:\n{self.text}"
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # the last process that had the terminal has ended
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def simulated(model: Path, **more: str) -> dict[str, str]:
    ports = dict.fromkeys(["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"], "0")
    port = {"PORT": str(free_port())}
    return {"MODEL": str(model), "ENGINE": "simulated", **ports, **port, **more}


@contextlib.contextmanager
def stream(environment: Mapping[str, str], max_tokens: int) -> Iterator[Iterator[Event]]:
    """A stream whose first text has come."""
    with httpx.stream(
        "POST",
        f"http://127.0.0.1:{environment['PORT']}/predictions",
        json={"input": {"prompt": "Hi", "max_tokens": max_tokens}},
        headers={"Accept": "text/event-stream"},
        timeout=60,
        trust_env=False,
    ) as reply:
        events = _events(reply.iter_lines())
        next(event for event in events if event[0] == "output")
        yield events


# Ctrl-C


@pytest.mark.parametrize("command", [SERVE, PREDICT], ids=["serve", "predict"])
def test_ctrl_c_in_the_first_imports(command: list[str], demo_model: Path, tmp_path: Path) -> None:
    # Python says of each module that it has been imported.
    python = [command[0], "-X", "importtime", *command[1:]]
    with Terminal(python, simulated(demo_model), tmp_path) as terminal:
        terminal.wait_for(" pydantic.types\r\n" if command is SERVE else " numpy\r\n")
        there = terminal.ctrl_c()
        assert terminal.status() == 130
        assert "Traceback" not in terminal.text
        assert terminal.text.endswith("stopped\r\n")
        terminal.leaves_nothing(there)


@pytest.mark.parametrize("command", [SERVE, PREDICT], ids=["serve", "predict"])
def test_ctrl_c_before_anything_is_set_up(command: list[str], tmp_path: Path) -> None:
    python = [command[0], "-X", "importtime", *command[1:]]
    with Terminal(python, {}, tmp_path) as terminal:
        terminal.wait_for(" argparse\r\n")  # the first import of the script's own
        terminal.ctrl_c()
        assert terminal.status() in (130, -signal.SIGINT)
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize(
    "event", ["Loading predictor", "model in place", "Initialize: tensorrt_llm"]
)
def test_ctrl_c_while_serve_starts(event: str, demo_model: Path, tmp_path: Path) -> None:
    environment = simulated(demo_model, LOG_LEVEL="debug")
    with Terminal(SERVE, environment, tmp_path) as terminal:
        terminal.wait_for(event)
        there = terminal.ctrl_c()
        assert terminal.status() == 130
        assert terminal.text.endswith("stopped before it was ready\r\n")
        terminal.leaves_nothing(there)


def test_serve_on_a_terminal_from_its_start_to_ctrl_c(demo_model: Path, tmp_path: Path) -> None:
    """By make, which adds nothing: short lines of progress, a command to try, one line at the end."""
    environment = simulated(demo_model)
    make = ["make", "--no-print-directory", f"BIN={Path(sys.executable).parent}"]
    old = ["-o", ".venv/.installed"]
    command = [*make, *old, f"PORT={environment['PORT']}", "serve"]
    with Terminal(command, environment, tmp_path) as terminal:
        terminal.wait_for("curl")
        terminal.wait_for("}}'\r\n")
        url = f"http://127.0.0.1:{environment['PORT']}"
        shown = re.sub(r"\x1b\[\d*[mK]", "", terminal.text).splitlines()
        own = [line for line in shown[:-2] if "removing what a server left" not in line]
        assert [re.sub(r"\d+\.\d s", "N s", line) for line in sorted(own)] == [
            "model in place in N s",
            "postprocessing loaded in N s",
            "preprocessing loaded in N s",
            "tensorrt_llm loaded in N s",
            "tokenizer loaded in N s",
            "warmed up in N s",
        ]
        assert shown[-2] == f"ready: {url} (Ctrl-C stops it); try"
        answer = subprocess.run(["bash", "-c", shown[-1]], capture_output=True, text=True)
        assert json.loads(answer.stdout)["status"] == "succeeded"
        before = len(terminal.text)
        there = terminal.ctrl_c()
        # A shell makes 130 of it. On a busy machine make itself may miss the signal and end with 0.
        assert terminal.status() in (-signal.SIGINT, 0)
        after = terminal.text[before:].replace("^C", "").replace("\r\x1b[K", "").splitlines()
        assert after == [
            "waiting for Triton to stop, at most 10 s (TRITON_STOP_TIMEOUT); "
            "Ctrl-C again stops at once"
        ]
        terminal.leaves_nothing(there)


def test_ctrl_c_lets_a_stream_end(demo_model: Path, tmp_path: Path) -> None:
    environment = simulated(demo_model, SIMULATED_INTER_TOKEN_MS="20")
    with Terminal(SERVE, environment, tmp_path) as terminal:
        terminal.wait_for("ready:")
        with stream(environment, 100) as events:
            there = terminal.ctrl_c()
            terminal.wait_for(
                "waiting for 1 prediction, at most 30 s (DRAIN_SECONDS); Ctrl-C again"
            )
            assert list(events)[-1][1]["status"] == "succeeded"
        assert terminal.status() == 130
        terminal.leaves_nothing(there)


def test_a_stream_that_does_not_end_in_time_is_ended(demo_model: Path, tmp_path: Path) -> None:
    environment = simulated(demo_model, SIMULATED_INTER_TOKEN_MS="1000", DRAIN_SECONDS="0.2")
    with Terminal(SERVE, environment, tmp_path) as terminal:
        terminal.wait_for("ready:")
        with stream(environment, 5000):
            there = terminal.ctrl_c()
            assert terminal.status() == 130
        assert "warning:\x1b[0m 1 prediction did not end in 0.2 s: stopped at once" in terminal.text
        terminal.leaves_nothing(there)


def test_a_second_ctrl_c_ends_a_stream_at_once(demo_model: Path, tmp_path: Path) -> None:
    environment = simulated(demo_model, SIMULATED_INTER_TOKEN_MS="1000", DRAIN_SECONDS="3600")
    with Terminal(SERVE, environment, tmp_path) as terminal:
        terminal.wait_for("ready:")
        with stream(environment, 5000):
            there = terminal.ctrl_c()
            terminal.wait_for("at most 3600 s")
            terminal.ctrl_c()
            assert terminal.status() == 130
        assert terminal.text.endswith("stopped at once\r\n")
        terminal.leaves_nothing(there)


def test_sigterm_while_serve_starts(demo_model: Path, tmp_path: Path) -> None:
    with Terminal(SERVE, simulated(demo_model), tmp_path) as terminal:
        terminal.wait_for("model in place")
        there = {terminal.process.pid, *children(terminal.process.pid)}
        terminal.process.terminate()
        assert terminal.status() == 0
        terminal.leaves_nothing(there)


@pytest.mark.parametrize("event", ["model in place", "warmed up", "pattern"])
def test_ctrl_c_at_predict(event: str, demo_model: Path, tmp_path: Path) -> None:
    environment = {
        **simulated(demo_model),
        "SIMULATED_TEXT": "pattern " * 9,
        "SIMULATED_INTER_TOKEN_MS": "300",
    }
    with Terminal(PREDICT, environment, tmp_path) as terminal:
        terminal.wait_for(event)
        there = terminal.ctrl_c()
        assert terminal.status() == 130
        assert "Traceback" not in terminal.text
        assert re.search(r"(\x1b\[K|\n)stopped\r\n$", terminal.text)
        terminal.leaves_nothing(there)


# What is shown


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS
    )


def test_a_port_in_use_is_the_last_line(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        with Terminal(SERVE, {"PORT": port}, tmp_path) as terminal:
            assert terminal.status() == 1
        assert terminal.text == f"\r\x1b[K\x1b[31merror:\x1b[0m port {port} is in use\r\n"
        on_request = tmp_path / "on_request"
        on_request.mkdir()
        with Terminal(SERVE, {"PORT": port, "LOG_FORMAT": "json"}, on_request) as terminal:
            assert terminal.status() == 1
        assert json.loads(terminal.text)["level"] == "ERROR"
        piped = run(SERVE, PORT=port)
    assert piped.returncode == 1
    assert json.loads(piped.stderr)["fields"]["message"] == f"port {port} is in use"
    assert "PORT=x is no number" in run(SERVE, PORT="x").stderr


def test_serve_ends_when_setup_fails_and_says_why_last(tmp_path: Path) -> None:
    with Terminal(SERVE, simulated(tmp_path / "none"), tmp_path) as terminal:
        assert terminal.status() == 1
    last = terminal.text.splitlines()[-1]
    assert "error:" in last
    assert f"MODEL={tmp_path / 'none'} does not exist" in last
    assert "setup failed" not in last


@pytest.mark.parametrize(
    ("process", "end"),
    [
        (
            "cog_triton.faces.cog.server",
            "error:\x1b[0m Cog's server ended by signal 9 (SIGKILL)\r\n",
        ),
        (
            "coglet.server._run_worker",
            "the predictor's process has ended, and Cog's server with it\r\n",
        ),
    ],
    ids=["server", "worker"],
)
def test_an_end_that_nobody_asked_for_is_an_error(
    process: str, end: str, demo_model: Path, tmp_path: Path
) -> None:
    with Terminal(SERVE, simulated(demo_model), tmp_path) as terminal:
        terminal.wait_for("ready:")
        there = {terminal.process.pid, *children(terminal.process.pid)}
        (pid,) = there & set(processes(process))
        os.kill(pid, signal.SIGKILL)
        assert terminal.status() == 1
        assert terminal.text.endswith(end)
        terminal.leaves_nothing(there)


def test_nothing_outlives_serve(demo_model: Path, tmp_path: Path) -> None:
    with Terminal(SERVE, simulated(demo_model), tmp_path) as terminal:
        terminal.wait_for("ready:")
        there = {terminal.process.pid, *children(terminal.process.pid)}
        os.kill(terminal.process.pid, signal.SIGKILL)
        assert terminal.status() == -signal.SIGKILL
        wait_until(lambda: not [pid for pid in there if alive(pid)], 60, "the end of all of it")
        terminal.leaves_nothing(there)


def test_a_pipe_gets_json_with_the_levels_of_what_was_said(
    demo_model: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, **simulated(demo_model), "TOKENIZER": str(tmp_path)}
    failed = run(SERVE, **environment)
    assert failed.returncode == 1
    lines = [json.loads(line) for line in failed.stderr.splitlines()]
    assert {line["level"] for line in lines} >= {"INFO", "ERROR"}
    assert "tritonserver" not in {line["target"] for line in lines if line["level"] == "INFO"}
    progress = [line for line in lines if line["target"] == "cog_triton.deployment"]
    assert progress[0]["fields"]["message"].startswith("model in place in ")
    assert lines[-1]["level"] == "ERROR"


def test_text_in_a_pipe_is_without_colour(demo_model: Path) -> None:
    failed = run(SERVE, **simulated(demo_model / "none"), LOG_FORMAT="text")
    assert failed.returncode == 1
    assert "\x1b" not in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: ")


def test_predict_in_a_pipe_prints_the_answer_alone(demo_model: Path) -> None:
    environment = {**simulated(demo_model), "ENGINE": "transformers"}
    done = run([*PREDICT, "-i", "temperature=0", "-i", "seed=0", QUESTION], **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ANSWER}\n"
    seed, figures = done.stderr.splitlines()
    assert seed == "Random seed used: 0"
    assert re.fullmatch(r"\d+ tokens, first after \d+ ms, \d+ tokens/s", figures)


@pytest.mark.parametrize("command", [SERVE, PREDICT], ids=["serve", "predict"])
def test_a_damaged_model_is_an_error_of_one_line(
    command: list[str], demo_model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(demo_model, damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    environment = {**simulated(damaged), "ENGINE": "transformers", "NO_COLOR": "1"}
    with Terminal(command, environment, tmp_path) as terminal:
        assert terminal.status() == 1
    *progress, error = terminal.text.replace("\r\x1b[K", "\n").strip().splitlines()
    assert f"{damaged}/model.safetensors is damaged or incomplete" in error
    assert not [line for line in progress if "rror" in line]


@pytest.mark.parametrize("colour", [True, False])
def test_predict_on_a_terminal_shows_the_answer_first(
    colour: bool, demo_model: Path, tmp_path: Path
) -> None:
    environment = {**simulated(demo_model), "SIMULATED_TEXT": "A text.", "NO_COLOR": "1"}
    if colour:
        environment["NO_COLOR"] = ""
    with Terminal([*PREDICT, "-i", "max_tokens=4", "Hi"], environment, tmp_path) as terminal:
        assert terminal.status() == 0
    stays = terminal.text.rpartition("\r\x1b[K")[2]
    dim, end = ("\x1b[2m", "\x1b[0m") if colour else ("", "")
    assert re.fullmatch(
        rf"[^\x1b]+\r\n{re.escape(dim)}Random seed used: \d+\r\n4 tokens, [^\x1b]+{re.escape(end)}\r\n",
        stays,
    )
