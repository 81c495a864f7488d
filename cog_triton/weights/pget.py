"""replicate/pget, which downloads over many connections at once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def is_installed() -> bool:
    """Whether it is on the PATH."""
    return shutil.which("pget") is not None


def run(url: str, target: Path) -> int:
    """Downloads ``url`` to the file ``target``; returns the exit status."""
    # What it prints has the URL.
    null = subprocess.DEVNULL
    return subprocess.run(
        command(url, target), stdin=null, stdout=null, stderr=null, check=False
    ).returncode


def command(url: str, target: Path) -> list[str]:
    """The command that downloads ``url`` to the file ``target``.

    Without its ``-x``: it would unpack whatever the archive says, wherever that says.
    """
    return ["pget", "--force", "--log-level", "error", url, str(target)]
