"""scripts/_recipe.py: how a command of the Makefile ends with make."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT, children

# Says which signals come, and goes on for a moment after the first, as a server drains.
COMMAND = """
import signal, sys, threading
came = threading.Event()
def note(number, _):
    print(f"signal {number}", flush=True)
    came.set()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print("up", flush=True)
while not came.is_set():
    came.wait(0.05)
threading.Event().wait(0.1)
print("drained", flush=True)
sys.exit(int(sys.argv[1]))
"""
TIMEOUT = 60.0


def start(tmp_path: Path, status: int = 0) -> "subprocess.Popen[str]":
    """Return make, in a process group of its own, whose command is up."""
    (tmp_path / "command.py").write_text(COMMAND)
    command = f"{sys.executable} command.py {status}"
    recipe = ROOT / "scripts" / "_recipe.py"
    (tmp_path / "Makefile").write_text(f"all:\n\t@exec {sys.executable} {recipe} {command}\n")
    # Under another make, MAKEFLAGS and MAKELEVEL would have it print its directory first.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    make = subprocess.Popen(
        ["make"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert make.stdout is not None
    assert make.stdout.readline() == "up\n"
    return make


def to_make(make: int) -> None:
    os.kill(make, signal.SIGTERM)


def to_make_and_its_group(make: int) -> None:
    """As timeout does."""
    os.kill(make, signal.SIGTERM)
    os.killpg(make, signal.SIGTERM)


def to_the_group(make: int) -> None:
    os.killpg(make, signal.SIGTERM)


@pytest.mark.parametrize("send", [to_make, to_make_and_its_group, to_the_group])
def test_sigterm_reaches_the_command_once_and_make_waits_for_it(
    send: Callable[[int], None], tmp_path: Path
) -> None:
    make = start(tmp_path)
    there = children(make.pid)
    send(make.pid)
    said, _ = make.communicate(timeout=TIMEOUT)
    lines = said.splitlines()
    if send is to_make_and_its_group and lines[1] == lines[0]:
        # Linux merged make's signal and the group's before the recipe ran: it could not tell them apart.
        del lines[1]
    assert lines[:2] == [f"signal {signal.SIGTERM:d}", "drained"]
    assert make.returncode == -signal.SIGTERM
    assert not [pid for pid in there if Path(f"/proc/{pid}").exists()]


def test_ctrl_c_is_no_error_of_make(tmp_path: Path) -> None:
    make = start(tmp_path, 128 + signal.SIGINT)
    os.killpg(make.pid, signal.SIGINT)
    said, _ = make.communicate(timeout=TIMEOUT)
    assert said.splitlines()[:2] == [f"signal {signal.SIGINT:d}", "drained"]
    assert "Error" not in said
    assert make.returncode == -signal.SIGINT


def test_sigterm_to_the_recipe_alone_is_passed_on(tmp_path: Path) -> None:
    make = start(tmp_path, 3)
    (recipe,) = [pid for pid in children(make.pid) if parent(pid) == make.pid]
    os.kill(recipe, signal.SIGTERM)
    said, _ = make.communicate(timeout=TIMEOUT)
    assert f"signal {signal.SIGTERM:d}\ndrained\n" in said
    assert "Error 3" in said


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
