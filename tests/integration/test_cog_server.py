"""The predictor under the real Cog server, as its users call it."""

import asyncio
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import LIST_TOKEN, SharedTriton
from tests.support import (
    CogServer,
    QuietHandler,
    alive,
    children,
    chunks,
    http_server,
    limit,
    started_by,
    wait_until,
)
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]


def test_a_json_prediction(cog_server: CogServer, tokenizer: Tokenizer) -> None:
    body = cog_server.predict(prompt=QUESTION, temperature=0, seed=0)
    assert body["status"] == "succeeded"
    assert "".join(body["output"]) == ANSWER
    assert body["metrics"]["input_token_count"] == len(tokenizer(QUESTION).input_ids)
    tokens = len(tokenizer(ANSWER, add_special_tokens=False).input_ids) + 1
    assert body["metrics"]["output_token_count"] == tokens
    assert 0 < body["metrics"]["time_to_first_token"] < body["metrics"]["predict_time"]
    assert body["metrics"]["tokens_per_second"] > 0


def test_a_chat_is_the_prompt_that_the_models_template_makes_of_it(
    cog_server: CogServer, tokenizer: Tokenizer
) -> None:
    """Without a second beginning of a text before it."""
    messages = [{"role": "user", "content": QUESTION}]
    body = cog_server.predict(messages=json.dumps(messages), temperature=0)
    assert "".join(body["output"]) == ANSWER
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert body["metrics"]["input_token_count"] == len(ids)
    given = {"messages": json.dumps(messages), "system_prompt": "Be kind."}
    with_system = cog_server.predict(**given, max_tokens=1)
    messages.insert(0, {"role": "system", "content": "Be kind."})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert with_system["metrics"]["input_token_count"] == len(ids)


def test_null_is_an_input_that_is_not_given(cog_server: CogServer) -> None:
    names = ("seed", "stop_sequences", "min_tokens", "messages", "temperature", "lora", "unknown")
    body = cog_server.predict(prompt=QUESTION, max_tokens=5, **dict.fromkeys(names))
    assert body["status"] == "succeeded", body
    assert body["metrics"]["output_token_count"] == 5
    assert body["metrics"]["finish_reason"] == "length"


def test_structured_output(cog_server: CogServer) -> None:
    def answer(**inputs: Any) -> str:
        body = cog_server.predict(prompt=QUESTION, temperature=1.5, seed=3, **inputs)
        assert body["metrics"]["finish_reason"] == "stop"
        return "".join(body["output"])

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    closed = json.dumps({**schema, "additionalProperties": False})
    assert json.loads(answer(json_schema=closed)) in ({"ok": True}, {"ok": False})
    assert re.fullmatch("[a-c][0-9]", answer(regex="[a-c][0-9]"))
    assert re.fullmatch("[a-c][0-9]", answer(grammar="root ::= [a-c] [0-9]"))
    assert answer(choice='["yes", "no (never)"]') in ("yes", "no (never)")


def test_the_log_has_the_seed_once_figures_on_demand_and_no_prompt(cog_server: CogServer) -> None:
    body = cog_server.predict(prompt=QUESTION, max_tokens=5, seed=0)
    assert body["logs"] == "Random seed used: 0\n"
    logs = cog_server.predict(prompt=QUESTION, log_performance_metrics=True)["logs"]
    assert "time_to_first_token: " in logs
    assert "output_token_count: " in logs
    assert QUESTION not in cog_server.log.read_text()


def test_triton_does_not_get_the_secrets_of_the_apis(
    cog_server: CogServer, triton: SharedTriton
) -> None:
    def has_token(pid: int) -> bool:
        return LIST_TOKEN.encode() in Path(f"/proc/{pid}/environ").read_bytes()

    assert has_token(cog_server.process.pid)
    of_triton = [triton.guard_pid, *children(triton.guard_pid)]
    assert len(of_triton) > 2
    assert not any(map(has_token, of_triton))


def test_a_seed_is_drawn_logged_and_gives_the_same_text_again(cog_server: CogServer) -> None:
    inputs = {"prompt": QUESTION, "temperature": 2, "top_p": 1, "max_tokens": 30}
    first, other = cog_server.predict(**inputs), cog_server.predict(**inputs)
    seed = int(first["logs"].removeprefix("Random seed used: "))
    assert "".join(cog_server.predict(**inputs, seed=seed)["output"]) == "".join(first["output"])
    assert "".join(other["output"]) != "".join(first["output"])


def test_sixty_four_predictions_at_once(paced_cog_server: CogServer) -> None:
    def answer(i: int) -> str:
        with paced_cog_server.stream(prompt="x" * i, max_tokens=40) as events:
            found = list(events)
        metrics = found[-1][1]["metrics"]
        assert metrics["output_token_count"] == 40
        assert metrics["input_token_count"] >= i
        return "".join(chunks(iter(found)))

    started = time.monotonic()
    alone = answer(3)
    took_alone = time.monotonic() - started
    started = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(answer, range(1, 65)))
    together = time.monotonic() - started
    assert answers[2] == alone
    assert len(set(answers)) > 20
    # One after the other, they would take this long.
    assert together < 64 * took_alone


