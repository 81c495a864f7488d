"""A Triton that runs already: which end tokens its answers have."""

import asyncio
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cog_triton.deployment import attached
from cog_triton.settings import read_settings
from cog_triton.text.end_tokens import EndTokens
from cog_triton.text.tokenizer import Tokenizer


class Triton:
    """Answers with the configuration of its preprocessing, if it has one."""

    def __init__(self, end_ids: str | None) -> None:
        self._config = ModelConfig() if end_ids is not None else None
        if end_ids:
            assert self._config is not None
            self._config.parameters["end_ids"].string_value = end_ids

    async def config(self, model: str) -> Any:
        assert model == "preprocessing"
        return self._config


@pytest.mark.parametrize(
    ("servers", "setting", "expected"),
    [
        pytest.param("2,6", "", EndTokens((2, 6)), id="the server's"),
        pytest.param("2,6", "2,6", EndTokens((2, 6)), id="the same"),
        pytest.param("2,6", "5,6", EndTokens((5, 6), named_in_requests=True), id="others"),
        pytest.param(
            "", "5,6", EndTokens((5, 6), named_in_requests=True), id="of a hand-filled one"
        ),
        pytest.param("", "", EndTokens((2,)), id="the tokenizer's"),
        pytest.param(None, "", EndTokens((2,)), id="without preprocessing"),
    ],
)
def test_end_tokens(
    demo_model: Any, tokenizer: Tokenizer, servers: str | None, setting: str, expected: EndTokens
) -> None:
    settings = read_settings({"MODEL": str(demo_model), "END_ID": setting})
    triton: Any = Triton(servers)
    found = asyncio.run(attached._end_tokens(settings, triton, tokenizer))
    assert found == expected
