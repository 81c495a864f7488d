"""What a start of the demo model imports, process by process: time that every start takes.

The engine's process: tests/compute/test_transformers_start.py.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

# PyTorch is hidden from transformers alone.
PREPROCESSING = """
from importlib.util import find_spec
is_installed = find_spec("torch") is not None
from cog_triton.models import preprocessing, stub

tokenizer = stub.tokenizer({"tokenizer_dir": sys.argv[1]})
preprocessing.Preprocessor(tokenizer, {"tokenizer_dir": sys.argv[1]})
from transformers.utils import is_torch_available
assert not is_torch_available()
assert (find_spec("torch") is not None) == is_installed
"""
POSTPROCESSING = """
from functools import partial
from cog_triton.models import postprocessing, stub

late = postprocessing.LateTokenizer(partial(stub.tokenizer, {"tokenizer_dir": sys.argv[1]}))
late.close()
"""
GUARD = """
sys.path.insert(0, "cog_triton/server")
import guard
"""
PREDICTOR = """
import predict

assert "fastapi" not in sys.modules
import cog_triton.api.openai.server
"""
FILL_TEMPLATE = """
from cog_triton.repository import fill
"""
COMMAND_LINE = """
from cog_triton.cli import main

try:
    main(["predict", "--help"])
except SystemExit:
    pass
"""


class Start(NamedTuple):
    """What a process imports first, and packages that it must not import by that."""

    name: str
    program: str
    unused: set[str]


# A process of the test does several starts. What one of them imports is there for the next ones, so those
# that import more come later.
PROCESSES = {
    "guard": [Start("guard", GUARD, {"logging", "tempfile", "asyncio", "cog_triton"})],
    "commands and postprocessing": [
        Start("command line", COMMAND_LINE, {"numpy", "pydantic", "cog", "grpc"}),
        Start("fill-template", FILL_TEMPLATE, {"numpy", "grpc", "cog"}),
        Start("postprocessing", POSTPROCESSING, {"torch", "transformers", "grpc", "cog"}),
    ],
    "preprocessing": [
        Start("preprocessing", PREPROCESSING, {"torch", "sympy", "grpc", "cog", "pydantic"})
    ],
    "predictor": [Start("predictor", PREDICTOR, {"torch", "transformers", "grpc", "httpx"})],
}


@pytest.mark.parametrize("process", PROCESSES)
def test_unused_packages_are_not_imported(process: str, demo_model: Path) -> None:
    lines = ["import sys"]
    for name, program, unused in PROCESSES[process]:
        lines += [
            program,
            f"imported = {unused!r} & set(sys.modules)",
            f"assert not imported, ({name!r}, imported)",
        ]
    command = [sys.executable, "-c", "\n".join(lines), str(demo_model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
