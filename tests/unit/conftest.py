from pathlib import Path

import pytest

from cog_triton.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))
