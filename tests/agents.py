"""Agents of npm: how each is set up for this server, and which calls it understands.

`make test-clients` installs them. What they would send anywhere but to this machine goes to a closed port.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.scripted_model import Step
from tests.support import ROOT

BIN = ROOT / ".venv-clients" / "agents" / "node_modules" / ".bin"
MCP_SERVER = [sys.executable, str(ROOT / "tests" / "notes_mcp_server.py")]
SECONDS = 300
CLOSED = "http://127.0.0.1:9"
MODEL = "m"


class Agent:
    """A command that works on the files of a directory.

    Attributes:
        name: the id of its tests.
        command: the name that npm gives it.
        mcp_tool: the name under which it offers the tool of an MCP server; empty where none is tried.
    """

    name: ClassVar[str]
    command: ClassVar[str]
    mcp_tool: ClassVar[str] = ""

    def __init__(self, directory: Path) -> None:
        path = shutil.which(self.command, path=str(BIN))
        if path is None:
            pytest.skip(f"{self.command} is not installed: `make test-clients` does that")
        self._path = path
        self._directory = directory
        self._home = directory / "home"
        self._home.mkdir()

    def steps(self, note: Path) -> list[Step]:
        """Return the calls that read a note, edit it, and show it by a command."""
        raise NotImplementedError

    def settings(self, url: str) -> dict[str, str]:
        """Write the configuration for a server; return what belongs in the environment."""
        raise NotImplementedError

    def asks(self, prompt: str) -> list[str]:
        """Return the arguments that begin a task."""
        raise NotImplementedError

    def asks_again(self, prompt: str) -> list[str]:
        """Return the arguments that go on with the last task."""
        raise NotImplementedError

    def reads_picture(self, picture: Path) -> Step:
        """Return the call that reads a picture."""
        raise NotImplementedError

    def add_mcp_server(self) -> None:
        """Add the MCP server to the configuration that has been written."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the agent left running."""

    def run(self, arguments: Sequence[str], environment: dict[str, str]) -> str:
        """Run the agent to its end, which must be good; return what it printed."""
        finished = self._finished(arguments, environment)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def fails(self, arguments: Sequence[str], environment: dict[str, str]) -> str:
        """Run the agent to an end with an error; return what it printed about it."""
        finished = self._finished(arguments, environment)
        assert finished.returncode != 0, finished.stdout
        return finished.stdout + finished.stderr

    def _finished(
        self, arguments: Sequence[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._path, *arguments],
            cwd=self._directory,
            env=self._environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def interrupted(
        self, arguments: Sequence[str], environment: dict[str, str], when: Callable[[], object]
    ) -> None:
        """Run the agent until ``when`` returns, and interrupt it as Ctrl-C does."""
        with subprocess.Popen(
            [self._path, *arguments],
            cwd=self._directory,
            env=self._environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                when()
                os.killpg(process.pid, signal.SIGINT)
                process.wait(SECONDS)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def _environment(self, environment: dict[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self._home),
            "HTTP_PROXY": CLOSED,
            "HTTPS_PROXY": CLOSED,
            "http_proxy": CLOSED,
            "https_proxy": CLOSED,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **environment,
        }


class ClaudeCode(Agent):
    """It asks for Anthropic's models by default."""

    name = "claude-code"
    command = "claude"
    mcp_tool = "mcp__notes__read_note"
    _tools = "Read,Edit,Bash,mcp__notes__read_note"

    def steps(self, note: Path) -> list[Step]:
        return [
            Step("Read", {"file_path": str(note)}),
            Step("Edit", {"file_path": str(note), "old_string": "41", "new_string": "42"}),
            Step("Bash", {"command": "cat note.txt", "description": "Shows the note"}),
        ]

    def reads_picture(self, picture: Path) -> Step:
        return Step("Read", {"file_path": str(picture)})

    def settings(self, url: str) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "any",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",  # it would offer the tools of MCP servers by a search alone
        }

    def asks(self, prompt: str) -> list[str]:
        arguments = ["-p", prompt, "--allowedTools", self._tools]
        configuration = self._directory / "mcp.json"
        if configuration.exists():
            arguments += ["--mcp-config", str(configuration)]
        return arguments

    def asks_again(self, prompt: str) -> list[str]:
        return [*self.asks(prompt), "--continue"]

    def add_mcp_server(self) -> None:
        command, *arguments = MCP_SERVER
        servers = {"notes": {"command": command, "args": arguments}}
        (self._directory / "mcp.json").write_text(json.dumps({"mcpServers": servers}))


class Codex(Agent):
    name = "codex"
    command = "codex"
    mcp_tool = "mcp__notes__read_note"
    _options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

    def steps(self, note: Path) -> list[Step]:
        return [
            Step("exec_command", {"cmd": f"cat {note.name}"}),
            Step("exec_command", {"cmd": f"sed -i s/41/42/ {note.name}"}),
            Step("exec_command", {"cmd": f"cat {note.name}"}),
        ]

    def reads_picture(self, picture: Path) -> Step:
        return Step("view_image", {"path": str(picture)})

    def settings(self, url: str) -> dict[str, str]:
        lines = [
            f'model = "{MODEL}"',
            'model_provider = "local"',
            "[model_providers.local]",
            'name = "cog-triton"',
            f'base_url = "{url}/v1"',
            'wire_api = "responses"',
        ]
        self._configuration.parent.mkdir(exist_ok=True)
        self._configuration.write_text("\n".join(lines))
        return {}

    @property
    def _configuration(self) -> Path:
        return self._home / ".codex" / "config.toml"

    def asks(self, prompt: str) -> list[str]:
        return ["exec", *self._options, "--", prompt]

    def asks_about(self, picture: Path, prompt: str) -> list[str]:
        return ["exec", *self._options, "--image", str(picture), "--", prompt]

    def asks_again(self, prompt: str) -> list[str]:
        return ["exec", "resume", "--last", *self._options, "--", prompt]

    def add_mcp_server(self) -> None:
        command, *arguments = MCP_SERVER
        with self._configuration.open("a") as file:
            file.write(f"\n[mcp_servers.notes]\ncommand = {command!r}\nargs = {arguments!r}\n")


class OpenCode(Agent):
    name = "opencode"
    command = "opencode"
    mcp_tool = "notes_read_note"

    def steps(self, note: Path) -> list[Step]:
        return [
            Step("read", {"filePath": str(note)}),
            Step("edit", {"filePath": str(note), "oldString": "41", "newString": "42"}),
            Step("bash", {"command": "cat note.txt", "description": "Shows the note"}),
        ]

    def reads_picture(self, picture: Path) -> Step:
        return Step("read", {"filePath": str(picture)})

    def settings(self, url: str) -> dict[str, str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "cog-triton",
            "options": {"baseURL": f"{url}/v1", "apiKey": "any"},
            "models": {MODEL: {"name": MODEL}},
        }
        configuration = {
            "provider": {"cog-triton": provider},
            "model": f"cog-triton/{MODEL}",
            "permission": "allow",
        }
        self._configuration.write_text(json.dumps(configuration))
        return {}

    @property
    def _configuration(self) -> Path:
        return self._directory / "opencode.json"

    def asks(self, prompt: str) -> list[str]:
        return ["run", prompt]

    def asks_again(self, prompt: str) -> list[str]:
        return ["run", "--continue", prompt]

    def add_mcp_server(self) -> None:
        configuration = json.loads(self._configuration.read_text())
        configuration["mcp"] = {"notes": {"type": "local", "command": MCP_SERVER}}
        self._configuration.write_text(json.dumps(configuration))


class QwenCode(Agent):
    name = "qwen-code"
    command = "qwen"

    def steps(self, note: Path) -> list[Step]:
        shown = {"command": "cat note.txt", "is_background": False}
        return [
            Step("read_file", {"file_path": str(note)}),
            Step("edit", {"file_path": str(note), "old_string": "41", "new_string": "42"}),
            Step("run_shell_command", shown),
        ]

    def reads_picture(self, picture: Path) -> Step:
        return Step("read_file", {"file_path": str(picture)})

    def settings(self, url: str) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "any",
            "OPENAI_MODEL": MODEL,
        }

    def asks(self, prompt: str) -> list[str]:
        return ["--auth-type", "openai", "--yolo", "-p", prompt]

    def asks_again(self, prompt: str) -> list[str]:
        return [*self.asks(prompt), "--continue"]


