"""Dynamo's requests and chunks as dictionaries; its processes are in tests/integration/test_dynamo.py."""

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.api.dynamo.convert import chunk_of, request_of, unknown_end_ids
from cog_triton.api.dynamo.scale import Processes, example
from cog_triton.errors import InvalidParameter, PromptTooLong
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.end_tokens import EndTokens
from tests.support import alive, wait_until

IDS = [5, 6, 7, 8]


def asked(groups: dict[str, Any] | None = None, name: str = "an id", **given: Any) -> Request:
    body = {"token_ids": IDS, "model": "demo", **(groups or {})}
    lengths: dict[str, Any] = {"prompt_tokens": 4, "context_length": 100, **given}
    return request_of(body, name, end_tokens=EndTokens((2, 3)), adapter="", **lengths)


def test_what_nobody_set_is_as_at_openais() -> None:
    unset = {"temperature": None, "seed": None, "n": None, "guided_decoding": None}
    stops = {"max_tokens": None, "stop": None}
    request = asked({"sampling_options": unset, "stop_conditions": stops})
    assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 1.0, 96)
    assert (request.prompt_ids, request.continued_ids) == (tuple(IDS), ())


def test_a_seed_of_the_id_is_the_same_on_every_worker() -> None:
    assert asked().seed == asked().seed
    assert asked(name="another").seed != asked().seed


def test_recommended_parameters_stand_in_for_those_not_given() -> None:
    request = asked({"sampling_options": {"top_k": 5}}, defaults={"temperature": 0.6, "top_k": 20})
    assert (request.temperature, request.top_k, request.top_p) == (0.6, 5, 1.0)


def test_no_seed_where_the_engine_does_better_without() -> None:
    assert asked(seeded=False).seed is None
    assert asked({"sampling_options": {"seed": 7}}, seeded=False).seed == 7


def test_a_moved_request_has_its_output_behind_the_prompt() -> None:
    request = asked({"stop_conditions": {"max_tokens": 9, "min_tokens": 2}}, prompt_tokens=3)
    assert (request.prompt_ids, request.continued_ids) == ((5, 6, 7), (8,))
    assert (request.max_tokens, request.min_tokens) == (10, 3)  # Dynamo has counted the rest


@pytest.mark.parametrize(
    ("reply", "path"),
    [
        pytest.param(httpx.Response(200, json={}), "/v1/chat/completions", id="a template"),
        pytest.param(httpx.Response(400, json={}), "/v1/completions", id="no template"),
        pytest.param(httpx.ReadTimeout("late"), "/v1/completions", id="no answer in time"),
    ],
)
def test_the_command_to_try_is_one_that_the_model_answers(
    reply: httpx.Response | httpx.HTTPError, path: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["messages"]
        if isinstance(reply, httpx.HTTPError):
            raise reply
        return reply

    async def printed() -> str:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await example(client, "http://h:1", "it's")

    command = shlex.split(asyncio.run(printed()))
    assert command[:3] == ["curl", "-s", f"http://h:1{path}"]
    body = json.loads(command[-1])
    assert body["model"] == "it's"
    assert ("messages" in body) == (path == "/v1/chat/completions")


@pytest.mark.parametrize(
    ("groups", "fields"),
    [
        pytest.param(
            {"sampling_options": {"top_k": -1, "min_p": 0.1}},
            {"top_k": 0, "min_p": 0.1},
            id="top_k for all, and min_p",
        ),
        pytest.param(
            {"sampling_options": {"frequency_penalty": 0.5}},
            {"frequency_penalty": 0.5},
            id="penalty",
        ),
        pytest.param(
            {"stop_conditions": {"stop_token_ids_hidden": [2, 3, 9]}},
            {"stop_token_ids": (9,)},
            id="hidden stop tokens, of which two end the text anyway",
        ),
        pytest.param(
            {"stop_conditions": {"stop_token_ids_visible": [4]}},
            {"stop_token_ids": (4,)},
            id="visible stop token",
        ),
        pytest.param(
            {"stop_conditions": {"ignore_eos": True, "stop_token_ids_hidden": [9]}},
            {"ignore_eos": True, "stop_token_ids": ()},
            id="no end tokens",
        ),
        pytest.param(
            {"output_options": {"logprobs": 3}},
            {"log_probs": 3, "prompt_log_probs": False},
            id="log probabilities",
        ),
        pytest.param(
            {"output_options": {"prompt_logprobs": 0}},
            {"prompt_log_probs": True},
            id="log probabilities of the prompt",
        ),
    ],
)
def test_options(groups: dict[str, Any], fields: dict[str, Any]) -> None:
    request = asked(groups)
    assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "guide"),
    [
        pytest.param(
            {"json": {"type": "object"}},
            Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}'),
            id="schema",
        ),
        pytest.param(
            {"json": '{"type": "object"}', "regex": None},
            Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}'),
            id="schema as text, beside an option without a value",
        ),
        pytest.param({"json_object": True}, Guide(GuideKind.JSON, ""), id="any object"),
        pytest.param(
            {"regex": "a|b", "backend": "xgrammar"},
            Guide(GuideKind.REGEX, "a|b"),
            id="regular expression",
        ),
        pytest.param({"choice": ["a", "b"]}, Guide(GuideKind.CHOICE, '["a", "b"]'), id="choice"),
        pytest.param(
            {"grammar": 'root ::= "a"'}, Guide(GuideKind.GRAMMAR, 'root ::= "a"'), id="grammar"
        ),
        pytest.param({"backend": "xgrammar"}, None, id="no guide"),
    ],
)
def test_guides(options: dict[str, Any], guide: Guide | None) -> None:
    assert asked({"sampling_options": {"guided_decoding": options}}).guide == guide


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        pytest.param({"sampling_options": {"n": 2}}, "n must be 1", id="two answers"),
        pytest.param(
            {"sampling_options": {"use_beam_search": True}}, "use_beam_search", id="beam search"
        ),
        pytest.param(
            {"stop_conditions": {"max_thinking_tokens": 4}},
            "max_thinking_tokens",
            id="thinking tokens",
        ),
        pytest.param(
            {"sampling_options": {"guided_decoding": {"lark": "x"}}},
            "lark is not supported",
            id="Lark grammar",
        ),
        pytest.param(
            {"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}},
            "cannot be combined",
            id="two guides",
        ),
        pytest.param(
            {"multi_modal_data": {"image_url": ["x"]}}, "the prompt must be text", id="image"
        ),
    ],
)
def test_what_has_no_effect_is_refused_by_name(groups: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameter, match=text):
        asked(groups)


