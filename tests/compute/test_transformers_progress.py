"""A checkpoint that takes long to load says how far it is; a small one says nothing."""

import io
from pathlib import Path

import pytest

from tests.late import transformers_loading, transformers_progress


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_progress, "PROGRESS_SECONDS", 0.0)


@pytest.mark.usefixtures("slow")
def test_each_line_counts_the_tensors_before_it() -> None:
    stream = io.StringIO()
    assert list(transformers_progress.LoadingProgress(["a", "b", "c"], stream)) == ["a", "b", "c"]
    lines = [transformers_progress.LOADING.format(done=n, total=3) for n in range(3)]
    assert stream.getvalue().splitlines() == lines


def test_a_quick_one_says_nothing() -> None:
    stream = io.StringIO()
    assert list(transformers_progress.LoadingProgress(["a", "b", "c"], stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("slow")
def test_lines_take_the_place_of_the_bar(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers_loading.load_model({"model": str(demo_model), "device": "cpu"})
    shown = capsys.readouterr()
    assert "loading weights: 1 of 20 tensors\n" in shown.out
    assert "Loading weights" not in shown.err
