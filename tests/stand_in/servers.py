"""Settings of real tritonservers with the stand-in."""

from pathlib import Path
from typing import Any

from cog_triton.server.installation import locate
from cog_triton.settings import read_settings
from tests.stand_in.build import library
from tests.stand_in.engine import make_engine

MODEL = "tensorrt_llm"


def environment(directory: Path, **engine: Any) -> dict[str, str]:
    """Settings of a deployment with the stand-in and a new engine in ``directory``.

    Args:
        engine: of the engine, for ``make_engine``.
    """
    backends = directory / "stand_in"
    backend = backends / "tensorrtllm" / library().name
    backend.parent.mkdir(parents=True)
    backend.symlink_to(library())
    (backends / "python").symlink_to(locate(read_settings({})).backends / "python")
    return {
        "ENGINE": "tensorrtllm",
        "ENGINE_DIR": str(make_engine(directory / "engine", **engine)),
        "TRITONSERVER_BACKEND_DIR": str(backends),
        "WORLD_SIZE": str(engine.get("world_size", 1)),
    }
