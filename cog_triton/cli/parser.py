"""The parser of a command's options: argparse, with errors that suggest what a misspelt word may mean."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

SIMILAR = 0.7  # of difflib's ratio: enough for a letter or two


def similar(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like ``word``; None if none is like it."""
    plain = {name.lower().replace("_", "-"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("_", "-"), plain, n=1, cutoff=SIMILAR)
    return plain[found[0]] if found else None


class CommandParser(argparse.ArgumentParser):
    """The options of one command.

    An error is one line that names the command, a suggestion for each option that does not exist, and where
    the options are listed.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._arguments: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._arguments = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        lines = [f"{self.prog}: error: {message}"]
        lines += self._suggestions(message)
        lines.append(f"Run `{self.prog} --help` for the options.")
        self.exit(2, "\n".join(lines) + "\n")

    def _suggestions(self, message: str) -> list[str]:
        lines = []
        for word in self._arguments:
            if word == "--":
                break
            option = word.partition("=")[0]
            if not option.startswith("--") or self._is_known(option):
                continue
            known = [name for name in self._option_string_actions if name.startswith("--")]
            if suggestion := similar(option, known):
                lines.append(f"  unknown option {option}; did you mean {suggestion}?")
        if choice := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            choices = re.findall(r"[\w.-]+", choice[2])
            if suggestion := similar(choice[1], choices):
                lines.append(f"  did you mean {suggestion}?")
        return lines

    def _is_known(self, option: str) -> bool:
        # argparse takes the beginning of an option for the option.
        return any(name.startswith(option) for name in self._option_string_actions)
