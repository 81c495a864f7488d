"""ENGINE=tensorrtllm from end to end: Cog's server, both transports, the ensemble, BLS, and the guides.

With the stand-in for TensorRT-LLM's backend, whose answer is the prompt again; see
tests/stand_in/README.md. With a seed of 1 the answer begins behind the token that begins the prompt.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.deployment import Deployment
from cog_triton.deployment.template_variables import Values
from cog_triton.errors import CogTritonError
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import make_server, running, settings_for
from tests.integration.test_generation import ask
from tests.integration.test_recovery import deployed
from tests.stand_in.engine import VOCAB_SIZE
from tests.stand_in.servers import MODEL, environment
from tests.support import (
    ROOT,
    CogServer,
    Server,
    free_port,
    limit,
    metrics,
    processes,
    server_sent_events,
    wait_until,
)

TEXT = "Grüße an alle: 日本語, and a friend 😀 of mine."
BLS = "tensorrt_llm_bls"


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def count(address: str, kind: str) -> float:
    """One of the stand-in's own counts."""
    return metrics(address)[f'stand_in{{count="{kind}",model="{MODEL}",version="1"}}']


# Cog's server


# The tokenizer's, one that chats end with, and one that is ordinary text.
END_TOKENS = ("</s>", "<|end|>", "?")


@pytest.fixture(scope="module")
def cog(
    demo_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CogServer]:
    directory = tmp_path_factory.mktemp("cog")
    ends = [str(token) for token in tokenizer.convert_tokens_to_ids(list(END_TOKENS))]
    settings = {
        "END_ID": ", ".join(ends),
        **environment(directory, vocab_size=VOCAB_SIZE + 64),
        "MODEL": str(demo_model),
        "STAND_IN_INTER_TOKEN_MS": "5",
        "TRITON_HTTP_PORT": str(free_port()),
        "TRITON_GRPC_PORT": str(free_port()),
    }
    with CogServer(settings, directory / "log") as server:
        server.wait_until_ready()
        yield server


def test_an_answer_as_json(cog: CogServer, tokenizer: Tokenizer) -> None:
    body = cog.predict(prompt=TEXT, seed=1, max_tokens=length(tokenizer, TEXT))
    assert "".join(body["output"]) == TEXT
    assert body["metrics"]["output_token_count"] == length(tokenizer, TEXT)
    assert body["metrics"]["input_token_count"] == length(tokenizer, TEXT) + 1


@pytest.mark.parametrize("end", END_TOKENS)
def test_any_end_token_ends_an_answer_that_does_not_have_it(
    cog: CogServer, tokenizer: Tokenizer, end: str
) -> None:
    """The backend has room for one end token; the others are stop words, which it leaves in."""
    text = "Until here"
    body = cog.predict(prompt=f"{text}{end} And no further.", seed=1, max_tokens=100)
    assert "".join(body["output"]) == text
    assert body["metrics"]["output_token_count"] == length(tokenizer, text)
    assert body["metrics"]["finish_reason"] == "stop"


@pytest.mark.parametrize("end", END_TOKENS)
def test_end_tokens_at_tritons_endpoints(cog: CogServer, tokenizer: Tokenizer, end: str) -> None:
    text = "Until here"
    address = cog.endpoints.http
    body = {"text_input": f"{text}{end} And no further.", "max_tokens": 100, "seed": 1}
    whole = post(address, "ensemble", **body)
    assert (whole["text_output"], whole["sequence_length"]) == (text, length(tokenizer, text))
    url = f"http://{address}/v2/models/ensemble/generate_stream"
    asked = {**body, "stream": True}
    with httpx.stream("POST", url, json=asked, timeout=limit(60), trust_env=False) as reply:
        events = [json.loads(data) for _, data in server_sent_events(reply)]
    assert "".join(event["text_output"] for event in events) == text
    # Its own end token is the only one of a request.
    further = post(address, "ensemble", **body, end_id=tokenizer.convert_tokens_to_ids("Ġno"))
    assert further["text_output"].startswith(text)
    assert len(further["text_output"]) > len(text)


