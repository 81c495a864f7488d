from __future__ import annotations

import asyncio
import csv
import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tools.benchmark import cli
from tools.benchmark.checks import at_least, at_most, report_rows, verdict
from tools.benchmark.cli import default_baselines, write
from tools.benchmark.driver import Answer, Context, Failed, engine_inputs, sampling_request
from tools.benchmark.http import Connection, Piece, Pool, events, parse_reply
from tools.benchmark.http_drivers import CogJson, CogSse, TritonHttp
from tools.benchmark.load import (
    Length,
    Load,
    Planned,
    plan,
    poisson_arrivals,
    shares,
    synthetic_prompts,
)
from tools.benchmark.machine import reported_settings, server_environment
from tools.benchmark.options import loads, parse
from tools.benchmark.processes import Usage, Watch, role_of
from tools.benchmark.report import Result, result, statistics, table, to_csv
from tools.benchmark.turns import compared
from tools.benchmark.vocabulary import Vocabulary, load_vocabulary
from tools.benchmark.worker import Record, closed_loop, error_text, is_short, open_loop, record


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def vocabulary(demo_model: Path) -> Vocabulary:
    return load_vocabulary(str(demo_model))


# What is sent, and when


def test_arrivals_have_the_rate_and_follow_the_seed() -> None:
    arrivals = poisson_arrivals(50, 5000, random(3))
    assert (
        arrivals == poisson_arrivals(50, 5000, random(3)) != poisson_arrivals(50, 5000, random(4))
    )
    assert arrivals == sorted(arrivals)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as an exponential distribution's


def test_lengths_are_normal_and_at_least_one() -> None:
    lengths = Length(100, 10).sample(5000, random())
    assert np.mean(lengths) == pytest.approx(100, abs=1)
    assert np.std(lengths) == pytest.approx(10, rel=0.1)
    assert set(Length(7).sample(20, random())) == {7}
    assert min(Length(1, 5).sample(200, random())) == 1


def test_prompts_differ_and_have_about_the_length(vocabulary: Vocabulary) -> None:
    prompts = synthetic_prompts([40] * 50, vocabulary.tokenizer, random())
    assert len(set(prompts)) == 50
    assert [tokens for _, tokens in prompts] == vocabulary.count([text for text, _ in prompts])
    assert all(abs(tokens - 40) <= 2 for _, tokens in prompts)


def test_prompts_of_one_token_differ_as_well(vocabulary: Vocabulary) -> None:
    assert len(set(synthetic_prompts([1] * 200, vocabulary.tokenizer, random()))) == 200


def test_the_same_load_is_the_same_plan(vocabulary: Vocabulary) -> None:
    load = Load(requests=20, warmup=3, input=Length(30, 5), output=Length(50, 9))
    warmup, requests = plan(load, vocabulary.tokenizer)
    assert (warmup, requests) == plan(load, vocabulary.tokenizer)
    assert (len(warmup), len(requests)) == (3, 20)
    assert not {request.prompt for request in warmup} & {request.prompt for request in requests}
    assert {request.at for request in requests} == {0.0}
    assert plan(replace(load, seed=1), vocabulary.tokenizer)[1] != requests


def test_a_plan_may_repeat_a_few_prompts_and_has_arrivals_in_an_open_loop(
    vocabulary: Vocabulary,
) -> None:
    load = Load(concurrency=None, request_rate=100, requests=20, prompts=4)
    warmup, requests = plan(load, vocabulary.tokenizer)
    assert len({request.prompt for request in requests}) == 4
    assert requests[0].at > 0
    assert {request.at for request in warmup} == {0.0}


def test_a_load_is_open_or_closed() -> None:
    with pytest.raises(ValueError, match="not both"):
        Load(concurrency=1, request_rate=1)
    with pytest.raises(ValueError, match="not both"):
        Load(concurrency=None)


@pytest.mark.parametrize(
    ("load", "count"),
    [
        (Load(concurrency=1), 100),
        (Load(concurrency=64), 256),
        (Load(concurrency=None, request_rate=50), 500),
        (Load(requests=3), 3),
    ],
)
def test_how_many_requests_a_load_has(load: Load, count: int) -> None:
    assert load.count == count


