"""The engine on TensorRT-LLM's LLM API in a real Triton; the LLM itself is a fake (tests/fakes)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cog_triton.client.stream import TritonClient
from cog_triton.errors import InvalidParameter, PromptTooLong, TritonStartError
from cog_triton.generation import Chunk, generate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.adapters import make_adapter
from tests.integration.conftest import engine_counters, make_server, running, settings_for
from tests.integration.test_generation import TRANSPORTS, collect, greedy, text, with_client
from tests.support import ROOT, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
MAX_NUM_TOKENS = 64


def make_llm_api_server(model: Path | str, directory: Path, **environment: str) -> TritonServer:
    server = make_server(settings_for(Path(model), ENGINE="llmapi", **environment), directory)
    # The stubs know no PYTHONPATH, but look for packages beside model.py.
    shutil.copytree(
        ROOT / "tests" / "fakes" / "tensorrt_llm",
        directory / "repository" / "tensorrt_llm" / "1" / "tensorrt_llm",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return server


@pytest.fixture(scope="module")
def llm_api_triton(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("llm_api")
    config = directory / "config.yaml"
    config.write_text(f"server: {{tensorrt_llm: {{args: {{max_num_tokens: {MAX_NUM_TOKENS}}}}}}}\n")
    make_adapter(demo_model, directory / "adapters" / "poet")
    settings = {"COG_TRITON_CONFIG": str(config), "LORA_DIR": str(directory / "adapters")}
    with running(make_llm_api_server(demo_model, directory, **settings)) as server:
        yield server


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_stream(transport: str, llm_api_triton: TritonServer, tokenizer: Tokenizer) -> None:
    pairs = PAIRS[:4]

    async def use(client: TritonClient) -> list[list[Chunk]]:
        return [await collect(greedy(pair.question), client, tokenizer) for pair in pairs]

    answers = with_client(transport, llm_api_triton, use)
    assert [text(chunks) for chunks in answers] == [pair.answer for pair in pairs]
    assert all(chunks[-1].finish_reason == "stop" for chunks in answers)
    assert len(answers[0]) > 5


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_the_generator_aborts_in_the_llm(
    transport: str,
    llm_api_triton: TritonServer,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "tritonserver")

    async def use(client: TritonClient) -> None:
        request = greedy(QUESTION, max_tokens=2000, min_tokens=2000)
        chunks = generate(request, client, tokenizer)
        await anext(chunks)
        await chunks.aclose()

    with_client(transport, llm_api_triton, use)
    wait_until(lambda: "fake LLM: aborted a request" in caplog.text, 10, "the LLM's abort")
    # The counters of the metrics endpoint follow the engine some milliseconds later.
    engine = engine_counters(llm_api_triton)
    wait_until(lambda: engine["active"] == 0, 10, "an idle engine")


def test_a_stop_sequence_aborts_in_the_llm(
    llm_api_triton: TritonServer, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tritonserver")
    stop = ANSWER[40:48]
    request = greedy(QUESTION, max_tokens=2000, min_tokens=2000, stop_sequences=(stop,))
    chunks = with_client("grpc", llm_api_triton, lambda c: collect(request, c, tokenizer))
    assert text(chunks) == ANSWER[: ANSWER.index(stop)]
    wait_until(lambda: "fake LLM: aborted a request" in caplog.text, 10, "the LLM's abort")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (5000, r"Prompt length \(\d+\) exceeds maximum input length \(2047\)"),
        (MAX_NUM_TOKENS, rf"exceeds maximum input length: .*max_num_tokens \({MAX_NUM_TOKENS}\)"),
    ],
)
def test_a_prompt_that_is_too_long(
    words: int, message: str, llm_api_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    request = greedy("word " * words)
    with pytest.raises(PromptTooLong, match=rf"^E1002 PromptTooLong: .*{message}"):
        with_client("grpc", llm_api_triton, lambda c: collect(request, c, tokenizer))


def test_a_penalty_that_the_sampler_would_ignore(
    llm_api_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    request = greedy(QUESTION, presence_penalty=0.5)
    message = r"^E1103 .*TensorRT-LLM 1\.2\.1 does not support presence_penalty.*sampler_type"
    with pytest.raises(InvalidParameter, match=message):
        with_client("grpc", llm_api_triton, lambda c: collect(request, c, tokenizer))


def test_an_adapter(llm_api_triton: TritonServer, tokenizer: Tokenizer) -> None:
    def ask(adapter: str) -> str:
        request = greedy(QUESTION, adapter=adapter, max_tokens=100)
        return text(with_client("grpc", llm_api_triton, lambda c: collect(request, c, tokenizer)))

    assert ask("poet") == ask("poet") != ask("") == ANSWER
    with pytest.raises(InvalidParameter, match=r"lora_task_id \d+: there is no such adapter"):
        ask("bard")


def test_a_load_that_fails_says_why(demo_model: Path, tmp_path: Path) -> None:
    server = make_llm_api_server("broken", tmp_path, TOKENIZER=str(demo_model))
    with pytest.raises(TritonStartError, match="the weights of broken are broken") as caught:
        server.start()
    assert "model tensorrt_llm: " in str(caught.value)
