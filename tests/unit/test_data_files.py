"""Tables that are data: how they are read, and that an installation has them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import BaseModel, ValidationError

from tools.demo_model import DIRECTORY
from tools.demo_model.corpus import read_data

ROOT = Path(__file__).resolve().parents[2]


class Pair(NamedTuple):
    name: str
    size: int


class Shape(BaseModel):
    pairs: dict[str, list[Pair]]


def test_a_file_is_read_as_its_type(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text("pairs:\n  é: [{name: a, size: 1}, {name: b, size: 2}]\n", encoding="utf-8")
    assert read_data(file, Shape).pairs == {"é": [Pair("a", 1), Pair("b", 2)]}


def test_every_place_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text("pairs:\n  a: [{name: a, size: big}, {name: 7, size: 1}]\n")
    with pytest.raises(ValidationError) as error:
        read_data(file, Shape)
    assert [".".join(map(str, e["loc"])) for e in error.value.errors()] == [
        "pairs.a.0.size",
        "pairs.a.1.name",
    ]


INSTALLED = """
import os
from setuptools import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
distribution.include_package_data = False  # what git or a build before this one knows of
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
files = [os.path.join(source, name) for _, source, _, names in command.data_files for name in names]
print(*map(os.path.normpath, files))
"""


def test_an_installation_has_every_data_file() -> None:
    """By setuptools in a process of its own, because it takes the place of distutils."""
    try:
        release = int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        release = 0
    if release < 77:
        pytest.skip("pyproject.toml is for setuptools 77 and later")
    command = [sys.executable, "-c", INSTALLED]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = {
        str(file.relative_to(ROOT))
        for folder in ("cog_triton", "tools")
        for kind in ("*.yaml", "*.html")
        for file in (ROOT / folder).rglob(kind)
    }
    files |= {str(file.relative_to(ROOT)) for file in DIRECTORY.iterdir()}
    assert {"cog_triton/repository/variables.yaml", "cog_triton/faces/openai/page.html"} <= files
    assert files <= set(run.stdout.split())
