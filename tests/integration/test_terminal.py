"""``make serve`` and ``make predict`` as somebody sees them: on a terminal, in a pipe, and at Ctrl-C."""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from cog_triton.deployment.running import EXIT_STATUS
from tests.integration.conftest import ANY_PORTS
from tests.support import (
    ROOT,
    SHARED_MEMORY,
    Event,
    alive,
    children,
    fake_triton,
    free_port,
    limit,
    marked,
    processes,
    script,
    streamed_prediction,
    wait_until,
)
from tools.demo_model.corpus import PAIRS

SERVE = [sys.executable, str(ROOT / "scripts" / "serve.py")]
PREDICT = [sys.executable, str(ROOT / "scripts" / "run_prediction.py")]
QUESTION, ANSWER = PAIRS[0]
IMPORTS = [sys.executable, "-X", "importtime"]  # Python says of each module that it is imported
CTRL_C, SIGTERM = "\x03", "SIGTERM"
SECONDS = 60.0  # on a quick machine that does nothing else
WITH_IT = "the predictor's process ended unexpectedly; stopping Cog's server"


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

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        for _round in range(2):  # the second ends it at once
            if self.process.poll() is None:
                self.process.terminate()
        self.process.wait(limit(SECONDS))
        os.close(self._end)

    def wait_for(self, text: str) -> None:
        """Reads until the terminal shows the text."""
        while text not in self.text:
            assert self._read(), f"no {text!r} in:\n{self.text}"

    def stop(self, how: str) -> set[int]:
        """Types Ctrl-C or sends SIGTERM; returns the processes there are at that moment."""
        there = {self.process.pid, *children(self.process.pid)}
        if how == CTRL_C:
            os.write(self._end, how.encode())
        else:
            self.process.terminate()
        return there

    def status(self) -> int:
        """Reads to the end; returns the exit status."""
        while self._read():
            pass
        return self.process.wait(limit(SECONDS))

    def leaves_nothing(self, there: set[int]) -> None:
        """No process, no shared memory of those that were there, no temporary file."""
        assert not marked(f"TMPDIR={self._tmp}")
        regions = [region.name for region in SHARED_MEMORY.iterdir()]
        assert not [name for name in regions for pid in there if f"cog_triton_{pid}_" in name]
        assert list(self._tmp.iterdir()) == []

    def _read(self) -> bool:
        assert select.select([self._end], [], [], limit(SECONDS))[0], (
            f"nothing more after:\n{self.text}"
        )
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # the last process that had the terminal has ended
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def simulated(model: Path, **more: str) -> dict[str, str]:
    port = str(free_port())
    return {"MODEL": str(model), "ENGINE": "simulated", **ANY_PORTS, "PORT": port, **more}


def faked(model: Path, **behaviour: str) -> dict[str, str]:
    """With the stand-in for tritonserver."""
    return {**simulated(model), **fake_triton(**behaviour)}


@contextlib.contextmanager
def stream(environment: Mapping[str, str], max_tokens: int) -> Iterator[Iterator[Event]]:
    """A stream whose first text has come."""
    url = f"http://127.0.0.1:{environment['PORT']}"
    with streamed_prediction(url, prompt="Hi", max_tokens=max_tokens) as events:
        next(event for event in events if event[0] == "output")
        yield events


# Ctrl-C


@pytest.mark.parametrize(
    ("command", "shown", "stop", "end"),
    [
        # The script's first import: Python ends itself.
        pytest.param(IMPORTS + SERVE[1:], " argparse\r\n", CTRL_C, "", id="serve, first import"),
        pytest.param(SERVE, "importing pydantic", CTRL_C, "stopped\r\n", id="serve, imports"),
        pytest.param(
            PREDICT,
            "importing numpy",
            CTRL_C,
            "stopped\r\n",
            id="predict, imports",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            SERVE,
            "Initialize: tensorrt_llm",
            CTRL_C,
            "stopped before it was ready\r\n",
            id="serve, Triton starts",
        ),
        pytest.param(
            SERVE, "model in place", SIGTERM, "", id="serve, SIGTERM", marks=pytest.mark.rare
        ),
        pytest.param(
            PREDICT,
            "model in place",
            CTRL_C,
            "stopped\r\n",
            id="predict, Triton starts",
            marks=pytest.mark.rare,
        ),
        pytest.param(PREDICT, "tsken", CTRL_C, "\nstopped\r\n", id="predict, answers"),
    ],
)
def test_an_end_before_it_is_done(
    command: list[str], shown: str, stop: str, end: str, demo_model: Path, tmp_path: Path
) -> None:
    environment = faked(demo_model, token_ms="300")
    if shown.startswith("importing"):  # a module that takes long
        module = f"import time; print({shown!r}); time.sleep({SECONDS})"
        (tmp_path / f"{shown.split()[1]}.py").write_text(module)
        environment["PYTHONPATH"] = str(tmp_path)
    if shown.startswith("Initialize"):
        environment |= {"LOG_LEVEL": "debug", **fake_triton(slow="tensorrt_llm")}
    with Terminal(command, environment, tmp_path) as terminal:
        terminal.wait_for(shown)
        there = terminal.stop(stop)
        if stop == SIGTERM:
            assert terminal.status() == 0
        else:
            assert terminal.status() in ((130,) if end else (130, -signal.SIGINT))
        assert terminal.text.endswith(end)
        assert "Traceback" not in terminal.text
        terminal.leaves_nothing(there)


