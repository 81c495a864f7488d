"""The predictor under the real Cog server, as its users call it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import PACE_MS
from tests.support import CogServer, alive, children, chunks, processes, wait_until
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
    with_system = cog_server.predict(
        messages=json.dumps(messages), system_prompt="Be kind.", max_tokens=1
    )
    messages.insert(0, {"role": "system", "content": "Be kind."})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert with_system["metrics"]["input_token_count"] == len(ids)


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"messages": "[]"}, "E1001 PromptRequired"),
        ({"messages": "{}"}, "E1103 InvalidParameter: messages must be a JSON list"),
        ({"messages": "[{}]", "prompt": "Hi"}, "prompt and messages exclude each other"),
        ({"prompt": "Hi", "tools": "[{}]"}, "tools needs messages"),
        ({"prompt": "Hi", "logit_bias": "[]"}, "E1103 InvalidParameter: logit_bias must be"),
        ({"prompt": "Hi", "regex": "a", "choice": "[]"}, "regex and choice exclude each other"),
        ({"prompt": "Hi", "repetition_penalty": 0}, "repetition_penalty must be greater than 0"),
    ],
)
def test_inputs_that_are_refused(cog_server: CogServer, inputs: dict[str, Any], why: str) -> None:
    body = cog_server.predict(**inputs)
    assert body["status"] == "failed"
    assert why in body["error"]


@pytest.mark.parametrize("body", [{}, {"input": {}}, {"input": {"prompt": None, "seed": 1}}])
def test_without_a_prompt_it_does_not_begin(cog_server: CogServer, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{cog_server.url}/predictions", json=body, trust_env=False)
    assert reply.status_code == 422
    (problem,) = reply.json()["detail"]
    assert problem["loc"] == ["body", "input", "prompt"]
    assert problem["msg"] == "E1001 PromptRequired: prompt or messages is required"


def test_null_is_an_input_that_is_not_given(cog_server: CogServer) -> None:
    names = ("seed", "stop_sequences", "min_tokens", "messages", "temperature", "lora", "unknown")
    inputs = dict.fromkeys(names)
    body = cog_server.predict(prompt=QUESTION, max_tokens=5, **inputs)
    assert body["status"] == "succeeded", body
    assert body["metrics"]["output_token_count"] == 5


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


def test_why_an_answer_ended_is_a_metric(cog_server: CogServer) -> None:
    def reason(**inputs: Any) -> str:
        body = cog_server.predict(prompt=QUESTION, temperature=0, **inputs)
        return str(body["metrics"]["finish_reason"])

    assert reason() == "stop"
    assert reason(stop_sequences=ANSWER[20:30]) == "stop"
    assert reason(max_tokens=5) == "length"
    tokens = len(ANSWER.split()) * 3
    assert reason(max_tokens=tokens, ignore_eos=True) == "length"


def test_the_log_has_the_seed_once_and_neither_the_prompt_nor_tritons_log(
    cog_server: CogServer,
) -> None:
    body = cog_server.predict(prompt=QUESTION, max_tokens=5, seed=0)
    assert body["logs"] == "Random seed used: 0\n"
    assert QUESTION not in cog_server.log.read_text()


def test_a_seed_is_drawn_logged_and_gives_the_same_text_again(cog_server: CogServer) -> None:
    inputs = {"prompt": QUESTION, "temperature": 2, "top_p": 1, "max_tokens": 30}
    first, other = cog_server.predict(**inputs), cog_server.predict(**inputs)
    seed = int(first["logs"].removeprefix("Random seed used: "))
    again = cog_server.predict(**inputs, seed=seed)
    assert "".join(again["output"]) == "".join(first["output"])
    assert "".join(other["output"]) != "".join(first["output"])


def test_performance_metrics_are_logged_on_demand(cog_server: CogServer) -> None:
    logs = cog_server.predict(prompt=QUESTION, log_performance_metrics=True)["logs"]
    assert "time_to_first_token: " in logs
    assert "output_token_count: " in logs


def test_output_events_arrive_while_the_engine_generates(paced_cog_server: CogServer) -> None:
    """The first comes when most tokens are not even made."""
    before = paced_cog_server.engine["generated"]
    with paced_cog_server.stream(prompt=QUESTION, max_tokens=100) as events:
        assert next(events)[0] == "start"
        first = next(event for event in events if event[0] == "output")
        made = paced_cog_server.engine["generated"] - before
        rest = list(events)
    assert first[1]["index"] == 0
    assert made < 50
    assert rest[-1][0] == "completed"
    assert rest[-1][1]["status"] == "succeeded"
    assert len([name for name, _ in rest if name == "output"]) > 50


def test_streamed_chunks_join_to_the_answer(cog_server: CogServer) -> None:
    for pair in [pair for pair in PAIRS if not pair.answer.isascii()]:
        with cog_server.stream(prompt=pair.question, temperature=0) as events:
            assert "".join(chunks(events)) == pair.answer


def test_sixty_four_predictions_at_once(paced_cog_server: CogServer) -> None:
    def answer(i: int) -> str:
        with paced_cog_server.stream(prompt="x" * i, max_tokens=40) as events:
            found = list(events)
        metrics = found[-1][1]["metrics"]
        assert metrics["output_token_count"] == 40
        assert metrics["input_token_count"] >= i
        return "".join(chunks(iter(found)))

    alone = answer(3)
    started = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(answer, range(1, 65)))
    together = time.monotonic() - started
    assert answers[2] == alone
    assert len(set(answers)) > 20
    # One after the other, the engine's pace alone would take this long.
    assert together < 64 * 40 * PACE_MS / 1000 / 2


def test_no_arrival_is_refused_while_a_slot_is_free(paced_cog_server: CogServer) -> None:
    """256 at the same moment, as many as there are slots, again and again.

    Cog's server takes a race that two of its threads lose for a lack of slots: so it has one.
    """
    (server,) = [
        pid
        for pid in processes("cog_triton.faces.cog.server")
        if pid in children(paced_cog_server.process.pid)
    ]
    threads = [file.read_text() for file in Path(f"/proc/{server}/task").glob("*/comm")]
    assert threads.count("tokio-rt-worker\n") == 1, threads
    for _ in range(3):
        statuses = asyncio.run(statuses_at_once(paced_cog_server, 256))
        assert statuses == ["200"] * 256


async def statuses_at_once(server: CogServer, count: int) -> list[str]:
    """The HTTP statuses of predictions whose connections are there before the first is sent."""
    body = b'{"input": {"prompt": "Hi", "max_tokens": 1}}'
    head = f"POST /predictions HTTP/1.1\r\nHost: cog\r\nContent-Length: {len(body)}\r\n"
    message = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body
    connections = [
        await asyncio.open_connection("127.0.0.1", server.port, limit=2**20) for _ in range(count)
    ]
    for _, writer in connections:
        writer.write(message)
    replies = await asyncio.gather(*(reader.read() for reader, _ in connections))
    for _, writer in connections:
        writer.close()
    return [reply.split()[1].decode() for reply in replies]


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "Hi", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "Hi", "min_tokens": -2}, "min_tokens"),
        ({"prompt": "Hi", "temperature": 5.1}, "temperature"),
        ({"prompt": "Hi", "temperature": -0.1}, "temperature"),
        ({"prompt": "Hi", "top_p": 1.1}, "top_p"),
        ({"prompt": "Hi", "top_k": -2}, "top_k"),
        ({"prompt": "Hi", "length_penalty": 6}, "length_penalty"),
        ({"prompt": "Hi", "seed": -2}, "seed"),
        ({"prompt": "Hi", "seed": 2**64}, "seed"),
        ({"prompt": "Hi", "max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_an_input_out_of_range_is_a_422(
    cog_server: CogServer, inputs: dict[str, Any], field: str
) -> None:
    body = cog_server.predict(**inputs)
    assert body["http_status"] == 422
    assert body["detail"][0]["loc"] == ["body", "input", field]


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({"prompt": ""}, "E1001 PromptRequired"),
        ({"prompt": "word " * 5000}, "E1002 PromptTooLong"),
        ({"prompt": "Hi", "prompt_template": "no place"}, "E1003 BadPromptTemplate"),
        ({"prompt": "Hi", "prompt_template": "{prompt.__class__}"}, "E1004 PromptTemplateError"),
        ({"prompt": "Hi", "max_tokens": 5, "max_new_tokens": 6}, "E1102 ConflictingMaxTokens"),
        ({"prompt": "Hi", "min_tokens": 5, "min_new_tokens": 6}, "E1101 ConflictingMinTokens"),
        ({"prompt": "Hi", "min_tokens": 9, "max_tokens": 6}, "E1103 InvalidParameter"),
        # What would be large is refused before it is built, by the limits of this deployment's model.
        ({"prompt": "x" * 20_000, "prompt_template": "{prompt}" * 2}, "E1002 PromptTooLong"),
        ({"prompt": "Hi", "system_prompt": "x" * 30_000}, "E1002 PromptTooLong"),
        ({"prompt": "Hi", "prompt_template": "{prompt}" * 20_000}, "E1004 PromptTemplateError"),
        ({"prompt": "Hi", "prompt_template": "{a}" * 1_700_000}, "E1004 PromptTemplateError"),
        ({"prompt": "Hi", "stop_sequences": "ab," * 1_600_000}, "E1103 InvalidParameter"),
        ({"prompt": "Hi", "stop_sequences": "ab," * 65}, "E1103 InvalidParameter"),
    ],
)
def test_an_invalid_request_fails_with_its_code_and_no_stack_trace(
    cog_server: CogServer, inputs: dict[str, Any], code: str
) -> None:
    body = cog_server.predict(**inputs)
    assert body["status"] == "failed"
    # Cog 0.23 puts words of its own before an exception's name and text.
    assert re.match(rf"Prediction failed: [\w ]+: {code}: ", body["error"])
    assert body["error"].count(code.split()[1]) == 1
    assert "ensemble" not in body["error"]
    assert "Traceback" not in str(body)
    assert len(body["error"]) < 500
    assert not body.get("output")


@pytest.mark.parametrize(
    "inputs",
    [
        {"max_new_tokens": 6},
        {"max_tokens": 512, "max_new_tokens": 6},
        {"max_tokens": 6, "max_new_tokens": 6},
        {"max_tokens": 6, "min_tokens": -1, "min_new_tokens": 2},
    ],
)
def test_the_old_names_still_work(cog_server: CogServer, inputs: dict[str, Any]) -> None:
    body = cog_server.predict(prompt=QUESTION, temperature=0, **inputs)
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
    assert server.engine["generated"] - generated < 1000, "far from the 5000 tokens asked for"


def test_cancelling_by_post_stops_the_engine(paced_cog_server: CogServer) -> None:
    generated = paced_cog_server.engine["generated"]
    with paced_cog_server.stream("cancel-me", prompt=QUESTION, max_tokens=5000) as events:
        next(event for event in events if event[0] == "output")
        wait_until(lambda: paced_cog_server.engine["active"] == 1, 10, "the request")
        cancel = f"{paced_cog_server.url}/predictions/cancel-me/cancel"
        assert httpx.post(cancel, trust_env=False).status_code == 200
        wait_until(lambda: paced_cog_server.engine["active"] == 0, 10, "the stop")
        ended = list(events)[-1]
    assert ended[1]["status"] == "canceled"
    assert ended[1]["metrics"]["finish_reason"] == "cancelled"
    cancelled_engine(paced_cog_server, generated)


def test_a_cancel_right_after_an_asynchronous_start_stops_the_engine(
    paced_cog_server: CogServer,
) -> None:
    """Before, while and just after the prediction's generator begins."""
    generated = paced_cog_server.engine["generated"]
    with httpx.Client(base_url=paced_cog_server.url, trust_env=False) as client:
        for attempt in range(20):
            path = f"/predictions/at-once-{attempt}"
            started = client.put(
                path,
                json={"input": {"prompt": QUESTION, "max_tokens": 5000}},
                headers={"Prefer": "respond-async"},
            )
            assert started.status_code == 202, started.text
            cancel = f"{path}/cancel"
            wait_until(lambda: client.post(cancel).status_code == 404, 10, "the end")  # noqa: B023
    cancelled_engine(paced_cog_server, generated)


