"""Responses that are kept, where they cannot be, and an answer that is continued."""

from pathlib import Path
from typing import Any

import pytest

from cog_triton.api.openai.storage.journal import Journal
from cog_triton.client.responses import Response
from tests.unit.api.openai.support import CHUNKS, RESPONSES, Backend, ask, post
from tests.unit.test_generation import END, Client, encode, run, text


def asked(file: Path, fields: dict[str, Any], **settings: str) -> tuple[int, Any]:
    reply = post(Backend(*CHUNKS, STORE=str(file), **settings), RESPONSES, **fields)
    body = reply.json()
    return reply.status_code, body["error"]["code"] if reply.status_code > 200 else body["store"]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, (200, True), (200, False)),
        ({"store": True}, (200, True), (503, "E2107")),
        ({"store": False}, (200, False), (200, False)),
        ({"background": True}, (200, True), (503, "E2107")),
        ({"previous_response_id": "r"}, *[(400, "previous_response_not_found"), (503, "E2107")]),
    ],
)
def test_a_damaged_file_fails_only_what_needs_it(
    fields: dict[str, Any], good: Any, bad: Any, tmp_path: Path
) -> None:
    assert asked(tmp_path / "good", fields) == good
    (tmp_path / "bad").write_text("no journal, but a long text\n" * 300)
    assert asked(tmp_path / "bad", fields) == bad


def test_without_a_journal_nothing_is_found() -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        reply = ask(Backend(STORE="0"), method, f"{RESPONSES}/resp_1{path}")
        assert reply.status_code == 404, (method, path)


def test_too_many_in_the_background_are_refused(tmp_path: Path) -> None:
    refused = asked(tmp_path / "journal", {"background": True}, STORE_BACKGROUND="0")
    assert refused == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("stops", [(), ("seven",)])
def test_an_answer_is_continued_at_any_token(tokenizer: Any, stops: tuple[str, ...]) -> None:
    """Its text is the rest, also where a character or a stop sequence is cut."""
    ids = encode(tokenizer, "one é 日本 two 🙂 sev three")
    values: dict[str, Any] = {"stop_sequences": stops, "max_tokens": len(ids)}
    whole = text(run(tokenizer, Client(*(Response([i], 2, False) for i in ids), END), **values))
    for cut in range(1, len(ids)):
        first = run(tokenizer, Client(*(Response([i], 2, False) for i in ids[:cut]), END), **values)
        rest = Client(*(Response([i], 2, False) for i in ids[cut:]), END)
        continued = run(tokenizer, rest, continued_ids=tuple(ids[:cut]), **values)
        assert text(first[:-1]) + text(continued) == whole
        assert continued[-1].output_tokens == len(ids)


def test_a_stuck_journal_makes_the_server_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(STORE=str(tmp_path / "journal"))
    assert ask(backend, "GET", "/health/ready").status_code == 200
    monkeypatch.setattr(Journal, "problem", lambda _: "it has committed nothing for 20 s")
    reply = ask(backend, "GET", "/health/ready")
    assert reply.status_code == 503
    assert reply.json()["detail"] == "it has committed nothing for 20 s"


def test_a_conversation_with_items_that_cannot_be_read_is_continued(tmp_path: Path) -> None:
    file = str(tmp_path / "journal")
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "First"},
        {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a", "stderr": ""}]},
    ]
    first = post(Backend(*CHUNKS, STORE=file), RESPONSES, input=items).json()
    backend = Backend(*CHUNKS, STORE=file)
    reply = post(backend, RESPONSES, previous_response_id=first["id"], input="Then")
    assert reply.status_code == 200, reply.text
    said = [(message["role"], message["content"]) for message in backend.tokenizer.messages]
    assert said == [("user", "First"), ("assistant", "ab"), ("user", "Then")]
    listed = ask(Backend(STORE=file), "GET", f"{RESPONSES}/{first['id']}/input_items").json()[
        "data"
    ]
    outputs = [item["output"] for item in listed if item["type"] == "shell_call_output"]
    assert outputs == [items[1]["output"]]
