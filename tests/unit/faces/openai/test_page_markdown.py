"""What the chat page makes of Markdown, by its own script in headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cog_triton.faces.openai.app import PAGE
from tests.browser import HOSTILE, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Without a server: the functions of its script are all that is used."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(PAGE)
        yield page


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("One\ntwo\n\nthree", "<p>One\ntwo</p><p>three</p>"),
        ("## A `b` #\ntext", "<h4>A <code>b</code></h4><p>text</p>"),
        (
            "**a** __b__ *c* _d_ ***e*** ~~f~~",
            "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em> "
            "<strong><em>e</em></strong> <s>f</s></p>",
        ),
        ("snake_case_name, 2 * 3 * 4, a*, \\*b\\*", "<p>snake_case_name, 2 * 3 * 4, a*, *b*</p>"),
        ("``a ` b`` and `", "<p><code>a ` b</code> and `</p>"),
        (
            "- a\n- b\n  1. c\n\n     d\n- e",
            '<ul><li><p>a</p></li><li><p>b</p><ol start="1"><li><p>c</p>'
            "<p>d</p></li></ol></li><li><p>e</p></li></ul>",
        ),
        ("3) a\n- b", '<ol start="3"><li><p>a</p></li></ol><ul><li><p>b</p></li></ul>'),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        (
            "a | b\n--- | --:\n`1` | 2",
            '<div class="table"><table><thead><tr><th class="">a</th>'
            '<th class="right">b</th></tr></thead><tbody><tr><td class=""><code>1</code></td>'
            '<td class="right">2</td></tr></tbody></table></div>',
        ),
        ('[a *b*](https://x.org/c_(d) "e")', "<p>{https://x.org/c_(d)}a <em>b</em></a></p>"),
        (
            "(<https://y.org/_f_>, https://z.org/*.)",
            "<p>({https://y.org/_f_}https://y.org/_f_</a>, "
            "{https://z.org/}https://z.org/</a>*.)</p>",
        ),
        ("[a](javascript:b) [c](/d) ![e](data:f)", "<p>[a](javascript:b) [c](/d) ![e](data:f)</p>"),
        ("<b>a</b> &amp; &lt;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp; &amp;lt;</p>"),
    ],
)
def test_markdown(page: Page, text: str, html: str) -> None:
    """Written out; the attributes that every link has are left out."""
    show = (
        "text => { const node = element('div'); showMarkdown(node, text); return node.innerHTML; }"
    )
    shown = page.evaluate(show, text)
    link = r'<a href="([^"]*)" target="_blank" rel="noopener noreferrer">'
    assert re.sub(link, r"{\1}", shown) == html


def test_code(page: Page) -> None:
    """It is shown while it comes, and ends where its own fence closes it."""
    show = """text => { const node = element('div'); showMarkdown(node, text);
        return [...node.children].map((n) => n.querySelector('code')?.textContent ?? n.textContent); }"""
    for text, parts in (
        ("```py\na\n\n  b\n```\nc", ["a\n\n  b", "c"]),
        ("a\n```\nb\n# c", ["a", "b\n# c"]),
        ("````\n```\na\n````", ["```\na"]),
        ("~~~\n```\n~~~\n", ["```"]),
        ("```", [""]),
    ):
        assert page.evaluate(show, text) == parts, text


def test_a_text_that_grows_is_shown_as_it_is_at_once(page: Page) -> None:
    grown = """text => {
        const [whole, parts] = [element('div'), element('div')];
        showMarkdown(whole, text);
        for (let end = 0; end <= text.length; end += 1) showMarkdown(parts, text.slice(0, end));
        return [whole.innerHTML, parts.innerHTML];
    }"""
    text = f"# A\n\n- b\n  - c\n\n{HOSTILE}\n> **d**\n\n1. e\n"
    whole, parts = page.evaluate(grown, text)
    assert parts == whole


def test_no_text_takes_long_to_show(page: Page) -> None:
    """Each would be minutes for a pattern that tries again and again."""
    show = "text => showMarkdown(element('div'), text)"
    for piece in (
        "`",
        "**a ",
        "*a",
        "_",
        "[",
        "[a](",
        "> ",
        "- ",
        "|",
        "\\",
        "https://",
        "~~a",
        "#",
    ):
        page.evaluate(show, piece * 20_000)
        page.evaluate(show, f"{piece}\n" * 5_000)
