"""What the models of Triton's Python backend read of their configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cog_triton.models import stub


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({}, {}),
        ({"parameters": None}, {}),
        ({"parameters": {"engine": {"string_value": "llmapi"}}}, {"engine": "llmapi"}),
        ({"parameters": {"a": {"string_value": "0"}, "b": {"string_value": ""}}}, {"a": "0"}),
    ],
)
def test_parameters_that_are_set(config: dict[str, Any], parameters: dict[str, str]) -> None:
    assert stub.parameters(config) == parameters
