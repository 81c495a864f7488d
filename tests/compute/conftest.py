"""The engine on transformers, and questions for the demo model."""

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.transformers_start import without_compiler
from cog_triton.processes import without_collections
from cog_triton.text.transformers_import import list_models_once
from tests.engines import ENGINES, Requests, running
from tests.late import torch
from tests.support import pass_over_old_objects
from tools.demo_model.corpus import PAIRS


@pytest.fixture(scope="package", autouse=True)
def pytorch() -> Iterator[None]:
    """Import what most tests here use, and have one thread compute, also in the processes they start.

    Models are so small that several threads would mostly wait for each other, which costs processor time.
    """
    if find_spec("vllm") is not None:
        # It brings another transformers, compiles models, and its own threads are tested.
        yield
        return
    with without_collections(), without_compiler():
        list_models_once()
        importlib.import_module("cog_triton.engines.transformers")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Look for no garbage among what was imported so far: transformers looks when an engine is closed."""
    pass_over_old_objects()


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[Requests]:
    """The engine on transformers."""
    with running(ENGINES["transformers"](demo_model), tokenizer_dir=str(demo_model)) as requests:
        yield requests


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Questions whose answers the model knows by heart, each token with a wide margin."""
    return [tokenizer(pair.question).input_ids for pair in PAIRS]
