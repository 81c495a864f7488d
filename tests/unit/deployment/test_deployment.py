"""Requests that a deployment refuses or changes, and its own metrics."""

import asyncio
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from cog_triton import errors
from cog_triton.deployment import deployment as deployment_module
from cog_triton.deployment import model_files, running
from cog_triton.deployment.deployment import (
    Deployment,
    check_supported,
    served_metrics,
    without_bos,
)
from cog_triton.deployment.engine_choice import EngineName
from cog_triton.deployment.template_variables import own_preprocessing
from cog_triton.request.admission import Admission
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("engine", "draws"), [("transformers", True), ("tensorrtllm", True), ("vllm", False)]
)
def test_a_seed_is_drawn_where_it_costs_nothing(
    engine: EngineName, draws: bool, demo_model: Path
) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    nothing = cast(Any, None)
    deployment = Deployment(
        read_settings({}), nothing, nothing, Admission(1, 1, 1.0), tokenizer, engine=engine
    )
    assert deployment.draws_seeds == draws


@pytest.mark.parametrize(("told", "sent"), [(True, [[1.5]]), (False, None)])
def test_a_length_penalty_goes_where_it_works(told: bool, sent: object, demo_model: Path) -> None:
    inputs: list[Mapping[str, Any]] = []

    def stream(_id: str, given: Mapping[str, Any], **_: object) -> Any:
        inputs.append(given)
        raise errors.TritonUnavailable("this far and no further")

    client, supervisor = cast(Any, SimpleNamespace(stream=stream)), cast(Any, None)
    parts = client, supervisor, Admission(1, 0, 1.0), load_tokenizer(str(demo_model))
    deployment = Deployment(read_settings({}), *parts, length_penalty=told)
    with pytest.raises(errors.TritonUnavailable):
        asyncio.run(anext(deployment.generate(Request(prompt="a", seed=0, length_penalty=1.5))))
    found = inputs[0].get("length_penalty")
    assert (None if found is None else found.tolist()) == sent


def request(**values: Any) -> Request:
    return Request(**{"prompt": "a", "seed": 0, **values})


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        pytest.param(request(min_p=0.1), "min_p", id="min_p"),
        pytest.param(
            request(log_probs=2, min_p=0.1), "min_p, top_logprobs", id="min_p and top_logprobs"
        ),
        pytest.param(
            request(log_probs=0, prompt_log_probs=True), "prompt_logprobs", id="prompt_logprobs"
        ),
        pytest.param(request(allowed_token_ids=[1]), "allowed_token_ids", id="allowed_token_ids"),
    ],
)
def test_what_nvidias_backend_would_ignore_is_refused(asked: Request, names: str) -> None:
    message = re.escape(f"TensorRT-LLM's C++ backend does not support {names}") + "$"
    with pytest.raises(errors.InvalidParameter, match=message):
        check_supported(asked, "tensorrtllm", own_preprocessing=True)
    check_supported(asked, "transformers", own_preprocessing=True)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        pytest.param(request(prompt_ids=[1, 2]), "prompt_ids", id="prompt_ids"),
        pytest.param(
            request(add_special_tokens=False), "add_special_tokens", id="add_special_tokens"
        ),
        pytest.param(request(logit_bias=[(1, 2.0)]), "logit_bias", id="logit_bias"),
    ],
)
def test_what_another_preprocessing_would_ignore_is_refused(asked: Request, name: str) -> None:
    message = f"the preprocessing model of TRITON_MODEL_REPO does not support {name}$"
    with pytest.raises(errors.InvalidParameter, match=message):
        check_supported(asked, "tensorrtllm", own_preprocessing=False)
    check_supported(asked, "transformers", own_preprocessing=True)
    check_supported(request(log_probs=0), "tensorrtllm", own_preprocessing=False)


