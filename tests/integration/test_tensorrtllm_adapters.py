"""LoRA adapters on ENGINE=tensorrtllm: sent to the engine when it does not have them, and not otherwise.

The stand-in shifts the ids of an answer by a number that follows from the adapter's weights; see
tests/stand_in/README.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cog_triton.adapters.tensors import read_adapter
from cog_triton.deployment import Deployment
from cog_triton.errors import ConfigurationError, InvalidParameter
from cog_triton.request.request import Request
from cog_triton.wire import IDS_ENSEMBLE
from tests.adapters import make_adapter
from tests.integration.conftest import make_server, running, settings_for
from tests.integration.test_recovery import once, part
from tests.integration.test_tensorrtllm_predictor import count
from tests.openai_server import OpenAIServer
from tests.stand_in.engine import VOCAB_SIZE
from tests.stand_in.servers import environment
from tests.support import wait_until

IDS = tuple(range(300, 340))
MODULES = ["attn_q", "attn_k", "attn_v", "attn_dense"]


def with_adapters(directory: Path, dtype: str = "float16", **build: Any) -> dict[str, str]:
    """Settings of an engine that takes adapters of rank 4 and below, in ``directory / "adapters"``."""
    engine = {
        "plugin_config": {"lora_plugin": "auto"},
        "lora_config": {"lora_target_modules": MODULES, "max_lora_rank": 4},
        **build,
    }
    (directory / "adapters").mkdir(exist_ok=True)
    settings = environment(directory, dtype=dtype, **engine)
    return {**settings, "LORA_DIR": str(directory / "adapters")}


@asynccontextmanager
async def deployed(model: Path, directory: Path, **environ: str) -> AsyncIterator[Deployment]:
    settings = settings_for(model, **{**with_adapters(directory), **environ})
    deployment = await Deployment.start(settings)
    try:
        yield deployment
    finally:
        await deployment.stop()


def request(adapter: str, max_tokens: int = len(IDS)) -> Request:
    return Request(
        prompt="", prompt_ids=IDS, seed=0, max_tokens=max_tokens, ignore_eos=True, adapter=adapter
    )


async def answer(deployment: Deployment, asked: Request) -> list[int]:
    return [token async for chunk in deployment.generate(asked) for token in chunk.ids]


def shifted(adapter: Path | None, dtype: str = "float16", count: int = len(IDS)) -> list[int]:
    """What the stand-in answers."""
    shift = 0
    if adapter is not None:
        weights = read_adapter(adapter, dtype)["lora_weights"]
        words = np.frombuffer(weights.tobytes(), np.uint16)
        shift = 1 + int(words.astype(np.uint64).sum()) % 97
    return [(IDS[i % len(IDS)] + shift) % VOCAB_SIZE for i in range(count)]


def metrics_address(deployment: Deployment) -> str:
    life = deployment.supervisor.running
    assert life is not None
    return life.server.endpoints.metrics


def wait_for_refusals(metrics: str, number: int) -> None:
    """Waits until the stand-in has refused so many requests in all."""
    wait_until(lambda: count(metrics, "failed") == number, 10, f"{number} requests refused")


def convert(adapter: Path, directory: Path) -> None:
    """Writes an adapter as NVIDIA's script does."""
    directory.mkdir()
    for name, tensor in read_adapter(adapter, "float16").items():
        np.save(directory / f"model.{name}.npy", tensor)


