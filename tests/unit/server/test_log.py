"""What a server's log tells: its levels, each rank's lines, and the reason of an end."""

import logging
import subprocess
import sys

import pytest

from cog_triton.server.log import CuttingFormatter, ServerLog, lines_of_ranks, parse_log_line
from tests.late import transformers_progress

DIED = "tritonserver died"


def triton(level: str, text: str) -> str:
    return f'{level}1121 07:09:36.844 1 model_lifecycle.cc:1] "{text}"'


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        pytest.param(
            (
                "E1121 07:09:36.844 1 model_lifecycle.cc:1] \"failed to load 'tensorrt_llm' "
                'version 1: Internal: Error: no header\\n\\nAt:\\n  /a.py(1): load\\n"\n'
                "+---+\n"
                'I1121 07:09:36.844 1 server.cc:305] "Waiting."\n'
            ),
            1,
            "tritonserver died\nmodel tensorrt_llm: Error: no header",
            id="a model that failed, without Python's trace and Triton's tables",
        ),
        pytest.param(
            triton("E", "failed to load 'tensorrt_llm' version 1: no GPU") + "\n",
            -9,
            "tritonserver died\nmodel tensorrt_llm: no GPU",
            id="a model that failed, whose server was killed while it was about to end",
        ),
        pytest.param(
            (
                "[1,1]<stderr>:E1121 07:09:36.844 1 model.cc:1] \"failed to load 'tensorrt_llm' "
                'version 1: no GPU"\n'
            ),
            None,
            "tritonserver died\nmodel tensorrt_llm on rank 1: no GPU",
            id="a model that failed on a rank",
        ),
        pytest.param(
            (
                "(Worker_TP1 pid=13) ERROR 11-22 23:59:57 [multiproc_executor.py:9]     raise "
                "ValueError(no)\n"
                "(Worker_TP1 pid=13) ERROR 11-22 23:59:57 [multiproc_executor.py:9] "
                "ValueError: no memory\n"
                "(EngineCore pid=12) ERROR 11-22 23:59:58 [core.py:1136] EngineCore failed to start.\n"
                "(EngineCore pid=12) ERROR 11-22 23:59:58 [core.py:1136] Exception: WorkerProc "
                "initialization failed. See root cause.\n"
                "(EngineCore pid=12) Exception: WorkerProc initialization failed. See root cause.\n"
                "E1122 23:59:59.000 1 model_lifecycle.cc:654] \"failed to load 'tensorrt_llm' "
                "version 1: Internal: RuntimeError: Engine core initialization failed. See "
                'root cause above. Failed core proc(s): {}"\n'
            ),
            None,
            "tritonserver died\nmodel tensorrt_llm: ValueError: no memory",
            id="vLLM's engine core and its workers say why, and who started them says to look above",
        ),
        pytest.param(
            (
                'I1121 07:09:36.844 1 model_lifecycle.cc:1] "loading: preprocessing:1"\n'
                'I1121 07:09:36.844 1 model_lifecycle.cc:1] "loading: tensorrt_llm:1"\n'
                "I1121 07:09:36.844 1 model_lifecycle.cc:1] \"successfully loaded 'preprocessing'\"\n"
            ),
            None,
            "tritonserver died\nstill loading: tensorrt_llm",
            id="models that still load",
        ),
        pytest.param(
            (
                'E1121 07:09:36.844 1 main.cc:1] "failed to start HTTP service: in use"\n'
                'I1121 07:09:36.844 1 main.cc:1] "bye"\n'
            ),
            1,
            "tritonserver died, with exit status 1\nfailed to start HTTP service: in use",
            id="a server that ended by itself",
        ),
        pytest.param(
            ('E1121 07:09:36.844 1 main.cc:1] "failed to start HTTP service: in use"\none more\n'),
            -11,
            (
                "tritonserver died, by signal 11 (SIGSEGV)\n"
                "the last lines of its log:\n"
                'E1121 07:09:36.844 1 main.cc:1] "failed to start HTTP service: in use"\n'
                "one more"
            ),
            id="a server that was killed",
        ),
        pytest.param(
            (
                "[1,0]<stderr>:serving\n"
                "[1,1]<stderr>:out of memory\n"
                "[1,1]<stderr>:tritonserver of rank 1 ended unexpectedly with status -9\n"
                "[1,0]<stderr>:lost a peer\n"
                "[1,0]<stderr>:tritonserver of rank 0 ended unexpectedly with status 1\n"
                "the process of model m ended unexpectedly with status -9\n"
            ),
            137,
            (
                "tritonserver died: rank 1 of 2 ended by signal 9 (SIGKILL)\n"
                "the last lines of rank 1's log:\n"
                "out of memory\n"
                "tritonserver of rank 1 ended unexpectedly with status -9"
            ),
            id="the rank that ended first, and not a stub after it",
        ),
        pytest.param(
            (
                "[1,1]<stderr>:serving\n"
                "mpirun noticed that process rank 1 with PID 0 on node here exited on signal 9 "
                "(Killed).\n"
            ),
            137,
            (
                "tritonserver died: rank 1 of 2 ended by signal 9 (SIGKILL)\n"
                "the last lines of rank 1's log:\n"
                "serving"
            ),
            id="a rank whose guard was killed",
        ),
        pytest.param(
            "[1,1]<stderr>:one\n[1,0]<stderr>:zero\nmpirun was here\n",
            None,
            (
                "tritonserver died\n"
                "the last lines of its log:\n"
                "mpirun was here\n"
                "the last lines of rank 0's log:\n"
                "zero\n"
                "the last lines of rank 1's log:\n"
                "one"
            ),
            id="no rank that ended",
        ),
    ],
)
def test_the_reason_of_an_end(text: str, status: int | None, reason: str) -> None:
    log = ServerLog(2)
    list(log.read(text.encode().splitlines(keepends=True)))
    assert log.reason(DIED, status) == reason


