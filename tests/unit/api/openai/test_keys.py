"""API keys and what each may have, without a server."""

import hashlib
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.keys import RELOAD_SECONDS, Key, Keys, digest_of, parsed_keys
from cog_triton.api.openai.quotas import Quotas
from cog_triton.errors import ConfigurationError
from tests.unit.api.openai.support import CHUNKS, TEXT, Backend, application, served

HASH = hashlib.sha256(b"sk-a").hexdigest()


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_has_names_keys_or_hashes_and_limits() -> None:
    lines = f"a sha256:{HASH} weight=2 max_running=3\nb.c sk-b tokens_per_minute=1e4\n"
    assert parsed_keys(f"# team keys\n\n{lines}", "f") == (
        Key("a", digest_of("sk-a"), 2.0, max_running=3.0),
        Key("b.c", digest_of("sk-b"), tokens_per_minute=10_000.0),
    )


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("sk-secret", id="no name"),
        pytest.param("a/b sk-secret", id="slash in a name"),
        pytest.param("a sk-secret weight=0", id="weight of 0"),
        pytest.param("a sk-secret weight=nan", id="weight that is no number"),
        pytest.param("a sk-secret weight=1e12", id="too large a weight"),
        pytest.param("a sk-secret sk-secret", id="two keys"),
        pytest.param("a sk-secret name=b", id="unknown limit"),
    ],
)
def test_a_line_that_is_wrong_is_named_without_its_key(line: str) -> None:
    with pytest.raises(ConfigurationError, match="f, line 2: a line is NAME KEY ") as raised:
        parsed_keys(f"# x\n{line}", "f")
    assert "sk-secret" not in str(raised.value)


def test_keys_of_the_environment_are_named_after_their_hashes() -> None:
    keys = Keys(f"sk-a, sk-b\nsha256:{hashlib.sha256(b'sk-c').hexdigest()}", None)
    assert keys.find("sk-a") == Key(f"key-{HASH[:8]}", digest_of("sk-a"))
    assert keys.find("sk-b")
    assert keys.find("sk-c")
    assert keys.find(f"sha256:{HASH}") is None  # who reads the hash cannot ask with it


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(None, "OPENAI_API_KEYS_FILE: .*No such", id="no file"),
        pytest.param("# none\n", "no API keys configured", id="comments only"),
        pytest.param("a sk-a\na sk-b\n", "a appears twice", id="a name twice"),
    ],
)
def test_what_makes_no_keys_is_refused(text: str | None, problem: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        Keys("", tmp_path / "keys")


def test_a_file_that_changes_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", file)
        clock.now += RELOAD_SECONDS

    write("a sk-a")
    keys = Keys("", file, clock=clock)
    write("a sk-b weight=3")
    assert keys.find("sk-a") is None
    assert keys.find("sk-b") == Key("a", digest_of("sk-b"), 3.0)
    write("a sk-c weight=much")
    assert keys.find("sk-c") is None
    assert keys.find("sk-b")
    assert "keeping the previous keys" in caplog.text
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(("processes", "most"), [(1, 2), (4, 6)])
def test_so_many_requests_at_once(processes: int, most: int) -> None:
    """Of several processes, each has its part of the limits."""
    quotas = Quotas(processes)
    key = Key("a", b"", max_running=most, requests_per_minute=10 * processes)
    assert (b"x-ratelimit-limit-requests", b"10") in quotas.headers(key)
    quotas.enter(key)
    quotas.enter(key)
    with pytest.raises(ApiError, match="the limit is 2 running requests") as refused:
        quotas.enter(key)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    quotas.enter(Key("b", b"", max_running=1))
    quotas.leave(key, 0)
    quotas.enter(key)


def test_so_many_requests_and_tokens_a_minute() -> None:
    clock = Clock()
    quotas, key = Quotas(clock=clock), Key("a", b"", requests_per_minute=6, tokens_per_minute=60)
    for _ in range(3):
        quotas.enter(key)
    quotas.leave(key, 80)
    assert dict(quotas.headers(key)) == {
        b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"3",
        b"x-ratelimit-reset-requests": b"30.000s",
        b"x-ratelimit-limit-tokens": b"60",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"80.000s",
    }
    with pytest.raises(
        ApiError, match="the limit is 60 tokens per minute; try again in 21 s"
    ) as at:
        quotas.enter(key)
    assert (at.value.type, at.value.headers) == ("tokens", {"Retry-After": "21"})
    clock.now += 21
    for _ in range(5):  # two came in that time
        quotas.enter(key)
    with pytest.raises(ApiError, match="6 requests per minute"):
        quotas.enter(key)
    assert quotas.headers(Key("b", b"")) == []


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_with_one_request_at_a_time_may_ask_again_at_the_last_byte(
    stream: bool, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one sk-one max_running=1\n")
    keys.chmod(0o600)
    app = application(served(Backend(*CHUNKS, OPENAI_API_KEYS_FILE=str(keys))))
    headers = {"Authorization": "Bearer sk-one"}
    statuses: list[int] = []

    async def ask(app: ASGIApp, **fields: Any) -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "x", **fields}
            reply = await client.post(TEXT, headers=headers, json=body)
        statuses.append(reply.status_code)

    async def ask_again_at_the_end(scope: Scope, receive: Receive, send: Send) -> None:
        async def ask_and_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await ask(app)
            await send(message)

        await app(scope, receive, ask_and_send)

    await ask(ask_again_at_the_end, stream=stream)
    assert statuses == [200, 200]
