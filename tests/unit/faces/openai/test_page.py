"""The chat page's bytes and headers; tests/integration/test_chat_page.py has it in a browser."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
import serve_openai

from cog_triton.faces.openai import command
from cog_triton.faces.openai.app import PAGE, PAGE_HEADERS, page_policy
from cog_triton.settings import read_settings
from tests.unit.faces.openai.support import Backend, ask


def test_it_is_the_root() -> None:
    reply = ask(Backend(), "GET", "/")
    assert reply.status_code == 200
    assert reply.text == PAGE
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert {name: reply.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS


def test_it_can_be_turned_off() -> None:
    backend = Backend(CHAT_PAGE="false")
    assert ask(backend, "GET", "/").status_code == 404
    assert ask(backend, "GET", "/health/live").status_code == 200


def test_its_policy_names_its_script_and_style_by_their_hashes() -> None:
    digest = base64.b64encode(hashlib.sha256(b"\nlet a;\n").digest()).decode()
    page = "<style>b {}</style><body><script>\nlet a;\n</script>"
    assert f"script-src 'sha256-{digest}';" in page_policy(page)
    with pytest.raises(ValueError, match="unpack"):
        page_policy(page + "<script></script>")


def test_it_loads_nothing_and_makes_no_html_of_texts() -> None:
    without_icon = re.sub(r'<link rel="icon" href="data:[^"]*">', "", PAGE)
    assert not re.findall(r"<link|\b(?:src|href)=\"|@import|[: ]url\(|\bimport\(", without_icon)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", PAGE)
    assert not re.findall(r"\son\w+=\"|\sstyle=\"", PAGE)
    assert len(PAGE) < 60_000


def test_the_commands_flag_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_PAGE", "true")
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    monkeypatch.setattr(serve_openai, "end_at_once_on_signals", lambda: None)
    monkeypatch.setattr(command, "run", lambda *_, **__: int(read_settings().chat_page))
    assert serve_openai.main([]) == 1
    assert serve_openai.main(["--no-page"]) == 0
