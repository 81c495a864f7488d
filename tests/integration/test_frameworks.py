"""Agent frameworks of PyPI, through a whole task: they read a file, edit it and run commands.

`make test-clients` installs them. The programs of tests/clients refuse whatever would leave this machine.
"""

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.generation import Chunk
from tests.framework_model import AFTER, BEFORE, BEGINNING, END, RESULTS, WEATHER, FrameworkModel
from tests.scripted_model import serving
from tests.support import ROOT, limit
from tests.unit.api.openai.support import Backend

pytestmark = pytest.mark.rare
FRAMEWORKS = ROOT / ".venv-frameworks" / "bin" / "python"
AIDER = ROOT / ".venv-aider" / "bin" / "python"
PROGRAMS = ROOT / "tests" / "clients"
SECONDS = 300  # of one way; the first imports the framework
# What keeps LiteLLM and DSPy from asking for tables of models.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
OPENAI = ("chat", "responses")
EVERY_API = (*OPENAI, "messages")


class Program:
    """A program of tests/clients that runs in a directory.

    Attributes:
        note: the file that the task is about.
    """

    def __init__(self, name: str, directory: Path, url: str) -> None:
        if not FRAMEWORKS.exists():
            pytest.skip("the frameworks are not installed: `make test-clients` does that")
        directory.mkdir()
        self.note = directory / "note.txt"
        self._errors = directory / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [str(FRAMEWORKS), str(PROGRAMS / f"{name}.py")],
                cwd=directory,
                env=environment(directory, url),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def go(self, way: str) -> dict[str, Any]:
        """Go one way with a new note; return the outcome."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.note.write_text(BEFORE)
        timer = threading.Timer(SECONDS, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(f"{way}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert line, self._errors.read_text()
        outcome: dict[str, Any] = json.loads(line)
        assert outcome.pop("outside") == [], outcome
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def environment(home: Path, url: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "SERVER_URL": url, **QUIET}


@pytest.fixture(scope="module")
def model() -> FrameworkModel:
    return FrameworkModel()


@pytest.fixture(scope="module")
def start(
    model: FrameworkModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Program]]:
    """Returns a program by its name, which is started the first time."""
    directory = tmp_path_factory.mktemp("frameworks")
    started: dict[str, Program] = {}

    def find(name: str) -> Program:
        if name not in started:
            started[name] = Program(name, directory / name, url)
        return started[name]

    with serving(model) as url:
        yield find
        for program in started.values():
            program.close()


@pytest.fixture
def program(
    request: pytest.FixtureRequest, start: Callable[[str], Program], model: FrameworkModel
) -> Program:
    model.conversations.clear()
    model.asked.clear()
    model.left.clear()
    return start(request.param)


def each(*frameworks: tuple[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test by programs, and the APIs that they can ask."""
    cases = [
        pytest.param(name, api, id=f"{name}-{api}") for name, apis in frameworks for api in apis
    ]
    return pytest.mark.parametrize(("program", "api"), cases, indirect=["program"])


FOR_AGENTS = (
    ("agents_sdk", OPENAI),
    ("pydantic_ai_agent", EVERY_API),
    ("langgraph_agent", EVERY_API),
    ("llama_index_agent", EVERY_API),
    ("haystack_agent", OPENAI),
)
AUTOGEN = ("autogen_agent", ("chat",))


def check_task(outcome: dict[str, Any], program: Program, model: FrameworkModel) -> None:
    assert outcome.get("answer") == END, outcome
    assert program.note.read_text() == AFTER
    # The thoughts, the text and the calls of an answer come back as one turn, and behind it their results.
    turns = [turn for turn in model.conversations[-1] if turn["role"] != "system"]
    user, first, *rest = turns
    assert user["role"] == "user"
    assert first["content"] == BEGINNING
    assert len(first["tool_calls"]) == 2
    roles = [turn["role"] for turn in rest]
    assert roles == ["tool", "tool", "assistant", "tool", "assistant", "tool"]
    assert [turn["content"] for turn in rest if turn["role"] == "tool"] == RESULTS


