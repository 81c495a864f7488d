"""SDKs of OpenAI, Anthropic and Vercel with a model whose answers are written beforehand."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents import BIN
from tests.late import anthropic, openai
from tests.scripted_model import ScriptedModel, Step, serving
from tests.support import ROOT, limit

# Their tests have imported the SDKs, too.
pytestmark = pytest.mark.xdist_group("cog_server")
END = "It is sunny."
PICTURE = "data:image/png;base64,iVBORw0KGgo="
REFUSED = "is not supported: this model reads text only"
WEATHER = [Step("weather", {"city": "Rome"})]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "parameters": PARAMETERS}
SPEAK: Any = [{"role": "user", "content": "Speak."}]


@pytest.fixture
def stalling() -> Iterator[tuple[ScriptedModel, str]]:
    """A model that begins an answer and waits for its cancel, and the address of its server."""
    model = ScriptedModel([], END, stalls=True)
    with serving(model) as url:
        yield model, url


@pytest.fixture
def answering() -> Iterator[str]:
    with serving(ScriptedModel([], END)) as url:
        yield url


def openai_client(url: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", http_client=http, max_retries=0)


def anthropic_client(url: str) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=url, api_key="any", http_client=http, max_retries=0)


def test_openais_sdk_cancels_a_chat(stalling: tuple[ScriptedModel, str]) -> None:
    model, url = stalling
    tools: Any = [{"type": "function", "function": TOOL}]
    with openai_client(url) as client:
        stream = client.chat.completions.create(model="m", messages=SPEAK, tools=tools, stream=True)
        next(iter(stream))
        stream.close()
        assert model.cancelled.wait(limit(60))


def test_openais_sdk_cancels_a_response(stalling: tuple[ScriptedModel, str]) -> None:
    model, url = stalling
    tools: Any = [{"type": "function", **TOOL}]
    with openai_client(url) as client:
        stream = client.responses.create(model="m", input="Speak.", tools=tools, stream=True)
        next(iter(stream))
        stream.close()
        assert model.cancelled.wait(limit(60))


def test_openais_sdk_gets_a_clear_refusal_of_a_picture(answering: str) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    item: Any = {
        "role": "user",
        "content": [{"type": "input_image", "image_url": PICTURE, "detail": "auto"}],
    }
    with openai_client(answering) as client:
        with pytest.raises(openai.BadRequestError, match=REFUSED):
            client.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.BadRequestError, match=REFUSED):
            client.responses.create(model="m", input=[item])


def test_anthropics_sdk_cancels(stalling: tuple[ScriptedModel, str]) -> None:
    model, url = stalling
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    with anthropic_client(url) as client:
        with client.messages.stream(
            model="m", max_tokens=100, messages=SPEAK, tools=tools
        ) as stream:
            next(iter(stream.text_stream))
        assert model.cancelled.wait(limit(60))


def test_anthropics_sdk_is_told_that_a_picture_was_left_out(answering: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with anthropic_client(answering) as client:
        reply = client.messages.with_raw_response.create(
            model="m", max_tokens=100, messages=messages
        )
    assert "content of type image" in reply.headers["warning"]


# The AI SDK of Vercel

AI_SDK = ROOT / "tests" / "integration" / "ai_sdk.mjs"
PROVIDERS = ("chat", "responses", "anthropic", "compatible")
EVERY_PROVIDER = pytest.mark.parametrize("provider", PROVIDERS)


def ai_sdk(url: str, provider: str, task: str) -> dict[str, Any]:
    """What the AI SDK gets of a server."""
    node = shutil.which("node", path=str(BIN))
    if node is None or not (BIN.parent / "ai").exists():
        pytest.skip("the AI SDK is not installed: `make test-clients` does that")
    ran = subprocess.run(
        [node, str(AI_SDK), url, provider, task, str(BIN.parent)],
        capture_output=True,
        text=True,
        timeout=limit(120),
        env={"AI_SDK_LOG_WARNINGS": "false"},
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.mark.rare
@EVERY_PROVIDER
def test_the_ai_sdk_streams_and_calls(provider: str) -> None:
    model = ScriptedModel(WEATHER, END)
    with serving(model) as url:
        result = ai_sdk(url, provider, "tools")
    assert result["text"] == END
    assert result["pieces"] > 1
    assert result["steps"] == 2
    (weather,) = model.results()
    assert "sunny in Rome" in weather


@pytest.mark.rare
@EVERY_PROVIDER
def test_the_ai_sdk_and_a_picture(provider: str, answering: str) -> None:
    result = ai_sdk(answering, provider, "picture")
    if provider == "anthropic":  # which is told by a header
        assert result["text"]
    else:
        assert result["status"] == 400
        assert REFUSED in result["error"]


@pytest.mark.rare
@EVERY_PROVIDER
def test_the_ai_sdk_cancels(provider: str, stalling: tuple[ScriptedModel, str]) -> None:
    model, url = stalling
    assert ai_sdk(url, provider, "cancel") == {"aborted": True}
    assert model.cancelled.wait(limit(60))
