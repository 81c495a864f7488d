"""The application on a backend that answers with what it is told to: routes, errors, ends."""

from dataclasses import dataclass
from typing import Any

import pytest

from cog_triton import errors
from cog_triton.api.openai.errors import api_error
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHAT,
    CHUNKS,
    RESPONSES,
    TEXT,
    Backend,
    ask,
    chat,
    complete,
    events,
    post,
    talkative,
)


def test_of_alternatives_with_one_text_the_likeliest_is_told() -> None:
    token = TokenLogProb(201, -0.5, ((201, -0.5), (97, -1.0), (202, -3.0)))
    backend = Backend(Chunk("\ufffd", 1, 3, "stop", log_probs=(token,)))
    text = {97: "a"}  # the others are parts of characters
    backend.tokenizer.decode = lambda ids, **_: text.get(ids[0], "\ufffd")
    (choice,) = complete(backend, logprobs=3).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]
    own = TokenLogProb(97, -3.0, ((201, -0.25),))  # which is told beside the likeliest
    backend = Backend(Chunk("a", 1, 3, "stop", log_probs=(own,)))
    (choice,) = complete(backend, logprobs=1).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{chr(201): -0.25, "a": -3.0}]


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ([97, 0, 98], "a\0b", [0, 1, 2, 3]),
        ("a\0b", "a\0b", [0, 1, 2, 3]),
        ("ab", "ab", [0, 1, 1, 2]),  # the tokenizer added the one between
    ],
)
def test_an_echo_has_the_special_tokens_of_the_request(
    prompt: Any, text: str, offsets: list[int]
) -> None:
    tokens = [TokenLogProb(token, -1.0) for token in (97, 0, 98, 99)]
    log_probs: dict[str, Any] = {"log_probs": tokens[3:], "prompt_log_probs": tokens[:3]}
    backend = Backend(Chunk("c", 1, 3, "stop", **log_probs))
    (choice,) = complete(backend, prompt=prompt, echo=True, logprobs=0).json()["choices"]
    told = choice["logprobs"]
    assert (choice["text"], told["text_offset"]) == (text + "c", offsets)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None


def test_the_events_of_a_response_have_log_probabilities_and_an_end() -> None:
    chunks = Chunk("", 1, 3, log_probs=(TokenLogProb(97, -0.5),)), Chunk("a", 1, 3, "length")
    fields = {"include": ["message.output_text.logprobs"], "stream": True}
    *told, last = events(post(Backend(*chunks), RESPONSES, **fields))
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    assert [event["logprobs"] for event in told if "delta" in event] == [[entry]]
    assert last["type"] == "response.incomplete"


def test_text_behind_thoughts_has_the_log_probabilities_of_all_its_tokens() -> None:
    """The first token of the answer is a part of a character, whose text comes with the second."""
    first, second = TokenLogProb(97, -0.5), TokenLogProb(97, -0.25)
    chunks = (
        Chunk("<think>Hm.", 1, 3, log_probs=(TokenLogProb(97, -9.0),)),
        Chunk("</think>", 2, 3, log_probs=(TokenLogProb(97, -8.0),)),
        Chunk("", 3, 3, log_probs=(first,)),
        Chunk("a", 4, 3, "stop", log_probs=(second,)),
    )
    fields = {"include": ["message.output_text.logprobs"], "stream": True}
    told = events(post(talkative(*chunks), RESPONSES, **fields))
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    shown = [entry["logprob"] for event in deltas for entry in event["logprobs"]]
    assert shown == [-0.5, -0.25]


@pytest.mark.parametrize(("given", "kept"), [("mine", True), ("a b", False), ("", False)])
def test_a_request_keeps_its_id_in_triton_too(given: str, kept: bool) -> None:
    backend, headers = Backend(*CHUNKS), {"x-request-id": given}
    body = {"model": "m", "prompt": ["x", "y"], "n": 2}
    own = ask(backend, "POST", TEXT, json=body, headers=headers).headers["x-request-id"]
    assert own
    assert (own == given) is kept
    names = {str(name) for _, name in backend.asked}
    assert len(names) == 4
    assert all(name.startswith(f"{own}-") for name in names)