@pytest.mark.parametrize("concurrency", [1, 2, 5, None])
@pytest.mark.parametrize("generators", [1, 3])
def test_generators_share_all_of_a_load(concurrency: int | None, generators: int) -> None:
    load = Load(concurrency, None if concurrency else 10.0, generators=generators)
    requests = [Planned(str(i), 1, 1) for i in range(11)]
    parts = shares(requests, load)
    assert len(parts) == min(generators, concurrency or generators)
    assert sorted(request.prompt for share in parts for request in share.requests) == sorted(
        request.prompt for request in requests
    )
    if concurrency:
        assert sum(share.concurrency or 0 for share in parts) == concurrency
        assert all(share.concurrency for share in parts)


def test_words_of_its_own_for_a_vocabulary_that_has_no_common_ones() -> None:
    words = {"<end>": 0, "w1": 1, "w2": 2, "w3": 3, "w4": 4}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    prompts = synthetic_prompts([20] * 10, tokenizer, random())
    assert len(set(prompts)) == 10
    assert {word for text, _ in prompts for word in text.split()} == {"w1", "w2", "w3", "w4"}
    assert {tokens for _, tokens in prompts} == {20}


def test_every_turn_has_prompts_of_its_own_and_a_warm_up_may_be_short(
    vocabulary: Vocabulary,
) -> None:
    load = Load(requests=5, warmup=5, warmup_tokens=2, output=Length(9))
    plans = [plan(load, vocabulary.tokenizer, turn) for turn in range(4)]
    prompts = [request.prompt for warmup, requests in plans for request in (*warmup, *requests)]
    assert len(set(prompts)) == len(prompts) == 4 * 10
    assert {request.output_tokens for request in plans[0][0]} == {2}
    assert {request.output_tokens for request in plans[0][1]} == {9}


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_length_of_an_output_is_forced(vocabulary: Vocabulary, ignore_eos: bool) -> None:
    context = Context(vocabulary, "", ignore_eos=ignore_eos)
    request = sampling_request(Planned("a b", 2, 7), context)
    inputs = engine_inputs(Planned("a b", 2, 7), context)
    assert request.max_tokens == inputs["request_output_len"].item() == 7
    if ignore_eos:
        assert (request.end_id, request.min_tokens) == (-1, 0)
        assert inputs["end_id"].item() == -1
        assert "min_tokens" not in inputs
    else:
        assert (request.end_id, request.min_tokens) == (None, 7)
        assert inputs["end_id"].item() == vocabulary.end_id
        assert inputs["min_tokens"].item() == 7


# HTTP


def split(raw: bytes, size: int) -> list[Piece]:
    """A reply that came in pieces of a size, the n-th at n seconds."""
    return [(float(i), raw[at : at + size]) for i, at in enumerate(range(0, len(raw), size))]


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + body