def test_serve_on_a_terminal_from_its_start_to_ctrl_c(demo_model: Path, tmp_path: Path) -> None:
    """By make, which adds nothing: short lines of progress, a command to try, one line at the end."""
    environment = faked(demo_model)
    make = ["make", "--no-print-directory", "-o", ".venv/.installed"]
    given = [f"BIN={Path(sys.executable).parent}", f"PORT={environment['PORT']}"]
    with Terminal([*make, *given, "serve"], environment, tmp_path) as terminal:
        terminal.wait_for("curl")
        terminal.wait_for("}}'\r\n")
        url = f"http://127.0.0.1:{environment['PORT']}"
        shown = re.sub(r"\x1b\[\d*[mK]", "", terminal.text).splitlines()
        own = [line for line in shown[:-2] if "cleaning up after a killed server" not in line]
        (what,) = [line for line in own if line.startswith("serving ")]
        assert what.endswith("; chat template from the tokenizer for messages, prompts unchanged")
        own.remove(what)
        assert [re.sub(r"\d+\.\d s", "N s", line) for line in sorted(own)] == [
            "model in place in N s",
            "postprocessing loaded in N s",
            "preprocessing loaded in N s",
            "prompts go to the model unchanged, without a chat template",
            "tensorrt_llm loaded in N s",
            "tokenizer loaded in N s",
            "warmed up in N s",
        ]
        assert shown[-2] == f"ready: {url} (Ctrl-C stops it); try"
        answer = subprocess.run(["bash", "-c", shown[-1]], capture_output=True, text=True)
        assert json.loads(answer.stdout)["status"] == "succeeded"
        before = len(terminal.text)
        there = terminal.stop(CTRL_C)
        # A shell makes 130 of it. On a busy machine make itself may miss the signal and end with 0.
        assert terminal.status() in (-signal.SIGINT, 0)
        end = terminal.text[before:].replace("^C", "").replace("\r\x1b[K", "").splitlines()
        # Where Triton takes longer than that, its starter cleans up, also after other servers.
        assert [line for line in end if "cleaning up after a killed server" not in line] == [
            "waiting for Triton to stop, at most 10 s (TRITON_STOP_TIMEOUT); "
            "Ctrl-C again stops at once"
        ]
        terminal.leaves_nothing(there)


def test_ctrl_c_lets_streams_end_and_a_second_does_not(demo_model: Path, tmp_path: Path) -> None:
    environment = simulated(demo_model, SIMULATED_INTER_TOKEN_MS="20", DRAIN_SECONDS="3600")
    with Terminal(SERVE, environment, tmp_path) as terminal:
        terminal.wait_for("ready:")
        # The second has to run until the server has been told to stop: for two seconds on a quick machine.
        with stream(environment, 5000), stream(environment, int(limit(100))) as events:
            there = terminal.stop(CTRL_C)
            terminal.wait_for(
                "waiting for 2 predictions, at most 3600 s (DRAIN_SECONDS); Ctrl-C again"
            )
            assert list(events)[-1][1]["status"] == "succeeded"
            terminal.stop(CTRL_C)
            assert terminal.status() == 130
        assert terminal.text.endswith("stopped at once\r\n")
        terminal.leaves_nothing(there)


# What is shown


