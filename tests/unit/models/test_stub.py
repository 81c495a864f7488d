"""What the models of Triton's Python backend read of their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import TritonTokenizerError, error_from_text
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


class FakeUtils:
    """As much of the stub's module as an error needs."""

    class TritonError:
        INVALID_ARG = 3

        def __init__(self, message: str, code: int = 2) -> None:
            self.message, self.code = message, code

    class InferenceResponse:
        def __init__(self, error: FakeUtils.TritonError) -> None:
            self.error = error


def test_what_was_not_foreseen_keeps_its_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    try:
        Path("/secret/file").read_text()
    except OSError as cause:
        response = stub.failure(FakeUtils, "preprocessing", cause)
    assert response.error.message == (
        "model 'preprocessing' failed: FileNotFoundError; the server's log has more"
    )
    assert isinstance(error_from_text(response.error.message), TritonTokenizerError)
    assert "/secret/file" in caplog.text


def test_texts_for_a_client_are_cut() -> None:
    for response in (stub.error(FakeUtils, "x" * 9999), stub.refusal(FakeUtils, "x" * 9999)):
        assert len(response.error.message) == stub.LONGEST
    assert stub.refusal(FakeUtils, "x").error.code == FakeUtils.TritonError.INVALID_ARG


def test_texts_of_a_request_that_are_no_unicode_are_refused() -> None:
    class Request:
        def parameters(self) -> str:
            return b"a\xed\xbf\xbf".decode()

        request_id = parameters

    for read in (stub.parameters_text, stub.request_id):
        with pytest.raises(ValueError, match=r"must be valid Unicode$") as caught:
            read(Request())
        assert not isinstance(caught.value, UnicodeDecodeError)
