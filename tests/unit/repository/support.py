"""What the tests of the repository share: our templates, values that fill them, and what comes of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.repository.fill import fill_repository
from tests.support import ROOT

TEMPLATES = ROOT / "triton_model_repo"
TOKENIZER: dict[str, object] = {"tokenizer_dir": "/models/demo"}
VALID: dict[str, dict[str, object]] = {
    "preprocessing": TOKENIZER,
    "postprocessing": TOKENIZER,
    "tensorrt_llm": {"model": "/models/demo"},
}


def parse(text: str) -> Any:
    return text_format.Parse(text, ModelConfig())


def config(repository: Path, model: str) -> Any:
    return parse((repository / model / "config.pbtxt").read_text(encoding="utf-8"))


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def names(tensors: Any) -> list[str]:
    return [tensor.name for tensor in tensors]


def fill(
    destination: Path, source: Path = TEMPLATES, /, **changes: Mapping[str, object]
) -> dict[str, Any]:
    """The configurations of a repository that is filled with ``VALID`` and changes by model."""
    models = [*VALID, *(model for model in changes if model not in VALID)]
    values = {model: {**VALID.get(model, {}), **changes.get(model, {})} for model in models}
    fill_repository(source, destination, values)
    return {path.name: config(destination, path.name) for path in destination.iterdir()}