EVENTS = chunked(
    b"event: start\ndata: {}\n\n",
    b'event: output\ndata: {"chunk":" a\xc3\xa4',
    b' sea","index":0}\n\nevent: output\r\ndata: {"chunk":" b","index":1}\r\n\r\n',
    b'event: metric\ndata: {"name":"output_token_count","value":2}\n\n',
    b'event: completed\ndata: {"status":"succeeded"}\n\n',
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_events_are_the_same_however_they_are_split(size: int) -> None:
    pieces = split(EVENTS, size)
    received = list(events(parse_reply(pieces).body))
    assert [event.name for event in received] == [
        "start",
        "output",
        "output",
        "metric",
        "completed",
    ]
    assert json.loads(received[1].data)["chunk"] == " aä sea"
    assert [event.at for event in received] == sorted(event.at for event in received)
    if size == 1:
        # The time of the piece in which the event was complete, or the end of its chunk.
        assert received[1].at >= EVENTS.index(b'"index":0}')


def test_a_reply_with_a_length() -> None:
    reply = parse_reply(split(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello", 9))
    assert (reply.status, reply.text) == (404, "hello")


def test_what_is_no_http_is_refused() -> None:
    with pytest.raises(ValueError, match="no HTTP reply"):
        parse_reply([(0.0, b"hello\r\n\r\n")])


REPLIES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    chunked(b"hello", b"0", b"world"),
    chunked(),
]


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_connection_knows_the_end_of_a_reply_and_is_used_again(size: int) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while request := await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            reply = REPLIES[int(request.split(b"/")[1].split()[0])]
            for start in range(0, len(reply), size):
                writer.write(reply[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async def run() -> list[bytes]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        bodies = []
        for number in range(len(REPLIES)):
            pieces = await pool.send(pool.message(f"/{number}", {}, b""))
            bodies.append(b"".join(data for _, data in pieces))
        pool.close()
        server.close()
        return bodies

    assert asyncio.run(run()) == REPLIES
    assert connections == 1


def test_a_connection_that_ends_too_early_is_an_error() -> None:
    async def run() -> None:
        connection = Connection()

        class Transport(asyncio.Transport):
            def write(self, data: Any) -> None:  # noqa: ARG002
                connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel")
                connection.connection_lost(None)

        connection.connection_made(Transport())
        await connection.send(b"")

    with pytest.raises(ConnectionError):
        asyncio.run(run())


def test_a_url_without_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match="no http"):
        Pool("localhost:5000")


# Answers


@pytest.fixture
def context(vocabulary: Vocabulary) -> Context:
    return Context(vocabulary, "", url="http://localhost:1", http="localhost:2")


def test_a_stream_of_cogs(context: Context) -> None:
    answer = CogSse(context).parse(split(EVENTS, 40))
    assert len(answer.times) == 2
    assert answer.tokens == context.vocabulary.count([" aä sea", " b"])
    assert (answer.total, answer.counted) == (2, True)


def test_a_prediction_that_failed(context: Context) -> None:
    failed = chunked(b'event: completed\ndata: {"status":"failed","error":"E1001 no"}\n\n')
    with pytest.raises(Failed, match="E1001 no"):
        CogSse(context).parse(split(failed, 100))
    with pytest.raises(Failed, match="no event completed"):
        CogSse(context).parse(split(chunked(b"event: start\ndata: {}\n\n"), 100))
    busy = b'HTTP/1.1 409 Conflict\r\nContent-Length: 18\r\n\r\n{"error": "at cap"}'
    for driver in (CogSse(context), CogJson(context), TritonHttp(context)):
        with pytest.raises(Failed, match="HTTP 409: at cap"):
            driver.parse([(0.0, busy)])


def test_a_prediction_as_json(context: Context) -> None:
    body = json.dumps(
        {"status": "succeeded", "output": ["a", "b"], "metrics": {"output_token_count": 9}}
    ).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = CogJson(context).parse([(1.0, head), (2.0, body)])
    assert (answer.times, answer.tokens, answer.total) == ([2.0], [9], 9)


def test_a_stream_of_tritons(context: Context) -> None:
    raw = chunked(*(b'data: {"sequence_length":%d}\n\n' % count for count in (1, 3, 0)))
    answer = TritonHttp(context).parse(split(raw, 1000))
    assert (answer.tokens, answer.total) == ([1, 3], 4)
    with pytest.raises(Failed, match="too long"):
        TritonHttp(context).parse(split(chunked(b'data: {"error":"too long"}\n\n'), 1000))


def test_what_is_a_short_answer() -> None:
    assert is_short(Answer(), 1)
    assert is_short(Answer([1.0], [9], 9), 10)
    assert not is_short(Answer([1.0], [10], 10), 10)
    assert not is_short(Answer([1.0], [9], 9, counted=False), 10)
    assert is_short(Answer([1.0], [7], 7, counted=False), 10)


class Echo(CogJson):
    """Answers after a moment, and counts how many requests run at once."""

    running = most = 0

    async def send(self, prepared: Any) -> list[Any]:
        if prepared == "fail":
            raise OSError("refused")
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(60 if prepared == "hang" else 0.001)
        self.running -= 1
        return [prepared]

    def parse(self, pieces: list[Any]) -> Answer:
        return Answer([0.0], [pieces[0]], pieces[0])


def test_a_closed_loop_has_so_many_streams_and_goes_on_after_errors(context: Context) -> None:
    driver = Echo(context)
    requests = [(Planned("", 1, 5), prepared) for prepared in (5, "fail", "hang", 4, 6, 7)]
    sent = asyncio.run(closed_loop(driver, requests, 2, 0.05))
    assert driver.most == 2
    errors = sorted(record(driver, request).error or "" for request in sent)
    assert errors == ["", "", "", "OSError: refused", "no end after 0.05 s", "short answer"]


def test_an_open_loop_does_not_wait_for_answers(context: Context) -> None:
    driver = Echo(context)
    requests = [(Planned("", 1, 1, at=0.0001 * i), "hang" if i < 5 else 1) for i in range(8)]
    sent = asyncio.run(open_loop(driver, requests, 0.2))
    assert driver.most >= 5
    assert sum(request.error is not None for request in sent) == 5
    assert [request.start for request in sent] == sorted(request.start for request in sent)


def test_an_errors_text_is_one_line() -> None:
    assert error_text(Failed("a\n b")) == "a b"
    assert error_text(OSError("gone")) == "OSError: gone"


# Figures


def test_statistics_of_known_numbers() -> None:
    assert statistics([float(i) for i in range(101)]) == {
        "mean": 50,
        "min": 0,
        "max": 100,
        "p50": 50,
        "p90": 90,
        "p99": 99,
    }
    assert set(statistics([]).values()) == {None}


RECORDS = [
    Record(10.0, 11.0, [10.2, 10.4, 10.9], [1, 2, 2], 8, 5, None),
    Record(10.5, 12.0, [11.0], [4], 6, 4, None),
    Record(10.5, 10.6, [], [], 6, 0, "short answer"),
]
USAGE = Usage("cog", 0.9, 50.0, None)


def measured(target: str = "cog-sse", **changes: Any) -> Result:
    return replace(result(target, Load(2), RECORDS, [USAGE], [1.8]), **changes)


def test_a_result() -> None:
    summary = measured()
    assert (summary.requests, summary.errors, summary.output_tokens) == (3, {"short answer": 1}, 9)
    assert summary.duration_s == 2.0
    assert summary.output_tokens_per_s == 4.5
    assert summary.requests_per_s == 1.0
    assert summary.input_tokens_mean == 7
    assert summary.ttft_samples_ms == [200.0, 500.0]
    assert summary.ttft_ms["mean"] == pytest.approx(350)
    # 0.8 s for 4 tokens
    assert summary.itl_ms["max"] == summary.itl_ms["min"] == pytest.approx(200)
    assert summary.chunk_gap_ms["min"] == pytest.approx(200)
    assert summary.chunk_gap_ms["max"] == pytest.approx(500)
    assert summary.e2e_ms["max"] == pytest.approx(1500)
    assert summary.tokens_per_chunk["mean"] == 2.25
    assert summary.tokens_per_chunk["one_token_fraction"] == 0.25
    assert summary.load_generator_cpu_share == 0.9


def test_a_result_without_a_good_request() -> None:
    summary = result("cog-sse", Load(2), RECORDS[2:], [USAGE], [0.0])
    assert summary.ttft_ms["p50"] is None
    assert summary.tokens_per_chunk["one_token_fraction"] is None
    assert "1/1" in table([summary])
    assert to_csv([summary])


def test_samples_are_thinned() -> None:
    records = [Record(0.0, 1.0, [i / 1e4], [1], 1, 1, None) for i in range(4500)]
    samples = result("engine", Load(2), records, [], [0.0]).ttft_samples_ms
    assert 1000 < len(samples) <= 2000


def test_ratios_are_to_baselines_under_the_same_load() -> None:
    base = measured("engine", output_tokens_per_s=9.0)
    idle = measured("triton-engine", output_tokens_per_s=0.0)
    of_load = {"cog-sse": [measured()], "engine": [base], "triton-engine": [idle]}
    stack, engine, _ = compared(of_load, ["engine", "triton-engine", "generate"])
    assert stack.ratio_to_baseline == {"engine": 0.5}  # not to one that made nothing
    assert engine.ratio_to_baseline == {}
    assert (stack.baseline, engine.baseline) == (False, True)


def test_the_table() -> None:
    lines = table([measured(ratio_to_baseline={"engine": 0.5}), measured("engine")]).splitlines()
    assert lines[0].split()[:4] == ["target", "load", "tok/s", "req/s"]
    assert lines[1].split()[:4] == ["cog-sse", "c=2", "4", "1.00"]
    assert "0.50" in lines[1].split()
    assert any("cog=100.000" in line for line in lines)
    assert "90% of a core" in "\n".join(lines)
    assert "1 x short answer" in "\n".join(lines)


ROLES = ("tritonserver", "preprocessing", "tensorrt_llm", "postprocessing", "cog", "predictor")


def test_tables_fit_120_columns_whatever_they_hold() -> None:
    name = "cog-sse, one token a response, 4,096 tokens"
    processes = [{"role": role, "cpu_s": 12.5, "rss_mb": 1.0, "uss_mb": 1.0} for role in ROLES]
    ratios = {name: 12.3, "triton-engine": 0.98, "engine": 0.97, "transformers": 1.0}
    slow = dict.fromkeys(("mean", "min", "max", "p50", "p90", "p99"), 98_765.0)
    one = measured(
        name,
        baseline=True,
        processes=processes,
        ratio_to_baseline=ratios,
        errors={"a reason " * 40: 3},
        **dict.fromkeys(("ttft_ms", "itl_ms", "chunk_gap_ms", "e2e_ms"), slow),
    )
    lines = table([one, measured()]).splitlines()
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    assert all(f"{role}=" in text for role in ROLES)
    assert text.count("98765/98765") == 3
    assert "…" not in text


def test_the_promises_fit_120_columns() -> None:
    checks = [at_most("a promise of many words " * 8, 123_456, 1, "tokens/s"), at_least("b", 2, 1)]
    lines = report_rows(checks).splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[0] for line in (lines[1], lines[-1])] == ["MISSED", "met"]


def test_a_verdict_names_what_was_missed() -> None:
    checks = [
        at_most("64 streams: TTFT p50", 33, 15, "ms"),
        at_least("  chunks of one token", 0.5, 0.95),
        at_least("memory", 2, 1),
    ]
    assert verdict(checks).splitlines() == [
        "2 of 3 promises were missed:",
        "  64 streams: TTFT p50: 33.0 ms, promised <= 15.0 ms",
        "  64 streams: chunks of one token: 0.50, promised >= 0.95",
    ]
    met = [at_least("rate", 2, 1)] * 2
    assert verdict(met) == "All 2 promises were met."


@pytest.mark.parametrize("value", [30.0, 20.0])
def test_a_missed_promise_is_the_exit_status(
    value: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [at_least("rate", value, 25, "tokens/s"), at_least("memory", 2, 1)]
    monkeypatch.setattr(cli, "run_suite", lambda *_: ([measured()], checks))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    missed = value < 25
    assert benchmark.main(["--suite", "--artifact-dir", str(tmp_path)]) == missed
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 120
    if missed:
        assert lines[-3] == "1 of 2 promises were missed:"
        assert lines[-2] == "  rate: 20.0 tokens/s, promised >= 25.0 tokens/s"
    else:
        assert lines[-2] == "All 2 promises were met."
    report = json.loads(Path(lines[-1]).read_text())
    assert [check["met"] for check in report["checks"]] == [not missed, True]
    assert '"results"' not in "\n".join(lines)


def test_the_csv_has_a_row_for_each_result() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([measured(), measured("engine")]))))
    assert [row["target"] for row in rows] == ["cog-sse", "engine"]
    assert float(rows[0]["ttft_ms.mean"]) == pytest.approx(350)
    assert rows[0]["errors"] == "1"
    assert rows[0]["cog.cpu_s"] == "0.9"
    assert "ttft_samples_ms" not in rows[0]