def test_the_names_of_a_model() -> None:
    assert chat(Backend(*CHUNKS), model="other").json()["model"] == "other"
    cards = ask(Backend(), "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["m", "other"]
    assert ask(Backend(), "GET", "/v1/models/m").json()["max_model_len"] == 64


@dataclass(frozen=True)
class ErrorCase:
    """An error of ours, and what clients of OpenAI's and of Anthropic's API are told."""

    error: errors.CogTritonError
    status: int
    openai_type: str
    openai_code: str
    anthropic_type: str
    anthropic_text: str = "x"
    retry_after: str | None = None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            ErrorCase(
                error=errors.PromptTooLong("x"),
                status=400,
                openai_type="invalid_request_error",
                openai_code="context_length_exceeded",
                anthropic_type="invalid_request_error",
                anthropic_text="prompt is too long: x",
            ),
            id="PromptTooLong",
        ),
        pytest.param(
            ErrorCase(
                error=errors.InvalidParameter("x"),
                status=400,
                openai_type="invalid_request_error",
                openai_code="E1103",
                anthropic_type="invalid_request_error",
            ),
            id="InvalidParameter",
        ),
        pytest.param(
            ErrorCase(
                error=errors.TritonOverloaded("x", retry_after=7.2),
                status=429,
                retry_after="7",
                openai_type="requests",
                openai_code="rate_limit_exceeded",
                anthropic_type="rate_limit_error",
            ),
            id="TritonOverloaded",
        ),
        pytest.param(
            ErrorCase(
                error=errors.TritonUnavailable("x"),
                status=503,
                retry_after="5",
                openai_type="server_error",
                openai_code="E2105",
                anthropic_type="overloaded_error",
            ),
            id="TritonUnavailable",
        ),
        pytest.param(
            ErrorCase(
                error=errors.TritonTimeout("x"),
                status=500,
                openai_type="server_error",
                openai_code="E2101",
                anthropic_type="api_error",
            ),
            id="TritonTimeout",
        ),
    ],
)
def test_an_error_before_the_first_chunk_has_a_status(stream: bool, case: ErrorCase) -> None:
    openai, anthropic = (
        post(Backend(case.error), path, stream=stream) for path in (TEXT, ANTHROPIC)
    )
    for reply in (openai, anthropic):
        assert reply.status_code == case.status
        assert reply.headers.get("retry-after") == case.retry_after
    found = openai.json()["error"]
    assert (found["type"], found["code"]) == (case.openai_type, case.openai_code)
    request_id = anthropic.headers["request-id"]
    assert request_id == anthropic.headers["x-request-id"]
    assert anthropic.json() == {
        "type": "error",
        "error": {"type": case.anthropic_type, "message": case.anthropic_text},
        "request_id": request_id,
    }


@pytest.mark.parametrize("answers", [1, 2])
def test_an_error_behind_the_first_chunk_is_an_event(answers: int) -> None:
    backend = Backend(CHUNKS[0], errors.TritonUnavailable("gone"))
    assert events(chat(backend, stream=True, n=answers))[-1]["error"]["code"] == "E2105"
    assert backend.open == 0
    assert chat(backend, n=answers).status_code == 503


def test_an_error_behind_the_first_chunk_in_the_newer_apis() -> None:
    backend = Backend(CHUNKS[0], errors.TritonUnavailable("gone"))
    told = {"type": "overloaded_error", "message": "gone"}
    assert events(post(backend, ANTHROPIC, stream=True))[-1] == {"type": "error", "error": told}
    *_, done, error, failed = events(post(backend, RESPONSES, stream=True))
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (error["type"], error["message"]) == ("error", "gone")
    response = failed["response"]
    assert (failed["type"], response["status"]) == ("response.failed", "failed")
    assert response["usage"] is None
    assert response["error"] == {"code": "server_error", "message": "gone"}


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_an_error_that_nobody_foresaw_keeps_its_text(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = ValueError("secret")
    replies = post(Backend(error), path), post(Backend(CHUNKS[0], error), path, stream=True)
    assert [reply.status_code for reply in replies] == [500, 200]
    for reply in replies:
        assert reply.headers["x-request-id"]
        assert ("request-id" in reply.headers) == (path == ANTHROPIC)
        assert "internal error" in reply.text
        assert "secret" not in reply.text
    assert "secret" in caplog.text


def test_every_error_of_the_package_has_a_status() -> None:
    kinds = [errors.CogTritonError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        told = api_error(kind("x"))
        assert told.status == 400 or not issubclass(kind, errors.UserError)
        assert ("Retry-After" in told.headers) == kind.retryable


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("HEAD", "/v1/completions", 405, None),
        ("GET", "/v1/none", 404, "unknown_url"),
        # A redirection would go by the address that a proxy has this server under.
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("POST", "/v1/completions//", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/", 200, None),
        ("HEAD", "/", 200, None),
        ("GET", "/version", 200, None),
        ("HEAD", "/version", 200, None),
        ("HEAD", "/health", 200, None),
        ("HEAD", "/health/ready", 200, None),
        ("HEAD", "/ping", 200, None),
    ],
)
def test_paths_and_methods(method: str, path: str, status: int, code: str | None) -> None:
    reply = ask(Backend(), method, path, **({"json": {}} if method == "POST" else {}))
    assert reply.status_code == status
    if code:
        assert reply.json()["error"]["code"] == code
