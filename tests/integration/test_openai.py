"""The OpenAI face: PyPI's client, the bytes on the wire, and ends of all kinds, on real servers."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.openai_server import MESSAGES, OpenAIServer, contents
from tests.support import alive, children, wait_until

PACE = {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "20"}
ANSWER = "Machine learning is"  # how it begins


@pytest.fixture(scope="module")
def server(
    demo_model: Path, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """With the demo model."""
    log = tmp_path_factory.mktemp("openai") / "log"
    environment = {"MODEL": str(demo_model), "ENGINE": engine_name, "MAX_REQUEST_BYTES": "100000"}
    with OpenAIServer(environment, log) as server:
        yield server


@pytest.fixture(scope="module")
def paced(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """With the simulated engine, at 20 ms a token."""
    log = tmp_path_factory.mktemp("paced") / "log"
    with OpenAIServer({"MODEL": str(demo_model), **PACE}, log) as server:
        yield server


# PyPI's client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.code == "model_not_found"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=8
    )
    (choice,) = answer.choices
    assert choice.message.content is not None
    assert choice.message.content.startswith(ANSWER)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (
        8,
        answer.usage.prompt_tokens + 8,
    )


def test_a_chat_without_a_limit_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 16


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 7, "max_tokens": 30}
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == [
        "assistant",
        *[None] * (len(chunks) - 2),
    ]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [*[None] * (len(reasons) - 1), whole.choices[0].finish_reason]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_several_answers_differ_and_are_those_of_the_seeds_after_the_first(
    client: openai.OpenAI,
) -> None:
    fields: dict[str, Any] = {
        "model": "demo",
        "prompt": "What is machine",
        "max_tokens": 20,
        "temperature": 2.0,
        "extra_body": {"ignore_eos": True},
    }
    three = client.completions.create(**fields, n=3, seed=5)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    alone = [client.completions.create(**fields, seed=seed) for seed in (5, 6, 7)]
    texts = [choice.text for choice in three.choices]
    assert texts == [answer.choices[0].text for answer in alone]
    assert len(set(texts)) == 3
    assert three.usage is not None
    assert three.usage.completion_tokens == 60
    stream = client.completions.create(**fields, n=3, seed=5, stream=True)
    pieces = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == texts


def test_prompts_of_all_kinds(server: OpenAIServer, client: openai.OpenAI) -> None:
    ids = server.post("/tokenize", {"prompt": "What is machine learning?"}).json()["tokens"]
    fields: dict[str, Any] = {"model": "demo", "temperature": 0}
    text = client.completions.create(prompt="What is machine learning?", **fields)
    assert client.completions.create(prompt=ids, **fields).choices == text.choices
    both = client.completions.create(prompt=[ids, ids[:3]], **fields)
    assert both.choices[0].text == text.choices[0].text
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (len(ids) + 3, 32)
    two = client.completions.create(prompt=["What is machine learning?", "Hello"], **fields)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == text.choices[0].text


def test_echo_and_stop(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": "What is machine learning?"}
    echoed = client.completions.create(**fields, temperature=0, echo=True, stop=[" is", "\n"])
    assert echoed.choices[0].text == "What is machine learning?Machine learning"
    assert echoed.choices[0].finish_reason == "stop"
    stream = client.completions.create(**fields, temperature=0, echo=True, stop=" is", stream=True)
    pieces = [choice.text for chunk in stream for choice in chunk.choices]
    assert pieces[0] == "What is machine learning?"
    assert "".join(pieces) == echoed.choices[0].text


@pytest.mark.parametrize("logprobs", [None, 0])
def test_echo_alone(client: openai.OpenAI, tokenizer: Any, logprobs: int | None) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": "What is machine learning?"}
    fields |= {"max_tokens": 0, "echo": True, "logprobs": logprobs}
    whole = client.completions.create(**fields).choices[0]
    assert (whole.text, whole.finish_reason) == (fields["prompt"], "length")
    chunks = [
        c for chunk in client.completions.create(**fields, stream=True) for c in chunk.choices
    ]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == "length"
    if logprobs is None:
        assert whole.logprobs is None
    else:
        ids = tokenizer(fields["prompt"]).input_ids
        assert whole.logprobs.tokens == [tokenizer.decode([token]) for token in ids]
        assert chunks[0].logprobs.token_logprobs == whole.logprobs.token_logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(
    client: openai.OpenAI, demo_model: Path, tokenizer: Any, stream: bool
) -> None:
    """As harnesses ask for them that compare how likely a model finds given texts."""
    prompt = "What is machine learning?" * 40  # more tokens than one step of the engine takes
    fields: dict[str, Any] = {"model": "demo", "prompt": prompt, "temperature": 0}
    fields |= {"max_tokens": 3, "logprobs": 2, "echo": True}
    if stream:
        chunks = [
            c for chunk in client.completions.create(**fields, stream=True) for c in chunk.choices
        ]
        text = "".join(chunk.text for chunk in chunks)
        parts = [chunk.logprobs.model_dump() for chunk in chunks if chunk.logprobs]
        told = {name: [v for part in parts for v in part[name]] for name in parts[0]}
    else:
        (choice,) = client.completions.create(**fields).choices
        text, told = choice.text, choice.logprobs.model_dump()

    ids = tokenizer(prompt).input_ids
    model = AutoModelForCausalLM.from_pretrained(demo_model).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values, most = told["token_logprobs"], told["top_logprobs"]
    wanted = [expected[i, token].item() for i, token in enumerate(ids[1:])]
    assert text.startswith(prompt)
    assert len(values) == len(most) == len(told["tokens"]) == len(ids) + 3
    assert values[0] is most[0] is None
    assert values[1 : len(ids)] == pytest.approx(wanted, abs=2e-3)
    for place, row in zip(most[1 : len(ids)], expected, strict=False):
        assert max(place.values()) == pytest.approx(row.max().item(), abs=2e-3)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token in tokenizer.all_special_tokens or text[offset:].startswith(token)


def test_an_asynchronous_client_has_many_at_once(server: OpenAIServer) -> None:
    async def ask() -> list[str | None]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http
        ) as client:
            answers = [
                client.chat.completions.create(
                    model="demo", messages=MESSAGES, temperature=0, max_tokens=12
                )
                for _ in range(16)
            ]
            return [a.choices[0].message.content for a in await asyncio.gather(*answers)]

    (text,) = set(asyncio.run(ask()))
    assert text is not None
    assert text.startswith(ANSWER)


# Errors


def error(reply: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = reply.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temperature": -1}, "temperature", "temperature must be at least 0"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"stop": ["x" * 300]}, "stop", "at most 256 characters"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 200}}, "logit_bias", "between -100 and 100"),
        ({"suffix": "!"}, "suffix", "suffix is not supported"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "contradict"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"seed": -2}, "seed", "at least 0"),
        ({"seed": 2**64}, "seed", "at most 18446744073709551615"),
        ({"prompt": [[999_999]]}, None, ""),
        ({"prompt": None}, "prompt", ""),
    ],
)
def test_a_users_mistake_is_named(
    server: OpenAIServer, fields: dict[str, Any], param: str | None, text: str
) -> None:
    reply = server.complete(**fields)
    assert reply.status_code == 400, reply.text
    told = error(reply)
    assert told["type"] == "invalid_request_error"
    assert text in told["message"]
    if param is not None:
        assert told["param"] == param


def test_a_prompt_that_is_too_long_has_openais_code(server: OpenAIServer) -> None:
    for prompt in ("hello " * 3000, "x" * 90_000):
        reply = server.complete(prompt=prompt)
        assert reply.status_code == 400
        assert error(reply)["code"] == "context_length_exceeded"


def test_bodies_that_are_no_requests(server: OpenAIServer) -> None:
    url, json_type = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
    for body, text in (("{", "no JSON"), ("[]", "JSON object"), ("", "JSON object")):
        reply = httpx.post(url, content=body, headers=json_type, trust_env=False)
        assert reply.status_code == 400
        assert text in error(reply)["message"]
    assert server.post("/v1/completions", {"prompt": "x"}).json()["model"] == "demo"


def test_the_command_of_the_ready_line(server: OpenAIServer) -> None:
    ready, command = server.log.read_text().partition("ready: ")[2].splitlines()[:2]
    page = f"{server.url}/"
    assert ready == f"{server.url}, with a page to chat at {page} (Ctrl-C stops it); try"
    assert "<title>" in httpx.get(page, trust_env=False).text
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["text"]


def test_a_body_that_is_too_large(server: OpenAIServer) -> None:
    def chunks() -> Iterator[bytes]:
        yield from [b"x" * 60_000] * 2

    assert server.complete(prompt="x" * 100_000).status_code == 413
    url = f"{server.url}/v1/completions"
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(url, content=chunks(), headers=headers, trust_env=False)
    assert reply.status_code == 413
    assert "100000 bytes" in error(reply)["message"]


def test_other_paths_and_models(server: OpenAIServer) -> None:
    assert error(server.get("/v1/nothing"))["message"] == "Invalid URL (GET /v1/nothing)"
    assert server.get("/v1/completions").status_code == 405
    reply = server.complete(model="other")
    assert reply.status_code == 404
    assert error(reply)["param"] == "model"
    reply = server.post("/v1/embeddings", {"model": "demo", "input": "x"})
    assert reply.status_code == 404
    assert "embeddings are not served" in error(reply)["message"]


def test_what_is_unknown_is_named_in_a_warning(server: OpenAIServer) -> None:
    reply = server.complete(max_tokens=2, color="red", metadata={}, best_of=1)
    assert reply.status_code == 200
    assert reply.headers["warning"] == '199 cog-triton "ignored fields: color"'
    assert "warning" not in server.complete(max_tokens=2).headers


# The bytes


def test_the_events_of_a_chat_to_the_byte(server: OpenAIServer) -> None:
    body = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 2}
    reply = server.post("/v1/chat/completions", {**body, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = reply.text.split("\n\n")
    first = json.loads(events[0].removeprefix("data: "))
    head = json.dumps(
        {
            "id": first["id"],
            "object": "chat.completion.chunk",
            "created": first["created"],
            "model": "demo",
            "system_fingerprint": None,
        },
        separators=(",", ":"),
    )[:-1]

    def line(delta: str, reason: str = "null") -> str:
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'
        return f'data: {head},"choices":[{choice}]}}'

    pieces = events[1:-3]
    assert events == [
        line('{"role":"assistant","content":"","refusal":null}'),
        *pieces,
        line("{}", '"length"'),
        "data: [DONE]",
        "",
    ]
    texts = [json.loads(piece[6:])["choices"][0]["delta"]["content"] for piece in pieces]
    assert pieces == [line(f'{{"content":{json.dumps(text)}}}') for text in texts]
    assert ANSWER.startswith("".join(texts))


def test_a_whole_chat_has_every_field_of_the_schema(server: OpenAIServer) -> None:
    body = server.chat(temperature=0, max_tokens=2).json()
    assert [*body] == [
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    ]
    (choice,) = body["choices"]
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert body["id"].startswith("chatcmpl-")


def test_a_request_keeps_its_id(server: OpenAIServer) -> None:
    url = f"{server.url}/v1/completions"
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 2}
    headers = {"x-request-id": "mine"}
    both = [httpx.post(url, json=body, headers=headers, trust_env=False) for _ in range(2)]
    assert [reply.headers["x-request-id"] for reply in both] == ["mine", "mine"]
    strange = httpx.post(url, json=body, headers={"x-request-id": "a b"}, trust_env=False)
    assert strange.headers["x-request-id"] not in ("a b", "")


# Tokens and health


def test_tokens_and_back(server: OpenAIServer) -> None:
    reply = server.post("/tokenize", {"prompt": "Hello", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    plain = server.post("/tokenize", {"prompt": "Hello", "add_special_tokens": False}).json()
    assert reply["tokens"][-len(plain["tokens"]) :] == plain["tokens"]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json() == {"prompt": "Hello"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    answer = server.chat(max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == chat["count"]
    assert error(server.post("/detokenize", {"tokens": [10**6]}))["param"] == "tokens"
    assert error(server.post("/tokenize", {}))["param"] == "prompt"


def test_health_and_version(server: OpenAIServer) -> None:
    for path in ("/health/live", "/health/ready", "/health", "/version"):
        assert server.get(path).status_code == 200
    assert "/v1/chat/completions" in server.get("/openapi.json").json()["paths"]


# Ends


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 2, "stream": True}, {}])
def test_a_client_that_goes_away_ends_its_request(
    paced: OpenAIServer, fields: dict[str, Any]
) -> None:
    stopped, answers = paced.engine["stopped"], fields.get("n", 1)
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 5000, **fields}
    url = f"{paced.url}/v1/chat/completions"
    if fields:
        with httpx.stream("POST", url, json=body, trust_env=False) as reply:
            lines = reply.iter_lines()
            next(lines)
            wait_until(lambda: paced.engine["active"] == answers, 10, "all answers begin")
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, trust_env=False, timeout=0.5)
    wait_until(lambda: paced.engine["active"] == 0, 10, "the end of the request")
    assert paced.engine["stopped"] == stopped + answers
    assert paced.get("/health").status_code == 200
    assert "Traceback" not in paced.log.read_text()


def test_an_error_in_mid_stream_is_an_event(demo_model: Path, tmp_path: Path) -> None:
    environment = {**PACE, "MODEL": str(demo_model), "SIMULATED_FAILURE_RATE": "1"}
    with OpenAIServer(environment, tmp_path / "log") as server:
        with server.stream(max_tokens=50) as stream:
            *events, last, done = stream
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert [*last] == ["error"]
        assert last["error"]["type"] == "server_error"
        assert done == "[DONE]"
        reply = server.chat(max_tokens=50)
        assert reply.status_code == 500
        assert error(reply)["message"].startswith("a simulated failure after")


def test_running_requests_end_before_the_server_does(demo_model: Path, tmp_path: Path) -> None:
    with OpenAIServer({**PACE, "MODEL": str(demo_model)}, tmp_path / "log") as server:
        with server.stream(max_tokens=100) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/health/ready").status_code == 503, 10, "draining")
            assert server.get("/health/live").status_code == 200
            refused = server.chat()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            *_, last, done = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.process.wait(timeout=60) == 0
        assert server.log.read_text().count("Traceback") == 0


def test_what_does_not_end_in_time_is_told_to_try_again(demo_model: Path, tmp_path: Path) -> None:
    environment = {**PACE, "MODEL": str(demo_model), "DRAIN_SECONDS": "0"}
    with OpenAIServer(environment, tmp_path / "log") as server:
        triton = children(server.process.pid)
        with server.stream(max_tokens=5000) as events:
            next(events)
            server.process.send_signal(signal.SIGINT)
            *_, last, done = events
        assert last["error"]["code"] == "E2105"
        assert "send the request again" in last["error"]["message"]
        assert done == "[DONE]"
        assert server.process.wait(timeout=60) == 130
        assert not [pid for pid in triton if alive(pid)]


def test_a_port_that_is_taken_is_one_line(paced: OpenAIServer, tmp_path: Path) -> None:
    second = OpenAIServer(PACE, tmp_path / "log")
    second.port = paced.port
    with pytest.raises(AssertionError, match=r"error: .*Address already in use"), second:
        pass
    assert len((tmp_path / "log").read_text().splitlines()) == 1


# Tools and thoughts, of the simulated engine

CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
TEMPLATE = """{{ bos_token }}{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{# <think></think> #}"""
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def caller(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a model that thinks, and calls a tool."""
    directory = tmp_path_factory.mktemp("caller")
    shutil.copytree(demo_model, directory / "demo")
    (directory / "demo" / "chat_template.jinja").write_text(TEMPLATE)
    text = f"<think>Hm.</think>\n\nLet me see.\n<tool_call>{CALL}</tool_call>"
    environment = {
        "MODEL": str(directory / "demo"),
        "ENGINE": "simulated",
        "SIMULATED_TEXT": text + "</s>",
    }
    http = openai.DefaultHttpxClient(trust_env=False)
    with (
        OpenAIServer(environment, directory / "log") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client,
    ):
        yield client


def from_the_beginning(caller: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    """Fields of a request whose answer begins where the simulated text does, which its prompt decides."""
    for number in range(500):
        messages = [{"role": "user", "content": str(number)}]
        asked = {"model": "demo", "messages": messages, "max_tokens": 200, **fields}
        message = caller.chat.completions.create(**asked).choices[0].message
        if getattr(message, "reasoning_content", None) == "Hm.":
            return asked
    raise AssertionError("no prompt leads to the beginning")


def test_a_call_of_a_tool(caller: openai.OpenAI) -> None:
    asked = from_the_beginning(caller, tools=TOOLS)
    (choice,) = caller.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    function = choice.message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("weather", {"city": "Paris"})
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "Hm."


def test_a_streamed_call_of_a_tool(caller: openai.OpenAI) -> None:
    asked = from_the_beginning(caller, tools=TOOLS)
    with caller.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.content == "Let me see."
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_without_tools_the_text_stays_as_it_is(caller: openai.OpenAI) -> None:
    asked = from_the_beginning(caller, tools=TOOLS, tool_choice="none")
    answer = caller.chat.completions.create(**asked)
    content = answer.choices[0].message.content
    assert content is not None
    assert content.startswith("Let me see.\n<tool_call>")


def test_messages_reach_the_models_own_template(server: OpenAIServer) -> None:
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    ids = server.post("/tokenize", {"messages": system}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == (
        "<s><|system|>Be brief.<|end|><|user|>What is machine learning?<|end|><|assistant|>"
    )
    assert contents_of(server, system)


def contents_of(server: OpenAIServer, messages: Any) -> str:
    with server.stream(messages=messages, temperature=0, max_tokens=12) as events:
        return contents(events)


def test_vllms_fields_on_an_engine(client: openai.OpenAI, tokenizer: Any) -> None:
    allowed = tokenizer(" the model", add_special_tokens=False).input_ids
    fields: dict[str, Any] = {"model": "demo", "prompt": "What is machine learning?"}
    extra: dict[str, Any] = {"allowed_token_ids": allowed, "return_token_ids": True}
    extra |= {"truncate_prompt_tokens": 4, "prompt_logprobs": 1, "priority": -1}
    (choice,) = client.completions.create(**fields, max_tokens=8, extra_body=extra).choices
    told = choice.model_dump()
    assert len(told["token_ids"]) == 8
    assert {*told["token_ids"]} <= {*allowed}
    assert len(told["prompt_token_ids"]) == len(told["prompt_logprobs"]) == 4
    for token, entry in zip(told["prompt_token_ids"][1:], told["prompt_logprobs"][1:], strict=True):
        assert entry[str(token)]["decoded_token"] == tokenizer.decode([token])

    question: Any = {"role": "user", "content": "What is machine learning?"}
    whole = client.chat.completions.create(model="demo", messages=[question], temperature=0)
    text = whole.choices[0].message.content or ""
    begun: Any = {"role": "assistant", "content": text[: text.index(" way")]}
    continued = client.chat.completions.create(
        model="demo",
        messages=[question, begun],
        temperature=0,
        extra_body={"continue_final_message": True, "echo": True},
    )
    assert continued.choices[0].message.content == text
    stopped = client.chat.completions.create(
        model="demo",
        messages=[question],
        temperature=0,
        stop=text[40:44],
        extra_body={"include_stop_str_in_output": True, "return_token_ids": True},
    )
    answer = stopped.choices[0].message.content or ""
    assert answer.endswith(text[40:44])
    assert stopped.usage is not None
    ids = stopped.choices[0].model_dump()["token_ids"]
    assert stopped.usage.completion_tokens == len(ids)
    assert answer in tokenizer.decode(ids)
    assert answer not in tokenizer.decode(ids[:-1])
