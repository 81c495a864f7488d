"""Clients that others wrote, on a real server: OpenAI's of PyPI and npm, Anthropic's, LangChain's."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.openai_server import MESSAGES, OpenAIServer

QUESTION = MESSAGES[0]["content"]
ANSWER = "Machine learning is"  # how it begins
NPM_PACKAGE = "openai@^7"
NPM_SECONDS = 60


class Verdict(BaseModel):
    """What the judge says."""

    sure: bool
    grade: int


def schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "title": name,
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }


OPENAI_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": schema(name)} for name in ("light", "heat")
]
ANTHROPIC_TOOLS: Any = [
    {"name": name, "description": name, "input_schema": schema(name)} for name in ("light", "heat")
]


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """With the demo model."""
    directory = tmp_path_factory.mktemp("clients")
    environment = {"MODEL": str(demo_model), "ENGINE": "transformers"}
    with OpenAIServer(environment, directory / "log") as server:
        yield server
    assert "Traceback" not in (directory / "log").read_text()


@pytest.fixture
def claude(server: OpenAIServer) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(base_url=server.url, api_key="none", http_client=http) as client:
        yield client


@pytest.fixture
def chain(server: OpenAIServer) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo",
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
        http_async_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


# OpenAI's Responses API


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="demo", input=QUESTION, temperature=0, max_output_tokens=8
    )
    assert response.output_text.startswith(ANSWER)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (
        8,
        response.usage.input_tokens + 8,
    )


def test_a_response_and_a_chat_are_the_same_text(client: openai.OpenAI) -> None:
    system: Any = {"role": "system", "content": "Be kind."}
    fields: dict[str, Any] = {"model": "demo", "seed": 3}
    chat = client.chat.completions.create(**fields, messages=[system, *MESSAGES], max_tokens=20)
    response = client.responses.create(
        model="demo",
        instructions="Be kind.",
        input=MESSAGES,
        max_output_tokens=20,
        extra_body={"seed": 3},
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_a_streamed_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert text.startswith(ANSWER)
    assert final.status == "completed"
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))


def test_responses_at_once(server: OpenAIServer) -> None:
    async def ask() -> set[str]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.responses.create(
                        model="demo", input=QUESTION, temperature=0, max_output_tokens=12
                    )
                    for _ in range(8)
                )
            )
            return {answer.output_text for answer in answers}

    (text,) = asyncio.run(ask())
    assert text.startswith(ANSWER)


def test_a_response_is_parsed_to_a_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="demo", input=QUESTION, text_format=Verdict)
    assert isinstance(response.output_parsed, Verdict)


def test_a_response_that_calls_and_the_turn_after_it(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "tools": OPENAI_TOOLS, "temperature": 0}
    named: Any = {"type": "function", "name": "heat"}
    response = client.responses.create(
        **fields, input=QUESTION, tool_choice=named, max_output_tokens=300
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, [*json.loads(call.arguments)]) == ("heat", ["on"])
    items: Any = [
        {"role": "user", "content": QUESTION},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    second = client.responses.create(model="demo", input=items, max_output_tokens=10)
    assert second.usage is not None
    assert response.usage is not None
    assert second.output_text


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="demo", input=QUESTION, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


# Anthropic's


def test_a_message(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = claude.messages.create(
        model="demo", max_tokens=8, messages=MESSAGES, extra_body={"temperature": 0}
    )
    assert message._request_id
    (block,) = message.content
    assert block.type == "text"
    assert block.text.startswith(ANSWER)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    counted = claude.messages.count_tokens(model="demo", messages=MESSAGES)
    assert counted.input_tokens == message.usage.input_tokens
    system: Any = {"role": "system", "content": "Be kind."}
    chat = client.chat.completions.create(
        model="demo", messages=[system, *MESSAGES], seed=3, max_tokens=20
    )
    same = claude.messages.create(
        model="demo", system="Be kind.", messages=MESSAGES, max_tokens=20, extra_body={"seed": 3}
    )
    assert same.content[0].text == chat.choices[0].message.content  # type: ignore[union-attr]


def test_a_streamed_message(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="demo",
        max_tokens=200,
        messages=MESSAGES,
        stop_sequences=[" learning"],
        extra_body={"temperature": 0},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "Machine"  # type: ignore[union-attr]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " learning")


def test_a_message_that_calls_and_the_turn_after_it(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="demo",
        max_tokens=300,
        messages=MESSAGES,
        tools=ANTHROPIC_TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
    ) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name in ("light", "heat")
    assert isinstance(call.input["on"], bool)
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(model="demo", max_tokens=5, messages=turns)
    assert second.usage.output_tokens > 0


def test_anthropics_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(model="demo", max_tokens=0, messages=MESSAGES)
    assert "max_tokens must be at least 1" in str(raised.value)
    assert raised.value.request_id
    assert raised.value.body["request_id"] == raised.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=MESSAGES)


# LangChain's


def test_langchain_invokes_and_streams(chain: ChatOpenAI) -> None:
    turns = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    whole = chain.invoke(turns)
    assert isinstance(whole, AIMessage)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"
    pieces = [chunk.text for chunk in chain.stream(turns)]
    assert "".join(pieces) == whole.text
    assert asyncio.run(chain.ainvoke(turns)).text == whole.text


def test_langchain_binds_tools(chain: ChatOpenAI) -> None:
    answer = chain.bind_tools(ANTHROPIC_TOOLS, tool_choice="heat").invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "heat"
    assert isinstance(call["args"]["on"], bool)


def test_langchain_has_structured_output(chain: ChatOpenAI) -> None:
    assert isinstance(chain.with_structured_output(Verdict).invoke(QUESTION), Verdict)


def test_langchain_on_the_responses_api(chain: ChatOpenAI) -> None:
    responses = chain.model_copy(update={"use_responses_api": True, "output_version": "v1"})
    answer = responses.invoke(QUESTION)
    assert answer.text == chain.invoke(QUESTION).text
    assert "".join(chunk.text for chunk in responses.stream(QUESTION)) == answer.text


# OpenAI's of npm


def test_openais_javascript_client(server: OpenAIServer, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("no node and npm on this machine")
    options = ("--no-audit", "--no-fund", "--silent", "--ignore-scripts")
    try:
        installed = subprocess.run(
            [npm, "install", *options, NPM_PACKAGE],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=NPM_SECONDS,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed {NPM_PACKAGE} in {NPM_SECONDS} s")
    if installed.returncode:
        pytest.skip(f"npm cannot install {NPM_PACKAGE}: {installed.stderr[-300:]}")
    script = tmp_path / "client.mjs"
    shutil.copy(Path(__file__).with_name("openai_client.mjs"), script)
    done = subprocess.run(
        [node, str(script), server.url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"checks": 6}
