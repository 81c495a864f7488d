from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # predict.py and scripts/ are no packages
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained demo model; built once, and only when its inputs have changed.

    Where there is no PyTorch to build it with, it is the one that is there.
    """
    if importlib.util.find_spec("torch") is None:
        if not (ROOT / "models" / "demo" / "config.json").is_file():
            pytest.skip("no PyTorch to make the demo model with, and none was made")
        return ROOT / "models" / "demo"
    import make_demo_model

    assert make_demo_model.main([]) == 0
    return ROOT / "models" / "demo"