def test_the_progress_of_loading_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cog_triton.server")
    line = transformers_progress.LOADING.format(done=3, total=20)
    list(ServerLog(1).read([f"{line}\n".encode(), f"a prompt: {line}\n".encode()]))
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param("one\ntwo\n", [(None, "one"), (None, "two")], id="one server"),
        pytest.param(
            "[1,0]<stderr>:from 0\n[1,1]<stdout>:  from 1\nmpirun: help\n",
            [(0, "from 0"), (1, "  from 1"), (None, "mpirun: help")],
            id="Open MPI 4",
        ),
        pytest.param(
            "[1,0]<stderr>: from 0\n[prterun-host-7@1,12]<stdout>: from 12\n",
            [(0, "from 0"), (12, "from 12")],
            id="Open MPI 5",
        ),
        pytest.param(
            "[1,1]<stderr>:up[1,1]<stderr>: 1[1,1]<stderr>: 7\n",
            [(1, "up 1 7")],
            id="a line in pieces",
        ),
        pytest.param(
            "[1,0]<stdout>:a[1,1]<stdout>:x[1,0]<stdout>:b\n[1,1]<stdout>:y\n",
            [(0, "ab"), (1, "xy")],
            id="lines that cross",
        ),
        pytest.param(
            "[1,0]<stdout>:out[1,0]<stderr>:err\n[1,0]<stdout>:put\n",
            [(0, "err"), (0, "output")],
            id="two streams of a rank",
        ),
        pytest.param("[1,1]<stderr>:cut o", [(1, "cut o")], id="the end of a rank"),
        pytest.param("ids [5,1] <stdout>\n", [(None, "ids [5,1] <stdout>")], id="no tag"),
    ],
)
def test_the_lines_of_each_rank(text: str, lines: list[tuple[int | None, str]]) -> None:
    """A line of mpirun's own is of no rank."""
    assert list(lines_of_ranks(text.splitlines(keepends=True))) == lines


NO_CUDA = 'E1121 07:09:36.844 1 cuda.cc:1] "CudaDriverHelper has not been initialized."'


@pytest.mark.parametrize(
    ("line", "gpu", "level"),
    [
        pytest.param(
            'I1121 07:09:36.844 1 server.cc:1] "up"', True, logging.INFO, id="information"
        ),
        pytest.param('W1121 07:09:36.844 1 server.cc:1] "hm"', True, logging.WARNING, id="warning"),
        pytest.param(
            "the line of a traceback", True, logging.CRITICAL, id="no level, after a critical line"
        ),
        pytest.param(NO_CUDA, True, logging.ERROR, id="no CUDA with a GPU"),
        pytest.param(NO_CUDA, False, logging.DEBUG, id="no CUDA without a GPU"),
        pytest.param(
            'E1121 07:09:36.844 1 model.cc:1] "Failed to create instance: no"',
            True,
            logging.DEBUG,
            id="instance, which the reason of the end repeats",
        ),
        pytest.param(
            "E1121 07:09:36.844 1 model.cc:1] \"failed to load 'a' version 1: no\"",
            True,
            logging.DEBUG,
            id="model, which the reason of the end repeats",
        ),
    ],
)
def test_the_level_of_a_line(line: str, gpu: bool, level: int) -> None:
    found, _ = parse_log_line(line, logging.CRITICAL, gpu=gpu)
    assert found == level


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
