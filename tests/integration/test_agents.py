"""Agents that others wrote, with a model whose answers are written beforehand.

`make test-clients` installs them; tests/agents.py says how each is set up.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import AGENTS, SECONDS, Agent, ClaudeCode, Codex
from tests.scripted_model import ScriptedModel, Step, serving

pytestmark = pytest.mark.rare
BEFORE = "the answer is 41\n"
AFTER = "the answer is 42\n"
END = "The note is mended."
TASK = "Mend the note."
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
EVERY_AGENT = pytest.mark.parametrize("agent", list(AGENTS), indirect=True)


@pytest.fixture
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    agent = AGENTS[request.param](tmp_path)
    yield agent
    agent.close()


@pytest.fixture
def note(tmp_path: Path) -> Path:
    file = tmp_path / "note.txt"
    file.write_text(BEFORE)
    return file


@EVERY_AGENT
def test_a_whole_task(agent: Agent, note: Path) -> None:
    """It reads a file, edits it and runs a command."""
    model = ScriptedModel(agent.steps(note), END)
    with serving(model) as url:
        printed = agent.run(agent.asks(TASK), agent.settings(url))
    assert END in printed
    assert note.read_text() == AFTER
    read, _, shown = model.results()
    assert BEFORE.strip() in read
    assert AFTER.strip() in shown


@pytest.mark.parametrize(
    "agent", ["claude-code", "codex", "opencode", "qwen-code", "continue"], indirect=True
)
def test_a_second_turn(agent: Agent, note: Path) -> None:
    """It goes on with a session: the model sees the first turn with its calls, and the new question."""
    model = ScriptedModel(agent.steps(note)[:1], END)
    question = "Which answer was in the note?"
    with serving(model) as url:
        environment = agent.settings(url)
        agent.run(agent.asks(TASK), environment)
        assert END in agent.run(agent.asks_again(question), environment)
    texts = [str(turn["content"]) for turn in model.conversations[-1]]
    for part in (TASK, BEFORE.strip(), END, question):
        assert any(part in text for text in texts), part


@EVERY_AGENT
def test_an_interrupt_cancels_the_answer(agent: Agent) -> None:
    model = ScriptedModel([], END, stalls=True)
    with serving(model) as url:
        environment = agent.settings(url)
        agent.interrupted(agent.asks(TASK), environment, lambda: model.stalled.wait(SECONDS))
        assert model.cancelled.wait(SECONDS)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(PIXEL))
    return file


@pytest.mark.parametrize("agent", ["claude-code", "codex", "opencode", "qwen-code"], indirect=True)
def test_a_picture_that_a_tool_reads_does_not_end_the_session(agent: Agent, picture: Path) -> None:
    """The server, or the agent itself, tells the model that it cannot read it."""
    model = ScriptedModel([agent.reads_picture(picture)], END)
    with serving(model) as url:
        environment = agent.settings(url)
        assert END in agent.run(agent.asks(TASK), environment)
        assert END in agent.run(agent.asks_again("Go on."), environment)
    assert PIXEL not in str(model.conversations)


def test_codex_shows_the_refusal_of_a_picture_and_goes_on(tmp_path: Path, picture: Path) -> None:
    agent = Codex(tmp_path)
    model = ScriptedModel([], END)
    with serving(model) as url:
        environment = agent.settings(url)
        shown = agent.fails(agent.asks_about(picture, TASK), environment)
        assert "input_image is not supported: this model reads text only" in shown
        assert END in agent.run(agent.asks_again("Go on."), environment)
    assert "input_image left out" in str(model.conversations[-1])


def test_claude_code_shortens_a_session_that_is_too_long(tmp_path: Path) -> None:
    agent = ClaudeCode(tmp_path)
    book = tmp_path / "book.txt"
    book.write_text("One more line of a long book.\n" * 1500)
    model = ScriptedModel([Step("Read", {"file_path": str(book)})], END, refuses_above=9000)
    with serving(model) as url:
        assert END in agent.run(agent.asks("Read the book."), agent.settings(url))
    assert model.refuses_above is None  # it was refused once


@pytest.mark.parametrize(
    "agent", [name for name, agent in AGENTS.items() if agent.mcp_tool], indirect=True
)
def test_the_tool_of_an_mcp_server(agent: Agent) -> None:
    model = ScriptedModel([Step(agent.mcp_tool, {"name": "shopping"})], END)
    with serving(model) as url:
        environment = agent.settings(url)
        agent.add_mcp_server()
        assert END in agent.run(agent.asks(TASK), environment)
    assert agent.mcp_tool in model.tools
    (result,) = model.results()
    assert "The note shopping is empty." in result
