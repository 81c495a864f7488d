"""Replicate's client, unmodified, against this server."""

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.integration.conftest import LIST_TOKEN
from tests.late import replicate
from tests.support import CogServer, limit, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
INPUT = {"prompt": QUESTION, "temperature": 0, "seed": None}
ENDLESS = {"prompt": QUESTION, "max_tokens": 5000}


class PatientTransport(httpx.HTTPTransport):
    """Waits as long as this machine needs: the client gives up half a second after the server's time."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["timeout"] = httpx.Timeout(limit(120)).as_dict()
        return super().handle_request(request)


def client_of(server: CogServer, token: str = "any") -> Any:
    return replicate.Client(api_token=token, base_url=server.url, transport=PatientTransport())


def reloaded_at_end(prediction: Any) -> bool:
    prediction.reload()
    return prediction.completed_at is not None


@pytest.fixture
def client(cog_server: CogServer) -> Any:
    return client_of(cog_server)


@pytest.mark.parametrize("wait", [True, False, 30])
def test_run(client: Any, wait: Any) -> None:
    client.poll_interval = 0.05
    assert "".join(client.run("meta/meta-llama-3-8b-instruct", input=INPUT, wait=wait)) == ANSWER


def test_run_of_a_version(cog_server: CogServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads of the version's schema that the output is an iterator."""
    monkeypatch.setenv("REPLICATE_BASE_URL", cog_server.url)
    client = replicate.Client(transport=PatientTransport())
    version = "5c7d5dc6dd8bf75c1acaa8565735e7986bc5b66206b55cca93cb72c9bf15ccaa"
    output = client.run(f"owner/name:{version}", INPUT)
    assert isinstance(output, Iterator)
    assert "".join(output) == ANSWER


def test_stream(client: Any) -> None:
    for pair in [pair for pair in PAIRS if not pair.answer.isascii()][:3]:
        events = list(client.stream("owner/name", input={**INPUT, "prompt": pair.question}))
        assert "".join(map(str, events)) == pair.answer
        assert [event.event.value for event in events][-1] == "done"


def test_a_prediction_from_its_creation_on(client: Any, cog_server: CogServer) -> None:
    created = client.predictions.create(model="owner/name", input=INPUT)
    assert (created.status, created.model, created.version) == ("starting", "owner/name", "hidden")
    assert created.input == INPUT
    got = wait_until(
        lambda: (found := client.predictions.get(created.id)).completed_at and found, 60, "its end"
    )
    assert (got.status, "".join(got.output), got.error) == ("succeeded", ANSWER, None)
    assert got.created_at <= got.started_at <= got.completed_at
    assert got.metrics["output_token_count"] > 0
    assert "Random seed used" in got.logs
    assert set(got.urls) == {"get", "cancel", "stream"}
    assert "".join(str(event) for event in got.stream()) == ANSWER, "once more, from the start"
    with pytest.raises(replicate.exceptions.ReplicateError, match="REPLICATE_LIST_TOKEN"):
        client.predictions.list()
    assert client_of(cog_server, LIST_TOKEN).predictions.list().results[0].id == created.id
    got.cancel()  # too late
    assert got.status == "succeeded"
    with pytest.raises(replicate.exceptions.ReplicateError, match="does not exist"):
        client.predictions.get("nothing")
    created = client.predictions.create(version="owner/name:abc", input=INPUT)
    assert (created.model, created.version) == ("owner/name", "abc")


def test_cancel(paced_cog_server: CogServer) -> None:
    client = client_of(paced_cog_server)
    for attempt in range(3):
        prediction = client.predictions.create(model="owner/name", input=ENDLESS)
        if attempt:
            next(iter(prediction.stream()))
        prediction.cancel()
        # The server answers a cancel within a second, whether the engine has stopped or not.
        wait_until(partial(reloaded_at_end, prediction), 60, "the end")
        assert prediction.status == "canceled"


def test_what_does_not_end_within_the_wait_is_starting(paced_cog_server: CogServer) -> None:
    client = client_of(paced_cog_server)
    prediction = client.predictions.create("any", ENDLESS, wait=1)
    assert prediction.status == "starting"

    def has_begun() -> bool:
        return bool(client.predictions.get(prediction.id).status == "processing")

    wait_until(has_begun, 60, "its first text")
    prediction.cancel()


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({}, "E1001 PromptRequired: prompt or messages is required"),
        ({"prompt": "Hi", "max_tokens": 0}, "input.max_tokens"),
        ({"prompt": "data:application/octet-stream;base64,/w=="}, "the file must be UTF-8 text"),
    ],
)
def test_inputs_that_are_refused(client: Any, inputs: dict[str, Any], why: str) -> None:
    with pytest.raises(replicate.exceptions.ReplicateError, match=why) as error:
        client.predictions.create(model="owner/name", input=inputs)
    assert error.value.status == 422


def test_a_prediction_that_fails(client: Any) -> None:
    with pytest.raises(replicate.exceptions.ModelError, match="E1003"):
        client.run("owner/name", input={"prompt": "Hi", "prompt_template": "no place"})
    with pytest.raises(RuntimeError, match="E1003"):
        list(client.stream("owner/name", input={"prompt": "Hi", "prompt_template": "no place"}))


@pytest.mark.parametrize("strategy", ["base64", "url"])
def test_a_file_is_its_text(client: Any, strategy: str) -> None:
    inputs = {**INPUT, "prompt": io.BytesIO(QUESTION.encode())}
    output = client.run("owner/name", input=inputs, file_encoding_strategy=strategy)
    assert "".join(output) == ANSWER


def test_a_file_is_kept_for_a_while(client: Any, cog_server: CogServer) -> None:
    file = io.BytesIO(QUESTION.encode())
    created = client.files.create(file, filename="a.txt", metadata={"customer": {"id": 7}})
    assert (created.name, created.content_type, created.metadata) == (
        "a.txt",
        "text/plain",
        {"customer": {"id": 7}},
    )
    assert client.files.get(created.id) == created
    with pytest.raises(replicate.exceptions.ReplicateError, match="REPLICATE_LIST_TOKEN"):
        client.files.list()
    assert created in client_of(cog_server, LIST_TOKEN).files.list()
    assert client.files.delete(created.id)
    with pytest.raises(replicate.exceptions.ReplicateError, match="does not exist"):
        client.files.get(created.id)


def test_the_model_and_its_version(client: Any) -> None:
    model = client.models.get("owner/name")
    assert (model.owner, model.name) == ("owner", "name")
    (version,) = model.versions.list().results
    assert "prompt" in version.openapi_schema["components"]["schemas"]["Input"]["properties"]
    assert model.latest_version == version
