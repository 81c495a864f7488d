"""The pages in Markdown: links lead somewhere, commands exist, docs/api.md has what the code has."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from cog_triton import errors
from cog_triton.cli import COMMANDS
from predict import Predictor
from tests.pages import NEEDS, NOT_RUN, PAGES, Block, blocks, script_calls
from tests.support import ROOT

BLOCKS = [block for page in PAGES for block in blocks(page)]
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


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_of_commands_says_what_it_needs(block: Block) -> None:
    assert block.needs <= NEEDS, f"{block}: <!-- needs: … --> is of {sorted(NEEDS)}"
    assert block.commands, f"{block}: no line begins with $"


def test_a_comment_that_marks_no_block_is_noticed() -> None:
    marks = sum(page.read_text(encoding="utf-8").count("<!-- needs:") for page in PAGES)
    assert marks == sum(bool(block.needs) for block in BLOCKS)


class Parsed(Exception):
    """A command line was right."""


CALLS = [
    (str(block), name, arguments)
    for block in BLOCKS
    for command in block.commands
    for name, arguments in script_calls(command)
    if name != "--help"
]


@pytest.mark.parametrize(("block", "name", "arguments"), CALLS, ids=[call[0] for call in CALLS])
def test_a_scripts_options_are_those_it_has(
    block: str, name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of blocks as well that no test can run."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    path = ROOT / "scripts" / COMMANDS.get(name, name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{block}: no {path}"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Parsed):
        module.main(arguments)


def test_blocks_are_read_as_they_are_typed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: gpu, network -->\n```console\n"
        "$ a \\\n  b 'c\nd'\nout\n$ cat <<END\nx\nEND\n$ e |\n  f\n"
        "```\ntext\n```bash\nx\ny\n```\n```\n$ z\n```\n"
    )
    first, second = blocks(page)
    assert first.needs == {"gpu", "network"} <= NOT_RUN
    assert not first.runs
    assert first.commands == ("a \\\n  b 'c\nd'", "cat <<END\nx\nEND", "e |\n  f")
    assert (second.commands, second.runs, second.line) == (("x\ny\n",), True, 15)


def test_calls_of_scripts_are_found_in_a_command() -> None:
    command = "A=1 cog-triton bench --url x | sort; true && python3 scripts/run.py --a 'b c' > f"
    assert list(script_calls(command)) == [
        ("bench", ["--url", "x"]),
        ("run.py", ["--a", "b c"]),
    ]


def test_what_is_named_beside_the_blocks_exists() -> None:
    missing = []
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            missing += [
                f"{page.name}: {path}"
                for path in re.findall(
                    r"(?:^|[ =])((?:scripts|tests|docs|deploy|examples)/[\w/.-]+\w)", code
                )
                if not (ROOT / path).exists() and not page.parent.joinpath(path).exists()
            ]
            command = re.match(r"cog-triton ([\w-]+)", code)
            missing += [f"{page.name}: {code}"] if command and command[1] not in COMMANDS else []
    assert missing == []
