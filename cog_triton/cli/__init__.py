"""``cog-triton COMMAND``: the commands of the package, a file each, and in a checkout those of scripts/.

commands.yaml, here and in scripts/, has of each the function that it calls, its help and its options.
May import everything. After a change: pytest tests/unit/test_cli.py tests/unit/test_pages.py
"""

import functools
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cog_triton import ROOT

SCRIPTS = ROOT / "scripts"


def main(argv: Sequence[str] | None = None, prog: str = "") -> int:
    """Run a command, ``prog`` in its usage; return its status: 2 if there is none, 130 after Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    from cog_triton.errors import CogTritonError, ConfigurationError

    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    commands = load_commands()
    if name in ("-h", "--help", "help"):
        lines = [f"  {name:14}  {summary(command)}" for name, command in commands.items()]
        print("usage: cog-triton COMMAND [OPTION …]", "", *lines, sep="\n")
        print("\ncog-triton COMMAND --help says more.")
        return 0
    if name not in commands:
        known = ", ".join(commands)
        print(f"cog-triton: no command {name!r}; it is one of {known}", file=sys.stderr)
        return 2
    command, prog = commands[name], prog or f"cog-triton {name}"
    options: Any = arguments
    if "options" in command:
        options = parse(name, arguments, prog)
    else:  # it reads its command line itself
        sys.argv[0] = prog
    module, _, function = command["call"].partition(":")
    try:
        for package, problem in command.get("needs", {}).items():
            if importlib.util.find_spec(package) is None:
                raise ConfigurationError(problem)
        call = getattr(importlib.import_module(module), function)
        signal.signal(signal.SIGINT, handler)
        return call(options) or 0
    except (CogTritonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return int(command.get("failed", 1))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@functools.cache
def load_commands() -> dict[str, Any]:
    """Return the entry of each command, by its name."""
    import yaml

    commands: dict[str, Any] = {}
    for directory in (Path(__file__).parent, SCRIPTS):
        if (file := directory / "commands.yaml").is_file():
            commands |= yaml.load(file.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    # Where predict.py is, and the modules of scripts.
    sys.path[:0] = [place for place in map(str, (ROOT, SCRIPTS)) if place not in sys.path]
    return {name: command for name, command in commands.items() if not name.startswith(".")}


def summary(command: dict[str, Any]) -> str:
    return str(command["help"]).partition("\n")[0].rstrip(".")


def parse(name: str, arguments: Sequence[str], prog: str | None = None) -> Any:
    """Return a command's options; those with ``sets`` are set in the environment, where settings are."""
    import argparse
    import os

    command = load_commands()[name]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog, description=command["help"], formatter_class=form)
    variables = {}
    for flags, given in command["options"].items():
        option = {"help": argparse.SUPPRESS, **(given or {})}
        if value := os.environ.get(option.pop("environ", "")):
            option["default"] = value
        if kind := option.get("type"):
            option["type"] = {"int": int, "float": float, "path": Path, "count": count}[kind]
        variable = option.pop("sets", "")
        variables[parser.add_argument(*flags.split(), **option).dest] = variable
    parsed = parser.parse_args(arguments)
    for option_name, variable in variables.items():
        value = getattr(parsed, option_name)
        if not variable or value is None:
            continue
        os.environ[variable] = ",".join(value) if isinstance(value, list) else str(value)
        if variable == "MODEL":
            # It would go before the model that the command line names.
            os.environ.pop("COG_WEIGHTS", None)
    return parsed


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value
