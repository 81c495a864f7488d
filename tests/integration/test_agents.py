"""Agents that others wrote, through a whole task: they read a file, edit it and run a command.

`make test-clients` installs them. What they would send anywhere but to this machine goes to a closed port.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripted_model import ScriptedModel, Step, serving
from tests.support import ROOT

pytestmark = pytest.mark.rare
BIN = ROOT / ".venv-clients" / "agents" / "node_modules" / ".bin"
SECONDS = 300
BEFORE = "the answer is 41\n"
AFTER = "the answer is 42\n"
END = "The note is mended."


def agent(name: str) -> str:
    """The path of an agent's command; the test is skipped where it is not installed."""
    path = shutil.which(name, path=str(BIN))
    if path is None:
        pytest.skip(f"{name} is not installed: `make test-clients` does that")
    return path


def run(command: list[str], directory: Path, **environment: str) -> str:
    """What an agent prints that runs in a directory, with a home of its own and no network."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    closed = "http://127.0.0.1:9"
    finished = subprocess.run(
        command,
        cwd=directory,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "HTTP_PROXY": closed,
            "HTTPS_PROXY": closed,
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture
def note(tmp_path: Path) -> Path:
    file = tmp_path / "note.txt"
    file.write_text(BEFORE)
    return file


def results_of(model: ScriptedModel) -> list[str]:
    """What the tools said, as the model read it in the last turn."""
    return [turn["content"] for turn in model.conversations[-1] if turn["role"] == "tool"]


def test_claude_code(note: Path) -> None:
    """With the names of Anthropic's models, which it asks for by default."""
    command = agent("claude")
    model = ScriptedModel(
        [
            Step("Read", {"file_path": str(note)}),
            Step("Edit", {"file_path": str(note), "old_string": "41", "new_string": "42"}),
            Step("Bash", {"command": "cat note.txt", "description": "Shows the note"}),
        ],
        END,
    )
    with serving(model) as url:
        printed = run(
            [command, "-p", "Mend the note.", "--allowedTools", "Read,Edit,Bash"],
            note.parent,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="any",
            DISABLE_AUTOUPDATER="1",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert printed.strip() == END
    assert note.read_text() == AFTER
    read, _, shown = results_of(model)
    assert "the answer is 41" in read
    assert shown.strip() == AFTER.strip()


def test_codex(note: Path) -> None:
    command = agent("codex")
    model = ScriptedModel(
        [
            Step("exec_command", {"cmd": "cat note.txt"}),
            Step("exec_command", {"cmd": "sed -i s/41/42/ note.txt"}),
            Step("exec_command", {"cmd": "cat note.txt"}),
        ],
        END,
    )
    with serving(model) as url:
        configuration = note.parent / "home" / ".codex"
        configuration.mkdir(parents=True)
        (configuration / "config.toml").write_text(
            "\n".join(
                [
                    'model = "m"',
                    'model_provider = "local"',
                    "[model_providers.local]",
                    'name = "cog-triton"',
                    f'base_url = "{url}/v1"',
                    'wire_api = "responses"',
                ]
            )
        )
        printed = run(
            [
                command,
                "exec",
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "Mend the note.",
            ],
            note.parent,
        )
    assert printed.strip() == END
    assert note.read_text() == AFTER
    read, _, shown = results_of(model)
    assert "the answer is 41" in read
    assert "the answer is 42" in shown
