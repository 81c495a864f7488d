"""OpenAI's API on a real server: PyPI's client, the prompts and fields of its APIs, and how it ends."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from cog_triton.text.tokenizer import Tokenizer
from tests.late import openai, torch, transformers
from tests.openai_server import ANSWER, MESSAGES, QUESTION, OpenAIServer
from tests.support import alive, children, command, limit

PACE = {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "20"}
TEXT: dict[str, Any] = {"model": "demo", "prompt": QUESTION, "temperature": 0}
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES}


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.code == "model_not_found"


def test_a_chat_ends_by_itself_or_at_its_limit(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, temperature=0)
    cut = client.chat.completions.create(**CHAT, temperature=0, max_completion_tokens=8)
    texts = [answer.choices[0].message.content or "" for answer in (whole, cut)]
    assert [answer.choices[0].finish_reason for answer in (whole, cut)] == ["stop", "length"]
    assert texts[0].startswith(texts[1])
    assert texts[1].startswith(ANSWER)
    assert whole.usage is not None
    assert cut.usage is not None
    assert whole.usage.completion_tokens > 16
    assert (cut.usage.completion_tokens, cut.usage.total_tokens) == (8, cut.usage.prompt_tokens + 8)


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**CHAT, "seed": 7, "max_tokens": 30}
    whole = client.chat.completions.create(**fields)
    counted: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**fields, **counted)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [*[None] * (len(reasons) - 1), whole.choices[0].finish_reason]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {last.id}


def test_several_answers_are_those_of_the_seeds_after_the_first(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**TEXT, "max_tokens": 20, "temperature": 2.0}
    fields |= {"extra_body": {"ignore_eos": True}}
    three = client.completions.create(**fields, n=3, seed=5)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    alone = [client.completions.create(**fields, seed=seed) for seed in (5, 6, 7)]
    texts = [choice.text for choice in three.choices]
    assert texts == [answer.choices[0].text for answer in alone]
    assert len(set(texts)) == 3
    assert three.usage is not None
    assert three.usage.completion_tokens == 60
    pieces = ["", "", ""]
    for chunk in client.completions.create(**fields, n=3, seed=5, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == texts


def test_prompts_of_all_kinds(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer(QUESTION).input_ids
    (choice,) = client.completions.create(**TEXT).choices
    assert client.completions.create(**{**TEXT, "prompt": ids}).choices == [choice]
    for prompts, tokens in (([ids, ids[:3]], len(ids) + 3), ([QUESTION, QUESTION], 2 * len(ids))):
        both = client.completions.create(**{**TEXT, "prompt": prompts})
        assert [answer.index for answer in both.choices] == [0, 1]
        assert both.choices[0].text == choice.text
        assert both.usage is not None
        assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (tokens, 32)


def test_echo_and_stop(client: openai.OpenAI) -> None:
    echoed = client.completions.create(**TEXT, echo=True, stop=[" is", "\n"])
    assert echoed.choices[0].text == f"{QUESTION}Machine learning"
    assert echoed.choices[0].finish_reason == "stop"
    stream = client.completions.create(**TEXT, echo=True, stop=" is", stream=True)
    pieces = [choice.text for chunk in stream for choice in chunk.choices]
    assert pieces[0] == QUESTION
    assert "".join(pieces) == echoed.choices[0].text


@pytest.mark.parametrize("logprobs", [None, 0])
def test_echo_alone(client: openai.OpenAI, tokenizer: Tokenizer, logprobs: int | None) -> None:
    fields: dict[str, Any] = {**TEXT, "max_tokens": 0, "echo": True, "logprobs": logprobs}
    (whole,) = client.completions.create(**fields).choices
    assert (whole.text, whole.finish_reason) == (QUESTION, "length")
    stream = client.completions.create(**fields, stream=True)
    chunks = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == "length"
    ids = None if logprobs is None else tokenizer(QUESTION).input_ids
    told = whole.logprobs and whole.logprobs.tokens
    assert told == (ids and [tokenizer.decode([token]) for token in ids])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(
    client: openai.OpenAI, demo_model: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    """As harnesses ask for them that compare how likely a model finds given texts."""
    prompt = QUESTION * 40  # more tokens than one step of the engine takes
    fields = {**TEXT, "prompt": prompt, "max_tokens": 3, "logprobs": 2, "echo": True}
    reply: Any = client.completions.create(**fields, stream=stream)
    choices = [choice for chunk in (reply if stream else [reply]) for choice in chunk.choices]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs.model_dump() for choice in choices if choice.logprobs]
    told = {name: [value for part in parts for value in part[name]] for name in parts[0]}

    ids = tokenizer(prompt).input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model).eval()
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


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "hello " * 3000}, "context_length_exceeded"),
        ({"prompt": "x" * 90_000}, "context_length_exceeded"),
        ({"prompt": [[999_999]]}, "E1103"),
    ],
)
def test_what_the_engine_refuses(server: OpenAIServer, fields: dict[str, Any], code: str) -> None:
    reply = server.complete(**fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


def test_every_operation_tells_its_errors(server: OpenAIServer) -> None:
    described = server.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= set(described)
    for path, methods in described.items():
        for operation in methods.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"], path


def test_tokens_and_back(server: OpenAIServer) -> None:
    reply = server.post("/tokenize", {"prompt": "Hello", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    plain = server.post("/tokenize", {"prompt": "Hello", "add_special_tokens": False}).json()
    assert reply["tokens"][-len(plain["tokens"]) :] == plain["tokens"]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json() == {"prompt": "Hello"}
    for path, body, param in (
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/tokenize", {}, "prompt"),
    ):
        assert server.post(path, body).json()["error"]["param"] == param


def test_messages_reach_the_models_own_template(server: OpenAIServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    chat = server.post("/tokenize", {"messages": messages}).json()
    text = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text == f"<s><|system|>Be brief.<|end|><|user|>{QUESTION}<|end|><|assistant|>"
    usage = server.chat(messages=messages, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]


def test_vllms_fields_on_an_engine(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    allowed = tokenizer(" the model", add_special_tokens=False).input_ids
    extra: dict[str, Any] = {"allowed_token_ids": allowed, "return_token_ids": True}
    extra |= {"truncate_prompt_tokens": 4, "prompt_logprobs": 1, "priority": -1}
    (choice,) = client.completions.create(**TEXT, max_tokens=8, extra_body=extra).choices
    told = choice.model_dump()
    assert len(told["token_ids"]) == 8
    assert {*told["token_ids"]} <= {*allowed}
    assert len(told["prompt_token_ids"]) == len(told["prompt_logprobs"]) == 4
    for token, entry in zip(told["prompt_token_ids"][1:], told["prompt_logprobs"][1:], strict=True):
        assert entry[str(token)]["decoded_token"] == tokenizer.decode([token])

    def chat(messages: Any = MESSAGES, stop: str | None = None, **extra: Any) -> Any:
        return client.chat.completions.create(
            model="demo", messages=messages, temperature=0, stop=stop, extra_body=extra
        )

    text = chat().choices[0].message.content
    begun = {"role": "assistant", "content": text[: text.index(" way")]}
    continued = chat([*MESSAGES, begun], continue_final_message=True, echo=True)
    assert continued.choices[0].message.content == text
    stopped = chat(stop=text[40:44], include_stop_str_in_output=True, return_token_ids=True)
    answer = stopped.choices[0].message.content
    assert answer.endswith(text[40:44])
    ids = stopped.choices[0].model_dump()["token_ids"]
    assert stopped.usage.completion_tokens == len(ids)
    assert answer in tokenizer.decode(ids)
    assert answer not in tokenizer.decode(ids[:-1])


# Ends


@pytest.mark.rare
def test_what_does_not_end_in_time_is_told_to_try_again(demo_model: Path, tmp_path: Path) -> None:
    environment = {**PACE, "MODEL": str(demo_model), "DRAIN_SECONDS": "0"}
    with OpenAIServer(environment, tmp_path / "log") as server:
        triton = children(server.process.pid)
        with server.stream(max_tokens=5000) as events:
            next(events)
            server.process.send_signal(signal.SIGINT)
            *_, last, done = events
        assert (last["error"]["code"], done) == ("E2105", "[DONE]")
        assert "send the request again" in last["error"]["message"]
        assert server.process.wait(timeout=limit(60)) == 130
        assert not [pid for pid in triton if alive(pid)]


def test_a_port_that_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("ENGINE", "simulated")
        monkeypatch.setenv("STORE", "0")
        monkeypatch.setenv("PORT", str(other.getsockname()[1]))
        done = command("openai")
    assert done.returncode != 0
    assert re.fullmatch(r"error: .*Address already in use.*\n", done.stderr)