@each(*FOR_AGENTS, AUTOGEN)
def test_a_whole_task(program: Program, api: str, model: FrameworkModel) -> None:
    check_task(program.go(f"{api}-task"), program, model)


@each(*FOR_AGENTS, AUTOGEN)
def test_a_task_that_streams(program: Program, api: str, model: FrameworkModel) -> None:
    outcome = program.go(f"{api}-streamed")
    check_task(outcome, program, model)
    pieces = outcome["pieces"]
    assert len(pieces) > 10
    # AutoGen puts thoughts between tags into the text.
    text = re.sub(r"<think>.*?</think>", "", "".join(pieces))
    assert text == BEGINNING + END


@each(("smolagents_agent", ("chat",)))
def test_a_task_whose_results_are_messages(
    program: Program, api: str, model: FrameworkModel
) -> None:
    assert program.go(f"{api}-task") == {"answer": END, "pieces": None}
    assert program.note.read_text() == AFTER
    assert len(model.conversations) == 4


@each(
    *FOR_AGENTS,
    AUTOGEN,
    ("instructor_models", ("chat", "messages")),
    ("dspy_module", ("chat",)),
)
def test_structured_output(program: Program, api: str, model: FrameworkModel) -> None:
    assert program.go(f"{api}-structured") == {"parsed": WEATHER}
    assert len(model.asked) == 1


@each(
    ("agents_sdk", OPENAI),
    ("pydantic_ai_agent", EVERY_API),
    ("langgraph_agent", EVERY_API),
    ("llama_index_agent", EVERY_API),
    ("instructor_models", ("chat", "messages")),
)
def test_structured_output_by_a_tool(program: Program, api: str, model: FrameworkModel) -> None:
    assert program.go(f"{api}-forced") == {"parsed": WEATHER}
    assert len(model.asked) == 1


@each(*FOR_AGENTS)
def test_cancelling_ends_the_answer(program: Program, api: str, model: FrameworkModel) -> None:
    """While the program goes on."""
    outcome = program.go(f"{api}-cancelled")
    assert outcome.get("pieces", [])[:3] == ["1 ", "2 ", "3 "], outcome
    assert model.left.wait(limit(60))


@each(*FOR_AGENTS)
def test_a_picture(program: Program, api: str, model: FrameworkModel) -> None:
    """OpenAI's APIs refuse it and name it; Anthropic's leaves it out."""
    outcome = program.go(f"{api}-image")
    if api == "messages":
        assert outcome == {"answer": END, "pieces": None}
        return
    assert "image" in outcome["error"]
    assert "400" in outcome["error"]
    assert not model.asked


# aider, whose model answers with an edit in its own form


EDIT = f"note.txt\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n"


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_aider_edits_a_file_and_runs_a_command(tmp_path: Path, streams: bool) -> None:
    if not AIDER.exists():
        pytest.skip("aider is not installed: `make test-clients` does that")
    note = tmp_path / "note.txt"
    note.write_text(BEFORE)
    written = [Chunk(letter, number, 10) for number, letter in enumerate(EDIT, 1)]
    model = Backend(*written, Chunk("", len(EDIT), 10, "stop"))
    model.context_length = 1_000_000
    with serving(model) as url:
        finished = subprocess.run(
            [
                str(AIDER),
                str(PROGRAMS / "aider_task.py"),
                "--model=openai/m",
                f"--openai-api-base={url}/v1",
                "--openai-api-key=any",
                "--edit-format=diff",
                "--stream" if streams else "--no-stream",
                "--auto-test",
                "--test-cmd=cat note.txt > shown.txt",
                "--message=Mend the note.",
                "--yes-always",
                "--no-git",
                "--no-check-update",
                "--no-show-release-notes",
                "--no-show-model-warnings",
                "--analytics-disable",
                "note.txt",
            ],
            cwd=tmp_path,
            env=environment(tmp_path, url),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert note.read_text() == AFTER
    assert (tmp_path / "shown.txt").read_text() == AFTER
    assert len(model.asked) == 1
    # It looks for prices of models, and goes on without.
    assert finished.stdout.splitlines()[-1] == "outside: ['raw.githubusercontent.com']"
