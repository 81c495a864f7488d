"""Every block of commands on the pages, run in order as it is printed; see ``tests.pages``.

Only ports differ: those in the commands are replaced by free ones. The working directory looks like the
checkout and takes what the commands write.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cog_triton.settings import read_settings
from cog_triton.weights.gguf import converted
from tests.pages import PAGES, Block, blocks, pages_of
from tests.support import ROOT, START_TIMEOUT, free_port, limit, wait_until
from tools import smollm2

pytestmark = pytest.mark.rare

PORTS = {
    "PORT": 5000,
    "OPENAI_PORT": 3000,
    "TRITON_HTTP_PORT": 8000,
    "TRITON_GRPC_PORT": 8001,
    "TRITON_METRICS_PORT": 8002,
}
SERVES = re.compile(
    r"make (serve|openai)|cog-triton (serve|openai|launch)"
    r"|scripts/(serve|serve_openai|launch_triton_server)\.py"
)
SERVE = "make serve"
COMMAND_SECONDS = 300
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "artifacts"
)
# What is exported, and the working directory; the ports are the server's.
KEEP = """{{
export -p | grep -vE ' (MAKEFLAGS|PORT|OPENAI_PORT|TRITON_[A-Z]+_PORT)='
printf 'cd %q\\n' "$PWD"
}} > {}"""
# A command that curl reports nothing of would pass whatever the server answered.
CURL = """#!/bin/sh
exec {curl} --fail-with-body "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout after `make setup`, which commands may change."""
    directory = tmp_path / "checkout"
    shutil.copytree(ROOT, directory, ignore=NOT_COPIED)
    shutil.rmtree(directory / "models", ignore_errors=True)
    environment = directory / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        (environment / entry.name).symlink_to(entry)
    makefile = (ROOT / "Makefile").read_text()
    for stamp in re.findall(r"^(?:STAMP|DEVELOPED) := (.+)$", makefile, re.MULTILINE):
        if not (directory / stamp).exists():  # where the tests' Python was not set up by make
            (directory / stamp).touch()
    # Older than the stamps, so that make installs nothing.
    os.utime(directory / "pyproject.toml", (0, 0))
    tools = directory / "tools-of-the-test"
    tools.mkdir()
    (tools / "curl").write_text(CURL.format(curl=shutil.which("curl")))
    (tools / "curl").chmod(0o755)
    return directory


class Terminal:
    """Where the commands of one page are typed: what one changes, the next one sees."""

    def __init__(self, checkout: Path, directory: Path) -> None:
        self._state = directory / "state"
        self._log = directory / "output"
        self._server: subprocess.Popen[bytes] | None = None
        path = f"{checkout}/tools-of-the-test:{checkout}/.venv/bin:{os.environ['PATH']}"
        self._state.write_text(f"cd {checkout}\n")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
            "PATH": path,
        }
        self._take_ports()

    def type(self, block: Block) -> None:
        """Runs a block's commands; a server among them is left running."""
        if "server" in block.needs and self._server is None:
            self.serve(SERVE)
        waiting: list[str] = []
        for command in block.commands:
            dry = {"--dry-run", "dry run"} & {*command.split(), *block.needs}
            if SERVES.search(command) and not dry:
                self._run(waiting, block)
                waiting = []
                self.serve(command)
            else:
                waiting.append(command)
        self._run(waiting, block)

    def serve(self, command: str) -> None:
        """Starts a server in the place of the one before, and waits until it is ready."""
        self.close()
        self._take_ports()
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", self._script([command])],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._is_ready, START_TIMEOUT, command)

    def close(self) -> None:
        """Ends the server, as Ctrl-C does."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self._server.pid, signal.SIGINT)
            self._server.wait(timeout=limit(60))
            self._server = None

    def _is_ready(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, self._log.read_text()[-3000:]
        return "ready: " in self._log.read_text()

    def _run(self, commands: list[str], block: Block) -> None:
        if not commands:
            return
        environment = dict(self._environment)
        if "other ports" in block.needs:
            for name in PORTS:
                del environment[name]
        if "dry run" in block.needs:
            environment["MAKEFLAGS"] = "n"
        output = self._log.with_suffix(".commands")
        with output.open("wb") as log:  # not a pipe: what runs in the background would keep it open
            done = subprocess.run(
                ["bash", "-c", f"{self._script(commands)}\nwait\n{KEEP.format(self._state)}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_SECONDS,
            )
        assert done.returncode == 0, f"{block}: {commands}\n{output.read_text()[-3000:]}"

    def _script(self, commands: list[str]) -> str:
        """The commands, behind what those before them have left."""
        return "\n".join([f". {self._state}", "set -eo pipefail", *map(self._with_ports, commands)])

    def _with_ports(self, command: str) -> str:
        # Its port is the Makefile's, whatever the environment says.
        command = re.sub(r"\bmake openai\b(?!.*PORT=)", "make openai PORT=3000", command)
        for name, usual in PORTS.items():
            command = re.sub(rf"\b{usual}\b", self._environment[name], command)
        return command

    def _take_ports(self) -> None:
        self._environment |= {name: str(free_port()) for name in PORTS}


@contextmanager
def opened(checkout: Path, directory: Path) -> Iterator[Terminal]:
    terminal = Terminal(checkout, directory)
    try:
        yield terminal
    finally:
        terminal.close()


FIRST_PAGES = [page for page in PAGES if not page.parent.with_suffix(".md").exists()]


def runs(page: Path) -> bool:
    return any(block.runs for other in pages_of(page) for block in blocks(other))


@pytest.mark.parametrize(
    "page",
    [page for page in FIRST_PAGES if runs(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run_as_printed(page: Path, checkout: Path, tmp_path: Path) -> None:
    typed = [block for other in pages_of(page) for block in blocks(other) if block.runs]
    if any("smollm2" in block.needs for block in typed):
        provide_smollm2(checkout)
    with opened(checkout, tmp_path) as terminal:
        for block in typed:
            terminal.type(block)


def provide_smollm2(checkout: Path) -> None:
    """Put the model into a checkout, converted already: `make` then finds it instead of fetching it."""
    try:
        converted(smollm2.gguf_file(), read_settings().weights_cache)
    except smollm2.CannotBeFetched as error:
        pytest.skip(str(error))
    (checkout / "artifacts").mkdir(exist_ok=True)
    (checkout / "artifacts" / "smollm2").symlink_to(smollm2.DIRECTORY)


@pytest.mark.parametrize("text", ["$ false | cat", "$ curl -s localhost:8000/v2/nothing"])
def test_a_command_that_fails_is_noticed(text: str, checkout: Path, tmp_path: Path) -> None:
    with (
        opened(checkout, tmp_path) as terminal,
        pytest.raises(AssertionError, match=r"api\.md:1: "),
    ):
        terminal.type(Block(ROOT / "docs" / "api.md", 1, frozenset(), (text.removeprefix("$ "),)))
