"""What a start of the demo model imports, process by process: time that every start takes.

The engine's process: tests/compute/test_transformers_start.py.
"""

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("program", "unused"),
    [
        pytest.param(
            PREPROCESSING, {"torch", "sympy", "grpc", "cog", "pydantic"}, id="preprocessing"
        ),
        pytest.param(POSTPROCESSING, {"torch", "transformers", "grpc", "cog"}, id="postprocessing"),
        pytest.param(GUARD, {"logging", "tempfile", "asyncio", "cog_triton"}, id="guard"),
        pytest.param(PREDICTOR, {"torch", "transformers", "grpc", "httpx"}, id="predictor"),
        pytest.param(FILL_TEMPLATE, {"numpy", "grpc", "cog"}, id="fill-template"),
        pytest.param(COMMAND_LINE, {"numpy", "pydantic", "cog", "grpc"}, id="command-line"),
    ],
)
def test_unused_packages_are_not_imported(program: str, unused: set[str], demo_model: Path) -> None:
    lines = ["import sys", program, f"imported = {unused!r} & set(sys.modules)"]
    lines.append("sys.exit(f'imported: {imported}' if imported else 0)")
    command = [sys.executable, "-c", "\n".join(lines), str(demo_model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
