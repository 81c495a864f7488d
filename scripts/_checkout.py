"""Makes the packages of this checkout importable: they need not be installed where a script runs.

A script imports this before it imports any of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT))


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Says what to do where a Python lacks what this checkout needs; other errors are shown as ever."""
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    print(
        f"{sys.executable} has no package {error.name}. `make setup-dev` makes an environment that has it: "
        f"run `source {ROOT / '.venv' / 'bin' / 'activate'}` and try again.",
        file=sys.stderr,
    )


sys.excepthook = explain
