"""What the programs of this folder share: the tools of the task, and no connection outside this machine.

A program reads ways from its standard input: an API and what is asked of it, such as chat-streamed.
It prints each outcome as a line of JSON.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

URL = os.environ["SERVER_URL"]
OPENAI_URL = f"{URL}/v1"
MODEL = "m"
CLAUDE = "claude-sonnet-4-5"  # for which the served model answers; frameworks know what it can do
KEY = "any"
TASK = "Mend the note."
QUESTION = "How is the weather in Paris?"
ENDLESS = "Count."
PATIENCE = 20  # seconds
ENOUGH = 3  # pieces of an endless answer, and then it is cancelled
HERE = ("127.0.0.1", "localhost", "::1", None)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PICTURE = f"data:image/png;base64,{PIXEL}"

outside: list[str] = []


def stay_here(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse and note what would leave this machine; an audit hook."""
    host = HERE[0]
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    if isinstance(host, bytes):
        host = host.decode()
    if host not in HERE:
        outside.append(host)
        raise OSError(f"{host} is outside this machine")


sys.addaudithook(stay_here)  # before a framework is imported


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: the path of the file
    """
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: the path of the file
        old: the text that is replaced
        new: the text in its place
    """
    file = Path(path)
    file.write_text(file.read_text().replace(old, new))
    return "done"


def run_command(command: str) -> str:
    """Run a command.

    Args:
        command: the command, for a shell
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


TOOLS = (read_file, edit_file, run_command)


def answer(text: str, pieces: list[str] | None = None) -> dict[str, Any]:
    """The outcome of a task: the last answer, and the pieces in which all text came if it was streamed."""
    return {"answer": text, "pieces": pieces}


async def cancel(pieces: AsyncIterator[str]) -> dict[str, Any]:
    """Cancel an answer without end after some pieces, as an application cancels a task."""
    came: list[str] = []
    enough = asyncio.Event()

    async def read() -> None:
        async for piece in pieces:
            came.append(piece)
            if len(came) == ENOUGH:
                enough.set()

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if reading.done():
        reading.result()
        raise AssertionError("the answer came to an end")
    reading.cancel()
    await asyncio.wait([reading], timeout=PATIENCE)
    return {"pieces": came}


def serve(apis: Iterable[str], ways: dict[str, Callable[[str], Any]]) -> None:
    """Go each way that is asked for, such as ``chat-streamed``: an API, and the name of a way.

    Args:
        apis: the APIs that the framework can ask.
        ways: functions or coroutines of an API, by their names.
    """
    printed = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # frameworks print

    async def go(line: str) -> dict[str, Any]:
        api, _, name = line.strip().partition("-")
        assert api in apis
        if inspect.iscoroutinefunction(ways[name]):
            return await ways[name](api)
        return await asyncio.to_thread(ways[name], api)

    async def serve_lines() -> None:
        # The loop goes on between two lines, as that of an application would: it closes what was left open.
        while line := await asyncio.to_thread(sys.stdin.readline):
            outside.clear()
            try:
                outcome = await go(line)
            except Exception as error:
                traceback.print_exc()
                outcome = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({**outcome, "outside": outside}), file=printed, flush=True)

    asyncio.run(serve_lines())
