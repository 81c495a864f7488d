"""``cog-triton COMMAND``: the files in scripts/, each by a short name.

A command runs in this process as if its file had been called, so both take the same options. The package
imports neither scripts/ nor tools/, and nothing is imported here: the list of commands is there at once.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
COMMANDS = {
    "predict": "run_prediction.py",
    "serve": "serve.py",
    "openai": "serve_openai.py",
    "run": "run.py",
    "client": "client.py",
    "identity-test": "identity_test.py",
    "gen-input-data": "gen_input_data.py",
    "fill-template": "fill_template.py",
    "launch": "launch_triton_server.py",
    "build-engine": "build_engine.py",
    "summarize": "summarize.py",
    "bench": "benchmark.py",
    "bench-engine": "benchmark_engine.py",
    "soak": "soak.py",
    "demo-model": "make_demo_model.py",
    "adapter": "adapter.py",
    "make-schema": "make_schema.py",
    "image-constraints": "image_constraints.py",
}
USAGE = "usage: cog-triton COMMAND [OPTION …]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, or 2 with one line when there is no such command."""
    command, *rest = [*(sys.argv[1:] if argv is None else argv), "--help"]
    if command not in COMMANDS and command not in ("-h", "--help", "help"):
        return _refuse(f"no command {command!r}; it is one of {', '.join(COMMANDS)}")
    if not SCRIPTS.is_dir():
        return _refuse(f"its commands are in the checkout's scripts/, and there is no {SCRIPTS}")
    if command not in COMMANDS:
        print(overview())
        return 0
    return run(command, rest[:-1])  # the file ends by SystemExit, if it has a status to give


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command's file as this process's main module; returns its exit status."""
    file = SCRIPTS / COMMANDS[command]
    module = ModuleType("__main__")
    module.__file__ = str(file)
    sys.modules["__main__"] = module  # as which a process that multiprocessing spawns runs it again
    sys.argv = [f"cog-triton {command}", *arguments]
    sys.path.insert(0, str(SCRIPTS))  # where a file finds its neighbours
    # runpy would put the file's name into sys.argv, and so into every usage line.
    exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), vars(module))
    return 0


def overview() -> str:
    """What ``--help`` says: a line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary(SCRIPTS / file)}" for name, file in COMMANDS.items()]
    return "\n".join(
        [USAGE, "", *lines, "", "cog-triton COMMAND --help says more. Each is a file in scripts/."]
    )


def summary(file: Path) -> str:
    """The first sentence of a file's docstring, without its end."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _refuse(reason: str) -> int:
    print(f"cog-triton: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
