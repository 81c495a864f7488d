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


def check(root: Path) -> int:
    return check_bounds.main([str(root), "--budgets", str(root / "budgets.yaml")])


def test_all_that_is_at_its_bound_passes(root: Path) -> None:
    assert check(root) == 0


def test_a_function_that_is_too_long_and_its_room_are_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (root / "cog_triton/room/module.py").open("a") as file:
        file.write("\n    pass\n")
    assert check(root) == 1
    assert capsys.readouterr().out.splitlines() == [
        "cog_triton/room/module.py:3 long: 61 lines, of 60",
        "cog_triton/room: 63 lines, of 62",
    ]


def test_a_file_that_is_too_long_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tools/it.py").write_text("pass\n" * 401)
    assert check(root) == 1
    assert capsys.readouterr().out == "tools/it.py: 401 lines, of 400\n"


def test_a_budget_of_no_room_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "budgets.yaml").write_text("cog_triton/gone: 10\n")
    assert check(root) == 1
    assert capsys.readouterr().out == "cog_triton/gone: has a budget and no code\n"
