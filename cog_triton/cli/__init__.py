"""``cog-triton COMMAND``: the commands of the package, a module each, and in a checkout those of tools/.

    registry.py    the names of the commands and their modules
    parser.py      argparse, with suggestions for misspelt options
    options.py     options that several commands have

The module of a command declares its options and imports what takes time in the functions that need it, so
that ``--help`` and a wrong option are answered at once.
May import everything. After a change: pytest tests/unit/test_cli.py tests/unit/test_pages.py
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

from cog_triton.cli.options import set_variables
from cog_triton.cli.parser import CommandParser, similar
from cog_triton.cli.registry import Command, load_commands

__all__ = ["Command", "load_commands", "main", "parse", "parser_of"]


def main(argv: Sequence[str] | None = None, prog: str = "") -> int:
    """Run a command, ``prog`` in its usage; return its status: 2 if there is none, 130 after Ctrl-C."""
    # Ctrl-C during an import ends the process without a traceback.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    commands = load_commands()
    if name == "help" and arguments and arguments[0] in commands:
        name, arguments = arguments[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text(commands))
        return 0
    if name in ("-V", "--version"):
        print(version_text())
        return 0
    if name not in commands:
        print(unknown_command(name, commands), file=sys.stderr)
        return 2
    from cog_triton.errors import CogTritonError

    command = commands[name]
    try:
        options = parse(name, arguments, prog or None)
        signal.signal(signal.SIGINT, handler)
        return command.load().run(options) or 0
    except BrokenPipeError:  # the reader of standard output has left, which is no fault to report
        raise
    except (CogTritonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return command.failure_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def help_text(commands: dict[str, Command]) -> str:
    lines = ["usage: cog-triton COMMAND [OPTION …]", "       cog-triton --version", ""]
    lines += ["Serve an LLM on NVIDIA Triton.", ""]
    lines += [f"  {command.name:14}  {command.summary}" for command in commands.values()]
    lines += ["", "Run `cog-triton COMMAND --help` for the options of a command."]
    return "\n".join(lines)


def version_text() -> str:
    from cog_triton import __version__

    return f"cog-triton {__version__}"


def unknown_command(name: str, commands: dict[str, Command]) -> str:
    suggestion = similar(name, commands)
    if suggestion is not None:
        advice = f"did you mean {suggestion!r}?"
    else:
        advice = f"the commands are {', '.join(commands)}"
    return f"cog-triton: error: unknown command {name!r}; {advice}"


def parser_of(command: Command, prog: str | None = None) -> CommandParser:
    """Return the parser of a command's options."""
    module = command.load()
    # Only line breaks: the first line may be an indented example.
    details = module.DESCRIPTION.strip("\n")
    description = f"{command.summary}.\n\n{details}\n"
    parser = CommandParser(prog or f"cog-triton {command.name}", description)
    module.add_options(parser)
    return parser


def parse(name: str, arguments: Sequence[str], prog: str | None = None) -> Any:
    """Return a command's ``Options``, and set the environment variables that they set."""
    command = load_commands()[name]
    options = parser_of(command, prog).parse_args(arguments, command.load().Options())
    set_variables(command.variables(options))
    return options
