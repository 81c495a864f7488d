"""Build the site of the docs: ``python -m tools.site`` writes ``artifacts/site/html``.

The pages are those that are read on the repository's host. They link to each other across directories, and
Zensical reads only one, so they are copied into one, each in its place, with the files that they link to.
The build is strict: a link to a page or a heading that is not there fails it.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "artifacts" / "site"
CONFIGURATION = ROOT / "docs" / "zensical.toml"
PAGES = (
    "*.md",
    "docs/**/*.md",
    "deploy/**/*.md",
    "examples/**/*.md",
    "tests/**/*.md",
    "triton_model_repo/*.md",
)
_LINK = re.compile(r"\]\(([^()\s#]+)")


def pages() -> list[Path]:
    """Return the pages of the site, relative to the checkout."""
    return sorted(page.relative_to(ROOT) for pattern in PAGES for page in ROOT.glob(pattern))


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the pictures and other files that a page links to, relative to the checkout."""
    for link in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page.parent / link).resolve()
        if "://" not in link and target.is_file() and target.suffix != ".md":
            yield target.relative_to(ROOT)


def build(directory: Path = DIRECTORY) -> Path:
    """Build the site anew, and return the directory with its HTML."""
    shutil.rmtree(directory, ignore_errors=True)
    found = pages()
    for file in [*found, *(file for page in found for file in linked_files(page))]:
        copy = directory / "pages" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy)
    shutil.copyfile(CONFIGURATION, directory / CONFIGURATION.name)
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=directory, check=True
    )
    return directory / "html"


if __name__ == "__main__":
    print(build() / "index.html")
