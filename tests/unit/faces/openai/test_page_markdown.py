"""What the chat page makes of Markdown, by its own script in headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cog_triton.faces.openai.pages import PAGE
from tests.browser import HOSTILE, chromium
from tests.support import load_cases

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Without a server: the functions of its script are all that is used."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(PAGE)
        yield page


TABLES = load_cases(__file__, "markdown.yaml")


@pytest.mark.parametrize(("text", "html"), TABLES["html"])
def test_markdown(page: Page, text: str, html: str) -> None:
    show = (
        "text => { const node = element('div'); showMarkdown(node, text); return node.innerHTML; }"
    )
    shown = page.evaluate(show, text)
    link = r'<a href="([^"]*)" target="_blank" rel="noopener noreferrer">'
    assert re.sub(link, r"{\1}", shown) == html


@pytest.mark.parametrize(("text", "parts"), TABLES["code"])
def test_code(page: Page, text: str, parts: list[str]) -> None:
    """It is shown while it comes, and ends where its own fence closes it."""
    show = """text => { const node = element('div'); showMarkdown(node, text);
        return [...node.children].map((n) => n.querySelector('code')?.textContent ?? n.textContent); }"""
    assert page.evaluate(show, text) == parts


def test_a_text_that_grows_is_shown_as_it_is_at_once(page: Page) -> None:
    grown = """text => {
        const [whole, parts] = [element('div'), element('div')];
        showMarkdown(whole, text);
        for (let end = 0; end <= text.length; end += 1) showMarkdown(parts, text.slice(0, end));
        return [whole.innerHTML, parts.innerHTML];
    }"""
    whole, parts = page.evaluate(grown, f"# A\n\n- b\n  - c\n\n{HOSTILE}\n> **d**\n\n1. e\n")
    assert parts == whole


def test_no_text_takes_long_to_show(page: Page) -> None:
    """Each would be minutes for a pattern that tries again and again."""
    show = "text => showMarkdown(element('div'), text)"
    for piece in (
        *("`", "**a ", "*a", "_", "[", "[a](", "> "),
        *("- ", "|", "\\", "https://", "~~a", "#"),
    ):
        page.evaluate(show, piece * 20_000)
        page.evaluate(show, f"{piece}\n" * 5_000)