def test_another_preprocessing_adds_the_beginning_of_a_chat_itself() -> None:
    tokenizer = SimpleNamespace(bos_token="<s>")
    chat = request(prompt="<s>[INST] <s>a", add_special_tokens=False)
    assert without_bos(chat, tokenizer) == request(prompt="[INST] <s>a")
    assert without_bos(chat, SimpleNamespace(bos_token=None)).prompt == chat.prompt
    raw = request(prompt="<s>a")
    assert without_bos(raw, tokenizer) is raw


def test_preprocessing_is_known_by_its_code(tmp_path: Path) -> None:
    assert own_preprocessing(read_settings({}))
    model = tmp_path / "preprocessing" / "1" / "model.py"
    assert not own_preprocessing(read_settings({"TRITON_MODEL_REPO": str(tmp_path)}))
    model.parent.mkdir(parents=True)
    model.write_text("import triton_python_backend_utils")
    assert not own_preprocessing(read_settings({"TRITON_MODEL_REPO": str(tmp_path)}))


def served(port: int, admission: Admission) -> Any:
    settings = read_settings({"PREDICTOR_METRICS_PORT": str(port)})
    supervisor: Any = SimpleNamespace(restarts=3)
    return served_metrics(settings, admission, supervisor)


def test_metrics_tell_of_the_queue() -> None:
    async def test() -> str:
        admission = Admission(1, 0, 1.0)
        async with (
            served(0, admission) as port,
            admission.acquire(),
            httpx.AsyncClient(trust_env=False) as client,
        ):
            with pytest.raises(errors.TritonOverloaded):
                await admission.acquire().__aenter__()
            return (await client.get(f"http://127.0.0.1:{port}/metrics")).text

    assert {
        "cog_triton_requests_running 1.0",
        "cog_triton_requests_waiting 0.0",
        "cog_triton_restarts 3.0",
        'cog_triton_requests_total{outcome="admitted"} 1.0',
        'cog_triton_requests_total{outcome="full"} 1.0',
        'cog_triton_queue_seconds_bucket{le="0.001"} 1.0',
    } <= set(asyncio.run(test()).splitlines())


def test_a_port_of_metrics_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = f"PREDICTOR_METRICS_PORT={port}: .*in use"
        with pytest.raises(errors.ConfigurationError, match=text):
            asyncio.run(served(port, Admission(1, 0, 1.0)).__aenter__())


def test_a_port_in_use_is_noticed_before_the_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(_: object) -> object:
        raise AssertionError("the model is fetched first")

    monkeypatch.setattr(model_files, "with_files", fetch)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = read_settings({"TRITON_HTTP_PORT": str(port), "MODEL": "org/model"})
        with pytest.raises(errors.ConfigurationError, match=f"TRITON_HTTP_PORT={port}: cannot"):
            asyncio.run(Deployment.start(settings))


def test_the_tokenizer_loads_after_triton_was_started_and_while_its_models_load(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    loaded = threading.Event()

    class Server(TritonServer):
        def spawn(self) -> None:
            steps.append("Triton is started")

        def wait_until_ready(self) -> None:
            assert loaded.wait(60)
            steps.append("the models are loaded")
            raise errors.ConfigurationError("this far and no further")

    def load(_: object) -> None:
        steps.append("the tokenizer is loaded")
        loaded.set()

    monkeypatch.setattr(running, "TritonServer", Server)
    monkeypatch.setattr(deployment_module, "tokenizer_of", load)
    ports = {f"TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    settings = read_settings({"MODEL": str(demo_model), "ENGINE": "simulated", **ports})
    with pytest.raises(errors.ConfigurationError, match="this far"):
        asyncio.run(Deployment.start(settings))
    assert steps == ["Triton is started", "the tokenizer is loaded", "the models are loaded"]


def test_a_family_that_transformers_does_not_know_is_refused_where_the_tokenizer_loads(
    demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "zebra"}')
    settings = read_settings({"MODEL": str(demo_model)})
    variables = {"engine": "transformers", "model": str(tmp_path)}

    async def load() -> None:
        await deployment_module.TokenizerLoader(settings, variables).load()

    with pytest.raises(errors.ConfigurationError, match="model type 'zebra'"):
        asyncio.run(load())
