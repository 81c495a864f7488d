"""No body stops the requests of others: the event loop of each port is never taken for long.

Times are of the processor, not of the clock, so that a busy machine changes them little. The lock of
Python's threads matters as well as the loop: so all threads together are bounded too.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
import pytest

from tests.support import pass_over_old_objects
from tests.unit.api.ports import CogPort, OpenAIPort, Port

LOOP_SECONDS = 0.25  # 0.1 on a machine that does nothing else
ALL_SECONDS = 3.0  # what was refused took up to 10
BYTES = 15_000_000
# Of what is read to its end: so much shows whether the work grows faster than the text.
READ_BYTES = 5_000_000
MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MILLION = 2**20 - 100
FORM = "multipart/form-data; boundary=x"
HEAD = b'--x\r\nContent-Disposition: form-data; name="NAME"; filename="a"\r\n\r\n'
END = b"\r\n--x--\r\n"


def repeated(text: bytes, size: int = BYTES) -> bytes:
    return text * (size // len(text))


def text_of(character: bytes) -> bytes:
    return repeated(character, READ_BYTES)


def names(count: int) -> bytes:
    """An object of so many names, which differ."""
    return b'{"' + b'":0,"'.join(map(b"%d".__mod__, range(count))) + b'":0}'


def properties() -> dict[str, Any]:
    """A schema of many properties."""
    return {"type": "object", "properties": {f"p{n}": {} for n in range(60_000)}}


def completion(fields: Callable[[], dict[str, Any]]) -> tuple[str, Callable[[], dict[str, Any]]]:
    return "/v1/completions", lambda: {"prompt": "x", **fields()}


# Shapes that no route may take for long, with a place for them in a body.
SHAPES: dict[str, Callable[[], bytes]] = {
    "deep lists": lambda: repeated(b"["),
    "deep objects": lambda: repeated(b'{"":'),
    "brackets that close": lambda: repeated(b"]"),
    "empty lists": lambda: b"[" + repeated(b"[],") + b"0]",
    "empty objects": lambda: b"[" + repeated(b"{},") + b"0]",
    "empty strings": lambda: b"[" + repeated(b'"",') + b"0]",
    "numbers": lambda: b"[" + repeated(b"0,") + b"0]",
    "as many numbers as may be": lambda: b"[" + b"7," * MILLION + b"0]",
    "as many nulls as may be": lambda: b"[" + b"null," * MILLION + b"0]",
    "as many strings as may be": lambda: b"[" + b'"a",' * 130_000 + b"0]",
    "as many lists as may be": lambda: b"[" + b"[[]]," * 32_000 + b"0]",
    "many names": lambda: names(300_000),
    "as many names as may be": lambda: names(130_000),
    "a long number": lambda: text_of(b"1"),
    "a long fraction": lambda: b"1." + text_of(b"1"),
    "long numbers": lambda: b"[" + text_of(b"7" * 300 + b",") + b"0]",
    "line feeds": lambda: b'"' + text_of(b"\\n") + b'"',
    "backslashes": lambda: b'"' + text_of(b"\\\\") + b'"',
    "an open string": lambda: b'"' + text_of(b'\\"'),
    "escapes": lambda: b'"' + text_of(b"\\u0416") + b'"',
    "surrogate pairs": lambda: b'"' + text_of(b"\\ud83d\\ude00") + b'"',
    "spaces": lambda: b"[" + text_of(b" \n") + b"]",
    "UTF-16": lambda: ("[" + "0," * (BYTES // 4) + "0]").encode("utf-16"),
}
OPENAI_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
    "/v1/batches": "metadata",
}
COGS_FIELDS = {
    "/predictions": "input",
    "/trainings": "webhook_events_filter",
    "/v1/predictions": "input",
    "/v1/models/a/b/predictions": "webhook",
    "/v1/deployments/a/b/predictions": "version",
}
# Fields of OpenAI's API that are long in a way of their own: a path, and the body.
FIELDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "messages": ("/v1/chat/completions", lambda: {"messages": [MESSAGE] * 4096}),
    "tools": ("/v1/chat/completions", lambda: {"messages": [MESSAGE], "tools": [TOOL] * 4096}),
    "a schema": (
        "/v1/chat/completions",
        lambda: {"messages": [MESSAGE], "guided_json": properties()},
    ),
    "a tool's schema": (
        "/v1/chat/completions",
        lambda: {
            "messages": [MESSAGE],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": properties()}}],
            "tool_choice": "required",
        },
    ),
    "a regex": completion(lambda: {"guided_regex": r"\d[a-z]|" * 16_000}),
    "choices": completion(lambda: {"guided_choice": ["(" * 5] * 60_000}),
    "stops": completion(lambda: {"stop": ["a"] * 130_000}),
    "stops that are none": completion(lambda: {"stop": [None] * MILLION}),
    "stop tokens that are none": completion(lambda: {"stop_token_ids": [None] * MILLION}),
    "bad words that are none": completion(lambda: {"bad_words": [0] * MILLION}),
    "biases": completion(lambda: {"logit_bias": dict.fromkeys(map(str, range(130_000)), 1)}),
    "allowed tokens": completion(lambda: {"allowed_token_ids": [7] * MILLION}),
    "ids": completion(lambda: {"prompt": [7] * MILLION, "n": 128}),
    "ids with echo": completion(lambda: {"prompt": [7] * MILLION, "echo": True, "logprobs": 1}),
    "prompts": completion(lambda: {"prompt": ["x" * 500] * 1024}),
    "items": ("/v1/responses", lambda: {"input": [MESSAGE] * 4096}),
    "flat tools": (
        "/v1/responses",
        lambda: {
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": {}}] * 4096,
        },
    ),
    "metadata that is none": (
        "/v1/responses",
        lambda: {"input": "x", "metadata": dict.fromkeys(map(str, range(130_000)), 1)},
    ),
    "included": ("/v1/responses", lambda: {"input": "x", "include": [None] * MILLION}),
    "sequences": (
        "/v1/messages",
        lambda: {"messages": [MESSAGE], "max_tokens": 1, "stop_sequences": [None] * MILLION},
    ),
    "names of tokens": (
        "/tokenize",
        lambda: {"prompt": "x" * 500_000, "return_token_strs": True},
    ),
    "tokens": ("/detokenize", lambda: {"tokens": [65] * MILLION}),
    "unknown fields": (
        "/v1/chat/completions",
        lambda: {"messages": [MESSAGE], **{f"field{n}": n for n in range(120_000)}},
    ),
}
FORMS: dict[str, Callable[[], bytes]] = {
    "line feeds": lambda: text_of(b"\n"),
    "line feeds in a file": lambda: HEAD + text_of(b"\n") + END,
    "carriage returns in a file": lambda: HEAD + text_of(b"\r\n-") + END,
    "half boundaries in a file": lambda: HEAD + text_of(b"\r\n--") + END,
    "parts": lambda: text_of(HEAD + b"\r\n"),
    "headers": lambda: b"--x\r\n" + text_of(b"a: b\r\n"),
    "a header": lambda: b"--x\r\na: " + text_of(b"b"),
    "options": lambda: b"--x\r\ncontent-disposition: " + text_of(b';a="'),
    "what follows": lambda: HEAD + END + text_of(b"\n"),
}


@pytest.fixture(scope="module", autouse=True)
def _pass_over_old_objects() -> None:
    pass_over_old_objects()


@contextlib.contextmanager
def uninterrupted(port: Port, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a callback of the port's loop, or all threads together, take too long."""
    longest = 0.0
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        nonlocal longest
        begun = time.thread_time()
        run(handle)
        if asyncio.get_running_loop() is port.loop:
            longest = max(longest, time.thread_time() - begun)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    begun = time.process_time()
    yield
    took = time.process_time() - begun
    assert longest > 0.0, "the loop did nothing"
    assert longest < LOOP_SECONDS
    assert took < ALL_SECONDS