def test_a_client_that_disconnects_stops_the_engine(paced_cog_server: CogServer) -> None:
    generated = paced_cog_server.engine["generated"]
    with paced_cog_server.stream(prompt=QUESTION, max_tokens=5000) as events:
        next(event for event in events if event[0] == "output")
        wait_until(lambda: paced_cog_server.engine["active"] == 1, 10, "the request")
    cancelled_engine(paced_cog_server, generated)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_serving_over_http_and_stopping(
    demo_model: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """One life of `make serve` on the other transport; everything it started ends with it."""
    environment = {"MODEL": str(demo_model), "ENGINE": "simulated", "TRANSPORT": "http"}
    with CogServer(environment, tmp_path / "log") as server:
        assert server.wait_until_set_up()["status"] == "READY"
        body = server.predict(prompt="Hi", max_tokens=50)
        assert body["metrics"]["output_token_count"] == 50
        started = children(server.process.pid)
        assert len(started) > 4
        assert server.stop(number) == status
        assert not [pid for pid in started if alive(pid)]


def test_the_worker_killed_takes_triton_and_its_stubs_along(
    demo_model: Path, tmp_path: Path
) -> None:
    environment = {"MODEL": str(demo_model), "ENGINE": "simulated"}
    with CogServer(environment, tmp_path / "log") as server:
        assert server.wait_until_set_up()["status"] == "READY"
        started = children(server.process.pid)
        (guard,) = [pid for pid in processes("guard.py") if pid in started]
        stat = Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()
        worker = int(stat[1])
        tree = [guard, *children(guard)]
        assert len(tree) > 4
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not [pid for pid in tree if alive(pid)], 20, "the end of Triton")


