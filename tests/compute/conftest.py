"""The engine on transformers, and questions for the demo model."""

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.processes import without_collections
from tests.engines import ENGINES, Requests, running
from tests.late import torch
from tools.demo_model.corpus import PAIRS


@pytest.fixture(scope="package", autouse=True)
def pytorch() -> Iterator[None]:
    """Import what most tests here use, and have one thread compute, also in the processes they start.

    Models are so small that several threads would mostly wait for each other, which costs processor time.
    Transformers looks for garbage twice whenever an engine is closed: not at what was imported.
    """
    with without_collections():
        importlib.import_module("cog_triton.engines.transformers")
    gc.freeze()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[Requests]:
    """The engine on transformers."""
    with running(ENGINES["transformers"](demo_model), tokenizer_dir=str(demo_model)) as requests:
        yield requests


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Questions whose answers the model knows by heart, each token with a wide margin."""
    return [tokenizer(pair.question).input_ids for pair in PAIRS]
