#!/usr/bin/env python3
"""Make a virtual environment of this checkout: `python3 scripts/setup_environment.py .venv -e .[local]`.

Needs Python 3.10 or later and nothing beyond it. uv installs in a third of pip's time, and is given pip's
indexes, links and certificates, which it does not read by itself. On a machine without an NVIDIA GPU it
takes PyTorch's build for CPUs from PyTorch's index, and where that cannot be reached, what pip would find.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
UV = "uv>=0.13,<0.14"
# Options of pip, and the variables of uv that mean the same.
OPTIONS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def main(arguments: list[str]) -> int:
    """Make the environment of the first argument, with the packages that the others name."""
    venv, *packages = arguments
    if sys.version_info < OLDEST:
        needed, here = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
        return fail(f"Python {needed} or later is needed, not {here}: make setup PYTHON=python3.12")
    if subprocess.call([sys.executable, "-m", "venv", venv]):
        return fail("there is no venv, which Debian and Ubuntu have in python3-venv")
    python = str(Path(venv, "bin", "python"))
    # An old pip does not find what PIP_CONFIG_FILE says when it is asked.
    if status := subprocess.call([python, "-m", "pip", "install", "-q", "--upgrade", "pip", UV]):
        return status
    environment = {**os.environ, **pip_configuration(python)}
    uv = [python, "-m", "uv", "pip", "install", "--python", python]
    if not has_gpu():
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        torch = re.findall(r'"(torch==[\w.]+)"', text)[:1]
        quick = {**environment, "UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5"}
        command = [*uv, "--quiet", "--torch-backend", "cpu", "--no-deps", *torch]
        if subprocess.call(command, env=quick, stderr=subprocess.DEVNULL):
            say(
                "PyTorch's index of builds for CPUs cannot be reached: its build is as pip finds it"
            )
    return subprocess.call([*uv, *packages], cwd=ROOT, env=environment)


def pip_configuration(python: str) -> dict[str, str]:
    """Return pip's settings as variables of uv; those that uv has already are its own."""
    found = {}
    for option, variable in OPTIONS.items():
        # As pip looks them up: the environment, the command's section, the global one.
        value = os.environ.get("PIP_" + option.upper().replace("-", "_"), "")
        for section in ("install", "global"):
            command = [python, "-m", "pip", "config", "get", f"{section}.{option}"]
            if not value:
                done = subprocess.run(command, capture_output=True, text=True)
                value = done.stdout if done.returncode == 0 else ""
        if value.strip() and variable not in os.environ:
            found[variable] = " ".join(value.split())
    if found:  # as pip, the best of all indexes
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")
    return found


def has_gpu() -> bool:
    """Return True if there is an NVIDIA GPU, by its driver's files."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)  # standard output is `make predict`'s


def fail(text: str) -> int:
    say(text)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