# Processes


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/x/triton_python_backend_stub /r/preprocessing/1/model.py p_0", "preprocessing"),
        ("/x/triton_python_backend_stub /r/tensorrt_llm/1/model.py p_0", "tensorrt_llm"),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/r", "tritonserver"),
        ("/v/python -I -S guard.py server p 10 /t /x/tritonserver --x", "other"),
        ("/v/python -m cog.server.http --host 127.0.0.1", "cog"),
        ("/v/python -m cog_triton.faces.cog.server --host 127.0.0.1", "cog"),
        ("python -c import coglet; coglet.server._run_worker()", "predictor"),
        ("/v/python -m tools.benchmark.worker", "load-generator"),
        ("/v/python /x/scripts/serve_openai.py --port 1", "openai"),
        ("/v/python -m vllm.entrypoints.openai.api_server --port 1", "vllm-serve"),
        ("VLLM::EngineCore", "vllm-engine"),
        ("/v/python -m transformers.cli.transformers serve /m --port 1", "serve"),
        ("", "other"),
    ],
)
def test_roles(command: str, role: str) -> None:
    assert role_of(command.split()) == role


def test_a_process_that_ends_while_it_is_watched_keeps_what_it_had_used() -> None:
    code = "import sys\nsum(range(3_000_000))\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        watch = Watch([], [process.pid], role="load-generator")
        watch.start()
        watch._stopped.wait(0.7)
        process.communicate()
        [usage] = watch.stop()
    assert usage.role == "load-generator"
    assert usage.cpu_s > 0
    assert usage.rss_mb > 1