@pytest.mark.parametrize("by", ["a stop sequence", "a cancel", "a client that goes away"])
def test_what_ends_early_frees_its_sequence_in_the_engine(cog: CogServer, by: str) -> None:
    address = f"127.0.0.1:{cog.metrics_port}"
    before = count(address, "cancelled")
    if by == "a stop sequence":
        words = "one two three four"
        body = cog.predict(prompt=words, seed=1, max_tokens=1000, stop_sequences="three")
        assert "".join(body["output"]) == "one two "
    else:
        with cog.stream("to-cancel", prompt=TEXT, max_tokens=2000) as events:
            next(event for event in events if event[0] == "output")
            if by == "a cancel":
                reply = httpx.post(f"{cog.url}/predictions/to-cancel/cancel", trust_env=False)
                assert reply.is_success
                assert list(events)[-1][1]["status"] == "canceled"
    wait_until(lambda: count(address, "cancelled") == before + 1, 60, "the engine's stop")


def test_a_prompt_that_is_too_long_is_the_users_mistake(cog: CogServer) -> None:
    body = cog.predict(prompt="word " * 5000)
    assert body["status"] == "failed"
    assert "E1002 PromptTooLong: " in body["error"]


def test_what_goes_beside_the_inputs(cog: CogServer, tokenizer: Tokenizer, transport: str) -> None:
    """Preprocessing reads it; the backend takes the rest as inputs, and none of it for a parameter."""
    text = "Until here.</s> And further."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    guide = Guide(GuideKind.CHOICE, '["a", "b"]')
    values: dict[str, Any] = {"seed": 0, "max_tokens": len(ids), "ignore_eos": True}
    requests = [
        Request(prompt=text, add_special_tokens=False, guide=guide, **values),
        Request(prompt="", prompt_ids=tuple(ids), log_probs=0, adapter="poet", **values),
        Request(
            prompt=text,
            add_special_tokens=False,
            logit_bias=((5, 1.0), (VOCAB_SIZE + 63, -1.0)),
            **values,
        ),
    ]
    stopped = Request(prompt=text, seed=1, max_tokens=1000, stop_sequences=("here",))
    *answers, cut = (ask(asked, cog, tokenizer, transport) for asked in (*requests, stopped))
    assert "".join(chunk.text for chunk in cut) == "Until "
    for chunks_ in answers:
        assert [token for chunk in chunks_ for token in chunk.ids] == ids
        assert chunks_[-1].finish_reason == "length"
        assert chunks_[-1].input_tokens == len(ids)
    plain, likely, _ = ([p for chunk in answer for p in chunk.log_probs] for answer in answers)
    assert plain == []
    assert likely == [TokenLogProb(token, -1.0) for token in ids]
    with pytest.raises(CogTritonError, match=r"E1103 .*EndId"):
        ask(Request(prompt=text, seed=1, end_id=5000), cog, tokenizer, transport)


# A deployment with other settings


@pytest.mark.parametrize(
    ("config", "engine", "request_", "error"),
    [
        # The backend's queue, or Triton's own before it, which is as long.
        (
            "max_queue_size: 1",
            {"max_batch_size": 1},
            {"max_tokens": 30},
            r"E2106 TritonOverloaded: .*[Mm]aximum queue size",
        ),
        pytest.param(
            "batch_scheduler_policy: max_utilization",
            {"max_num_tokens": 64},
            {"max_tokens": 1000},
            r"E1002 PromptTooLong: .*potentially greater",
            marks=pytest.mark.rare,
        ),
        ('batching_strategy: "${batching_strategy}"', {}, {}, "E3002 TemplateError"),
    ],
    ids=["a full queue", "a stream that might be evicted", "a placeholder"],
)
def test_refusals_have_their_codes(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    engine: dict[str, Any],
    request_: dict[str, Any],
    error: str,
) -> None:
    monkeypatch.setenv("STAND_IN_INTER_TOKEN_MS", "50")
    file = tmp_path / "config.yaml"
    file.write_text(f"server: {{tensorrt_llm: {{args: {{{config}}}}}}}")
    settings = {"COG_TRITON_CONFIG": str(file), **environment(tmp_path, **engine)}

    async def send(deployment: Deployment, seed: int) -> None:
        async for _ in deployment.generate(Request("Hello there", seed, **request_)):
            pass

    async def main() -> None:
        async with deployed(demo_model, **settings) as deployment:
            await asyncio.gather(*(send(deployment, seed) for seed in range(4)))

    with pytest.raises(CogTritonError, match=error):
        asyncio.run(main())


