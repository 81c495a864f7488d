#!/usr/bin/env python3
"""Makes the virtual environment .venv of this checkout, with everything that its commands need.

    python3 scripts/setup_environment.py

Needs Python 3.10 or later and nothing beyond it. It says a line for each step and for each large download.
On a machine without an NVIDIA GPU it takes PyTorch's build for CPUs, a tenth of that for CUDA, from
PyTorch's own index; where that cannot be reached, whatever the configured index has.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = (
    "https://download.pytorch.org/whl/cpu"  # PyTorch's public address of its builds for CPUs
)
INDEX_TIMEOUT = 4.0
EXTRAS = ".[local,dev]"
LARGE_MB = 40.0
OLDEST = (3, 10)

_DOWNLOAD = re.compile(r"^\s*(Downloading|Using cached) (\S+) \(([\d.]+) ([kMG]?B)\)")
_MEGABYTES = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]


class SetupError(Exception):
    """A set-up that failed, in the user's words."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: %(default)s")
    parser.add_argument("--cpu-index", default=CPU_INDEX, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    begin = time.monotonic()
    try:
        set_up(arguments.venv, arguments.cpu_index)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    say(f"ready, after {time.monotonic() - begin:.0f} s")
    return 0


def set_up(venv: Path, cpu_index: str) -> None:
    """All the steps.

    Raises:
        SetupError: one failed.
    """
    if sys.version_info < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise SetupError(
            f"Python {needed} or later is needed, and this is {platform.python_version()}; "
            "name another one: make setup PYTHON=python3.12"
        )
    say(f"virtual environment {venv}, with Python {platform.python_version()}")
    run(
        [sys.executable, "-m", "venv", str(venv)],
        advice="Debian and Ubuntu have it in python3-venv",
    )
    python = str(venv / "bin" / "python")
    run([python, *_PIP, "--upgrade", "pip"])
    install_torch(python, cpu_index)
    say(f"the packages of {EXTRAS}, about 360 MB besides PyTorch")
    run([python, *_PIP, "--editable", EXTRAS])


def install_torch(python: str, cpu_index: str) -> None:
    """Installs PyTorch's build for CPUs, where one is wanted and can be had; else says what will come."""
    version = torch_version((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if has_gpu():
        say(f"PyTorch {version} for this machine's GPU, several GB with CUDA's libraries")
    elif not (cpu_build(cpu_index, version) and install_cpu_build(python, cpu_index, version)):
        say(
            f"no NVIDIA GPU here, and no build for CPUs to be had from {cpu_index}: PyTorch {version} as "
            "pip's index has it, about 200 MB for CPUs, or several GB with CUDA's libraries"
        )


def install_cpu_build(python: str, index: str, version: str) -> bool:
    """Installs PyTorch's build for CPUs; False if that fails."""
    say(f"no NVIDIA GPU here: PyTorch {version} for CPUs, about 200 MB, from {index}")
    try:
        # Its dependencies come with the others, from the configured index.
        run([python, *_PIP, "--no-deps", "--index-url", index, f"torch=={version}+cpu"])
    except SetupError as error:
        say(str(error))
        return False
    return True


def torch_version(project: str) -> str:
    """The release of PyTorch that pyproject.toml pins."""
    return str(re.findall(r'"torch==([\w.]+)"', project)[0])


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU, by its driver's files."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def cpu_build(index: str, version: str) -> bool:
    """Return whether an index has PyTorch's build for CPUs for this Python. Takes seconds, once."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=INDEX_TIMEOUT) as reply:
            page = urllib.parse.unquote(reply.read().decode(errors="replace"))
    except (OSError, ValueError):
        return False
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = re.escape(platform.machine())
    wheel = rf"torch-{re.escape(version)}\+cpu-({tag}-{tag}-[\w.]*{machine}|py3-none-any)\.whl"
    return re.search(wheel, page) is not None


def run(command: list[str], *, advice: str = "") -> None:
    """Runs a command and shows what it downloads; its own words are shown only if it fails.

    Raises:
        SetupError: it failed; with its last lines.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said: deque[str] = deque(maxlen=15)
    with Progress() as progress:
        for line in process.stdout:
            progress.show(line)
            said.append(line.rstrip())
    if process.wait():
        reason = "\n".join([*said, f"failed with status {process.returncode}: {' '.join(command)}"])
        raise SetupError(f"{reason}\n{advice}" if advice else reason)


class Progress:
    """Pip's downloads: a line for each large one, and on a terminal one line for the rest."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._megabytes = 0.0
        self._files = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._overwrite("")
        if self._megabytes >= LARGE_MB:
            say(f"  {self._files} files, {self._megabytes:.0f} MB in all")

    def show(self, line: str) -> None:
        download = _DOWNLOAD.match(line)
        if download is None:
            if self._terminal and line.startswith(("Collecting", "Installing", "Building")):
                self._overwrite(" ".join(line.split()))
            return
        how, file, amount, unit = download.groups()
        size = float(amount) * _MEGABYTES[unit]
        self._megabytes += size
        self._files += 1
        name = "-".join(urllib.parse.unquote(file.rpartition("/")[2]).split("-")[:2])
        if size >= LARGE_MB:
            self._overwrite("")
            say(f"  {name}, {size:.0f} MB" + (", cached" if how == "Using cached" else ""))
        self._overwrite(f"{name}, {self._megabytes:.0f} MB so far")

    def _overwrite(self, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 4
            shown = "  " + text[:width] if text else ""
            print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    # Not to standard output: that is `make predict`'s answer's.
    print(text if text.startswith(" ") else f"setup: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
