"""The pages in Markdown: their links lead somewhere, and docs/api.md has what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cog_triton import errors
from predict import Predictor

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for pattern in ("[A-Z]*.md", "docs/*.md", "deploy/**/*.md", "examples/**/*.md")
    for page in sorted(ROOT.glob(pattern))
]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def anchors(page: Path) -> set[str]:
    """What a link may name behind its #, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^()\s]+)\)", prose(page))
    return [link for link in links if not link.startswith("http") and not leads(page, link)]


def leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Two words\n\n```\n# No heading\n[x](none.md)\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md) [x](b.md#two-words) [x](b.md#no-heading) [x](c.md) [x](#here)")
    assert broken(page) == ["b.md#no-heading", "c.md", "#here"]
    assert broken(tmp_path / "b.md") == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = re.findall(r"\]\(([^()\s#]+)", prose(page))
            waiting += [(page.parent / link).resolve() for link in links if "//" not in link]
    assert [page for page in PAGES if page not in reached] == []


def test_every_error_is_in_the_table() -> None:
    kinds = [errors.CogTritonError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    never_raised = {errors.CogTritonError, errors.UserError, errors.ServerError}
    expected = {f"| {kind.code} | `{kind.__name__}` |" for kind in {*kinds} - never_raised}
    assert set(re.findall(r"^\| E\d{4} \| `\w+` \|", API, re.MULTILINE)) == expected


def test_every_input_is_in_the_table() -> None:
    table = API.split("## Inputs")[1].split("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert names == set(Predictor.predict.__annotations__) - {"return"}
