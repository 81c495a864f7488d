"""The engine on vLLM in a real Triton, on CPUs: `make test-vllm` has an environment for it."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.client.stream import TritonClient
from cog_triton.deployment import Deployment
from cog_triton.errors import InvalidParameter, TritonStartError
from cog_triton.generation import generate
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.adapters import make_adapter
from tests.integration.conftest import engine_counters, make_server, running, settings_for
from tests.integration.resuming_requests import REQUESTS
from tests.integration.test_generation import ask, greedy, with_client
from tests.integration.test_recovery import deployed, part
from tests.integration.test_resuming import kill_while_all_run, serving
from tests.late import torch
from tests.support import wait_until
from tools.demo_model.corpus import PAIRS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
)
QUESTION, ANSWER = PAIRS[0]
SECONDS = 300
# So many of such length take vLLM many seconds on two cores: an end that comes late is no end.
STREAMS, LENGTH = 16, 1900


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the engine. On a GPU it takes a share of the memory: two servers run at a time."""
    if not torch.cuda.is_available():
        return {"ENGINE": "vllm"}
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text("server: {tensorrt_llm: {args: {kv_cache_free_gpu_mem_fraction: 0.3}}}")
    return {"ENGINE": "vllm", "COG_TRITON_CONFIG": str(config)}


