"""client.py, identity_test.py, gen_input_data.py and run.py as the guides call them, on real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _token_clients import CLIENTS, Batch, random_prompts
from tritonclient.grpc import InferenceServerClient

from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import make_server, settings_for
from tests.support import ROOT, free_port

PROMPT = "What is machine learning?"
ANSWER = "Machine learning is"  # how it begins


def script(name: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def at(server: TritonServer, protocol: str) -> tuple[str, ...]:
    return "-i", protocol, "-u", getattr(server.endpoints, protocol)


# client.py


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("streaming", [True, False])
def test_client(triton: TritonServer, demo_model: Path, protocol: str, streaming: bool) -> None:
    done = script(
        "client.py",
        f"--text={PROMPT}",
        *("--output_len=10", "--tokenizer_dir", str(demo_model), "--tokenizer_type", "auto"),
        *at(triton, protocol),
        *(["--streaming"] if streaming else []),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    latency = lines.pop(-1 if streaming else 0)
    assert re.fullmatch(r"\[INFO\] Latency: \d+\.\d{3} ms", latency)
    input_line, output = lines
    assert input_line == f"Input: {PROMPT}"
    assert output.startswith(f"Output: {ANSWER}")


def test_a_whole_answer_ends_before_its_end_token(triton: TritonServer, demo_model: Path) -> None:
    flags = ("--output_len", "500", "--tokenizer_dir", str(demo_model))
    done = script("client.py", "--text", PROMPT, *flags, *at(triton, "http"))
    assert done.stdout.endswith(".\n")
    assert "</s>" not in done.stdout


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_a_server_one_line_says_so(demo_model: Path, protocol: str) -> None:
    nowhere = f"localhost:{free_port()}"
    done = script("client.py", "--tokenizer_dir", str(demo_model), "-i", protocol, "-u", nowhere)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("E2105 TritonUnavailable: Triton cannot be reached")
    assert nowhere.split(":")[1] in line


def test_what_the_engine_refuses_is_said(triton: TritonServer, demo_model: Path) -> None:
    beams = ("--tokenizer_dir", str(demo_model), "--beam_width", "2", *at(triton, "grpc"))
    done = script("client.py", *beams)
    assert done.returncode == 1
    assert "beam_width" in done.stderr


# identity_test.py


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_identity_test(paced_triton: TritonServer, protocol: str, mode: str) -> None:
    done = script(
        "identity_test.py",
        *("--batch_size=8", "--start_len=128", "--output_len=20", "-p", "2", "-m", mode),
        *at(paced_triton, protocol),
    )
    assert done.returncode == 0, done.stderr
    size, latency, throughput = done.stdout.splitlines()
    assert size == "[INFO] Batch size: 8, Start len: 128, Output len: 20"
    milliseconds = float(re.fullmatch(r"\[INFO\] Latency: (\S+) ms", latency)[1])  # type: ignore[index]
    sentences = re.fullmatch(r"\[INFO\] Throughput: (\S+) sentences / sec", throughput)
    assert sentences is not None
    assert float(sentences[1]) == pytest.approx(8000 / milliseconds, rel=0.001)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("streaming", [True, False])
def test_each_sequence_of_a_batch_gets_its_own_answer(
    triton: TritonServer, tokenizer: Tokenizer, protocol: str, streaming: bool
) -> None:
    prompts = random_prompts(2, 6, 256, seed=1)
    known = tuple(tokenizer(PROMPT).input_ids)
    assert len(known) == 6

    async def complete() -> tuple[list[list[int]], list[int]]:
        client = CLIENTS[protocol](getattr(triton.endpoints, protocol))
        order: list[int] = []
        batch = Batch((prompts[0], known, prompts[1]), output_len=9, streaming=streaming)
        rows = await client.complete(batch, lambda row, _: order.append(row))
        await client.aclose()
        return rows, order

    rows, order = asyncio.run(complete())
    assert [len(row) for row in rows] == [9, 9, 9]
    assert tokenizer.decode(rows[1]).startswith(ANSWER)
    assert rows[1] not in (rows[0], rows[2])
    assert {*order} == {0, 1, 2}
    assert streaming or len(order) == 3


def test_a_batch_needs_decoupling(demo_model: Path, tmp_path: Path) -> None:
    settings = settings_for(demo_model, ENGINE="simulated")
    server = make_server(settings, tmp_path, {"tensorrt_llm": {"decoupled_mode": False}})
    server.start()
    try:
        over_grpc = script("identity_test.py", "-p", "1", *at(server, "grpc"))
        over_http = script("identity_test.py", "-p", "1", *at(server, "http"))
    finally:
        server.stop()
    assert over_grpc.returncode == 1
    assert "InvalidParameter: a batch of prompts needs decoupled_mode true" in over_grpc.stderr
    assert over_http.returncode == 0, over_http.stderr


# gen_input_data.py


def test_each_sample_is_a_request_that_the_server_takes(
    triton: TritonServer, demo_model: Path, tmp_path: Path
) -> None:
    """As perf_analyzer sends them: the tensors of the file with the model's data types, in a batch."""
    flags = ("--start_len=12", "--output_len=5", "--num_samples=3", "--tokenizer", str(demo_model))
    done = script("gen_input_data.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    samples = json.loads((tmp_path / "input_data.json").read_text())["data"]
    assert len(samples) == 3
    with InferenceServerClient(triton.endpoints.grpc) as client:
        config = client.get_model_config("tensorrt_llm", as_json=True)["config"]
    kinds = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["input"]}
    inputs: dict[str, Any] = {}
    for name in samples[0]:
        kind, dims = kinds[name]
        assert all(tensor_fits(sample[name], [int(dim) for dim in dims]) for sample in samples)
        rows = [sample[name]["content"] for sample in samples]
        inputs[name] = np.array(rows, DTYPES[kind])
    assert len({tuple(row) for row in inputs["input_ids"].tolist()}) == 3
    assert sorted(sequences(triton, inputs)) == [0, 1, 2]


DTYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}


def tensor_fits(tensor: dict[str, Any], dims: list[int]) -> bool:
    """By perf_analyzer's documentation: a flat ``content``, and its ``shape`` without the batch."""
    shape = tensor["shape"]
    fits = len(shape) == len(dims) and all(w in (-1, n) for w, n in zip(dims, shape, strict=True))
    return fits and len(tensor["content"]) == np.prod(shape)


def sequences(server: TritonServer, inputs: dict[str, Any]) -> list[int]:
    """The places in the batch that a whole answer came for."""
    from cog_triton.client.grpc_transport import Channel, infer_request, stream_messages

    async def ask() -> list[int]:
        async with contextlib.aclosing(Channel(server.endpoints.grpc)) as channel:
            request = infer_request("tensorrt_llm", "", inputs, ("sequence_length", "batch_index"))
            messages = [message.tensors async for message in stream_messages(channel, request)]
        return [int(tensors["batch_index"].item()) for tensors in messages if tensors]

    return asyncio.run(ask())


# run.py


def test_run_completes_each_prompt_on_a_checkpoint(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\nWhat is a KV cache?\n")
    done = script(
        "run.py",
        *("--engine_dir", str(demo_model), "--tokenizer_dir", str(demo_model)),
        *("--max_output_len=10", "--input_file", str(prompts), "--log_level", "error"),
        *("--bad_words", "keeps", "--num_beams", "1"),
    )
    assert done.returncode == 0, done.stderr
    first, output, second, other = done.stdout.splitlines()
    assert first == f'Input [Text 0]: "{PROMPT}"'
    assert output.startswith(f'Output [Text 0 Beam 0]: "{ANSWER}')
    assert second == 'Input [Text 1]: "What is a KV cache?"'
    assert other.startswith('Output [Text 1 Beam 0]: "A KV cache')
    assert "keeps" not in other


def test_run_streams_on_the_engine_of_the_settings(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE", "simulated")
    monkeypatch.setenv("SIMULATED_TEXT", "one two three")
    done = script(
        "run.py",
        *("--hf_model_dir", str(demo_model), "--max_output_len=200", "--streaming"),
        *("--stop_words", "three", "--input_text", "a b c", "--max_input_length", "2"),
    )
    assert done.returncode == 0, done.stderr
    input_line, output = done.stdout.splitlines()
    assert 'Input [Text 0]: "a' in input_line
    assert "c" not in input_line.split(":")[1]
    assert output.startswith('Output [Text 0 Beam 0]: "')
    assert "three" not in output


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (["--num_beams", "2"], 2, "--num_beams cannot be honoured"),
        (["--engine_dir", "/no/such"], 1, "E3001 ConfigurationError: '/no/such' is no"),
        (["--input_file", "/no/such"], 1, "No such file or directory: '/no/such'"),
    ],
)
def test_run_says_what_it_cannot_do(flags: list[str], status: int, reason: str) -> None:
    done = script("run.py", "--max_output_len=3", *flags)
    assert done.returncode == status
    assert reason in done.stderr.splitlines()[-1]
