"""``cog-triton completion``: shell completion, made by shtab from the parsers of the commands."""

import argparse
from pathlib import Path

DESCRIPTION = """
    source <(cog-triton completion bash)
    cog-triton completion bash > ~/.local/share/bash-completion/completions/cog-triton
    cog-triton completion zsh > "${fpath[1]}/_cog-triton"
    cog-triton completion fish > ~/.config/fish/completions/cog-triton.fish
"""
SHELLS = ("bash", "zsh", "fish", "tcsh")
# Placeholders of options that take the name of a file or a directory, or something else.
_PLACES = ("DIRECTORY", "MODEL")


class Options(argparse.Namespace):
    shell: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that the script is for")


def run(options: Options) -> None:
    import shtab

    print(shtab.complete(whole_parser(), shell=options.shell))


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with every command as a subcommand."""
    import shtab

    from cog_triton.cli.registry import load_commands

    parser = argparse.ArgumentParser("cog-triton")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    subcommands = parser.add_subparsers()
    for command in load_commands().values():
        subparser = subcommands.add_parser(command.name, help=command.summary)
        command.load().add_options(subparser)
        for action in subparser._actions:
            if action.type is Path or action.metavar in _PLACES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
