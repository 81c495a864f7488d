"""The engine on TensorRT-LLM's LLM API in a real Triton; the LLM itself is a fake (tests/fakes)."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cog_triton.client.stream import TritonClient
from cog_triton.errors import InvalidParameter, PromptTooLong
from cog_triton.generation import generate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.adapters import make_adapter
from tests.integration.conftest import engine_counters, make_server, running, settings_for
from tests.integration.test_generation import ask, greedy, text, with_client
from tests.support import ROOT, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
MAX_NUM_TOKENS = 64


@pytest.fixture(scope="module")
def llm_api_triton(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("llm_api")
    config = directory / "config.yaml"
    config.write_text(f"server: {{tensorrt_llm: {{args: {{max_num_tokens: {MAX_NUM_TOKENS}}}}}}}\n")
    make_adapter(demo_model, directory / "adapters" / "poet")
    files = {"COG_TRITON_CONFIG": str(config), "LORA_DIR": str(directory / "adapters")}
    server = make_server(settings_for(demo_model, ENGINE="llmapi", **files), directory)
    # The stubs know no PYTHONPATH, but look for packages beside model.py.
    shutil.copytree(
        ROOT / "tests" / "fakes" / "tensorrt_llm",
        directory / "repository" / "tensorrt_llm" / "1" / "tensorrt_llm",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with running(server):
        yield server


def test_answers(transport: str, llm_api_triton: TritonServer, tokenizer: Tokenizer) -> None:
    for question, answer in PAIRS[:4]:
        chunks = ask(greedy(question), llm_api_triton, tokenizer, transport)
        assert text(chunks) == answer
        assert chunks[-1].finish_reason == "stop"


def test_an_answer_streams_and_closing_it_aborts_in_the_llm(
    transport: str,
    llm_api_triton: TritonServer,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "tritonserver")

    async def use(client: TritonClient) -> None:
        chunks = generate(greedy(QUESTION, max_tokens=2000, min_tokens=2000), client, tokenizer)
        for _ in range(6):
            assert not (await anext(chunks)).finish_reason
        await chunks.aclose()

    with_client(transport, llm_api_triton, use)
    wait_until(lambda: "fake LLM: aborted a request" in caplog.text, 60, "the LLM's abort")
    # The counters of the metrics endpoint follow the engine some milliseconds later.
    wait_until(lambda: engine_counters(llm_api_triton)["active"] == 0, 60, "an idle engine")


def test_a_prompt_too_long_for_the_llm(llm_api_triton: TritonServer, tokenizer: Tokenizer) -> None:
    message = rf"exceeds maximum input length: .*max_num_tokens \({MAX_NUM_TOKENS}\)"
    with pytest.raises(PromptTooLong, match=rf"^E1002 PromptTooLong: .*{message}"):
        ask(greedy("word " * MAX_NUM_TOKENS), llm_api_triton, tokenizer, "grpc")


def test_an_adapter(llm_api_triton: TritonServer, tokenizer: Tokenizer) -> None:
    def answer(adapter: str) -> str:
        request = greedy(QUESTION, adapter=adapter, max_tokens=100)
        return text(ask(request, llm_api_triton, tokenizer, "grpc"))

    assert answer("poet") == answer("poet") != answer("") == ANSWER
    with pytest.raises(InvalidParameter, match=r"lora_task_id \d+: no adapter has this id"):
        answer("bard")
