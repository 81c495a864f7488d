"""This checkout's packages, importable by a script that imports this first; its command of cog-triton."""

import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT))


def run(command: str) -> None:
    """Exit with the status of ``cog-triton COMMAND``, which gets this script's arguments."""
    from cog_triton.__main__ import main

    sys.exit(main([command, *sys.argv[1:]], Path(sys.argv[0]).name))


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError):
        print(
            f"{sys.executable} has no package {error.name}. `make setup-dev` makes an environment that has "
            f"it: run `source {ROOT / '.venv' / 'bin' / 'activate'}` and try again.",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = explain
