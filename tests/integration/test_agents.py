"""Agents that others wrote, with a model whose answers are written beforehand.

`make test-clients` installs them; tests/agents.py says how each is set up.
"""

from pathlib import Path

import pytest

from tests.agents import AGENTS, SECONDS, Agent
from tests.scripted_model import ScriptedModel, Step, serving

pytestmark = pytest.mark.rare
BEFORE = "the answer is 41\n"
AFTER = "the answer is 42\n"
END = "The note is mended."
TASK = "Mend the note."
EVERY_AGENT = pytest.mark.parametrize("agent", list(AGENTS), indirect=True)


@pytest.fixture
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Agent:
    return AGENTS[request.param](tmp_path)


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
