"""What scripts/check_bounds.py counts, and when it fails."""

from __future__ import annotations

from pathlib import Path

import check_bounds
import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small project: a function of 60 lines in a room of 62, and a predict of 101."""
    for name in ("cog_triton/room", "triton_model_repo", "tools", "scripts"):
        (tmp_path / name).mkdir(parents=True)
    long = ['"""It says."""', "", "def long():", "    # why", *["    pass"] * 58]
    (tmp_path / "cog_triton/room/module.py").write_text("\n".join(long))
    (tmp_path / "predict.py").write_text("def predict():\n" + "    pass\n" * 100)
    (tmp_path / "train.py").write_text("def train(): pass\n")
    (tmp_path / "budgets.yaml").write_text("cog_triton/room: 62\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "printed"),
    [
        ("train.py", "", "the code is within its bounds\n"),
        (
            "cog_triton/room/module.py",
            "\n    pass\n",
            "cog_triton/room/module.py:3 long: 61 lines, of 60\ncog_triton/room: 63 lines, of 62\n",
        ),
        ("tools/it.py", "pass\n" * 401, "tools/it.py: 401 lines, of 400\n"),
        ("budgets.yaml", "cog_triton/gone: 10\n", "cog_triton/gone: has a budget and no code\n"),
    ],
)
def test_what_is_beyond_a_bound_is_named(
    root: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, printed: str
) -> None:
    with (root / file).open("a") as added:
        added.write(text)
    status = check_bounds.main(root, root / "budgets.yaml")
    assert (capsys.readouterr().out, status) == (printed, int(bool(text)))
