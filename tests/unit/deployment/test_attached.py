"""A Triton that runs already: which end tokens its answers have."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cog_triton.deployment import attached
from cog_triton.errors import ConfigurationError, InvalidParameter, TritonUnavailable, blameless
from cog_triton.protocol.triton_messages import service_pb2
from cog_triton.request.admission import Admission
from cog_triton.request.request import Request, triton_inputs
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


LOST = blameless(TritonUnavailable("the connection was lost"))
UNKNOWN = TritonUnavailable("Request for unknown model: 'm' is not found")


def running(answers: list[Any], **settings: str) -> attached.RunningTriton:
    """A Triton that answers one question after the other: with a reply, an error, or not in time."""
    triton = attached.RunningTriton(read_settings(settings), "127.0.0.1:1")

    async def call(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(60)
        return answer

    client: Any = triton.current
    client.call = call
    return triton


@pytest.mark.parametrize(
    ("before", "last", "found"),
    [
        ([], "a config", True),
        ([None, None], "a config", True),
        ([LOST, None, LOST], "a config", True),
        ([], UNKNOWN, False),
        ([None, LOST], UNKNOWN, False),
    ],
    ids=["at once", "after time-outs", "after losses", "unknown", "unknown after both"],
)
def test_a_model_is_asked_for_again_until_triton_answers(
    before: list[Any], last: Any, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time-out or a lost connection does not say that there is no such model."""
    monkeypatch.setattr(attached, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(attached, "POLL_SECONDS", 0.0)
    reply = SimpleNamespace(config=last) if found else last
    answers = [*before, reply]
    config = asyncio.run(_config(answers))
    assert (config, answers) == (last if found else None, [])


async def _config(answers: list[Any], **settings: str) -> Any:
    return await running(answers, **settings).config("m")


def test_a_triton_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "ASK_SECONDS", 0.01)
    with pytest.raises(ConfigurationError, match="whether it has a model m"):
        asyncio.run(_config([None] * 99, TRITON_START_TIMEOUT="0.05"))


@pytest.mark.parametrize(
    "endpoint", ["localhost:abc", "http://localhost:99999", "http://[::1:8001"]
)
def test_an_address_with_a_wrong_port_or_host_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--triton-endpoint .* is not valid"):
        attached.address_of(endpoint)


@pytest.mark.anyio
async def test_requests_wait_for_a_triton_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "POLL_SECONDS", 0.0)
    triton = running([LOST, SimpleNamespace(ready=False), SimpleNamespace(ready=True)])
    failed = triton.current
    back = await triton.client(failed)
    assert back is triton.current is not failed
    assert await triton.client(failed) is back, "it was replaced for all requests"
    await back.aclose()
    gone = running([LOST] * 999, RESUME_TIMEOUT="0.01")
    with pytest.raises(TritonUnavailable, match="no Triton is ready"):
        await gone.client(gone.current)


# An ensemble that returns text and no ids


def deployment_of_text(
    tokenizer: Tokenizer, known: Mapping[str, bool], *texts: Sequence[str]
) -> tuple[attached.TextDeployment, list[Any]]:
    """A deployment whose ensemble returns these texts, and the requests that it gets."""
    requests: list[Any] = []

    async def responses(request: Any) -> AsyncGenerator[list[Any], None]:
        requests.append(request)
        for together in texts:
            yield [response_of(text) for text in together]
        yield [service_pb2.ModelInferResponse()]

    nothing: Any = None
    triton: Any = SimpleNamespace(current=SimpleNamespace(responses=responses))
    deployment = attached.TextDeployment(
        read_settings({}),
        nothing,
        nothing,
        Admission(1, 1, 1.0),
        tokenizer,
        triton=triton,
        model="ensemble",
        known=known,
        adapters=None,
    )
    return deployment, requests


def response_of(text: str) -> Any:
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(struct.pack("<I", len(text.encode())) + text.encode())
    return response


TEXTS = (["Machine", " learn"], ["ing is"])


@pytest.mark.anyio
async def test_an_ensemble_of_text_streams_it_and_the_tokenizer_counts(
    tokenizer: Tokenizer,
) -> None:
    request = Request("Hi", 1, max_tokens=50)
    known = {**dict.fromkeys(triton_inputs(request), True), "bad_words": False, "random_seed": True}
    del known["seed"]
    deployment, requests = deployment_of_text(tokenizer, known, *TEXTS)
    chunks = [chunk async for chunk in deployment.generate(request)]
    assert [chunk.text for chunk in chunks] == ["Machine learn", "ing is", "", ""]
    count = len(tokenizer("Machine learning is", add_special_tokens=False).input_ids)
    assert (chunks[-1].output_tokens, chunks[-1].finish_reason) == (count, "stop")
    assert chunks[-1].input_tokens == len(tokenizer("Hi").input_ids)
    # The old name of an input, and the words that this ensemble demands.
    assert {"random_seed", "bad_words"} <= {tensor.name for tensor in requests[0].inputs}
    assert "seed" not in {tensor.name for tensor in requests[0].inputs}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop_sequences": ("rning",)}, "Machine lea", "stop"),
        ({"stop_sequences": ("rning",), "include_stop": True}, "Machine learning", "stop"),
        ({"max_tokens": 2}, "Machine learning is", "length"),
    ],
    ids=["stop sequence", "stop sequence that is kept", "limit"],
)
async def test_where_a_text_of_an_ensemble_ends(
    fields: dict[str, Any], text: str, reason: str, tokenizer: Tokenizer
) -> None:
    request = Request("Hi", 1, **fields)
    known = dict.fromkeys(triton_inputs(request), True)
    deployment, _ = deployment_of_text(tokenizer, known, *TEXTS)
    chunks = [chunk async for chunk in deployment.generate(request)]
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (text, reason)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logit_bias": ((5, 1.0),)}, "logit_bias is not supported"),
        ({"min_p": 0.1}, "min_p is not supported"),
        ({"log_probs": 0}, "logprobs are not supported"),
        ({"log_probs": 2}, "top_logprobs is not supported"),
        ({"log_probs": 0, "prompt_log_probs": True}, "prompt_logprobs is not supported"),
        ({"allowed_token_ids": (5,)}, "allowed_token_ids is not supported"),
        ({"stop_token_ids": (5,)}, "stop_token_ids is not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens must be true"),
        ({"prompt_ids": (1, 2)}, "prompt_ids is not supported"),
    ],
    ids=str,
)
@pytest.mark.anyio
async def test_what_an_ensemble_of_text_cannot_do_is_refused_by_name(
    fields: dict[str, Any], problem: str, tokenizer: Tokenizer
) -> None:
    request = Request("Hi", 1, **fields)
    deployment, requests = deployment_of_text(
        tokenizer, dict.fromkeys(triton_inputs(request), True), ["text"]
    )
    with pytest.raises(InvalidParameter, match=problem):
        await anext(deployment.generate(request))
    assert requests == []