def test_a_full_context_is_the_prompts() -> None:
    with pytest.raises(PromptTooLong):
        asked(context_length=4)


def test_the_last_chunk_counts_the_whole_output() -> None:
    assert chunk_of(Chunk("x", 13, 4, "stop", ids=(7,), stop_token=9)) == {
        "token_ids": [7],
        "index": 0,
        "finish_reason": "stop",
        "completion_usage": {"prompt_tokens": 4, "completion_tokens": 13, "total_tokens": 17},
        "stop_reason": 9,
    }


@pytest.mark.parametrize(
    ("stop_conditions", "eos_token_ids", "ids"),
    [({}, [2], [7]), ({}, None, [7]), ({"stop_token_ids_hidden": [106]}, [2], [7, 106])],
)
def test_an_end_token_that_the_frontend_does_not_know_is_left_out(
    stop_conditions: dict[str, Any], eos_token_ids: list[int] | None, ids: list[int]
) -> None:
    """It would show the token's text."""
    body = {"stop_conditions": stop_conditions, "eos_token_ids": eos_token_ids}
    unknown = unknown_end_ids(body, EndTokens((1, 106)))
    log_probs = (TokenLogProb(7, -1.0), TokenLogProb(106, -2.0))
    made = chunk_of(Chunk("x", 2, 4, "stop", ids=(7, 106), log_probs=log_probs), unknown)
    assert made["token_ids"] == ids
    assert made["log_probs"] == [-1.0, -2.0][: len(ids)]
    assert made["completion_usage"]["completion_tokens"] == 2


def test_an_end_token_that_did_not_end_the_output_is_kept() -> None:
    assert chunk_of(Chunk("x", 2, 4, ids=(7, 106)), {106})["token_ids"] == [7, 106]
    assert chunk_of(Chunk("x", 2, 4, "length", ids=(7, 106)), {106})["token_ids"] == [7, 106]
    by_request = Chunk("x", 2, 4, "stop", ids=(7, 106), stop_token=106)
    assert chunk_of(by_request, {106})["token_ids"] == [7, 106]


def test_log_probabilities_have_ranks_and_the_chosen_token() -> None:
    chosen = TokenLogProb(7, -2.0, ((3, -0.5), (4, -1.0)))
    made = chunk_of(Chunk("x", 1, 4, ids=(7,), log_probs=(chosen,)))
    assert made["log_probs"] == [-2.0]
    ranked = [(one["rank"], one["token_id"], one["logprob"]) for one in made["top_logprobs"][0]]
    assert ranked == [(1, 3, -0.5), (2, 4, -1.0), (3, 7, -2.0)]


def test_a_prompts_first_token_has_no_log_probability() -> None:
    prompt = (TokenLogProb(5, 0.0), TokenLogProb(6, -1.5, ((9, -0.5),)))
    made = chunk_of(Chunk("x", 1, 2, ids=(7,), prompt_log_probs=prompt))
    table = [None, {"6": {"logprob": -1.5}, "9": {"logprob": -0.5}}]
    assert made["engine_data"] == {"prompt_logprobs": table}


SCALE = """
import asyncio, sys
from cog_triton.api.dynamo.scale import Processes

processes = Processes({"DYN_FILE_KV": sys.argv[1]}, sys.argv[1], start_timeout=600)
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
asyncio.run(processes._keep(command))
"""


def test_workers_end_with_a_scale_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCALE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scale:
        assert scale.stdout is not None
        worker = int(scale.stdout.readline())
        assert alive(worker)
        scale.kill()
    wait_until(lambda: not alive(worker), 60, "the end of the worker")


def test_a_scale_whose_processes_cannot_start_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    processes = Processes({"DYN_FILE_KV": str(tmp_path)}, str(tmp_path), start_timeout=600)
    ending = processes.run("127.0.0.1", port=9, workers=1)
    assert asyncio.run(asyncio.wait_for(ending, 60)) == 1
    assert "dynamo.frontend cannot be started: [Errno 2]" in caplog.text
