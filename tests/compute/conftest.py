"""The engine on transformers, and questions for the demo model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import ENGINES, Requests, running
from tools.demo_model.corpus import PAIRS


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[Requests]:
    """The engine on transformers."""
    with running(ENGINES["transformers"](demo_model), tokenizer_dir=str(demo_model)) as requests:
        yield requests


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Questions whose answers the model knows by heart, each token with a wide margin."""
    return [tokenizer(pair.question).input_ids for pair in PAIRS]