def test_no_arrival_is_refused_while_a_slot_is_free(paced_cog_server: CogServer) -> None:
    """256 at the same moment, as many as there are slots.

    Cog's server takes a race that two of its threads lose for a lack of slots: so it has one.
    """
    (server,) = started_by(paced_cog_server.process.pid, "cog_triton.api.cog.server")
    threads = [file.read_text() for file in Path(f"/proc/{server}/task").glob("*/comm")]
    assert threads.count("tokio-rt-worker\n") == 1, threads

    body = json.dumps({"input": {"prompt": "Hi", "max_tokens": 1}})
    head = ("POST /predictions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    request = "\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode()

    async def status() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", paced_cog_server.port)
        try:
            writer.write(request)
            return int((await reader.readline()).split()[1])
        finally:
            writer.close()

    async def statuses() -> list[int]:
        # A client of httpx takes ten times as long, and they would come one after the other.
        asked = asyncio.gather(*(status() for _ in range(256)))
        return await asyncio.wait_for(asked, limit(60))

    assert asyncio.run(statuses()) == [200] * 256


@pytest.mark.parametrize(
    ("body", "field"),
    [
        pytest.param({}, "prompt", id="no input"),
        pytest.param({"input": {}}, "prompt", id="no prompt"),
        pytest.param({"input": {"prompt": None, "seed": 1}}, "prompt", id="prompt that is null"),
        pytest.param({"input": {"prompt": 5}}, "prompt", id="prompt that is a number"),
        pytest.param({"input": {"prompt": "Hi", "max_tokens": 0}}, "max_tokens", id="no tokens"),
        pytest.param(
            {"input": {"prompt": "Hi", "max_new_tokens": "many"}},
            "max_new_tokens",
            id="text for a number",
        ),
        pytest.param(
            {"input": {"prompt": "Hi", "temperature": 5.1}}, "temperature", id="temperature above 5"
        ),
        pytest.param({"input": {"prompt": "Hi", "seed": 2**64}}, "seed", id="seed of 65 bits"),
    ],
)
def test_an_input_that_is_missing_or_out_of_range_is_a_422(
    cog_server: CogServer, body: dict[str, Any], field: str
) -> None:
    reply = httpx.post(
        f"{cog_server.url}/predictions", json=body, trust_env=False, timeout=limit(60)
    )
    assert reply.status_code == 422
    (problem,) = reply.json()["detail"]
    assert problem["loc"] == ["body", "input", field]
    if not body.get("input", {}).get("prompt"):
        assert problem["msg"] == "E1001 PromptRequired: prompt or messages is required"


# What would be large is refused before it is built, by the limits of this deployment's model.
LARGE = [
    pytest.param({"prompt": "word " * 5000}, "E1002 PromptTooLong", id="prompt of many words"),
    pytest.param(
        {"prompt": "x" * 20_000, "prompt_template": "{prompt}" * 2},
        "E1002 PromptTooLong",
        id="prompt that is long in its template",
    ),
    pytest.param(
        {"prompt": "Hi", "prompt_template": "{a}" * 90_000},
        "E1004 PromptTemplateError",
        id="template of many names",
    ),
    pytest.param(
        {"prompt": "Hi", "stop_sequences": "ab," * 20_000},
        "E1103 InvalidParameter",
        id="many stop sequences",
    ),
]


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        pytest.param({"prompt": ""}, "E1001 PromptRequired", id="empty prompt"),
        pytest.param({"messages": "[]"}, "E1001 PromptRequired", id="no messages"),
        pytest.param(
            {"messages": "{}"},
            "E1103 InvalidParameter: messages must be a JSON list",
            id="messages that are no list",
        ),
        pytest.param(
            {"prompt": "Hi", "tools": "[{}]"},
            "E1103 InvalidParameter: tools needs messages",
            id="tools that are no tools, without messages",
        ),
        pytest.param(
            {"prompt": "Hi", "logit_bias": "[]"},
            "E1103 InvalidParameter: logit_bias must be",
            id="biases that are no object",
        ),
        pytest.param(
            {"prompt": "Hi", "prompt_template": "no place"},
            "E1003 BadPromptTemplate",
            id="template without a place",
        ),
        pytest.param(
            {"prompt": "Hi", "prompt_template": "{prompt.__class__}"},
            "E1004 PromptTemplateError",
            id="template with code",
        ),
        pytest.param(
            {"prompt": "Hi", "max_tokens": 5, "max_new_tokens": 6},
            "E1102 ConflictingMaxTokens",
            id="two names of max_tokens",
        ),
        pytest.param(
            {"prompt": "Hi", "min_tokens": 5, "min_new_tokens": 6},
            "E1101 ConflictingMinTokens",
            id="two names of min_tokens",
        ),
        *LARGE,
    ],
)
def test_an_invalid_request_fails_with_its_code_and_no_stack_trace(
    cog_server: CogServer, inputs: dict[str, Any], code: str
) -> None:
    body = cog_server.predict(**inputs)
    assert body["status"] == "failed"
    # Cog 0.23 puts words of its own before an exception's name and text.
    assert re.match(rf"Prediction failed: [\w ]+: {re.escape(code)}", body["error"])
    assert body["error"].count(code.split()[1]) == 1
    assert "ensemble" not in body["error"]
    assert "Traceback" not in str(body)
    assert len(body["error"]) < 500
    assert not body.get("output")


