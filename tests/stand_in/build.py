"""Compiles the stand-in for TensorRT-LLM's Triton backend.

    python -m tests.stand_in.build

prints the library's path. It is compiled once for each state of the sources, with the machine's C++
compiler, or with the one in the ``ziglang`` wheel.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cog_triton.deployment.engine_choice import BACKEND_LIBRARY

SOURCES = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"cog-triton-stand-in-{os.getuid()}"


def library() -> Path:
    """The compiled stand-in; where it does not compile, the compiler says why."""
    command = [
        *compiler(),
        *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"),
        "backend.cc",
    ]
    digest = hashlib.sha256("\0".join(command).encode())
    for file in sorted(SOURCES.glob("*.[hc]*")):
        digest.update(file.read_bytes())
    target = CACHE / digest.hexdigest()[:16] / BACKEND_LIBRARY
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            built = Path(directory) / BACKEND_LIBRARY
            subprocess.run([*command, "-o", str(built)], cwd=SOURCES, check=True)
            built.replace(target)  # another process may be compiling, too
    return target


def compiler() -> list[str]:
    """The command of a C++ compiler, with its own options."""
    for path in filter(None, map(shutil.which, ("c++", "g++", "clang++"))):
        return [path, "-static-libstdc++", "-static-libgcc"]
    if importlib.util.find_spec("ziglang") is None:
        raise FileNotFoundError("no C++ compiler, and no ziglang package, which has one")
    # Triton's functions come from the server that loads this.
    return [sys.executable, "-m", "ziglang", "c++", "-Wl,-z,undefs"]


if __name__ == "__main__":
    print(library())
