"""What is said of a start, and of what failed in it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from cog_triton.server.guard import RANK_ENDED, STUB_ENDED
from cog_triton.server.log import CuttingFormatter, ServerLog

FAILED = (
    "E0101 00:00:00.000000 1 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' version 1: "
    'Internal: Error: no header\\n\\nAt:\\n  /a.py(1): load\\n  /b.py(2): initialize\\n"'
)


def log_of(*lines: str) -> ServerLog:
    log = ServerLog(1)
    for _ in log.read(f"{line}\n".encode() for line in lines):
        pass
    return log


def test_how_long_models_take_to_load(caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        'model_lifecycle.cc:472] "loading: a:1"',
        'model_lifecycle.cc:472] "loading: b:1"',
        "model_lifecycle.cc:839] \"successfully loaded 'b'\"",
        "python_be.cc:1845] \"Input tensors of 'a'\"",
        '[1,1]<stderr>:model_lifecycle.cc:472] "loading: a:1"',
        "[1,1]<stderr>:model_lifecycle.cc:839] \"successfully loaded 'a'\"",
        "model_lifecycle.cc:839] \"successfully loaded 'a'\"",
        'model_lifecycle.cc:472] "loading: ensemble:1"',
        "model_lifecycle.cc:839] \"successfully loaded 'ensemble'\"",
    ]
    with caplog.at_level(logging.INFO, "cog_triton.server"):
        log_of(*lines)
    said = [f"{model} loaded in 0.0 s" for model in ("b", "a on rank 1", "a")]
    assert caplog.messages == said


def test_the_cause_comes_last_and_once() -> None:
    """Without Triton's tables, and without where in Python it was, which is in the log."""
    reason = log_of(FAILED, "+---+", 'I0101 00:00:00.000000 1 server.cc:305] "Waiting."').reason(
        "tritonserver died while starting", 1
    )
    assert reason.splitlines() == [
        "tritonserver died while starting, with exit status 1",
        "model tensorrt_llm: Error: no header",
    ]


def test_without_a_model_that_failed_the_last_lines_are_all_that_is_known() -> None:
    assert log_of("one", "two").reason("tritonserver died", -11).splitlines() == [
        "tritonserver died, by signal 11 (SIGSEGV)",
        "the last lines of its log:",
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("debug", ["DEBUG a: 1", "INFO a: 2", "INFO tritonserver: 3", "WARNING httpx: 4"]),
        ("info", ["INFO a: 2", "WARNING httpx: 4"]),
        ("error", []),
    ],
)
def test_tritons_own_lines_are_logged_at_debug(level: str, lines: list[str]) -> None:
    code = (
        "import logging, sys\n"
        "from cog_triton.server.log import log_to\n"
        "log_to(sys.argv[1])\n"
        "logging.getLogger('a').debug(1); logging.getLogger('a').info(2)\n"
        "logging.getLogger('tritonserver').info(3); logging.getLogger('httpx').warning(4)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, level], stderr=subprocess.PIPE, text=True)
    assert done.stderr.splitlines() == lines


def test_a_line_with_a_request_in_it_is_cut() -> None:
    log = ServerLog(1)
    text = "x" * 4_000_000
    lines = [f'E0101 00:00:00.000000 1 a.cc:1] "{text}"\n', f"{text}\n", "short\n"]
    read = list(log.read(line.encode() for line in lines))
    assert [len(line) for _, line in read][1:] == [2000, 5]
    assert all(len(line) <= 2000 for _, line in read)
    assert read[0][0] == logging.ERROR
    assert len(log.reason("tritonserver died", -11)) < 5_000


def test_the_cause_is_that_of_the_process_that_failed() -> None:
    """vLLM's engine core and its workers say why, and who started them says to look above."""
    failed = (
        "E1122 23:59:59.000000 1 model_lifecycle.cc:654] \"failed to load 'tensorrt_llm' version 1: "
        "Internal: RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        'proc(s): {}"'
    )
    logged = "ERROR 11-22 23:59:58 [core.py:1136]"
    log = ServerLog(1)
    lines = [
        "(Worker_TP1 pid=13) ERROR 11-22 23:59:57 [multiproc_executor.py:9]     raise ValueError(no)",
        "(Worker_TP1 pid=13) ERROR 11-22 23:59:57 [multiproc_executor.py:9] ValueError: no memory",
        f"(EngineCore pid=12) {logged} EngineCore failed to start.",
        f"(EngineCore pid=12) {logged} Exception: WorkerProc initialization failed. See root cause.",
        "(EngineCore pid=12) Exception: WorkerProc initialization failed. See root cause.",
        failed,
    ]
    list(log.read(f"{line}\n".encode() for line in lines))
    reason = log.reason("tritonserver did not start")
    assert reason.splitlines()[-1] == "model tensorrt_llm: ValueError: no memory"


def test_a_record_is_cut_and_keeps_its_trace() -> None:
    try:
        raise ValueError("y" * 4_000_000)
    except ValueError as error:
        record = logging.LogRecord(
            "a", logging.ERROR, "", 0, "%s", ("x" * 4_000_000,), (type(error), error, None)
        )
    text = CuttingFormatter("%(levelname)s %(message)s").format(record)
    assert len(text) <= 2000 + 1
    record.args, record.exc_text = ("what failed",), None
    text = CuttingFormatter("%(levelname)s %(message)s").format(record)
    assert text.startswith("ERROR what failed\nValueError: yyy")
    assert len(text) < 5_000


def test_a_stub_that_ends_after_a_rank_is_not_the_cause() -> None:
    log = ServerLog(2)
    lines = (RANK_ENDED.format(rank=1, status=-9), STUB_ENDED.format(model="m", status=-9))
    list(log.read(f"{line}\n".encode() for line in lines))
    assert log.end(1) == ": rank 1 of 2 ended by signal 9 (SIGKILL)"
