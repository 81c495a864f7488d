"""A directory that goes with its process."""

import os
import tempfile
from pathlib import Path

import pytest

from cog_triton.processes import temporary_directory
from tests.support import run_until_killed

KILLED = """import os
from cog_triton.processes import temporary_directory
with temporary_directory("own-"):
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_until_killed(KILLED, TMPDIR=str(tmp_path))
    (left,) = tmp_path.iterdir()
    with temporary_directory("own-") as young:
        assert left.is_dir()
        for directory in (left, young):
            os.utime(directory, (0, 0))
        with temporary_directory("own-"):
            assert not left.exists()
            assert Path(young).is_dir()
    assert not list(tmp_path.iterdir())
