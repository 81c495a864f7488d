"""The chat page's bytes and headers; tests/integration/test_chat_page.py has it in a browser."""

import re

import pytest

from cog_triton import ROOT, cli
from cog_triton.api.openai import server
from cog_triton.api.openai.pages import (
    DOCS_PATH,
    FORMULAS_PATH,
    PAGE,
    PAGE_HEADERS,
    SCRIPT_PATH,
    STYLE_PATH,
    integrity,
)
from cog_triton.cli import serve
from cog_triton.settings import read_settings
from tests.unit.api.openai.support import Backend, ask

DEMO = ROOT / "cog_triton" / "demo"


def test_it_is_the_root() -> None:
    reply = ask(Backend(), "GET", "/")
    assert (reply.status_code, reply.text) == (200, PAGE)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert PAGE_HEADERS.keys() <= {name.title() for name in reply.headers}
    assert ask(Backend(CHAT_PAGE="false"), "GET", "/").status_code == 404


def test_the_reference_loads_its_own_files_alone() -> None:
    with_key = Backend(OPENAI_API_KEYS="sk-a")
    page = ask(with_key, "GET", DOCS_PATH)
    assert page.status_code == 200
    assert "script-src 'self' 'sha256-" in page.headers["content-security-policy"]
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert set(addresses) == {"data:,", SCRIPT_PATH[1:], STYLE_PATH[1:]}
    for path, kind in ((SCRIPT_PATH, "text/javascript"), (STYLE_PATH, "text/css")):
        reply = ask(with_key, "GET", path)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(kind)
        assert len(reply.content) > 100_000


def test_the_library_of_formulas_is_the_one_that_the_page_names() -> None:
    reply = ask(Backend(OPENAI_API_KEYS="sk-a"), "GET", FORMULAS_PATH)
    assert reply.headers["content-type"].startswith("text/javascript")
    assert f'integrity="{integrity(reply.content)}"' in PAGE
    policy = PAGE_HEADERS["Content-Security-Policy"]
    (scripts,) = re.findall("script-src ([^;]+)", policy)
    assert f"'{integrity(reply.content)}'" in scripts
    assert "self" not in scripts
    assert "unsafe" not in policy
    assert ask(Backend(CHAT_PAGE="false"), "GET", FORMULAS_PATH).status_code == 404


@pytest.mark.parametrize(("directory", "toy"), [(str(DEMO), True), ("/nowhere", None)])
def test_the_demo_model_is_called_a_toy(directory: str, toy: bool | None) -> None:
    cards = ask(Backend(TOKENIZER=directory), "GET", "/v1/models").json()["data"]
    assert [card.get("toy") for card in cards] == [toy] * len(cards)


def test_the_commands_flag_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_PAGE", "true")
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    monkeypatch.setattr(serve, "end_at_once_on_signals", lambda: None)
    monkeypatch.setattr(server, "run", lambda *_, **__: int(read_settings().chat_page))
    assert cli.main(["openai"]) == 1
    assert cli.main(["openai", "--no-page"]) == 0
