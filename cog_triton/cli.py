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
    """Run a command; return its exit status, or 2 with one line when there is no such command."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    problem = ""
    if command not in (*COMMANDS, "-h", "--help", "help"):
        problem = f"no command {command!r}; it is one of {', '.join(COMMANDS)}"
    elif not SCRIPTS.is_dir():
        problem = f"its commands are in the checkout's scripts/, and there is no {SCRIPTS}"
    if problem:
        print(f"cog-triton: {problem}", file=sys.stderr)
        return 2
    if command in COMMANDS:
        run(command, arguments)  # which ends by SystemExit, if it has a status to give
        return 0
    width = max(map(len, COMMANDS))
    print(USAGE, "", sep="\n")
    for name, file in COMMANDS.items():
        print(f"  {name:{width}}  {summary(SCRIPTS / file)}")
    print("\ncog-triton COMMAND --help says more. Each is a file in scripts/.")
    return 0


def run(command: str, arguments: Sequence[str]) -> None:
    """Run a command's file as this process's main module."""
    file = SCRIPTS / COMMANDS[command]
    module = ModuleType("__main__")
    module.__file__ = str(file)
    sys.modules["__main__"] = module  # as which a process that multiprocessing spawns runs it again
    sys.argv = [f"cog-triton {command}", *arguments]
    sys.path.insert(0, str(SCRIPTS))  # where a file finds its neighbours
    # runpy would put the file's name into sys.argv, and so into every usage line.
    exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), vars(module))


def summary(file: Path) -> str:
    """Return the first sentence of a file's docstring, without its end."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
