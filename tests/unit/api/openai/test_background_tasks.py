"""Tasks beside requests: the failure of one is in the log and in the health of the server."""

import ast
import asyncio
import logging
from pathlib import Path

import httpx
import pytest

import cog_triton.api.openai
from cog_triton.api.openai.app import create_app
from cog_triton.api.openai.background_tasks import BackgroundTasks
from cog_triton.api.openai.served import Served
from tests.unit.api.openai.support import Backend, served

pytestmark = pytest.mark.anyio
PACKAGE = Path(cog_triton.api.openai.__file__).parent
# Functions that start a task by asyncio itself, and see to its end.
STARTERS = {
    "background_tasks.py: start",
    "jobs.py: _begin",  # a failed job is logged and tried again
    "protocol/answering.py: __call__",
    "protocol/writer.py: merged",
    "supervisor.py: run",
}


async def failing() -> None:
    raise OSError("the disk is gone")


async def health(application: Served) -> httpx.Response:
    app = create_app(application)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        return await client.get("/health/ready")


async def test_a_task_that_fails_is_logged_and_makes_the_server_not_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    application = served(Backend())
    assert (await health(application)).status_code == 200
    await asyncio.wait([application.tasks.start("refresh the metrics", failing())])
    await asyncio.sleep(0)  # for the task's callback
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "the background task 'refresh the metrics' failed"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the disk is gone"
    reply = await health(application)
    assert reply.status_code == 503
    assert reply.json() == {
        "status": "unavailable",
        "detail": "the background task 'refresh the metrics' failed: OSError",
    }


async def test_the_journals_task_makes_the_server_not_ready_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = served(Backend(STORE=str(tmp_path / "journal")))
    assert (await health(application)).status_code == 200
    assert application.storage is not None
    journal = application.storage.journal
    monkeypatch.setattr(journal, "_commit_pending", failing)
    journal.write(lambda connection: connection.total_changes)
    await asyncio.sleep(0.01)
    assert application.problem() == "the background task 'commit writes' failed: OSError"
    journal._committing = None
    await journal.close()


async def test_tasks_that_end_or_are_stopped_are_no_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = BackgroundTasks()
    ended = tasks.start("end at once", asyncio.sleep(0))
    running = tasks.start("run", asyncio.Event().wait())  # type: ignore[arg-type]
    await ended
    await tasks.stop()
    assert running.cancelled()
    assert tasks.problem() is None
    assert caplog.records == []


def starters(file: Path) -> set[str]:
    """The functions of a file that start a task by asyncio itself."""
    found = set[str]()
    text = file.read_text(encoding="utf-8")
    if "create_task" not in text and "ensure_future" not in text:
        return found
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
        names = {part.func.attr for part in calls if isinstance(part.func, ast.Attribute)}
        if names & {"create_task", "ensure_future"}:
            found.add(f"{file.relative_to(PACKAGE)}: {node.name}")
    return found


def test_no_task_is_started_whose_failure_nobody_sees() -> None:
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        found |= starters(file)
    assert found == STARTERS
