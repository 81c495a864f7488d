"""The pages in Markdown: links lead somewhere, commands exist, tables and examples are the code's."""

import argparse
import re
import runpy
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton import errors, settings
from cog_triton.cli import load_commands, main, parser_of
from cog_triton.repository.fill import fill_repository
from cog_triton.repository.variables import TABLES, VARIABLES, load_overrides
from predict import Predictor
from tests.pages import NEEDS, PAGES, blocks, script_calls
from tests.support import ROOT

BLOCKS = [block for page in PAGES for block in blocks(page)]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
NAMES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not (anchor and target.exists()):
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
    # GitHub's rule makes anchors of them.
    return anchor in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^()\s]+)\)", prose(page))
    assert [link for link in links if not link.startswith("http") and not leads(page, link)] == []


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
    assert set(re.findall(r"^\| E\d{4} \| `\w+` \|", ERRORS, re.MULTILINE)) == expected


def test_every_input_is_in_the_table() -> None:
    table = API.split("## Inputs")[1].split("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert names == set(Predictor.predict.__annotations__) - {"return"}


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert phony is not None
    targets = phony[1].replace("\\\n", " ").split()
    # Under a make of its own, it would print which directory it enters.
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[1] for line in shown.stdout.splitlines()]
    assert sorted(listed) == sorted(targets)
    assert all(" # " in line for line in shown.stdout.splitlines())


def test_blocks_of_commands_say_what_they_need() -> None:
    assert [block for block in BLOCKS if not block.commands] == []  # no line begins with $
    assert [block for block in BLOCKS if not block.needs <= NEEDS] == []
    marks = sum(page.read_text(encoding="utf-8").count("<!-- needs:") for page in PAGES)
    assert marks == sum(bool(block.needs) for block in BLOCKS)  # each marks a block


CALLS = [
    (str(block), name, arguments)
    for block in BLOCKS
    for command in block.commands
    for name, arguments in script_calls(command)
    if name != "--help"
]


class Parsed(Exception):
    """A command line was right."""


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
    if name.endswith(".py"):
        (name,) = re.findall(r'_checkout\.run\("([\w-]+)"\)', (ROOT / "scripts" / name).read_text())
    assert name in load_commands(), block
    with pytest.raises(Parsed):
        main([name, *arguments])


def test_what_is_named_beside_the_blocks_exists() -> None:
    named = re.compile(r"(?:^|[ =])((?:scripts|tests|docs|deploy|examples)/[\w/.-]+\w)")
    missing = []
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            for path in named.findall(code):
                if not any((base / path).exists() for base in (ROOT, page.parent)):
                    missing.append(f"{page.name}: {path}")
            command = re.match(r"cog-triton ([a-z][\w-]+)", code)
            if command and command[1] not in load_commands():
                missing.append(f"{page.name}: {code}")
    assert missing == []


def test_the_tests_that_the_makefile_names_exist() -> None:
    text = "".join(file.read_text() for file in ROOT.glob("tests/integration/*.py"))
    named = {*re.findall(r"\btest_\w+\b(?!\.py)", (ROOT / "Makefile").read_text())}
    assert named <= {*re.findall(r"def (test_\w+)", text)}


def test_the_pages_are_up_to_date() -> None:
    for page in NAMES["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert text == NAMES["filled"](text), "run scripts/make_docs.py"


def test_every_name_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in NAMES["PAGES"])
    names = [*settings.VARIABLES]
    for table in (VARIABLES, TABLES.ignored, TABLES.renamed):
        names += [name for model in table.values() for name in model]
    assert [name for name in names if f"| `{name}` |" not in pages] == []


# Variables that are no settings of a deployment, with who reads them.
READ_BY_OTHERS = {"COG_MAX_CONCURRENCY"}  # Cog's server
RECOMMENDING = [ROOT / "docs" / "configuration.md", ROOT / "docs" / "tutorials" / "migrating.md"]


def last_cells(page: Path) -> Iterator[str]:
    """The text of the last cell of each row of a page's tables, but of generated ones."""
    text = re.sub(r"<!-- \S+:begin -->.*?<!-- \S+:end -->", "", prose(page), flags=re.DOTALL)
    for line in text.splitlines():
        if line.startswith("| "):
            yield line.strip("| ").rpartition(" | ")[2]


@pytest.mark.parametrize("page", RECOMMENDING, ids=lambda page: page.stem)
def test_settings_and_variables_that_tables_recommend_exist(page: Path) -> None:
    actions = parser_of(load_commands()["openai"])._actions
    options = {name for action in actions for name in action.option_strings}
    settings_found = set[str]()
    options_found = set[str]()
    variables_found = set[str]()
    for cell in last_cells(page):
        settings_found |= {*re.findall(r"`([A-Z][A-Z\d_]+)(?:=[^`]*)?`", cell)}
        options_found |= {*re.findall(r"`(--[\w-]+)`", cell)}
        variables_found |= {*re.findall(r"`(\w+)` \*", cell)}
    assert settings_found
    assert settings_found <= {*settings.VARIABLES} | READ_BY_OTHERS
    assert options_found <= options
    assert variables_found <= VARIABLES["tensorrt_llm"].keys()


def test_the_worked_examples_are_read(tmp_path: Path) -> None:
    one, two = (block.split("```")[0] for block in CONFIGURATION.split("```yaml\n")[1:])
    file = tmp_path / "config.yaml"
    file.write_text(two)
    assert load_overrides(file)["tensorrt_llm"]
    file.write_text(one)
    overrides = load_overrides(file)
    for model in ("preprocessing", "postprocessing"):
        overrides[model]["tokenizer_dir"] = "/models/llama"
    fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)


TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_configurations_in_a_tutorial_are_read(page: Path, tmp_path: Path) -> None:
    for text in re.findall(r"^```yaml\n(server:.*?)^```$", page.read_text(), re.DOTALL | re.M):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        overrides = load_overrides(file)
        for model in ("preprocessing", "postprocessing"):
            overrides.setdefault(model, {})["tokenizer_dir"] = "/models/llama"
        overrides["tensorrt_llm"] |= {"engine": "vllm", "model": "/models/llama"}
        fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)


def test_the_message_on_the_page_is_the_one_that_comes(tmp_path: Path) -> None:
    overrides: dict[str, dict[str, object]] = {
        "preprocessing": {"tokenizer_dirr": "/models/llama"},
        "postprocessing": {"tokenizer_dir": "/models/llama"},
        "tensorrt_llm": {"kv_cache_free_gpu_mem_fraction": 90},
    }
    with pytest.raises(errors.TemplateError) as raised:
        fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)
    assert textwrap.indent(str(raised.value), "    ") in CONFIGURATION
