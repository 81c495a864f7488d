"""Compiles the stand-in for TensorRT-LLM's Triton backend.

    python -m tests.stand_in.build

prints the library's path. It is compiled once for each state of the sources, with the machine's C++
compiler, or with the one in the ``ziglang`` wheel.
"""

from __future__ import annotations

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
COMPILERS = ("c++", "g++", "clang++")


def library(cache: Path = CACHE) -> Path:
    """The compiled stand-in, in a directory that holds nothing else.

    Raises:
        FileNotFoundError: there is no compiler.
        subprocess.CalledProcessError: it does not compile; the compiler has said why.
    """
    compiler = find_compiler()
    target = cache / source_hash(compiler) / BACKEND_LIBRARY
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            built = Path(directory) / BACKEND_LIBRARY
            subprocess.run(command(compiler, built), check=True)
            built.replace(target)  # another process may be compiling, too
    return target


def backend_directory(directory: Path, python_backend: Path) -> Path:
    """Makes a Triton backend directory of the stand-in and a Python backend, and returns it."""
    (directory / "tensorrtllm").mkdir(parents=True)
    (directory / "tensorrtllm" / BACKEND_LIBRARY).symlink_to(library())
    (directory / "python").symlink_to(python_backend)
    return directory


def find_compiler() -> tuple[str, ...]:
    """The command of a C++ compiler.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang") is None:
        raise FileNotFoundError("no C++ compiler, and no ziglang package, which has one")
    return (sys.executable, "-m", "ziglang", "c++")


def command(compiler: tuple[str, ...], target: Path) -> list[str]:
    """The command line that compiles the backend."""
    return [
        *compiler,
        *("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"),
        # Triton's functions come from the server that loads this.
        *(("-Wl,-z,undefs",) if "ziglang" in compiler else ("-static-libstdc++", "-static-libgcc")),
        *("-o", str(target), str(SOURCES / "backend.cc")),
    ]


def source_hash(compiler: tuple[str, ...]) -> str:
    """What changes when the result of compiling may."""
    digest = hashlib.sha256("\0".join(command(compiler, Path("target"))).encode())
    for file in sorted(SOURCES.glob("*.[hc]*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(library())
