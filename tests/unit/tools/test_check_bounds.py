"""What scripts/check_bounds.py counts, and when it fails."""

from __future__ import annotations

from pathlib import Path

import check_bounds
import pytest
from check_bounds import PRODUCT_LINES, SERVING_LINES


def tree(root: Path, body: int, tests: int) -> None:
    """A small project: one function of so many lines in what serves, and so many tests' statements."""
    for name in ("cog_triton", "triton_model_repo", "tools", "scripts", "tests"):
        (root / name).mkdir()
    lines = ['"""It says."""', "", "def long():", "    # why", *["    pass"] * (body - 2)]
    (root / "cog_triton" / "module.py").write_text("\n".join(lines))
    (root / "predict.py").write_text("def predict():\n" + "    pass\n" * 100)
    (root / "train.py").write_text("def train(): pass\n" * 9)
    (root / "tests" / "test_it.py").write_text('"""Statements."""\n' + "pass\n" * tests)


@pytest.mark.parametrize("body", [60, 61])
def test_a_function_that_is_too_long(
    body: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, body, 1000)
    status = check_bounds.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    if body == 60:
        assert status == 0
        assert lines[0] == "ok     longest function, lines: 60 (at most 60)"
    else:
        assert status == 1
        assert lines[0] == (
            "MISSED longest function, lines: 61 (at most 60): cog_triton/module.py:3 long 61"
        )
    # Of the ten functions nine have one line, Cog's predict is none of them.
    assert lines[1:] == [
        "ok     median function, lines: 1 (at most 8)",
        "ok     90th percentile of functions, lines: 1 (at most 25)",
        "ok     longest file, lines: 101 (at most 400)",
        f"ok     product, lines: {body + 2 + 101 + 9:,} (at most {PRODUCT_LINES:,})",
        f"ok     of it what serves, lines: {body + 2 + 101:,} (at most {SERVING_LINES:,})",
        # long() and its body, predict() and its body, and nine times two.
        f"ok     tests, statements: 1,000 (at least the product's {body - 2 + 1 + 101 + 18})",
    ]


def test_fewer_statements_in_tests_than_in_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, 10, 10)
    assert check_bounds.main([str(tmp_path)]) == 1
    assert "MISSED tests, statements: 10 (at least the product's 128)" in capsys.readouterr().out


def test_what_is_longest_is_named_first() -> None:
    bound = check_bounds.longest("file", {"a": 5, "b": 7, "c": 9}, 6)
    assert str(bound) == "MISSED file: 9 (at most 6): c 9, b 7"
