"""How the stand-in for TensorRT-LLM's backend is compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cog_triton.deployment.engine_choice import BACKEND_LIBRARY
from tests.stand_in.build import SOURCES, command, find_compiler, library, source_hash

ZIG = (sys.executable, "-m", "ziglang", "c++")


def test_the_machines_compiler_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == ZIG
    (tmp_path / "g++").touch(mode=0o755)
    assert find_compiler() == (str(tmp_path / "g++"),)


def test_the_command_lines() -> None:
    shared = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    files = ["-o", "/t.so", str(SOURCES / "backend.cc")]
    static = ["-static-libstdc++", "-static-libgcc"]
    assert command(("/usr/bin/c++",), Path("/t.so")) == ["/usr/bin/c++", *shared, *static, *files]
    assert command(ZIG, Path("/t.so")) == [*ZIG, *shared, "-Wl,-z,undefs", *files]


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho compiled > "$2"\n')
    monkeypatch.setenv("PATH", str(compiler.parent))
    built = library(tmp_path / "cache")
    assert built == tmp_path / "cache" / source_hash((str(compiler),)) / BACKEND_LIBRARY
    assert built.read_text() == "compiled\n"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert library(tmp_path / "cache") == built
