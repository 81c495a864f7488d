"""Clients that others wrote, on a real server: OpenAI's of PyPI and npm, Anthropic's, LangChain's."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.integration.test_openai_structured import SWITCH, Verdict
from tests.late import anthropic, openai
from tests.openai_server import ANSWER, MESSAGES, QUESTION, OpenAIServer

NPM_PACKAGE = "openai@^7"
NPM_SECONDS = 60
GREEDY: dict[str, Any] = {"temperature": 0}
RESPONSE: dict[str, Any] = {"model": "demo", "input": QUESTION}
MESSAGE: dict[str, Any] = {"model": "demo", "messages": MESSAGES}
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": SWITCH} for name in ("light", "heat")
]
ANTHROPIC_TOOLS: Any = [
    {"name": name, "description": name, "input_schema": {**SWITCH, "title": name}}
    for name in ("light", "heat")
]


@pytest.fixture
def claude(server: OpenAIServer) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(base_url=server.url, api_key="none", http_client=http) as client:
        yield client


# OpenAI's Responses API


def test_a_response_that_is_cut(client: openai.OpenAI) -> None:
    cut = client.responses.create(**RESPONSE, **GREEDY, max_output_tokens=8)
    assert cut.output_text.startswith(ANSWER)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage is not None
    assert (cut.usage.output_tokens, cut.usage.total_tokens) == (8, cut.usage.input_tokens + 8)


def test_a_streamed_response(client: openai.OpenAI) -> None:
    with client.responses.stream(**RESPONSE, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert text.startswith(ANSWER)
    assert final.status == "completed"


def test_a_response_is_parsed_to_a_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(**RESPONSE, text_format=Verdict)
    assert isinstance(response.output_parsed, Verdict)


def test_a_response_that_calls_and_the_turn_after_it(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "name": "heat"}
    with client.responses.stream(
        **RESPONSE, **GREEDY, tools=TOOLS, tool_choice=named, max_output_tokens=300
    ) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert (call.name, [*json.loads(call.arguments)]) == ("heat", ["on"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    made = call.model_dump(exclude_none=True, exclude={"parsed_arguments"})
    items: Any = [*MESSAGES, made, result]
    assert client.responses.create(model="demo", input=items, max_output_tokens=10).output_text


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**RESPONSE, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


# Anthropic's


def test_a_message_that_is_cut(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**MESSAGE, max_tokens=8, extra_body=GREEDY)
    assert message._request_id
    (block,) = message.content
    assert block.type == "text"
    assert block.text.startswith(ANSWER)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    assert claude.messages.count_tokens(**MESSAGE).input_tokens == message.usage.input_tokens


def test_a_streamed_message(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "stop_sequences": [" learning"]}
    with claude.messages.stream(**MESSAGE, **fields, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "Machine"  # type: ignore[union-attr]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " learning")


def test_a_message_that_calls_and_the_turn_after_it(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(
        **MESSAGE, max_tokens=300, tools=ANTHROPIC_TOOLS, tool_choice=choice, extra_body=GREEDY
    ) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name in ("light", "heat")
    assert isinstance(call.input["on"], bool)
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    made, told = ("assistant", message.content), ("user", [result])
    turns: Any = [{"role": role, "content": content} for role, content in (made, told)]
    second = claude.messages.create(model="demo", max_tokens=5, messages=[*MESSAGES, *turns])
    assert second.usage.output_tokens > 0


def test_anthropics_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be at least 1") as raised:
        claude.messages.create(**MESSAGE, max_tokens=0)
    assert raised.value.request_id
    assert raised.value.body["request_id"] == raised.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=MESSAGES)


# LangChain's


@pytest.mark.rare
def test_langchain(server: OpenAIServer) -> None:
    # Its imports take seconds, which every process of a test run would spend.
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    chain = ChatOpenAI(
        model="demo",
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
        http_async_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )
    turns = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    whole = chain.invoke(turns)
    assert isinstance(whole, AIMessage)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.text for chunk in chain.stream(turns)) == whole.text
    assert asyncio.run(chain.ainvoke(turns)).text == whole.text
    (call,) = chain.bind_tools(ANTHROPIC_TOOLS, tool_choice="heat").invoke(QUESTION).tool_calls
    assert call["name"] == "heat"
    assert isinstance(call["args"]["on"], bool)
    assert isinstance(chain.with_structured_output(Verdict).invoke(QUESTION), Verdict)
    responses = chain.model_copy(update={"use_responses_api": True, "output_version": "v1"})
    answer = responses.invoke(turns)
    assert answer.text == whole.text
    assert "".join(chunk.text for chunk in responses.stream(turns)) == answer.text


# OpenAI's of npm


@pytest.mark.rare
def test_openais_javascript_client(server: OpenAIServer, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("no node and npm on this machine")
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts"]
    options: Any = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": NPM_SECONDS}
    try:
        installed = subprocess.run([*command, NPM_PACKAGE], **options)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed {NPM_PACKAGE} in {NPM_SECONDS} s")
    if installed.returncode:
        pytest.skip(f"npm cannot install {NPM_PACKAGE}: {installed.stderr[-300:]}")
    script = shutil.copy(Path(__file__).with_name("openai_client.mjs"), tmp_path)
    done = subprocess.run([node, script, server.url], **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"checks": 4}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="a text"),
        pytest.param({"system": [{"type": "text", "text": "Be brief."}] * 2}, id="a system list"),
        pytest.param(
            {
                "tools": ANTHROPIC_TOOLS,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "messages": [
                    *MESSAGES,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                            {
                                "type": "tool_use",
                                "id": "t1",
                                "name": "light",
                                "input": {"on": True},
                            },
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": "done"},
                            {"type": "text", "text": "And now?"},
                        ],
                    },
                ],
            },
            id="tools, thoughts and results",
        ),
    ],
)
def test_a_count_is_that_of_the_usage(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    body: Any = {**MESSAGE, **fields}
    counted = claude.messages.count_tokens(**body)
    assert counted.input_tokens == claude.messages.create(**body, max_tokens=1).usage.input_tokens
