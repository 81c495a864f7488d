"""ENGINE=tensorrtllm from end to end: Cog's server, both transports, the ensemble, BLS, and the guides.

With the stand-in for TensorRT-LLM's backend, whose answer is the prompt again; see
tests/stand_in/README.md. With a seed of 1 the answer begins behind the token that begins the prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.deployment import Deployment
from cog_triton.errors import CogTritonError
from cog_triton.generation import Chunk
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb
from tests.integration.conftest import make_server, settings_for
from tests.stand_in.servers import MODEL, environment
from tests.support import ROOT, CogServer, chunks, free_port, metrics, processes, wait_until

TEXT = "Grüße an alle: 日本語, and a friend 😀 of mine."
TRANSPORTS = ["grpc", "http"]


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def count(address: str, kind: str) -> float:
    """One of the stand-in's own counts."""
    return metrics(address)[f'stand_in{{count="{kind}",model="{MODEL}",version="1"}}']


# Cog's server


@pytest.fixture(scope="module", params=TRANSPORTS)
def cog(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    directory = tmp_path_factory.mktemp("cog")
    settings = {
        **environment(directory),
        "MODEL": str(demo_model),
        "TRANSPORT": request.param,
        "STAND_IN_INTER_TOKEN_MS": "5",
    }
    with CogServer(settings, directory / "log") as server:
        assert server.wait_until_set_up()["status"] == "READY", server.log.read_text()
        yield server


def test_an_answer_as_json(cog: CogServer, tokenizer: Tokenizer) -> None:
    body = cog.predict(prompt=TEXT, seed=1, max_tokens=length(tokenizer, TEXT))
    assert "".join(body["output"]) == TEXT
    assert body["metrics"]["output_token_count"] == length(tokenizer, TEXT)
    assert body["metrics"]["input_token_count"] == length(tokenizer, TEXT) + 1


def test_an_answer_as_events(cog: CogServer, tokenizer: Tokenizer) -> None:
    with cog.stream(prompt=TEXT, seed=1, max_tokens=length(tokenizer, TEXT)) as events:
        pieces = chunks(events)
    assert "".join(pieces) == TEXT
    assert len(pieces) > 10


def test_the_end_token_ends_an_answer_that_does_not_have_it(cog: CogServer) -> None:
    body = cog.predict(prompt="Until here.</s> And no further.", seed=1, max_tokens=100)
    assert "".join(body["output"]) == "Until here."


def test_a_stop_sequence_frees_the_sequence_in_the_engine(cog: CogServer) -> None:
    address = f"127.0.0.1:{cog.metrics_port}"
    before = count(address, "cancelled")
    body = cog.predict(prompt="one two three four", seed=1, max_tokens=1000, stop_sequences="three")
    assert "".join(body["output"]) == "one two "
    wait_until(lambda: count(address, "cancelled") == before + 1, 10, "the engine's stop")


def test_a_cancelled_prediction_frees_the_sequence_in_the_engine(cog: CogServer) -> None:
    address = f"127.0.0.1:{cog.metrics_port}"
    before = count(address, "cancelled")
    with cog.stream("to-cancel", prompt=TEXT, max_tokens=2000) as events:
        next(event for event in events if event[0] == "output")
        reply = httpx.post(f"{cog.url}/predictions/to-cancel/cancel", trust_env=False)
        assert reply.is_success
        assert list(events)[-1][1]["status"] == "canceled"
    wait_until(lambda: count(address, "cancelled") == before + 1, 10, "the engine's stop")


def test_a_client_that_goes_away_frees_the_sequence_in_the_engine(cog: CogServer) -> None:
    address = f"127.0.0.1:{cog.metrics_port}"
    before = count(address, "cancelled")
    with cog.stream(prompt=TEXT, max_tokens=2000) as events:
        next(event for event in events if event[0] == "output")
    wait_until(lambda: count(address, "cancelled") == before + 1, 10, "the engine's stop")


def test_a_prompt_that_is_too_long_is_the_users_mistake(cog: CogServer) -> None:
    body = cog.predict(prompt="word " * 5000)
    assert body["status"] == "failed"
    assert "E1002 PromptTooLong: " in body["error"]


# A deployment with other settings


def run(
    model: Path,
    directory: Path,
    *requests: Request,
    config: str = "",
    transport: str = "grpc",
    **engine: Any,
) -> list[list[Chunk]]:
    """Sends requests at once; the first error of theirs is raised.

    Args:
        config: of the configuration file.
    """
    directory.mkdir(exist_ok=True)
    file = directory / "config.yaml"
    file.write_text(config)
    stand_in = {"COG_TRITON_CONFIG": str(file), **environment(directory, **engine)}
    stand_in["TRANSPORT"] = transport

    async def main() -> list[list[Chunk]]:
        deployment = await Deployment.start(settings_for(model, **stand_in))
        try:
            return await asyncio.gather(*map(collect, map(deployment.generate, requests)))
        finally:
            await deployment.stop()

    async def collect(stream: Any) -> list[Chunk]:
        return [chunk async for chunk in stream]

    return asyncio.run(main())


def test_a_full_queue_is_the_servers_fault(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_INTER_TOKEN_MS", "50")
    requests = [Request(prompt="Hello", seed=n, max_tokens=30) for n in range(4)]
    config = "server: {tensorrt_llm: {args: {max_queue_size: 1}}}"
    # The backend's queue, or Triton's own before it, which is as long.
    with pytest.raises(CogTritonError, match=r"E2106 TritonOverloaded: .*[Mm]aximum queue size"):
        run(demo_model, tmp_path, *requests, config=config, max_batch_size=1)


def test_a_stream_that_might_be_evicted_is_the_users_mistake(
    demo_model: Path, tmp_path: Path
) -> None:
    request = Request(prompt="Hello there", seed=0, max_tokens=1000)
    config = "server: {tensorrt_llm: {args: {batch_scheduler_policy: max_utilization}}}"
    with pytest.raises(CogTritonError, match=r"E1002 PromptTooLong: .*potentially greater"):
        run(demo_model, tmp_path, request, config=config, max_num_tokens=64)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_goes_beside_the_inputs(
    demo_model: Path, tmp_path: Path, tokenizer: Tokenizer, transport: str
) -> None:
    """Preprocessing reads it; the backend takes the rest as inputs, and none of it for a parameter."""
    text = "Until here.</s> And further."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    guide = Guide(GuideKind.CHOICE, '["a", "b"]')
    values: dict[str, Any] = {"seed": 0, "max_tokens": len(ids), "ignore_eos": True}
    requests = [
        Request(prompt=text, add_special_tokens=False, guide=guide, **values),
        Request(prompt="", prompt_ids=tuple(ids), log_probs=0, adapter="poet", **values),
        Request(prompt=text, add_special_tokens=False, logit_bias=((5, 1.0),), **values),
    ]
    answers = run(demo_model, tmp_path, *requests, transport=transport)
    for chunks_ in answers:
        assert [token for chunk in chunks_ for token in chunk.ids] == ids
        assert chunks_[-1].finish_reason == "length"
        assert chunks_[-1].input_tokens == len(ids)
    plain, likely, _ = ([p for chunk in answer for p in chunk.log_probs] for answer in answers)
    assert plain == []
    assert likely == [TokenLogProb(token, -1.0) for token in ids]


def test_an_end_id_that_is_no_token_is_the_users_mistake(demo_model: Path, tmp_path: Path) -> None:
    request = Request(prompt="Hello", seed=0, end_id=5000)
    with pytest.raises(CogTritonError, match=r"E1103 InvalidParameter: .*EndId"):
        run(demo_model, tmp_path, request)


def test_a_placeholder_in_the_configuration_file_is_refused_before_the_start(
    demo_model: Path, tmp_path: Path
) -> None:
    config = 'server: {tensorrt_llm: {args: {batching_strategy: "${batching_strategy}"}}}'
    with pytest.raises(CogTritonError, match="E3002 TemplateError"):
        run(demo_model, tmp_path, Request(prompt="Hello", seed=0), config=config)


# Clients of the ensemble and of BLS


def post(address: str, model: str, **body: Any) -> Any:
    url = f"http://{address}/v2/models/{model}/generate"
    reply = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert reply.is_success, reply.text
    return reply.json()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_ensemble_and_bls(
    demo_model: Path, tmp_path: Path, tokenizer: Tokenizer, model: str, decoupled: bool
) -> None:
    settings = settings_for(demo_model, **environment(tmp_path))
    mode = {"decoupled_mode": decoupled}
    values: dict[str, dict[str, object]] = {MODEL: dict(mode), "tensorrt_llm_bls": dict(mode)}
    server = make_server(settings, tmp_path, values)
    server.start()
    try:
        body = {"text_input": TEXT, "max_tokens": length(tokenizer, TEXT), "seed": 1}
        assert post(server.endpoints.http, model, **body)["text_output"] == TEXT
        words = {"text_input": "one two three four", "max_tokens": 50, "seed": 1}
        reply = post(server.endpoints.http, model, **words, stop_words=["three"])
        assert reply["text_output"] == "one two three"
    finally:
        server.stop()


def test_performance_metrics_by_the_ensemble(demo_model: Path, tmp_path: Path) -> None:
    server = make_server(settings_for(demo_model, **environment(tmp_path)), tmp_path)
    server.start()
    try:
        body = {"text_input": "Hello", "max_tokens": 2, "seed": 1, "return_perf_metrics": True}
        reply = post(server.endpoints.http, "ensemble", **body)
        assert 0 < reply["arrival_time_ns"] <= reply["last_token_time_ns"]
    finally:
        server.stop()


# The guides' commands. They stand as they are, but for the paths and ports of the machine, and
# triton_backend: guides that are older than it run this template's default otherwise.

README = """
mkdir triton_model_repo
cp -r all_models/inflight_batcher_llm/* triton_model_repo/
rm -rf triton_model_repo/tensorrt_llm_bls
cp engines/fp16/1-gpu/* triton_model_repo/tensorrt_llm/1
export HF_GPT_MODEL={model}
python3 tools/fill_template.py -i triton_model_repo/preprocessing/config.pbtxt "triton_max_batch_size:4,tokenizer_dir:${{HF_GPT_MODEL}},tokenizer_type:auto,preprocessing_instance_count:1"
python3 tools/fill_template.py -i triton_model_repo/postprocessing/config.pbtxt "triton_max_batch_size:4,tokenizer_dir:${{HF_GPT_MODEL}},tokenizer_type:auto,postprocessing_instance_count:1"
python3 tools/fill_template.py -i triton_model_repo/tensorrt_llm/config.pbtxt "triton_max_batch_size:4,decoupled_mode:True,engine_dir:{directory}/triton_model_repo/tensorrt_llm/1,batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:100,batch_scheduler_policy:max_utilization"
python3 tools/fill_template.py -i triton_model_repo/ensemble/config.pbtxt "triton_max_batch_size:4"
exec python3 scripts/launch_triton_server.py --world_size=1 --model_repo={directory}/triton_model_repo
"""  # noqa: E501
LLAMA = """
mkdir triton_model_repo
cp -r all_models/inflight_batcher_llm/ensemble triton_model_repo/
cp -r all_models/inflight_batcher_llm/preprocessing triton_model_repo/
cp -r all_models/inflight_batcher_llm/postprocessing triton_model_repo/
cp -r all_models/inflight_batcher_llm/tensorrt_llm triton_model_repo/
export HF_LLAMA_MODEL={model}
python3 tools/fill_template.py -i triton_model_repo/preprocessing/config.pbtxt tokenizer_dir:${{HF_LLAMA_MODEL}},tokenizer_type:llama,triton_max_batch_size:64,preprocessing_instance_count:1
python3 tools/fill_template.py -i triton_model_repo/tensorrt_llm/config.pbtxt triton_max_batch_size:64,decoupled_mode:False,max_beam_width:1,engine_dir:{directory}/engines/fp16/4-gpu/,max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,batching_strategy:inflight_batching,max_queue_delay_microseconds:600
python3 tools/fill_template.py -i triton_model_repo/postprocessing/config.pbtxt tokenizer_dir:${{HF_LLAMA_MODEL}},tokenizer_type:llama,triton_max_batch_size:64,postprocessing_instance_count:1
python3 tools/fill_template.py -i triton_model_repo/ensemble/config.pbtxt triton_max_batch_size:64
exec python3 scripts/launch_triton_server.py --world_size=4 --model_repo={directory}/triton_model_repo
"""  # noqa: E501
CURL = """curl -X POST localhost:{port}/v2/models/ensemble/generate -d '{{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}}'"""  # noqa: E501


@pytest.mark.parametrize(
    ("commands", "world_size", "with_prompt"),
    [
        # Its commands leave exclude_input_in_output at NVIDIA's default.
        pytest.param(README, 1, True, id="readme"),
        pytest.param(
            LLAMA,
            4,
            False,
            id="llama",
            marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun in PATH"),
        ),
    ],
)
def test_the_guides_commands(
    demo_model: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    commands: str,
    world_size: int,
    with_prompt: bool,
) -> None:
    settings = environment(tmp_path, world_size=world_size)
    (tmp_path / "engines" / "fp16").mkdir(parents=True)
    (tmp_path / "engine").rename(tmp_path / "engines" / "fp16" / f"{world_size}-gpu")
    (tmp_path / "all_models").mkdir()
    (tmp_path / "all_models" / "inflight_batcher_llm").symlink_to(ROOT / "triton_model_repo")
    for name in ("tools", "scripts"):
        (tmp_path / name).symlink_to(ROOT / "scripts")
    port = free_port()
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRITON_HTTP_PORT": str(port),
        "TRITON_GRPC_PORT": "0",
        "TRITON_METRICS_PORT": "0",
        "TRITON_STOP_TIMEOUT": "60",  # four ranks on few cores
        "TRITONSERVER_BACKEND_DIR": settings["TRITONSERVER_BACKEND_DIR"],
    }
    log = tmp_path / "log"
    script = "set -e\n" + commands.format(model=demo_model.resolve(), directory=tmp_path)
    with log.open("w") as output:
        server = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=variables, stdout=output, stderr=output
        )
    try:
        wait_until(
            lambda: "ready: " in log.read_text() or server.poll() is not None, 90, "the start"
        )
        assert "ready: " in log.read_text(), log.read_text()[-3000:]
        curl = ["bash", "-c", CURL.format(port=port)]
        reply = json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)
        # The prompt's tokens, with the one that begins it, over and over.
        prompt = "What is machine learning?"
        assert reply["text_output"].startswith(prompt)
        begun = len(tokenizer(prompt).input_ids) if with_prompt else 0
        assert reply["sequence_length"] == 20 + begun
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert not processes(f"{tmp_path}/triton_model_repo")