# Clients of the ensemble and of BLS


def post(address: str, model: str, **body: Any) -> Any:
    url = f"http://{address}/v2/models/{model}/generate"
    reply = httpx.post(url, json=body, timeout=limit(60), trust_env=False)
    assert reply.is_success, reply.text
    return reply.json()


@pytest.mark.rare
def test_the_ensemble_and_bls_without_decoupled_mode(
    demo_model: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = settings_for(demo_model, **environment(tmp_path))
    values: Values = {model: {"decoupled_mode": False} for model in (MODEL, BLS)}
    with running(make_server(settings, tmp_path, values)) as server:
        address = server.endpoints.http
        for model in ("ensemble", BLS):
            body = {"text_input": TEXT, "max_tokens": length(tokenizer, TEXT), "seed": 1}
            assert post(address, model, **body)["text_output"] == TEXT
            words = {"text_input": "one two three four", "max_tokens": 50, "seed": 1}
            reply = post(address, model, **words, stop_words=["three"])
            assert reply["text_output"] == "one two three"
        body = {"text_input": "Hello", "max_tokens": 2, "seed": 1, "return_perf_metrics": True}
        reply = post(address, "ensemble", **body)
        assert 0 < reply["arrival_time_ns"] <= reply["last_token_time_ns"]


# The guides' commands


CURL = """curl -X POST localhost:{port}/v2/models/ensemble/generate -d \
'{{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": "", \
"pad_id": 2, "end_id": 2}}'"""


@pytest.mark.parametrize(
    ("guide", "world_size"),
    [
        ("readme", 1),
        pytest.param(
            "llama",
            4,
            marks=[
                pytest.mark.rare,
                pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun in PATH"),
            ],
        ),
    ],
)
def test_the_guides_commands(
    demo_model: Path, tokenizer: Tokenizer, tmp_path: Path, guide: str, world_size: int
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
        "MODEL": str(demo_model.resolve()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRITON_HTTP_PORT": str(port),
        "TRITON_STOP_TIMEOUT": "60",  # four ranks on few cores
        "TRITONSERVER_BACKEND_DIR": settings["TRITONSERVER_BACKEND_DIR"],
    }
    server = Server(variables, tmp_path / "log")
    server.command = ["bash", "-e", str(Path(__file__).parent / "guides" / f"{guide}.sh")]
    server.directory = tmp_path
    with server:
        server.wait_for_line()
        curl = ["bash", "-c", CURL.format(port=port)]
        reply = json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)
        # The prompt's tokens, with the one that begins it, over and over. The README's commands leave
        # exclude_input_in_output at NVIDIA's default, so there they come after the prompt.
        prompt = "What is machine learning?"
        with_prompt = guide == "readme"
        begun = len(tokenizer(prompt).input_ids) if with_prompt else 0
        assert reply["sequence_length"] == 20 + begun
        assert reply["text_output"].startswith(prompt * (1 + with_prompt))
        body = {"text_input": prompt, "max_tokens": 20, "exclude_input_in_output": True}
        assert (
            reply["text_output"]
            == prompt * with_prompt + (post(f"127.0.0.1:{port}", "ensemble", **body)["text_output"])
        )
        assert server.stop() == 0
    assert not processes(f"{tmp_path}/triton_model_repo")
