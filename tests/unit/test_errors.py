"""The texts of errors: ours, and those of files and of Triton."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from cog_triton import errors
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings


def test_a_problem_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as missing:
        (tmp_path / "none").read_bytes()
    assert errors.file_problem(missing.value) == f"{tmp_path}/none: No such file or directory"
    # Of a copy, the file that was to be written.
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").symlink_to(tmp_path / "none")
    with pytest.raises(shutil.Error) as copy:
        shutil.copytree(tmp_path / "source", tmp_path / "copy")
    assert errors.file_problem(copy.value).startswith(f"{tmp_path}/copy/file: ")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "from", None, "to")
    assert errors.file_problem(full) == "to: No space left on device"
    assert errors.file_problem(OSError("no file at all")) == "no file at all"


def test_a_server_whose_files_cannot_be_written_says_which(tmp_path: Path) -> None:
    ports = dict.fromkeys(("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"), "0")
    (tmp_path / "backends").touch()  # where a directory is to be
    with pytest.raises(errors.ConfigurationError, match=f"{tmp_path}/backends"):
        TritonServer(tmp_path / "repository", tmp_path, read_settings(ports)).start()


@pytest.mark.parametrize(
    ("error", "longest"),
    [(errors.InvalidParameter, 2_000), (errors.TritonStartError, 20_000)],  # with lines of a log
)
def test_the_text_of_an_error_is_cut(error: type[errors.CogTritonError], longest: int) -> None:
    assert str(error("short")).endswith(": short")
    for text in (str(error("x" * 4_000_000)), *error("x" * 4_000_000).args):
        assert longest <= len(text) < longest + 100
        assert text.endswith("x…")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param(
            (
                "Internal: SafetensorError: Error while deserializing header: header too "
                r"large\n\nAt:\n  /a.py(4570): load\n"
            ),
            "SafetensorError: Error while deserializing header: header too large",
            id="traceback with newlines that are escaped",
        ),
        pytest.param(
            (
                "in ensemble 'ensemble', [TensorRT-LLM][ERROR] Assertion failed: no cache "
                "(/src/kv.cpp:92)\n"
                "1       0x7f8c2dc45ab1 tensorrt_llm::common::throwRuntimeError + 100\n"
                "2       0x7f8c2 /lib/x.so"
            ),
            "[TensorRT-LLM][ERROR] Assertion failed: no cache (/src/kv.cpp:92)",
            id="stack of C++",
        ),
        pytest.param(
            (
                "in ensemble 'ensemble_ids', Failed to process the request(s) for model "
                "instance 'preprocessing_0_0', message: ValueError: a bad word\n"
                "\n"
                "At:\n"
                "  m.py(9): execute\n"
            ),
            "a bad word",
            id="traceback after an ensemble's words",
        ),
        pytest.param(
            "Internal: KeyError: 'model'\n\nAt:\n  model.py(3): initialize",
            "KeyError: 'model'",
            id="traceback after a KeyError",
        ),
        pytest.param(
            "Internal: ConfigurationError: E3001 ConfigurationError: none\n",
            "none",
            id="the project's code",
        ),
        pytest.param(
            "in ensemble 'ensemble_ids', top_p must be 1, not 2",
            "top_p must be 1, not 2",
            id="words of an ensemble",
        ),
        pytest.param(
            "ValueError: model type `z`\nis unknown.\n\nUpdate it.",
            "model type `z` is unknown.",
            id="several lines",
        ),
        pytest.param("Triton says so", "Triton says so", id="a text as it is"),
        pytest.param("", "", id="nothing"),
        pytest.param("x" * 5000, "x" * (errors.LONGEST - 1) + "…", id="too long a text"),
    ],
)
def test_the_cause_is_what_is_left_of_tritons_text(text: str, cause: str) -> None:
    assert errors.cause(text) == cause
    assert errors.cause(cause) == cause
