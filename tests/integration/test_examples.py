"""The clients in examples/client/, against the real Cog server with the simulated engine."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_cog_server import cancelled_engine
from tests.support import ROOT, CogServer
from tools.server_sent_events import EventParser

EXAMPLES = ROOT / "examples" / "client"
QUESTION = "What is machine learning?"
LONG = 5000
# A machine's proxies are not for a server on the machine itself. And Python flushes of its own accord where
# it is told to be unbuffered, which would hide a client that forgets to.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


@dataclass(frozen=True)
class Client:
    """One of the examples: its command, and whether it prints what the server sends as it is."""

    command: tuple[str, ...]
    raw: bool = False

    def arguments(self, action: str, url: str, inputs: dict[str, Any]) -> list[str]:
        return [*self.command, action, json.dumps(inputs), url]

    def run(self, action: str, url: str, **inputs: Any) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"text": True, "timeout": 60, "env": ENVIRONMENT}
        return subprocess.run(self.arguments(action, url, inputs), capture_output=True, **options)

    def text(self, action: str, output: str) -> str:
        if not self.raw:
            return output.removesuffix("\n")
        if action == "whole":
            return "".join(json.loads(output)["output"])
        return "".join(data.get("chunk", "") for data in event_data(output))


def event_data(output: str) -> list[dict[str, Any]]:
    return [json.loads(data) for _, data in EventParser().feed(output.encode())]


def node() -> str:
    """The JavaScript runtime; without one that is new enough, the test is skipped."""
    if (path := shutil.which("node")) is None:
        pytest.skip("no node in PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    if int(version.removeprefix("v").split(".")[0]) < 18:
        pytest.skip(f"node {version.strip()} is older than 18")
    return path


@pytest.fixture(params=["curl", "python", "javascript"])
def client(request: pytest.FixtureRequest) -> Client:
    if request.param == "curl":
        if shutil.which("curl") is None:
            pytest.skip("no curl in PATH")
        return Client((str(EXAMPLES / "client.sh"),), raw=True)
    if request.param == "python":
        return Client((sys.executable, str(EXAMPLES / "client.py")))
    return Client((node(), str(EXAMPLES / "client.mjs")))


@pytest.mark.parametrize("action", ["whole", "stream"])
def test_the_answer(client: Client, action: str, paced_cog_server: CogServer) -> None:
    inputs = {"prompt": QUESTION, "max_tokens": 40}
    expected = "".join(paced_cog_server.predict(**inputs)["output"])
    ran = client.run(action, paced_cog_server.url, **inputs)
    assert ran.returncode == 0, ran.stderr
    assert client.text(action, ran.stdout) == expected
    assert len(expected) > 40


def test_a_stream_is_printed_as_it_comes(client: Client, paced_cog_server: CogServer) -> None:
    before = paced_cog_server.engine["generated"]
    arguments = client.arguments(
        "stream", paced_cog_server.url, {"prompt": QUESTION, "max_tokens": 100}
    )
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        printed = os.read(process.stdout.fileno(), 65536)
        while client.raw and b"event: output" not in printed:
            printed += os.read(process.stdout.fileno(), 65536)
        assert printed
        assert paced_cog_server.engine["generated"] - before < 50
        process.stdout.read()
    assert process.returncode == 0


def test_a_cancel_stops_the_engine(client: Client, paced_cog_server: CogServer) -> None:
    generated = paced_cog_server.engine["generated"]
    ran = client.run("cancel", paced_cog_server.url, prompt=QUESTION, max_tokens=LONG)
    assert ran.returncode == 0, ran.stderr
    assert 0 < len(client.text("cancel", ran.stdout)) < LONG
    if client.raw:
        assert event_data(ran.stdout)[-1]["status"] == "canceled"
    cancelled_engine(paced_cog_server, generated)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"prompt": QUESTION, "max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "E1001 PromptRequired"),
    ],
)
@pytest.mark.parametrize("action", [pytest.param("whole", marks=pytest.mark.rare), "stream"])
def test_what_is_refused_or_fails_is_said(
    client: Client, action: str, inputs: dict[str, Any], said: str, paced_cog_server: CogServer
) -> None:
    ran = client.run(action, paced_cog_server.url, **inputs)
    # curl takes a prediction that failed for one that went well.
    assert (ran.returncode == 0) == (client.raw and not inputs["prompt"])
    assert said in ran.stdout + ran.stderr


# Characters of several bytes, and one at which Python ends lines and server-sent events do not.
EVENTS = (("output", {"chunk": "Größe: \u2028€"}), ("completed", {"status": "succeeded"}))
STREAM = ": a comment\n\n" + "".join(
    f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n" for name, data in EVENTS
)


def test_events_that_come_byte_by_byte_in_python() -> None:
    events = runpy.run_path(str(EXAMPLES / "client.py"))["events"]
    assert tuple(events(bytes([byte]) for byte in STREAM.encode())) == EVENTS


def test_events_that_come_byte_by_byte_in_javascript(tmp_path: Path) -> None:
    program = tmp_path / "events.mjs"
    program.write_text(
        f"import {{ events }} from {json.dumps((EXAMPLES / 'client.mjs').as_uri())};\n"
        f"const bytes = new TextEncoder().encode({json.dumps(STREAM)});\n"
        "const pieces = (async function* () { for (const b of bytes) yield Uint8Array.of(b); })();\n"
        "for await (const event of events(pieces)) console.log(JSON.stringify(event));\n"
    )
    ran = subprocess.run([node(), str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [tuple(json.loads(line)) for line in ran.stdout.split("\n")[:-1]] == list(EVENTS)