@pytest.fixture(scope="module")
def server(
    demo_model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """With vLLM and the adapter 1."""
    directory = tmp_path_factory.mktemp("vllm")
    make_adapter(demo_model, directory / "adapters" / "1")
    variables: dict[str, object] = {
        "lora_prefetch_dir": str(directory / "adapters"),
        "lora_cache_max_adapter_size": "8",
    }
    settings = settings_for(demo_model, **environment)
    with running(make_server(settings, directory, {"tensorrt_llm": variables})) as server:
        yield server


def post(server: TritonServer, **inputs: Any) -> httpx.Response:
    url = f"http://{server.endpoints.http}/v2/models/ensemble/generate"
    body = {"text_input": QUESTION, "exclude_input_in_output": True, **inputs}
    return httpx.post(url, json=body, trust_env=False, timeout=SECONDS)


def test_a_cancel_aborts_in_vllm(
    transport: str, server: TritonServer, tokenizer: Tokenizer
) -> None:
    engine = engine_counters(server)

    async def begin(client: TritonClient) -> None:
        chunks = generate(greedy(QUESTION, max_tokens=LENGTH, min_tokens=LENGTH), client, tokenizer)
        await anext(chunks)
        await chunks.aclose()

    async def use(client: TritonClient) -> None:
        await asyncio.gather(*(begin(client) for _ in range(STREAMS)))

    generated = engine["generated"]
    with_client(transport, server, use)
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")
    assert engine["generated"] - generated < STREAMS * LENGTH


def test_limits_are_vllms_and_no_fault_of_the_server(
    server: TritonServer, tokenizer: Tokenizer
) -> None:
    request = Request(prompt=QUESTION, seed=0, temperature=3.0, top_k=5)
    with pytest.raises(InvalidParameter, match=r"^E1103 .*temperature must be in \[0, 2\]"):
        ask(request, server, tokenizer, "grpc")
    assert post(server, max_tokens=512).json()["text_output"] == ANSWER


def test_what_a_request_may_ask_for(server: TritonServer) -> None:
    word = ANSWER.split()[1]
    plain = post(server, max_tokens=40, return_log_probs=True).json()
    assert word in plain["text_output"]
    log_probs = plain["output_log_probs"]
    assert len(log_probs) == 40
    assert all(-5 < value <= 0 for value in log_probs)
    assert plain["cum_log_probs"] == pytest.approx(sum(log_probs), abs=1e-3)
    assert word not in post(server, max_tokens=40, bad_words=[word]).json()["text_output"]
    bias = {"embedding_bias_words": [word], "embedding_bias_weights": [-100.0]}
    assert post(server, max_tokens=40, **bias).json()["text_output"] != plain["text_output"]


@pytest.mark.skipif("torch.cuda.is_available()", reason="about vLLM's build for CPUs")
def test_an_adapter_is_refused_by_the_build_for_cpus(server: TritonServer) -> None:
    """Which would apply it to other requests of the batch; tests/compute has them alone."""
    reply = post(server, max_tokens=40, lora_task_id=1)
    assert reply.status_code == 400
    assert "does not support lora_task_id" in reply.text


def vllm_processes(server: TritonServer) -> list[psutil.Process]:
    """The engine core and its workers."""
    stub = psutil.Process(part(server.shm_prefix, "tensorrt_llm"))
    return [p for p in stub.children(recursive=True) if "resource_tracker" not in str(p.cmdline())]


def test_a_killed_engine_core_is_noticed_and_all_goes_on(
    demo_model: Path, environment: dict[str, str]
) -> None:
    async def answer(deployment: Deployment, begun: asyncio.Event | None = None) -> str:
        whole = ""
        request = greedy(QUESTION, max_tokens=LENGTH, min_tokens=LENGTH)
        async for chunk in deployment.generate(request):
            whole += chunk.text
            if begun is not None and chunk.output_tokens >= 5:
                begun.set()
        return whole

    async def test() -> None:
        # On a busy machine vLLM takes minutes to start.
        async with deployed(demo_model, **environment, RESUME_TIMEOUT=str(SECONDS)) as deployment:
            uninterrupted = [await answer(deployment)] * STREAMS
            life = deployment.supervisor.running
            assert life is not None
            processes = vllm_processes(life.server)
            begun = asyncio.Event()
            running = [asyncio.create_task(answer(deployment, begun)) for _ in uninterrupted]
            await begun.wait()
            processes[0].kill()
            assert await asyncio.wait_for(asyncio.gather(*running), SECONDS) == uninterrupted
            assert deployment.supervisor.restarts == 1
            assert not any(p.is_running() for p in processes)
            # Nothing runs now, and its end is noticed all the same.
            life = deployment.supervisor.running
            assert life is not None
            stub = part(life.server.shm_prefix, "tensorrt_llm")
            processes = vllm_processes(life.server)
            processes[-1].kill()
            await asyncio.to_thread(psutil.Process(stub).wait, SECONDS)
            wait_until(lambda: not any(p.is_running() for p in processes), 60, "their end")

    asyncio.run(test())


@pytest.mark.anyio
async def test_every_kind_goes_on_when_a_part_dies(
    demo_model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """But adapters, which its build for CPUs refuses."""
    kinds = [name for name in REQUESTS if "adapter" not in name]
    config = tmp_path / "guided.yaml"
    arguments = "guided_decoding_backend: xgrammar, kv_cache_free_gpu_mem_fraction: 0.3"
    config.write_text(f"server: {{tensorrt_llm: {{args: {{{arguments}}}}}}}")
    given = {**environment, "COG_TRITON_CONFIG": str(config)}
    with serving(demo_model, tmp_path, kinds, **given) as asked:
        await kill_while_all_run(asked, ["engine core", "tensorrt_llm", "tritonserver"], 3)


def test_an_engine_core_for_two_that_cannot_start_says_why(
    demo_model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The second instance waited minutes for what the first could not start."""
    (tmp_path / "vllm.yaml").write_text("kv_cache_memory_bytes: 1000")
    variables = {"tensorrt_llm_instance_count": 2, "vllm_config": str(tmp_path / "vllm.yaml")}
    settings = settings_for(demo_model, **environment)
    server = make_server(settings, tmp_path, {"tensorrt_llm": variables})
    why = "model tensorrt_llm: ValueError: No available memory"
    with pytest.raises(TritonStartError, match=why):
        server.start()


@pytest.mark.parametrize("killed", [True, False], ids=["the stub", "the server"])
def test_its_processes_end_with(
    demo_model: Path, environment: dict[str, str], tmp_path: Path, killed: bool
) -> None:
    with running(make_server(settings_for(demo_model, **environment), tmp_path)) as server:
        processes = vllm_processes(server)
        shared = regions(processes)
        # On a GPU the engine core is the only one, and shares no memory of its own.
        assert len(processes) >= (1 if torch.cuda.is_available() else 2)
        assert shared or torch.cuda.is_available()
        if killed:
            os.kill(part(server.shm_prefix, "tensorrt_llm"), signal.SIGKILL)
            wait_until(lambda: not any(p.is_running() for p in processes), 60, "their end")
            wait_until(lambda: not any(map(os.path.exists, shared)), 60, "their memory's end")
    assert not any(p.is_running() for p in processes)
    assert not any(map(os.path.exists, shared))


def regions(processes: list[psutil.Process]) -> set[str]:
    """The shared memory of vLLM's own that processes have mapped."""
    maps = {region.path for process in processes for region in process.memory_maps()}
    return {path for path in maps if path.startswith(("/dev/shm/psm_", "/dev/shm/sem."))}