# The command line


def test_the_command_line_has_genai_perfs_names() -> None:
    line = (
        "--concurrency 16 --request-count 50 --warmup-request-count 5 --num-prompts 20 "
        "--synthetic-input-tokens-mean 200 --synthetic-input-tokens-stddev 10 "
        "--output-tokens-mean 100 --output-tokens-stddev 2 --random-seed 123 --streaming "
        "--tokenizer cog_triton/demo --profile-export-file x.json --artifact-dir a --generate-plots "
        "-u localhost:5000 --rounds 3 --ignore-eos"
    )
    arguments = parse(line.split())
    [load] = loads(arguments)
    assert load == Load(
        16,
        None,
        50,
        5,
        Length(200, 10),
        Length(100, 2),
        prompts=20,
        seed=123,
        generators=1,
        rounds=3,
        ignore_eos=True,
    )
    assert (arguments.url, arguments.profile_export_file) == ("localhost:5000", Path("x.json"))
    assert arguments.target == ["cog-sse"]


def test_several_values_are_several_loads() -> None:
    assert [load.concurrency for load in loads(parse(["--concurrency", "1", "16"]))] == [1, 16]
    assert [load.request_rate for load in loads(parse(["--request-rate", "10", "50.5"]))] == [
        10,
        50.5,
    ]
    assert [load.concurrency for load in loads(parse([]))] == [1]


