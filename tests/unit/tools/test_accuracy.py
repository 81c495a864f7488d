"""The comparison with Hugging Face: what is read, counted and refused. No engine runs here."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.cli import parse
from cog_triton.errors import ConfigurationError
from cog_triton.text.tokenizer import Tokenizer
from tests.late import accuracy_compare as compare
from tests.support import ROOT
from tools.accuracy.sides import Answer
from tools.accuracy.texts import TASKS, examples, file_rows, shortened

DEMO = ROOT / "examples" / "summarize" / "demo.jsonl"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    monkeypatch.setattr(os, "environ", {**os.environ})  # which options set
    return lambda *flags: parse("summarize", ["--hf_model_dir=m", *flags])


# Texts


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]
    from pyarrow.parquet import write_table  # type: ignore[import-untyped, unused-ignore]

    (tmp_path / "b.jsonl").write_text('{"question": "2", "more": 1}\n{"question": "é"}\n')
    (tmp_path / "a.json").write_text('{"question": "1"}\n')
    (tmp_path / "README.md").touch()
    write_table(pyarrow.table({"question": ["3", "4"]}), tmp_path / "c.parquet")
    assert [row["question"] for row in file_rows(tmp_path)] == ["1", "2", "é", "3", "4"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param("a.jsonl", "\n{", "a.jsonl cannot be read: JSON parse error", id="no JSON"),
        pytest.param("a.parquet", "x", "a.parquet cannot be read: ", id="no Parquet"),
        pytest.param(
            "a.csv",
            "x",
            "a.csv: neither .jsonl, .json, .parquet nor a directory of them",
            id="another kind of file",
        ),
        pytest.param("b.jsonl", None, "b.jsonl cannot be read: ", id="no file"),
        pytest.param(
            "a.jsonl",
            '{"question": "q"}',
            "no column 'answer' of text, but question",
            id="a column lacks",
        ),
        pytest.param(
            "a.jsonl",
            '{"question": "q", "answer": 1}',
            "no column 'answer' of text, but answer",
            id="a column of numbers",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, tokenizer: Tokenizer, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        list(examples(TASKS["question_answering"], tmp_path / name, tokenizer, 9))


def test_the_hub_is_asked_for_the_tasks_data_set(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigurationError, match="no data set on the hub: give --dataset_dir"):
        list(examples(TASKS["question_answering"], None, tokenizer, 9))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigurationError, match=r"cnn_dailymail .*pip install 'datasets>=5\.2,<6'"
    ):
        list(examples(TASKS["summarize"], None, tokenizer, 100))
    hub = Mock()
    hub.load_dataset().shuffle.return_value = [{"article": " It was n't so. ", "highlights": "r"}]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = list(examples(TASKS["summarize"], None, tokenizer, 100))
    assert found == [("It wasn't so.  TL;DR:", "r")]
    hub.load_dataset.assert_any_call("abisee/cnn_dailymail", "3.0.0", split="test")


@given(text=st.text(max_size=60), limit=st.integers(1, 20))
def test_a_shortened_text_has_no_more_tokens(tokenizer: Tokenizer, text: str, limit: int) -> None:
    found = shortened(text, tokenizer, limit)
    assert len(tokenizer(found).input_ids) <= max(limit, len(tokenizer("").input_ids))
    if len(tokenizer(text).input_ids) <= limit:
        assert found == text


# Figures


def test_rouge() -> None:
    def rouge(*texts: tuple[str, str]) -> dict[str, float]:
        answers = [Answer([], text) for text, _ in texts]
        figures = compare.figures(answers, [("", expected) for _, expected in texts], None)
        return {name: figures[name] for name in compare.ROUGE}

    same = rouge(("The cat sat. It slept.", "the cat sat it slept"))
    assert same == pytest.approx(dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 100))
    # 2 of 3 words, both ways; then a mean of the two.
    found = rouge(("a cat slept", "a cat sat"), ("x", "y"))
    assert found["rouge1"] == pytest.approx(100 * (2 / 3) / 2)
    assert found["rouge2"] == pytest.approx(100 * (1 / 2) / 2)
    assert rouge(("机器学习", "机器学习"))["rouge1"] == 0


def test_agreement() -> None:
    first = [Answer([1, 2], "a"), Answer([1, 2, 3], "b"), Answer([], "")]
    second = [Answer([1, 2], "a"), Answer([1, 9], "c"), Answer([], "")]
    assert compare.agreement(first, second) == {
        "outputs": 3,
        "same_ids": 2,
        "same_texts": 2,
        "leading_tokens": 3,
        "tokens": 5,
        "leading_share": 0.6,
    }
    assert compare.agreement(first[2:], second[2:])["leading_share"] == 1


@pytest.mark.parametrize(("rouge1", "failed"), [(15.1, 0), (15.0, 1), (math.nan, 1)])
def test_the_threshold_if_none_is_given(options: Any, rouge1: float, failed: int) -> None:
    found = compare.failures(options("--check_accuracy"), {"rouge1": rouge1}, {})
    assert found == [f"ROUGE-1 of the engine is {rouge1:.2f}, not greater than 15"] * failed


# The command line


def test_the_guides_command(options: Any) -> None:
    guides = "--engine_dir ./phi-engine --batch_size 1 --test_trt_llm --test_hf --data_type fp16 "
    guides += "--check_accuracy --tensorrt_llm_rouge1_threshold=20"
    found = options(*guides.split())
    assert (found.engine_dir, found.tensorrt_llm_rouge1_threshold) == ("./phi-engine", 20)
    assert (found.eval_task, found.max_ite, found.output_len) == ("summarize", 20, 100)
    page = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    for name in TASKS:
        assert f"`{name}`" in page
        options(f"--eval_task={name}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grpc-url=u", "--settings", "A=B"], "--settings start an engine; --grpc-url has one"),
        (["--test_hf", "--check_accuracy"], "give --test_trt_llm as well"),
        (["--test_trt_llm", "--leading_threshold=1"], "--leading_threshold wants both"),
        (["--settings", "ENGINE"], "--settings: 'ENGINE' is not of the form KEY=VALUE"),
        ([f"--dataset_dir={DEMO}"], "no column 'article' of text, but answer, question"),
    ],
)
def test_what_cannot_be_compared(
    options: Any, demo_model: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        compare.compare(options(f"--hf_model_dir={demo_model}", *flags))
