from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from cog_triton.errors import (
    CogTritonError,
    ConfigurationError,
    InvalidParameter,
    TritonStartError,
    TritonUnknownError,
    file_problem,
)
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        (tmp_path / "none").read_bytes()
    assert file_problem(caught.value) == f"{tmp_path}/none: No such file or directory"


def test_of_a_copy_the_file_is_named_that_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").symlink_to(tmp_path / "none")
    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "source", tmp_path / "copy")
    assert file_problem(caught.value).startswith(f"{tmp_path}/copy/file: ")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "from", None, "to")
    assert file_problem(full) == "to: No space left on device"
    assert file_problem(OSError("no file at all")) == "no file at all"


def test_a_server_whose_files_cannot_be_written_says_which(tmp_path: Path) -> None:
    ports = dict.fromkeys(("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"), "0")
    (tmp_path / "backends").touch()  # where a directory is to be
    server = TritonServer(tmp_path / "repository", tmp_path, read_settings(ports))
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}/backends: File exists$"):
        server.start()


@pytest.mark.parametrize("error", [InvalidParameter, TritonUnknownError])
def test_the_text_of_an_error_is_cut(error: type[CogTritonError]) -> None:
    assert str(error("short")).endswith(": short")
    for text in (str(error("x" * 4_000_000)), *error("x" * 4_000_000).args):
        assert 2_000 <= len(text) < 2_100
        assert text.endswith("x…")


def test_of_a_failed_start_there_is_room_for_the_last_lines_of_a_log() -> None:
    assert str(ConfigurationError("x" * 19_000)).endswith("x" * 19_000)
    assert len(str(TritonStartError("x" * 4_000_000))) < 20_100
