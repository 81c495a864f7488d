"""A directory that goes with its process, and imports without collections of garbage."""

import contextlib
import gc
import os
import tempfile
from pathlib import Path

import pytest

from cog_triton.processes import temporary_directory, without_collections
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


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_collections_come_back_as_they_were(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), without_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
