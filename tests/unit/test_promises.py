"""The list of tests/promises.yaml: its pages, sections and tests exist, and no section is left out."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from tests.pages import PAGES, names_a_test
from tests.support import ROOT

LIST = ROOT / "tests" / "promises.yaml"
# For users; the others are for those who change the project.
USERS_PAGES = [
    page
    for page in PAGES
    if page == ROOT / "README.md"
    or page.relative_to(ROOT).parts[0] in ("docs", "deploy", "examples")
]
# The promises of a section with their tests, or the reason why it has none.
Section: TypeAlias = dict[str, str] | str
SECTIONS: dict[str, dict[str, Section]] = yaml.safe_load(LIST.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Promise:
    """A statement of a page, and the test that proves it."""

    page: str
    section: str
    text: str
    test: str

    def __str__(self) -> str:
        return f"{self.page}, {self.section}: {self.text}: {self.test}"


PROMISES = [
    Promise(page, section, text, test)
    for page, sections in SECTIONS.items()
    for section, promises in sections.items()
    if isinstance(promises, dict)
    for text, test in promises.items()
]


def headings(page: Path) -> list[tuple[int, str]]:
    """The headings of a page, each with its level."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose, re.MULTILINE)]


def sections_of(page: Path) -> dict[str, set[str]]:
    """The sections of a page, each with its heading and those below it, where its promises may be."""
    found = headings(page)
    top = 2 if any(level == 2 for level, _ in found) else 1
    sections: dict[str, set[str]] = {}
    for level, title in found:
        if level == top:
            section = sections[title] = {title}
        elif level > top and sections:
            section.add(title)
    return sections


def test_every_named_test_exists() -> None:
    missing = [str(promise) for promise in PROMISES if not names_a_test(promise.test)]
    assert missing == [], "name the tests that prove these promises now"


def test_the_list_has_the_users_pages() -> None:
    assert SECTIONS.keys() == {str(page.relative_to(ROOT)) for page in USERS_PAGES}


@pytest.mark.parametrize("page", USERS_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_section_has_a_promise_or_a_reason(page: Path) -> None:
    listed = SECTIONS[str(page.relative_to(ROOT))]
    titles = {title for _, title in headings(page)}
    assert [title for title in listed if title not in titles] == [], "there is no such heading"
    assert [title for title, promises in listed.items() if not promises] == []
    sections = sections_of(page)
    left_out = [title for title, titles in sections.items() if titles.isdisjoint(listed)]
    assert left_out == [], "list what these sections promise, or say why they promise nothing"


def test_no_promise_is_written_twice_in_a_section() -> None:
    lines = re.findall(r"^    .+: tests/\S+$", LIST.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == len(PROMISES)
