"""The training entry of Cog: a build configuration in, the tar of an engine out.

``cog build`` reads this file without running it, so types and defaults are literals.

    cog train -i config=@examples/engines/phi-3-mini-4k.yaml
"""

import shutil
import tempfile
from pathlib import Path as LocalPath
from typing import Optional

from cog import BaseModel, Input, Path, Secret

from tools.engine_builder.build import build
from tools.engine_builder.config import load_config
from tools.engine_builder.toolchain import find_toolchain


class TrainingOutput(BaseModel):  # type: ignore[misc, unused-ignore]
    weights: Path


def train(
    config: Path = Input(  # noqa: B008
        description="YAML file that describes the engine, or its URL; see examples/engines."
    ),
    hf_token: Optional[Secret] = Input(  # noqa: B008, UP045
        description="Hugging Face token, for gated models. It is not stored.",
        default=None,
    ),
) -> TrainingOutput:
    """Build an engine; the weights are a tar with the engine and its tokenizer."""
    settings = load_config(LocalPath(config))
    directory = LocalPath(tempfile.mkdtemp(prefix="engine-"))
    output = directory / "engine.tar"
    try:
        build(
            settings,
            output,
            toolchain=find_toolchain(),
            hf_token=hf_token.get_secret_value() if hf_token else None,
        )
    except BaseException:
        # All but the log, which the error names: the rest may be large.
        for path in directory.glob("engine.build/*/"):
            shutil.rmtree(path, ignore_errors=True)
        raise
    return TrainingOutput(weights=Path(output))
