"""Tests that compute, with the kernels of several processors.

PyTorch takes the widest instructions that the processor has, and kernels round differently: no test may
depend on which of them it is. The same training ends in another model, which answers as well.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ROOT

KERNELS = {
    "every x86-64": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
# The engines that do not compute with PyTorch left out, and what takes long for other reasons.
COMPUTES = ("tests/compute", "-k=not simulated and not llmapi")
TRAIN = (
    "import sys; from pathlib import Path; from tools.demo_model import make_demo_model; "
    "make_demo_model(Path(sys.argv[1]))"
)
SECONDS = 900

pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
]


def run(kernels: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | KERNELS[kernels],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def run_tests(kernels: str, *arguments: str) -> None:
    assert " passed" in run(kernels, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_model_that_ships(kernels: str) -> None:
    run_tests(kernels, "-m=not rare", *COMPUTES)


def test_a_model_that_is_trained_with_the_narrowest(tmp_path: Path) -> None:
    model = tmp_path / "demo"
    run("every x86-64", "-c", TRAIN, str(model))
    trained = "tests/compute/test_demo_model.py"
    run_tests("every x86-64", "-m=not rare", f"--demo-model={model}", trained)