@pytest.mark.parametrize(
    "argv",
    [
        "--concurrency 1 --request-rate 1",
        "--concurrency 0",
        "--request-rate -1",
        "--target nothing",
        "--settings ENGINE",
        "--output-tokens-mean nan",
        "--target triton-http --grpc-url localhost:8001",
        "--target generate --http-url localhost:8000",
    ],
)
def test_what_makes_no_sense_is_refused(argv: str) -> None:
    with pytest.raises(SystemExit):
        parse(argv.split())


def test_a_url_is_tritons_when_only_triton_is_measured() -> None:
    arguments = parse(["--target", "triton-grpc", "-u", "localhost:8001"])
    assert (arguments.url, arguments.grpc_url) == (None, "localhost:8001")


def test_baselines(demo_model: Path) -> None:
    environment = {"ENGINE": "simulated", "MODEL": str(demo_model)}

    def baselines(argv: str) -> list[str]:
        return default_baselines(parse(argv.split()), environment)

    assert baselines("") == ["triton-engine", "engine"]
    assert baselines("--baseline") == []
    assert baselines("--baseline triton-grpc") == ["triton-grpc"]
    assert baselines("--url http://localhost:5000") == []
    assert baselines("--target engine cog-sse") == ["triton-engine"]


def test_settings_go_to_the_servers_and_secrets_stay_out_of_the_report() -> None:
    environment = server_environment(["ENGINE=simulated", "SYSTEM_PROMPT=a=b", "HF_TOKEN=secret"])
    assert environment["SYSTEM_PROMPT"] == "a=b"
    assert environment["PATH"]
    reported = reported_settings(environment)
    assert reported["ENGINE"] == "simulated"
    assert "secret" not in reported.values()


def test_the_files_of_a_report(tmp_path: Path) -> None:
    paths = write({"title": "t", "results": []}, "a,b\n", tmp_path / "a", tmp_path / "b" / "p.json")
    assert {path.name for path in paths} >= {"p.json", "benchmark.csv"}
    assert json.loads((tmp_path / "b" / "p.json").read_text())["title"] == "t"


def test_the_package_does_not_bring_its_benchmark() -> None:
    code = "import sys, cog_triton, predict; print('tools.benchmark' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "False"
