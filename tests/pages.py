"""The pages in Markdown and the commands in them; each block of commands is run, or says what it needs.

A comment on the line before a block says what that is:

    <!-- needs: server -->       the one that the page started last, or else `make serve`
    <!-- needs: other ports -->  run without the ports that the page's server has
    <!-- needs: dry run -->      make, which changes or takes too much: it only says what it would run
    <!-- needs: smollm2 -->      run where SmolLM2 can be had: a wheel of the package index
    <!-- needs: network -->      not run: a download, an image, a tool or a model that is not here
    <!-- needs: gpu -->          not run: a GPU, or TensorRT-LLM
    <!-- needs: cluster -->      not run: Slurm
    <!-- needs: minutes -->      not run: it takes long, and what it does is tested otherwise
"""

import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PAGES = [
    page
    for pattern in (
        "[A-Z]*.md",
        "docs/**/*.md",
        "deploy/**/*.md",
        "examples/**/*.md",
        "tests/**/*.md",
    )
    for page in sorted(ROOT.glob(pattern))
]
NOT_RUN = {"network", "gpu", "cluster", "minutes"}
NEEDS = NOT_RUN | {"server", "dry run", "smollm2", "other ports"}


@dataclass(frozen=True)
class Block:
    """A fenced block of commands."""

    page: Path
    line: int  # of its first command, counted from 1
    needs: frozenset[str]
    commands: tuple[str, ...]  # without prompts and output

    @property
    def runs(self) -> bool:
        return not self.needs & NOT_RUN

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def names_a_test(identifier: str) -> bool:
    """Return whether there is a test of this id: FILE::FUNCTION, or FILE::FUNCTION[CASE] of any case."""
    file, _, test = identifier.partition("::")
    return test.partition("[")[0] in _functions_of(file)


@functools.cache
def _functions_of(file: str) -> frozenset[str]:
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return frozenset(re.findall(r"^(?:async )?def (\w+)\(", text, re.MULTILINE))


def pages_of(page: Path) -> list[Path]:
    """The page, and those in the folder of its name, whose commands continue its own on one server."""
    return [page, *(other for other in PAGES if other.parent == page.with_suffix(""))]


@functools.cache
def blocks(page: Path) -> list[Block]:
    """The blocks of commands of a page, in order."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(
        r"(?:^<!-- needs: ([^\n]*) -->\n)?^```(console|bash|sh)\n(.*?)^```$",
        text,
        re.DOTALL | re.MULTILINE,
    )
    return [
        Block(
            page,
            text.count("\n", 0, match.start(3)) + 1,
            frozenset(filter(None, re.split(r",\s*", match[1] or ""))),
            tuple(_typed(match[3])) if match[2] == "console" else (match[3],),
        )
        for match in fences
    ]


def _typed(text: str) -> Iterator[str]:
    """What is typed at the prompts of a console: lines behind a ``$``, and those that bash waits for."""
    waiting = iter(text.splitlines())
    for line in waiting:
        if line.startswith("$ "):
            command = line[2:]
            while not _complete(command):
                command += "\n" + next(waiting)
            yield command


def _complete(command: str) -> bool:
    """Whether bash would run a command, and not wait for another line."""
    if command.endswith("\\"):
        return False
    here_document = re.search(r"<<'?(\w+)'?$", command.partition("\n")[0])
    if here_document is not None:
        return command.endswith(f"\n{here_document[1]}")
    if not re.search(r"[\"'(){}]|<<|\b(?:do|then|in)\b", command):
        return True
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True)
    # An open here-document is but a warning.
    return not (checked.returncode or checked.stderr)


def script_calls(command: str) -> Iterator[tuple[str, list[str]]]:
    """The calls of scripts/ in a command: a file, or a command of cog-triton, and its arguments."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            calls.append([])
        elif calls[-1] or not re.match(r"\w+=", word):
            calls[-1].append(word)
    for words in calls:
        if words[:1] == ["cog-triton"]:
            yield words[1], words[2:]
        for place, word in enumerate(words):
            if name := re.search(r"(?:^|/)scripts/(\w+\.py)$", word):
                yield name[1], words[place + 1 :]
