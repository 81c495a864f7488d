"""Tests that compute, with the kernels of several processors and a model that is trained with them.

PyTorch takes the widest instructions that the processor has. Kernels round differently, so the same
training ends in another model: no other test may depend on which of them it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytest.importorskip("torch")

KERNELS = {
    "every x86-64": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "this processor": {},
}
TRAINING = ("tests/unit/tools/test_demo_model.py",)
# The engines that do not compute with PyTorch left out, and what takes long for other reasons.
COMPUTES = (
    *TRAINING,
    "tests/unit/engines",
    "tests/unit/adapters",
    "-k=not simulated and not llmapi and not set_back and not bar_ends",
)
TRAIN = (
    "import sys; from pathlib import Path; from tools.demo_model import make_demo_model; "
    "make_demo_model(Path(sys.argv[1]))"
)
SECONDS = 900


@pytest.mark.rare
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_model_trained_with(kernels: str, tmp_path: Path) -> None:
    model = tmp_path / "demo"
    # make test has computed with this processor's, with the model that ships.
    tests = COMPUTES if KERNELS[kernels] else TRAINING
    command = ["pytest", "-q", "-p", "no:cacheprovider", f"--demo-model={model}", *tests]
    for arguments in (["-c", TRAIN, str(model)], ["-m", *command]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | KERNELS[kernels],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
