"""What the models of Triton's Python backend read of their configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.errors import (
    EngineError,
    EngineUnavailable,
    InvalidParameter,
    TritonTokenizerError,
    TritonUnavailable,
    error_from_text,
)
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

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    class TritonError:
        INVALID_ARG = 3

        def __init__(self, message: str, code: int = 2) -> None:
            self.message, self.code = message, code

    class InferenceResponse:
        def __init__(self, error: FakeUtils.TritonError) -> None:
            self.error = error


@pytest.fixture(autouse=True)
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub, "pb_utils", FakeUtils)


def test_what_was_not_foreseen_keeps_its_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    try:
        Path("/secret/file").read_text()
    except OSError as cause:
        response = stub.failure("preprocessing", cause)
    assert response.error.message == (
        "model 'preprocessing' failed: FileNotFoundError; the server's log has more"
    )
    assert isinstance(error_from_text(response.error.message), TritonTokenizerError)
    assert "/secret/file" in caplog.text


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (InvalidParameter("x" * 9999), FakeUtils.TritonError.INVALID_ARG),
        (EngineError("x" * 9999), FakeUtils.TritonError.INVALID_ARG),
        (KeyError("x" * 9999), FakeUtils.TritonError.INVALID_ARG),  # named below
        (EngineUnavailable("x" * 9999), 2),
        (TritonUnavailable("x" * 9999), 2),
    ],
)
def test_errors_for_a_client_are_cut_and_say_whose_fault_it_is(
    cause: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    response = stub.failure("preprocessing", cause, KeyError)
    assert (len(response.error.message), response.error.code) == (stub.LONGEST, code)
    assert not caplog.text


def test_texts_of_a_request_that_are_no_unicode_are_refused() -> None:
    class Request:
        def parameters(self) -> str:
            return b"a\xed\xbf\xbf".decode()

        request_id = parameters

    for read in (stub.request_parameters, stub.request_id):
        with pytest.raises(InvalidParameter, match=r"must be valid Unicode$"):
            read(Request())


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[tuple[object, int]] = []
        self.cancelled = True

    def send(self, response: object = None, flags: int = 0) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not any(flags for _, flags in self.sent)
        return self.cancelled


def test_triton_is_not_asked_about_a_request_that_is_over() -> None:
    sender = FakeSender()
    client = stub.Client(SimpleNamespace(get_response_sender=lambda: sender))
    client.send("a", last=False)
    assert client.gone()
    client.send(last=True)
    client.fail("preprocessing", KeyError())
    assert client.closed
    assert not client.gone()
    assert sender.sent == [("a", 0), (None, 1)]
