"""What the chat page makes of Markdown, by its own script in headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cog_triton.api.openai.pages import FORMULAS_FILE, PAGE
from tests.browser import HOSTILE, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Browser) -> Page:
    """Without a server: the functions of its script are all that is used."""
    page = browser.new_page()
    page.set_content(PAGE)
    return page


@pytest.mark.parametrize(
    ("text", "html"),
    [
        pytest.param("One\ntwo\n\nthree", "<p>One\ntwo</p><p>three</p>", id="paragraphs"),
        pytest.param("## A `b` #\ntext", "<h4>A <code>b</code></h4><p>text</p>", id="heading"),
        pytest.param(
            "**a** __b__ *c* _d_ ***e*** ~~f~~",
            (
                "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em> <strong><em>"
                "e</em></strong> <s>f</s></p>"
            ),
            id="emphasis",
        ),
        pytest.param(
            r"snake_case_name, 2 * 3 * 4, a*, \*b\*",
            "<p>snake_case_name, 2 * 3 * 4, a*, *b*</p>",
            id="marks that are text",
        ),
        pytest.param("``a ` b`` and `", "<p><code>a ` b</code> and `</p>", id="code in a line"),
        pytest.param(
            "- a\n- b\n  1. c\n\n     d\n- e",
            (
                '<ul><li><p>a</p></li><li><p>b</p><ol start="1"><li><p>c</p><p>d</p></li></ol>'
                "</li><li><p>e</p></li></ul>"
            ),
            id="lists in lists",
        ),
        pytest.param(
            "3) a\n- b",
            '<ol start="3"><li><p>a</p></li></ol><ul><li><p>b</p></li></ul>',
            id="lists of two kinds",
        ),
        pytest.param(
            "> a\n> > b",
            "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
            id="quotation in a quotation",
        ),
        pytest.param("a\n***\nb", "<p>a</p><hr><p>b</p>", id="rule"),
        pytest.param(
            "a | b\n--- | --:\n`1` | 2",
            (
                '<div class="table"><table><thead><tr><th class="">a</th><th class="right">'
                'b</th></tr></thead><tbody><tr><td class=""><code>1</code></td>'
                '<td class="right">2</td></tr></tbody></table></div>'
            ),
            id="table",
        ),
        pytest.param(
            '[a *b*](https://x.org/c_(d) "e")',
            "<p>{https://x.org/c_(d)}a <em>b</em></a></p>",
            id="link",
        ),
        pytest.param(
            "(<https://y.org/_f_>, https://z.org/*.)",
            (
                "<p>({https://y.org/_f_}https://y.org/_f_</a>"
                ", {https://z.org/}https://z.org/</a>*.)</p>"
            ),
            id="bare links",
        ),
        pytest.param(
            "[a](javascript:b) [c](/d) ![e](data:f)",
            "<p>[a](javascript:b) [c](/d) ![e](data:f)</p>",
            id="links to what is no web page",
        ),
        pytest.param(
            "<b>a</b> &amp; &lt;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp; &amp;lt;</p>", id="HTML"
        ),
    ],
)
def test_markdown(page: Page, text: str, html: str) -> None:
    """``{address}`` in the expected HTML is the tag of a link to that address."""
    show = (
        "text => { const node = element('div'); showMarkdown(node, text); return node.innerHTML; }"
    )
    shown = page.evaluate(show, text)
    link = r'<a href="([^"]*)" target="_blank" rel="noopener noreferrer">'
    assert re.sub(link, r"{\1}", shown) == html


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("```py\na\n\n  b\n```\nc", ["a\n\n  b", "c"], id="block with a language"),
        pytest.param("a\n```\nb\n# c", ["a", "b\n# c"], id="block without an end"),
        pytest.param("````\n```\na\n````", ["```\na"], id="fence in a longer fence"),
        pytest.param("~~~\n```\n~~~\n", ["```"], id="fence of another kind"),
    ],
)
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
        *("$", "$$", "$a", "\\(", "\\[", "$a $"),
    ):
        page.evaluate(show, piece * 8_000)
        page.evaluate(show, f"{piece}\n" * 2_000)


# Formulas


@pytest.fixture(scope="module")
def page_with_formulas(browser: Browser) -> Page:
    page = browser.new_page()
    page.set_content(PAGE)
    page.add_script_tag(content=FORMULAS_FILE.read_text(encoding="utf-8"))
    return page


SHOW = "text => { const node = element('div'); showMarkdown(node, text); return node.outerHTML; }"
PARTS = """text => { const node = element('div'); showMarkdown(node, text);
    return [...node.querySelectorAll('math')].map((math) => math.getAttribute('display') ?? 'inline'); }"""


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("$x$ and \\(y\\)", ["inline", "inline"]),
        ("so $$x^2$$ and \\[y\\] here", ["block", "block"]),
        ("$$\n\\frac{a}{b}\n\n= c\n$$", ["block"]),
        ("\\[\n- x\n\\]\nand", ["block"]),
        ("- $a_1 * b_2 * c$\n- **$d$**", ["inline", "inline"]),
        ("| a |\n|--|\n| $x$ |", ["inline"]),
        ("it costs $5 and $10, $1-$2 or US$5", []),
        ("`$x$` and \\$x\\$", []),
        ("```\n$$x$$\n```", []),
        ("$HOME and $PATH", []),
        ("$\\frac{$ is none", []),
        ("$$\nx", []),  # its end has not come
    ],
)
def test_formulas(page_with_formulas: Page, text: str, formulas: list[str]) -> None:
    assert page_with_formulas.evaluate(PARTS, text) == formulas


@pytest.mark.parametrize("text", ["$\\nonsense{x}$", "$\\frac{a}$", "\\[\\begin{x}\\]", "$$}$$"])
def test_what_is_no_formula_is_shown_as_it_was_written(page_with_formulas: Page, text: str) -> None:
    show = "text => { const node = element('div'); showMarkdown(node, text); return node.textContent; }"
    assert page_with_formulas.evaluate(show, text) == text


@pytest.mark.parametrize(
    "formula",
    [
        "\\href{javascript:window.hit=1}{x}",
        "\\url{javascript:window.hit=1}",
        "\\includegraphics{https://evil.example/x.png}",
        "\\style{position:fixed}{x}",
        "\\class{unseen}{x}",
        "\\id{prompt}{x}",
        "\\data{onclick=window.hit=1}{x}",
        "\\text{<img src=x onerror=window.hit=1>}",
        "\\color{red;background:url(//evil.example)}{x}",
        "\\htmlClass{a}{b}",
    ],
)
def test_a_formula_is_only_a_formula(page_with_formulas: Page, formula: str) -> None:
    html = page_with_formulas.evaluate(SHOW, f"${formula}$ and $${formula}$$")
    assert not re.search(r"<(?!/?(m[a-z]*|div|p|span|annotation|semantics)[ >])", html), html
    assert not re.search(r"<[^>]*(href|src|on\w+|class=.unseen|id=|position|evil)[^>]*>", html), (
        html
    )
    assert page_with_formulas.evaluate("window.hit") is None


def test_formulas_that_grow_without_end_are_given_up(page_with_formulas: Page) -> None:
    for formula in (
        "\\def\\a{\\a\\a}\\a",
        "\\def\\a{xx}\\def\\b{\\a\\a}" + "\\b" * 500,
        "{" * 1900,
        "x^" * 900,
        "\\sqrt{" * 300 + "}" * 300,
        "\\rule{99999em}{99999em}",
    ):
        page_with_formulas.evaluate(SHOW, f"$${formula}$$")
        page_with_formulas.evaluate(SHOW, f"\\({formula}\\)")