def test_an_adapter_is_sent_when_the_engine_does_not_have_it(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_LORA_PLACES", "1")
    adapters = tmp_path / "adapters"

    async def test() -> None:
        async with deployed(demo_model, tmp_path) as deployment:
            poet = make_adapter(demo_model, adapters / "poet", seed=1)
            convert(make_adapter(demo_model, tmp_path / "7", seed=2), adapters / "7")
            # The third evicts the first, which is sent once more then.
            for name, misses in (("poet", 1), ("poet", 1), ("7", 2), ("poet", 3), ("", 3)):
                expected = shifted(adapters / name if name else None)
                assert await answer(deployment, request(name)) == expected, name
                wait_for_refusals(metrics_address(deployment), misses)
            assert shifted(poet) != shifted(adapters / "7") != shifted(None)
            together = [answer(deployment, request(name)) for name in ("poet", "", "7") * 4]
            for name, ids in zip(
                ("poet", "", "7") * 4, await asyncio.gather(*together), strict=True
            ):
                assert ids == shifted(adapters / name if name else None)

    asyncio.run(test())


def test_after_a_restart_it_is_sent_again(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that goes on with an answer has no adapters."""
    monkeypatch.setenv("STAND_IN_INTER_TOKEN_MS", "20")

    async def test() -> None:
        async with deployed(demo_model, tmp_path) as deployment:
            poet = make_adapter(demo_model, tmp_path / "adapters" / "poet")
            life = deployment.supervisor.running
            assert life is not None
            triton = part(life.server.shm_prefix, "tritonserver")
            kill = once(partial(os.kill, triton, signal.SIGKILL))
            ids: list[int] = []
            async for chunk in deployment.generate(request("poet")):
                ids += chunk.ids
                if len(ids) >= 5:
                    kill()
            assert deployment.supervisor.restarts == 1
            # The stand-in begins the prompt anew, of which the delivered ids are the end.
            assert ids[:5] == shifted(poet, count=5)
            begun = ids.index(ids[0], 1)
            assert ids[begun:] == shifted(poet, count=len(ids) - begun)
            assert len(ids) == len(IDS)

    asyncio.run(test())


def test_what_cannot_be_used_fails_its_requests_alone(demo_model: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"

    async def test() -> None:
        async with deployed(demo_model, tmp_path, TRITON_RESTARTS="0") as deployment:
            make_adapter(demo_model, adapters / "poet")
            convert(adapters / "poet", adapters / "foreign")
            rows = np.load(adapters / "foreign" / "model.lora_config.npy")
            rows[0, 0, 0] = 6  # a module that the engine was not built with
            np.save(adapters / "foreign" / "model.lora_config.npy", rows)
            make_adapter(demo_model, adapters / "broken")
            (adapters / "broken" / "adapter_model.safetensors").write_bytes(b"half of it")
            with pytest.raises(InvalidParameter, match="lora module mlp_4h_to_h not enabled"):
                await answer(deployment, request("foreign"))
            with pytest.raises(InvalidParameter, match=r"'broken' cannot be used: .*damaged"):
                await answer(deployment, request("broken"))
            assert await answer(deployment, request("poet")) == shifted(adapters / "poet")

    asyncio.run(test())


def test_an_engine_in_bfloat16(demo_model: Path, tmp_path: Path) -> None:
    environ = with_adapters(tmp_path, "bfloat16")

    async def test() -> None:
        deployment = await Deployment.start(settings_for(demo_model, **environ))
        try:
            poet = make_adapter(demo_model, tmp_path / "adapters" / "poet")
            assert await answer(deployment, request("poet")) == shifted(poet, "bfloat16")
        finally:
            await deployment.stop()

    asyncio.run(test())


def test_what_can_be_known_before_the_start(demo_model: Path, tmp_path: Path) -> None:
    environ = with_adapters(tmp_path, plugin_config={})
    with pytest.raises(ConfigurationError, match="was built without lora_plugin"):
        asyncio.run(Deployment.start(settings_for(demo_model, **environ)))


@pytest.mark.parametrize("old", [False, True])
def test_the_openai_face_on_a_triton_that_runs_already(
    demo_model: Path, tmp_path: Path, old: bool
) -> None:
    """On an ensemble with ids, and on one without."""
    settings = settings_for(demo_model, **with_adapters(tmp_path))
    poet = make_adapter(demo_model, tmp_path / "adapters" / "poet")
    server = make_server(settings, tmp_path)
    if old:
        os.rename(tmp_path / "repository" / IDS_ENSEMBLE, tmp_path / IDS_ENSEMBLE)
    with running(server) as triton:
        endpoint = f"http://{triton.endpoints.grpc}"
        names = ("--triton-endpoint", endpoint, "--tokenizer", str(demo_model), "--model", "demo")
        with OpenAIServer({"LORA_DIR": str(poet.parent)}, tmp_path / "log", *names) as face:
            fields = {"prompt": "Hello there", "max_tokens": 8, "seed": 1}
            plain, changed, again = (
                face.complete(model=model, **fields).json()["choices"][0]["text"]
                for model in ("demo", "poet", "poet")
            )
            assert changed == again != plain
            wait_for_refusals(triton.endpoints.metrics, 1)