def test_the_old_names_still_work(cog_server: CogServer) -> None:
    old = {"max_tokens": 512, "max_new_tokens": 6, "min_tokens": -1, "min_new_tokens": 2}
    body = cog_server.predict(prompt=QUESTION, temperature=0, **old)
    assert body["metrics"]["output_token_count"] == 6


def test_template_system_prompt_and_stop_sequences(cog_server: CogServer) -> None:
    body = cog_server.predict(
        prompt="machine",
        system_prompt="learning?",
        prompt_template="What is {prompt} {system_prompt}",
        stop_sequences="nowhere,find pat",
        temperature=0,
    )
    assert "".join(body["output"]) == ANSWER[: ANSWER.index("find pat")]


def cancelled_engine(server: CogServer, generated: float) -> None:
    # What the engine reports of this one is newer than what it was told before. It is paced: were it
    # still at work for another, it would be for minutes.
    server.predict(prompt="Hi", max_tokens=5)
    wait_until(
        lambda: server.engine["generated"] >= generated + 5 and server.engine["active"] == 0,
        10,
        "the stop",
    )
    assert server.engine["generated"] - generated < 2500, "far from the 5000 tokens asked for"


def test_output_comes_as_it_is_generated_until_it_is_cancelled(paced_cog_server: CogServer) -> None:
    generated = paced_cog_server.engine["generated"]
    with paced_cog_server.stream("cancel-me", prompt=QUESTION, max_tokens=5000) as events:
        assert next(events)[0] == "start"
        assert next(event for event in events if event[0] == "output")[1]["index"] == 0
        # Of 5000, which takes 100 seconds.
        assert paced_cog_server.engine["generated"] - generated < 2500
        cancel = f"{paced_cog_server.url}/predictions/cancel-me/cancel"
        assert httpx.post(cancel, trust_env=False, timeout=limit(60)).status_code == 200
        ended = list(events)[-1]
    assert ended[1]["status"] == "canceled"
    assert ended[1]["metrics"]["finish_reason"] == "cancelled"
    cancelled_engine(paced_cog_server, generated)


def test_a_url_in_a_request_is_text(paced_cog_server: CogServer) -> None:
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_PUT = do_POST = do_GET

    with http_server(Handler) as url:
        inputs = {"prompt": f"{url}/file", "max_tokens": 1}
        body = {"input": inputs, "output_file_prefix": f"{url}/out"}
        answer = httpx.post(
            f"{paced_cog_server.url}/predictions", json=body, trust_env=False, timeout=limit(60)
        )
    assert answer.json()["status"] == "succeeded"
    assert asked == []


def test_a_stream_has_events_of_the_log_and_the_metrics(paced_cog_server: CogServer) -> None:
    with paced_cog_server.stream(prompt="Hi", max_tokens=3, seed=5) as events:
        names = [name for name, _ in events]
    assert {*names} == {"start", "output", "log", "metric", "completed"}
    assert (names[0], names[-1]) == ("start", "completed")


def test_a_cancel_of_no_prediction_is_a_404(paced_cog_server: CogServer) -> None:
    url = f"{paced_cog_server.url}/predictions/nothing-has-this-id/cancel"
    assert httpx.post(url, trust_env=False, timeout=limit(60)).status_code == 404


def test_health_is_what_a_request_would_see(paced_cog_server: CogServer) -> None:
    def health() -> str:
        url = f"{paced_cog_server.url}/health-check"
        return str(httpx.get(url, trust_env=False, timeout=limit(60)).json()["status"])

    (preprocessing,) = started_by(paced_cog_server.process.pid, "/preprocessing/1/model.py")
    os.kill(preprocessing, signal.SIGSTOP)  # of which Triton's own health tells nothing
    wait_until(lambda: health() == "UNHEALTHY", 60, "the change")
    # Were it to go on, it would use memory that Triton has freed: another takes its place.
    wait_until(lambda: not alive(preprocessing), 60, "its end")
    wait_until(lambda: health() == "READY", 60, "the change back")


def test_a_worker_that_is_killed_early_ends_the_server(demo_model: Path, tmp_path: Path) -> None:
    with CogServer({"MODEL": str(demo_model), "ENGINE": "simulated"}, tmp_path / "log") as server:
        appears = partial(started_by, server.process.pid, "coglet.server._run_worker")
        os.kill(wait_until(appears, 60, "the start of the worker")[0], signal.SIGKILL)
        assert server.process.wait(limit(60)) != 0
    # Cog itself says so where the worker had not read its first message, or was setting up.
    ends = "the predictor's process ended", "failed to send Init", "worker crashed"
    assert any(end in server.log.read_text() for end in ends)