def shapes_of(first: str, stored: str, paths: Iterable[str]) -> list[Any]:
    """Every shape at every path; rare where another path already shows what a port does with the shape.

    Paths whose objects are stored check them once more.
    """
    cases = []
    for path, shape in itertools.product(paths, SHAPES):
        is_common = path == first or (path == stored and shape == "as many names as may be")
        marks = () if is_common else (pytest.mark.rare,)
        cases.append(pytest.param(path, shape, id=f"{path}, {shape}", marks=marks))
    return cases


JSON_TYPE = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("path", "shape"), shapes_of("/v1/chat/completions", "/v1/batches", OPENAI_FIELDS)
)
def test_shapes_at_the_openai_port(
    openai_port: OpenAIPort, path: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {"/v1/messages": b'"max_tokens":1,'}.get(path, b"")
    body = b'{%b"%b":%b}' % (needed, OPENAI_FIELDS[path].encode(), SHAPES[shape]())
    with uninterrupted(openai_port, monkeypatch):
        reply = openai_port.ask("POST", path, body, JSON_TYPE)
    assert reply.status_code < 500, reply.text


@pytest.mark.parametrize(
    ("path", "shape"), shapes_of("/predictions", "/v1/predictions", COGS_FIELDS)
)
def test_shapes_at_cogs_port(
    cog_port: CogPort, path: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"%b":%b}' % (COGS_FIELDS[path].encode(), SHAPES[shape]())
    with uninterrupted(cog_port, monkeypatch):
        reply = cog_port.ask("POST", path, body, JSON_TYPE)
    assert reply.status_code < 500, reply.text


@pytest.mark.parametrize("field", FIELDS)
def test_long_fields_at_the_openai_port(
    openai_port: OpenAIPort, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fields = FIELDS[field]
    body = orjson.dumps(fields())
    with uninterrupted(openai_port, monkeypatch):
        reply = openai_port.ask("POST", path, body, JSON_TYPE)
    assert reply.status_code < 500, reply.text


@pytest.mark.parametrize("form", FORMS)
def test_forms_at_both_ports(
    openai_port: OpenAIPort, cog_port: CogPort, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Content-Type": FORM}
    for port, name in ((cog_port, b"content"), (openai_port, b"file")):
        body = FORMS[form]().replace(b"NAME", name)
        with uninterrupted(port, monkeypatch), contextlib.suppress(ConnectionError):
            assert port.ask("POST", "/v1/files", body, headers).status_code < 500
        monkeypatch.undo()
