"""What is known of a Triton that runs already."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cog_triton.faces.openai.attached import adapters_of, engine_of


@pytest.mark.parametrize(
    ("backend", "engine"), [("tensorrtllm", "tensorrtllm"), ("python", None), (None, None)]
)
def test_the_engine_is_known_by_its_backend(
    backend: str | None, engine: str | None, tmp_path: Path
) -> None:
    config = None if backend is None else ModelConfig(backend=backend)
    assert engine_of(config) == engine
    assert (adapters_of(config, tmp_path) is None) == (engine is None)
    assert adapters_of(config, None) is None
