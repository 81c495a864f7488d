"""The site of the docs: it builds strictly, every link leads somewhere, and every page is in its menu."""

import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import PAGES
from tests.support import ROOT
from tools import site

pytestmark = [pytest.mark.rare, pytest.mark.xdist_group("site")]


class Links(HTMLParser):
    """What a page of HTML refers to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="zensical is not installed")
    return site.build(tmp_path_factory.mktemp("site"))


def dead_links(built: Path) -> Iterator[str]:
    pages = {
        file: Links(file.read_text()) for file in built.rglob("*.html") if file.name != "404.html"
    }
    for file, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            path = path / "index.html" if path.is_dir() else path
            anchors = pages[path].anchors if path in pages else {parts.fragment}
            if not path.exists() or (parts.fragment and parts.fragment not in anchors):
                yield f"{file.relative_to(built)}: {target}"


def test_no_link_is_dead(built: Path) -> None:
    assert sorted(dead_links(built)) == []


def test_pages_load_nothing_from_other_servers(built: Path) -> None:
    for file in built.rglob("*.html"):
        text = file.read_text()
        assert "fonts.googleapis" not in text
        assert '<script src="http' not in text


def test_every_page_is_found_by_the_search(built: Path) -> None:
    searched = (built / "search.json").read_text()
    assert "admission" in searched
    assert "kill -9" in searched


def test_every_page_is_in_the_menu() -> None:
    menu = site.CONFIGURATION.read_text()
    assert [page for page in site.pages() if f'"{page}"' not in menu] == []


def test_the_site_has_the_pages_whose_commands_are_tested() -> None:
    expected = {page.relative_to(ROOT) for page in PAGES}
    assert expected <= set(site.pages())


def test_a_dead_link_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zensical", reason="zensical is not installed")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "README.md").write_text("# Home\n\n[There is none](docs/none.md)\n")
    monkeypatch.setattr(site, "ROOT", checkout)
    configuration = tmp_path / "zensical.toml"
    configuration.write_text('[project]\nsite_name = "x"\ndocs_dir = "pages"\nsite_dir = "html"\n')
    monkeypatch.setattr(site, "CONFIGURATION", configuration)
    with pytest.raises(subprocess.CalledProcessError):
        site.build(tmp_path / "site")