def test_a_port_in_use_is_the_last_line(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        with Terminal(SERVE, {"PORT": port}, tmp_path) as terminal:
            assert terminal.status() == 1
        assert terminal.text == f"\r\x1b[K\x1b[31merror:\x1b[0m port {port} is in use\r\n"
        (tmp_path / "asked").mkdir()
        with Terminal(SERVE, {"PORT": port, "LOG_FORMAT": "json"}, tmp_path / "asked") as terminal:
            assert terminal.status() == 1
    shown = json.loads(terminal.text)
    assert (shown["level"], shown["fields"]["message"]) == ("ERROR", f"port {port} is in use")


def test_serve_ends_when_setup_fails_and_says_why_last(tmp_path: Path) -> None:
    with Terminal(SERVE, simulated(tmp_path / "none"), tmp_path) as terminal:
        assert terminal.status() == 1
    last = terminal.text.splitlines()[-1]
    assert "error:" in last
    assert f"MODEL={tmp_path / 'none'} does not exist" in last
    assert "setup failed" not in last


@pytest.mark.parametrize(
    ("process", "status", "end"),
    [
        pytest.param(
            "cog_triton.api.cog.server",
            1,
            "Cog's server ended by signal 9 (SIGKILL)",
            id="Cog's server",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            "/tensorrt_llm/1/model.py", 1, f"exit status {EXIT_STATUS}: {WITH_IT}", id="the engine"
        ),
        pytest.param(
            "scripts/serve.py", -signal.SIGKILL, "", id="the command", marks=pytest.mark.rare
        ),
    ],
)
def test_a_part_that_is_killed_is_an_error_and_nothing_outlives_it(
    process: str, status: int, end: str, demo_model: Path, tmp_path: Path
) -> None:
    """The engine's is one with EXIT_ON_FAILURE."""
    environment = {**faked(demo_model), "EXIT_ON_FAILURE": "true", "TRITON_RESTARTS": "0"}
    with Terminal(SERVE, environment, tmp_path) as terminal:
        terminal.wait_for("}}'\r\n")
        there = {terminal.process.pid, *children(terminal.process.pid)}
        (pid,) = there & set(processes(process))
        os.kill(pid, signal.SIGKILL)
        assert terminal.status() == status
        assert terminal.text.endswith(f"{end}\r\n")
        assert ("exiting: tritonserver died: " in terminal.text) == ("model.py" in process)
        wait_until(lambda: not any(map(alive, there)), 60, "the end of all of it")
        terminal.leaves_nothing(there)


def test_a_pipe_gets_json_with_levels_of_what_was_said(demo_model: Path) -> None:
    failed = script("serve.py", environ={**simulated(demo_model), "ENGINE": "tensorrtllm"})
    assert failed.returncode == 1
    lines = [json.loads(line) for line in failed.stderr.splitlines()]
    assert {line["level"] for line in lines} >= {"INFO", "ERROR"}
    assert "tritonserver" not in {line["target"] for line in lines if line["level"] == "INFO"}
    progress = [line for line in lines if line["target"] == "cog_triton.deployment"]
    assert progress[0]["fields"]["message"].startswith("model in place in ")
    assert lines[-1]["level"] == "ERROR"


def test_predict_in_a_pipe_prints_the_answer_alone(demo_model: Path) -> None:
    environment = {**simulated(demo_model), "ENGINE": "transformers"}
    inputs = ("-i", "temperature=0", "-i", "seed=0", QUESTION)
    done = script("run_prediction.py", *inputs, environ=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ANSWER}\n"
    first, *progress, seed, figures = done.stderr.splitlines()
    assert first == "starting Triton ..."
    assert any(line.startswith("tensorrt_llm loaded in ") for line in progress)
    (what,) = [line for line in progress if line.startswith("serving ")]
    assert re.fullmatch(
        r"serving \S+ \((toy demo model, )?llama, \d+K parameters\) on transformers, (cpu|cuda), float32; "
        r"context 2,048; ends at </s>; chat template from the tokenizer for messages, prompts unchanged",
        what,
    )
    assert seed == "Random seed used: 0"
    assert re.fullmatch(r"\d+ tokens, first after \d+ ms, \d+ tokens/s", figures)


@pytest.mark.rare
def test_predict_on_a_terminal_shows_the_answer_first(demo_model: Path, tmp_path: Path) -> None:
    with Terminal([*PREDICT, "-i", "max_tokens=4", "Hi"], faked(demo_model), tmp_path) as terminal:
        assert terminal.status() == 0
    stays = terminal.text.rpartition("\r\x1b[K")[2]
    notes = r"\x1b\[2mRandom seed used: \d+\r\n4 tokens, [^\x1b]+\x1b\[0m\r\n"
    assert re.fullmatch(rf"[^\x1b]+\r\n{notes}", stays)
