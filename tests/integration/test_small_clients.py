"""client.py, identity_test.py, gen_input_data.py and run.py as the guides call them, on real servers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from tests.integration.conftest import Triton
from tests.integration.test_ensemble import infer
from tests.openai_server import ANSWER
from tests.openai_server import QUESTION as PROMPT
from tests.support import command, free_port


def at(server: Triton, protocol: str) -> tuple[str, ...]:
    return "-i", protocol, "-u", getattr(server.endpoints, protocol)


# client.py


@pytest.mark.parametrize(
    ("protocol", "streaming"),
    [pytest.param("http", True, marks=pytest.mark.rare), ("grpc", True), ("http", False)],
)
def test_client(triton: Triton, demo_model: Path, protocol: str, streaming: bool) -> None:
    done = command(
        "client",
        f"--text={PROMPT}",
        *("--output_len=10", "--tokenizer_dir", str(demo_model), "--tokenizer_type", "auto"),
        *at(triton, protocol),
        *(["--streaming"] if streaming else []),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\[INFO\] Latency: \d+\.\d{3} ms", lines.pop(-1 if streaming else 0))
    input_line, output = lines
    assert input_line == f"Input: {PROMPT}"
    assert output.startswith(f"Output: {ANSWER}")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_a_server_one_line_says_so(demo_model: Path, protocol: str) -> None:
    nowhere = f"localhost:{free_port()}"
    done = command("client", "--tokenizer_dir", str(demo_model), "-i", protocol, "-u", nowhere)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: E2105 TritonUnavailable: Triton cannot be reached")
    assert nowhere.split(":")[1] in line


# identity_test.py


@pytest.mark.parametrize(
    ("protocol", "mode"), [pytest.param("http", "sync", marks=pytest.mark.rare), ("grpc", "async")]
)
def test_identity_test(paced_triton: Triton, protocol: str, mode: str) -> None:
    done = command(
        "identity-test",
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


# gen_input_data.py


def test_each_sample_is_a_request_that_the_server_takes(
    triton: Triton, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As perf_analyzer sends them: the tensors of the file with the model's data types, in a batch."""
    flags = ("--start_len=12", "--output_len=5", "--num_samples=3", "--tokenizer", str(demo_model))
    monkeypatch.chdir(tmp_path)
    done = command("gen-input-data", *flags)
    assert done.returncode == 0, done.stderr
    samples = json.loads((tmp_path / "input_data.json").read_text())["data"]
    assert len(samples) == 3
    assert samples[0]["request_output_len"]["content"] == [5]
    with InferenceServerClient(triton.endpoints.grpc) as client:
        config = client.get_model_config("tensorrt_llm", as_json=True)["config"]
    kinds = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["input"]}
    inputs: dict[str, Any] = {}
    for name in samples[0]:
        kind, dims = kinds[name]
        for tensor in (sample[name] for sample in samples):  # flat, and a shape without the batch
            assert len(tensor["shape"]) == len(dims)
            assert len(tensor["content"]) == np.prod(tensor["shape"])
        inputs[name] = np.array([sample[name]["content"] for sample in samples], DTYPES[kind])
    assert len({tuple(row) for row in inputs["input_ids"].tolist()}) == 3
    outputs = ["output_ids", "sequence_length", "batch_index"]
    answers = infer(triton.endpoints.grpc, inputs, outputs, "tensorrt_llm")
    assert sorted(int(answer["batch_index"].item()) for answer in answers if answer) == [0, 1, 2]


DTYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}


# run.py


def test_run_completes_each_prompt_on_a_checkpoint(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\nWhat is a KV cache?\n")
    done = command(
        "run",
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


@pytest.mark.rare
def test_run_streams_on_the_engine_of_the_settings(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE", "simulated")
    monkeypatch.setenv("SIMULATED_TEXT", "one two three")
    done = command(
        "run",
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
        (["--num_beams", "2"], 2, "argument --num_beams: invalid choice"),
        (["--engine_dir", "/no/such"], 1, "E3001 ConfigurationError: '/no/such' is no"),
    ],
)
def test_run_says_what_it_cannot_do(flags: list[str], status: int, reason: str) -> None:
    done = command("run", "--max_output_len=3", *flags)
    assert done.returncode == status
    assert reason in done.stderr
