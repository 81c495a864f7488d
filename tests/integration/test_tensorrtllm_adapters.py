"""LoRA adapters on ENGINE=tensorrtllm: sent to the engine when it does not have them, and not otherwise.

The stand-in shifts the ids of an answer by a number that follows from the adapter's weights; see
tests/stand_in/README.md.
"""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cog_triton.adapters.tensors import read_adapter
from cog_triton.deployment import Deployment
from cog_triton.errors import InvalidParameter
from cog_triton.protocol.names import IDS_ENSEMBLE
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from tests.adapters import make_adapter
from tests.integration.conftest import attached, make_server, running, settings_for
from tests.integration.test_recovery import deployed, once, part
from tests.integration.test_tensorrtllm_predictor import count
from tests.stand_in.engine import VOCAB_SIZE
from tests.stand_in.servers import environment
from tests.support import wait_until

IDS = tuple(range(300, 340))


def with_adapters(directory: Path, **build: Any) -> dict[str, str]:
    """Settings of an engine that takes adapters of rank 4 and below, in ``directory / "adapters"``."""
    lora = {"lora_target_modules": ["attn_q", "attn_k", "attn_v", "attn_dense"], "max_lora_rank": 4}
    build = {"plugin_config": {"lora_plugin": "auto"}, "lora_config": lora, **build}
    (directory / "adapters").mkdir(exist_ok=True)
    return {**environment(directory, **build), "LORA_DIR": str(directory / "adapters")}


def request(adapter: str) -> Request:
    values: dict[str, Any] = {"prompt_ids": IDS, "max_tokens": len(IDS), "ignore_eos": True}
    return Request(prompt="", seed=0, adapter=adapter, **values)


async def answer(deployment: Deployment, asked: Request) -> list[int]:
    return [token async for chunk in deployment.generate(asked) for token in chunk.ids]


def shifted(adapter: Path | None, dtype: str = "float16", count: int = len(IDS)) -> list[int]:
    """What the stand-in answers."""
    shift = 0
    if adapter is not None:
        words = np.frombuffer(read_adapter(adapter, dtype)["lora_weights"].tobytes(), np.uint16)
        shift = 1 + int(words.astype(np.uint64).sum()) % 97
    return [(IDS[i % len(IDS)] + shift) % VOCAB_SIZE for i in range(count)]


def server_of(deployment: Deployment) -> TritonServer:
    assert deployment.supervisor.running is not None
    return deployment.supervisor.running.server


def wait_for_refusals(server: TritonServer, number: int) -> None:
    """Waits until the stand-in has refused so many requests in all."""
    wait_until(
        lambda: count(server.endpoints.metrics, "failed") == number,
        10,
        f"{number} requests refused",
    )


def convert(adapter: Path, directory: Path) -> None:
    """Writes an adapter as NVIDIA's script does."""
    directory.mkdir()
    for name, tensor in read_adapter(adapter, "float16").items():
        np.save(directory / f"model.{name}.npy", tensor)


@pytest.mark.anyio
async def test_an_adapter_is_sent_when_the_engine_does_not_have_it(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot be used fails its requests only."""
    monkeypatch.setenv("STAND_IN_LORA_PLACES", "1")
    adapters = tmp_path / "adapters"
    environ = {**with_adapters(tmp_path), "TRITON_RESTARTS": "0"}
    async with deployed(demo_model, **environ) as deployment:
        poet = make_adapter(demo_model, adapters / "poet", seed=1)
        convert(make_adapter(demo_model, tmp_path / "7", seed=2), adapters / "7")
        # The third evicts the first, which is sent once more then.
        for name, misses in (("poet", 1), ("poet", 1), ("7", 2), ("poet", 3), ("", 3)):
            expected = shifted(adapters / name if name else None)
            assert await answer(deployment, request(name)) == expected, name
            wait_for_refusals(server_of(deployment), misses)
        assert shifted(poet) != shifted(adapters / "7") != shifted(None)
        names = ("poet", "", "7") * 4
        together = await asyncio.gather(*(answer(deployment, request(name)) for name in names))
        for name, ids in zip(names, together, strict=True):
            assert ids == shifted(adapters / name if name else None)

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
        assert await answer(deployment, request("poet")) == shifted(poet)


@pytest.mark.rare
@pytest.mark.anyio
async def test_after_a_restart_it_is_sent_again(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that goes on with an answer has no adapters."""
    monkeypatch.setenv("STAND_IN_INTER_TOKEN_MS", "20")
    async with deployed(demo_model, **with_adapters(tmp_path)) as deployment:
        poet = make_adapter(demo_model, tmp_path / "adapters" / "poet")
        triton = part(server_of(deployment).shm_prefix, "tritonserver")
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


@pytest.mark.rare
@pytest.mark.anyio
async def test_an_engine_in_bfloat16(demo_model: Path, tmp_path: Path) -> None:
    async with deployed(demo_model, **with_adapters(tmp_path, dtype="bfloat16")) as deployment:
        poet = make_adapter(demo_model, tmp_path / "adapters" / "poet")
        assert await answer(deployment, request("poet")) == shifted(poet, "bfloat16")


@pytest.mark.rare
def test_the_openai_face_on_a_triton_that_runs_already(demo_model: Path, tmp_path: Path) -> None:
    """On an ensemble without ids, as it was; with them is test_openai_attached.py's."""
    settings = settings_for(demo_model, **with_adapters(tmp_path))
    poet = make_adapter(demo_model, tmp_path / "adapters" / "poet")
    server = make_server(settings, tmp_path)
    os.rename(tmp_path / "repository" / IDS_ENSEMBLE, tmp_path / IDS_ENSEMBLE)
    with (
        running(server) as triton,
        attached(triton, demo_model, tmp_path / "log", LORA_DIR=str(poet.parent)) as openai,
    ):
        fields = {"prompt": "Hello there", "max_tokens": 8, "seed": 1}
        plain, changed, again = (
            openai.complete(model=model, **fields).json()["choices"][0]["text"]
            for model in ("demo", "poet", "poet")
        )
        assert changed == again != plain
        wait_for_refusals(triton, 1)
