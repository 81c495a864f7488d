"""Structured output, tools and adapters through OpenAI's API on a GPU, with each engine that is installed.

python -m pytest tests/gpu
"""

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.adapters import make_adapter
from tests.integration.conftest import client  # noqa: F401
from tests.integration.test_openai_lora import ask, models
from tests.integration.test_openai_structured import (  # noqa: F401
    test_a_named_call_is_that_one,
    test_a_required_call_is_made,
    test_log_probabilities_of_a_chat,
    test_what_vllms_users_write,
)
from tests.openai_server import OpenAIServer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM")
CONFIG = {"guided_decoding_backend": "xgrammar", "lora_cache_max_adapter_size": "8"}


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def server(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """With the demo model, whose weights are float32, and the adapters poet and bard."""
    directory = tmp_path_factory.mktemp(request.param)
    for seed, name in enumerate(("poet", "bard"), 1):
        make_adapter(demo_model, directory / "adapters" / name, seed=seed)
    config = directory / "config.yaml"
    config.write_text(json.dumps({"server": {"tensorrt_llm": {"args": CONFIG}}}))
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": request.param,
        "LORA_DIR": str(directory / "adapters"),
        "COG_TRITON_CONFIG": str(config),
    }
    with OpenAIServer(environment, directory / "log") as server:
        yield server


def test_adapters_share_a_batch_and_leave_others_alone(server: OpenAIServer) -> None:
    assert {"demo", "poet", "bard"} <= {name.rpartition(":")[2] for name in models(server)}
    names = ["", "poet", "bard"] * 4
    alone = {name: ask(server, name) for name in names[:3]}
    assert len({*alone.values()}) == 3
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: ask(server, name), names))
    assert together == [alone[name] for name in names]