class Continue(Agent):
    name = "continue"
    command = "cn"
    mcp_tool = "read_note"

    def steps(self, note: Path) -> list[Step]:
        return [
            Step("Read", {"filepath": str(note)}),
            Step("Edit", {"file_path": str(note), "old_string": "41", "new_string": "42"}),
            Step("Bash", {"command": "cat note.txt"}),
        ]

    def settings(self, url: str) -> dict[str, str]:
        model = {
            "name": MODEL,
            "provider": "openai",
            "model": MODEL,
            "apiBase": f"{url}/v1",
            "apiKey": "any",
            "capabilities": ["tool_use"],
            "roles": ["chat"],
        }
        configuration = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
        self._configuration.write_text(json.dumps(configuration))
        return {"CONTINUE_TELEMETRY_ENABLED": "0"}

    @property
    def _configuration(self) -> Path:
        return self._directory / "config.yaml"

    def asks(self, prompt: str) -> list[str]:
        return ["-p", "--auto", "--config", str(self._configuration), prompt]

    def asks_again(self, prompt: str) -> list[str]:
        return ["--resume", *self.asks(prompt)]

    def add_mcp_server(self) -> None:
        configuration = json.loads(self._configuration.read_text())
        command, *arguments = MCP_SERVER
        server = {"name": "notes", "command": command, "args": arguments}
        configuration["mcpServers"] = [server]
        self._configuration.write_text(json.dumps(configuration))


class Cline(Agent):
    name = "cline"
    command = "cline"

    def steps(self, note: Path) -> list[Step]:
        return [
            Step("read_files", {"files": [{"path": str(note)}]}),
            Step("editor", {"path": str(note), "old_text": "41", "new_text": "42"}),
            Step("run_commands", {"commands": ["cat note.txt"]}),
        ]

    def settings(self, url: str) -> dict[str, str]:
        options = {"provider": "openai-compatible", "apikey": "any", "modelid": MODEL}
        named = [f"--{name}={value}" for name, value in options.items()]
        self.run(["auth", *named, f"--baseurl={url}/v1"], {})
        return {}

    def asks(self, prompt: str) -> list[str]:
        return ["-P", "openai-compatible", "-m", MODEL, prompt]

    def close(self) -> None:
        """End its daemon, which outlives the command and has the directory as an argument."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self._directory) in (process.info["cmdline"] or ()):
                process.kill()


AGENTS: dict[str, type[Agent]] = {
    agent.name: agent for agent in (ClaudeCode, Codex, OpenCode, QwenCode, Continue, Cline)
}
