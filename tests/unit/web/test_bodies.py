"""Bodies: counted before anything is made of them, parsed beside the loop where they are large."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.web import bodies
from cog_triton.web.bodies import LARGE_BYTES, BadBody, off_loop, parse_json
from cog_triton.web.forms import FORM_HEADER_BYTES, FORM_PARTS, FORM_TEXT_BYTES, Part, read_form

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(alphabet='a"\\,[{é'),
    lambda values: st.lists(values) | st.dictionaries(st.text(alphabet='a"\\,[{é'), values),
    max_leaves=25,
)
FORM = "multipart/form-data; boundary=x"
HEAD = b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n'
END = b"\r\n--x--\r\n"


@given(JSON, st.booleans(), st.integers(1, 9))
def test_what_is_within_the_bounds_is_parsed(value: Any, ascii_only: bool, piece: int) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SCANNED_BYTES", piece)
        assert parse_json(raw) == value


def values_of(value: Any) -> list[Any]:
    """A JSON value and all that are in it, names of fields among them."""
    found = [value]
    if isinstance(value, list):
        found += [inner for each in value for inner in values_of(each)]
    if isinstance(value, dict):
        found += [*value, *(inner for each in value.values() for inner in values_of(each))]
    return found


@given(JSON, st.integers(1, 9))
def test_the_counts_are_those_of_the_values(value: Any, piece: int) -> None:
    raw = json.dumps(value).encode()
    counts = bodies._JsonCounts()
    for first in range(0, len(raw), piece):
        counts.add(raw[first : first + piece])
    values = values_of(value)
    assert counts._quotes // 2 == sum(isinstance(each, str) for each in values)
    assert counts._containers == sum(isinstance(each, list | dict) for each in values)
    assert (counts._depth, counts._in_string) == (0, False)


@pytest.mark.parametrize(
    ("raw", "limit"),
    [
        pytest.param(b"[" + b"[]," * 70_000 + b"0]", "65536 objects and lists", id="empty lists"),
        pytest.param(b"[" + b"{}," * 70_000 + b"0]", "65536 objects and lists", id="empty objects"),
        pytest.param(b"[" + b"0," * 2_000_000 + b"0]", "1048576 values", id="numbers"),
        pytest.param(b"[" + b'"",' * 140_000 + b"0]", "131072 strings", id="empty strings"),
        pytest.param(b'["\\\\",' + b'"",' * 140_000 + b"0]", "131072 strings", id="escapes"),
        pytest.param(b"[" * 129 + b"]" * 129, "128 levels of nesting", id="levels"),
        pytest.param(b'{"":' * 129 + b"0" + b"}" * 129, "128 levels of nesting", id="objects"),
        pytest.param(b"]" * 129 + b"[" * 100, "an unmatched closing bracket", id="brackets"),
    ],
)
def test_too_much_is_refused_before_anything_is_made(
    raw: bytes, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "orjson", None)
    with pytest.raises(BadBody, match=limit):
        parse_json(raw)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_encodings_of_unicode(encoding: str) -> None:
    assert parse_json('{"a": "é,∢"}'.encode(encoding)) == {"a": "é,∢"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'"\\ud800"',
        b'"\xff"',
        b"NaN",
        b"1e999",
        b"1" * 5000,
        b'"\xff\xfe',
        b"\xfe\xff\xd8",
    ],
)
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(BadBody, match="must be JSON"):
        parse_json(raw)


@pytest.mark.parametrize(("size", "beside"), [(LARGE_BYTES - 1, False), (LARGE_BYTES, True)])
def test_large_bodies_are_parsed_beside_the_loop(size: int, beside: bool) -> None:
    thread = asyncio.run(off_loop(size, threading.current_thread))
    assert (thread is not threading.current_thread()) == beside


def read(body: bytes, kind: str = FORM, piece: int = 1 << 16) -> dict[str, tuple[Part, bytes]]:
    """The parts of a form that comes in pieces, with their contents."""

    async def pieces() -> AsyncIterator[bytes]:
        for first in range(0, len(body), piece):
            yield body[first : first + piece]

    async def parts() -> dict[str, tuple[Part, bytes]]:
        async with read_form(pieces(), kind) as found:
            return {name: (part, part.file.read()) for name, part in found.items()}

    return asyncio.run(parts())


@given(st.binary().filter(lambda content: b"\r\n--x" not in content), st.integers(1, 50))
def test_a_form_is_read_however_it_is_split(content: bytes, piece: int) -> None:
    other = (
        b'--x\r\ncontent-disposition: form-data; name="\xc3\xa9"\r\nContent-Type: a/b;c=d\r\n\r\n'
    )
    found = read(HEAD + content + b"\r\n" + other + b"text" + END + b"\n\n", piece=piece)
    assert list(found) == ["é", "a"] or list(found) == ["a", "é"]
    part, read_content = found["a"]
    assert (part.filename, part.size, read_content) == ("b", len(content), content)
    assert (found["é"][0].filename, found["é"][0].content_type) == (None, "a/b")


@pytest.mark.parametrize("charset", ["utf-7", "punycode", "idna", "unknown", "rot13", "\0"])
def test_names_are_in_utf_8_whatever_the_form_says(charset: str) -> None:
    body = HEAD.replace(b'"b"', b'"+2AA-\xff.jsonl"') + b"x" + END
    part, _ = read(body, f"{FORM}; charset={charset}")["a"]
    assert part.filename == "+2AA-\ufffd.jsonl"


PARTS = HEAD + b"\r\n"
HEADERS = b"--x\r\n" + b"a: b\r\n" * 3000


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param(PARTS * (FORM_PARTS + 1) + END, f"at most {FORM_PARTS} parts", id="parts"),
        pytest.param(HEADERS, "header", id="headers"),
        pytest.param(b"--x\r\na: " + b"b" * 2 * FORM_HEADER_BYTES, "header", id="a long header"),
        pytest.param(b"--x\r\n" + b"b" * 2 * FORM_HEADER_BYTES, "header", id="a long name"),
        pytest.param(HEAD + b"x", "ends before its last boundary", id="no end"),
        pytest.param(b"\n" * 1000, "ends before its last boundary", id="line feeds"),
        pytest.param(b"text", "must be multipart", id="a text"),
        pytest.param(b"--x\r\nA: b\r\n\r\n" + END, "must have a name", id="no name"),
    ],
)
@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_forms_that_are_refused(body: bytes, why: str, piece: int) -> None:
    with pytest.raises(BadBody, match=why):
        read(body, piece=piece)


@pytest.mark.parametrize(
    "kind", ["", "multipart/form-data", "text/plain; boundary=x", "multipart/mixed"]
)
def test_what_is_no_form(kind: str) -> None:
    with pytest.raises(BadBody, match="must be multipart/form-data, with a boundary"):
        read(HEAD + END, kind)


@pytest.mark.parametrize("content", [b"x" * (FORM_TEXT_BYTES + 1), b"\xff"], ids=["long", "bytes"])
def test_a_field_is_a_short_text(content: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD + content + END

    async def text() -> str:
        async with read_form(pieces(), FORM) as found:
            return found["a"].text()

    with pytest.raises(BadBody, match="in 'a'"):
        asyncio.run(text())