def test_a_worker_that_is_killed_as_it_appears_takes_the_server_along(
    demo_model: Path, tmp_path: Path
) -> None:
    with CogServer({"MODEL": str(demo_model), "ENGINE": "simulated"}, tmp_path / "log") as server:

        def worker() -> list[int]:
            started = children(server.process.pid)
            return [pid for pid in processes("coglet.server._run_worker") if pid in started]

        os.kill(wait_until(worker, 60, "the start of the worker")[0], signal.SIGKILL)
        assert server.process.wait(60) != 0
    assert "the predictor's process has ended" in server.log.read_text()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"MODEL": "no/such/model"}, "E3001 ConfigurationError: MODEL=no/such/model"),
        ({"ENGINE": "magic"}, "E3001 ConfigurationError: invalid settings: ENGINE='magic'"),
        ({"PROMPT_TEMPLATE": "{oops}"}, "E1004"),
        ({"STOP_SEQUENCES": "a," * 65}, "E1103"),
        ({"TRITON_HTTP_PORT": "{taken}"}, "TRITON_HTTP_PORT="),
        ({"COG_TRITON_CONFIG": "{config}"}, "E3002 TemplateError"),
    ],
)
def test_a_setup_that_cannot_work_says_why(
    demo_model: Path, tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("server: {tensorrt_llm: {args: {batching_strategi: V1}}}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        values = {"{taken}": str(listener.getsockname()[1]), "{config}": str(config)}
        environment = {name: values.get(value, value) for name, value in environment.items()}
        with CogServer({"MODEL": str(demo_model), **environment}, tmp_path / "log") as server:
            assert server.process.wait(timeout=60) == 1
    last = json.loads(server.log.read_text().splitlines()[-1])
    assert last["level"] == "ERROR"
    assert reason in last["fields"]["message"]


def test_weights_from_a_url(demo_model: Path, tmp_path: Path) -> None:
    """As Replicate hands over a trained model: a tar file, by COG_WEIGHTS."""
    (tmp_path / "www").mkdir()
    with tarfile.open(tmp_path / "www" / "model.tar", "w") as tar:
        for file in demo_model.iterdir():
            tar.add(file, file.name)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "www"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever).start()
        environment = {
            "COG_WEIGHTS": f"http://127.0.0.1:{web.server_port}/model.tar",
            "WEIGHTS_CACHE": str(tmp_path / "cache"),
            "MODEL": "no/such/model",
            "ENGINE": "transformers",
        }
        with CogServer(environment, tmp_path / "log") as server:
            assert server.wait_until_set_up()["status"] == "READY"
            body = server.predict(prompt=QUESTION, temperature=0)
            assert "".join(body["output"]) == ANSWER
        web.shutdown()


def test_what_does_not_end_in_time_may_be_sent_again(demo_model: Path, tmp_path: Path) -> None:
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "SIMULATED_INTER_TOKEN_MS": "20",
        "DRAIN_SECONDS": "0.5",
    }
    with CogServer(environment, tmp_path / "log") as server, ThreadPoolExecutor(1) as pool:
        assert server.wait_until_set_up()["status"] == "READY", server.log.read_text()
        waiting = pool.submit(server.predict, prompt="Hi", max_tokens=2000)
        with server.stream(prompt="Hi", max_tokens=2000) as events:
            assert next(name for name, _ in events if name == "output")
            wait_until(lambda: server.engine["active"] == 2, 10, "both requests")
            server.process.send_signal(signal.SIGTERM)
            last = list(events)[-1]
        assert last[0] == "completed"
        for body in (last[1], waiting.result()):
            assert body["status"] == "failed"
            assert body["metrics"]["finish_reason"] == "error"
            assert "E2105 TritonUnavailable: the server is being stopped; send" in body["error"]
        assert server.process.wait(timeout=30) == 0
