"""What a server's log tells: its levels, each rank's lines, and the reason of an end."""

import logging
import subprocess
import sys
from typing import Any

import pytest

from cog_triton.engines import transformers_progress
from cog_triton.server.log import CuttingFormatter, ServerLog, lines_of_ranks, parse_log_line
from tests.support import load_cases

DIED = "tritonserver died"
LOGS = load_cases(__file__, "logs.yaml")


def triton(level: str, text: str) -> str:
    return f'{level}1121 07:09:36.844 1 model_lifecycle.cc:1] "{text}"'


@pytest.mark.parametrize("given", LOGS["reasons"], ids=lambda given: given["case"])
def test_the_reason_of_an_end(given: dict[str, Any]) -> None:
    log = ServerLog(2)
    list(log.read(given["log"].encode().splitlines(keepends=True)))
    assert log.reason(DIED, given.get("status")) == given["reason"].removesuffix("\n")


def test_the_progress_of_loading_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cog_triton.server")
    line = transformers_progress.LOADING.format(done=3, total=20)
    list(ServerLog(1).read([f"{line}\n".encode(), f"a prompt: {line}\n".encode()]))
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize("given", LOGS["merged"], ids=lambda given: given["case"])
def test_the_lines_of_each_rank(given: dict[str, Any]) -> None:
    read = lines_of_ranks(given["log"].splitlines(keepends=True))
    assert [[rank, line] for rank, line in read] == given["lines"]


@pytest.mark.parametrize("given", LOGS["levels"])
def test_the_level_of_a_line(given: dict[str, Any]) -> None:
    level, _ = parse_log_line(given["line"], logging.CRITICAL, gpu=given.get("gpu", True))
    assert logging.getLevelName(level) == given["level"]


def test_the_level_of_a_line_is_kept_for_each_rank() -> None:
    lines = [
        f"[1,0]<stderr>:{triton('E', 'a traceback')}",
        f"[1,1]<stderr>:{triton('I', 'all is well')}",
        "[1,0]<stderr>:of two lines",
        "[1,1]<stderr>:as before",
    ]
    read = ServerLog(2).read(f"{line}\n".encode() for line in lines)
    assert [level for level, _ in read] == [logging.ERROR, logging.INFO] * 2


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
    log, text = ServerLog(1), "x" * 4_000_000
    read = [*log.read(f"{line}\n".encode() for line in (triton("E", text), text, "short"))]
    assert [len(line) for _, line in read][1:] == [2000, 5]
    assert len(read[0][1]) <= 2000
    assert len(log.reason(DIED, -11)) < 5_000


def test_a_record_is_cut_and_keeps_its_trace() -> None:
    error = ValueError("y" * 4_000_000)
    trace = (type(error), error, None)
    record = logging.LogRecord("a", logging.ERROR, "", 0, "%s", ("what failed",), trace)
    text = CuttingFormatter("%(levelname)s %(message)s").format(record)
    assert text.startswith("ERROR what failed\nValueError: yyy")
    assert len(text) < 5_000
