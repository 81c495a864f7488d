"""The comparison with Hugging Face: what is read, asked, counted and refused. No engine runs here."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import summarize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cog_triton.errors import (
    ConfigurationError,
    TritonMalformedJSON,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from tools.accuracy import compare, texts
from tools.accuracy.compare import ENGINE, HUGGING_FACE, agreement, leading, rouge
from tools.accuracy.sides import Answer, Answers, ask_cog, at_once, in_batches, until_end
from tools.accuracy.texts import (
    TASKS,
    DataError,
    Example,
    hub_examples,
    prepared,
    read_examples,
    shortened,
)
from tools.demo_model.corpus import PAIRS

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "examples" / "summarize" / "demo.jsonl"
QA = TASKS["question_answering"]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


def options(*flags: str) -> argparse.Namespace:
    return compare.parse(["--hf_model_dir=m", *flags])


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as caught:
        options(*flags)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("summarize.py: error: ")


# Data


def written(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_jsonl_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", {"question": "q", "answer": "é", "more": 1})
    file.write_text(file.read_text() + "\n")
    assert list(read_examples(file, QA)) == [Example("q", "é")]


def test_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]
    from pyarrow.parquet import write_table  # type: ignore[import-untyped, unused-ignore]

    table = pyarrow.table({"id": [1, 2], "article": ["a", "b"], "highlights": ["c", "d"]})
    write_table(table, tmp_path / "a.parquet")
    examples = [Example("a", "c"), Example("b", "d")]
    assert list(read_examples(tmp_path / "a.parquet", TASKS["summarize"])) == examples
    assert list(read_examples(tmp_path, TASKS["summarize"])) == examples
    with pytest.raises(DataError, match="no column 'question', but article, highlights, id"):
        list(read_examples(tmp_path / "a.parquet", QA))


def test_a_directory_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    written(tmp_path / "b.jsonl", {"question": "2", "answer": ""})
    written(tmp_path / "a.json", {"question": "1", "answer": ""})
    (tmp_path / "README.md").touch()
    assert [example.text for example in read_examples(tmp_path, QA)] == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"question": "q"}',
            "a.jsonl, line 1: no column 'answer', but question; see --i",
        ),
        ("a.jsonl", '{"question": 1, "answer": ""}', "line 1: question is no text"),
        ("a.jsonl", "\n{", "line 2: no JSON: "),
        ("a.jsonl", "[]", "line 1: no JSON object"),
        ("a.parquet", "x", "a.parquet: no Parquet file: "),
        ("a.csv", "x", "a.csv: neither .jsonl, .json nor .parquet"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        list(read_examples(tmp_path / name, QA))
    assert message in str(caught.value)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        list(read_examples(tmp_path / "absent", QA))
    with pytest.raises(DataError, match=r"neither \.jsonl, \.json nor \.parquet"):
        list(read_examples(tmp_path, QA))


def test_the_hub_needs_a_data_set_and_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no data set on the hub: give a file with --dataset_dir"):
        list(hub_examples(QA, None, 0))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"abisee/cnn_dailymail .* pip install 'datasets>=5\.2,<6'"):
        list(hub_examples(TASKS["summarize"], None, 0))


class Hub:
    """Stands for the library ``datasets``."""

    def __init__(self, rows: list[Mapping[str, Any]] | None) -> None:
        self.rows, self.asked = rows, {}  # type: tuple[list[Mapping[str, Any]] | None, dict[str, Any]]

    def load_dataset(self, *names: object, **arguments: object) -> Hub:
        self.asked = {"names": names, **arguments}
        if self.rows is None:
            raise ConnectionError("no route")
        return self

    def shuffle(self, seed: int) -> list[Mapping[str, Any]]:
        self.asked["seed"] = seed
        return self.rows or []


def test_the_hub_is_asked_for_the_tasks_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"article": "a", "highlights": "h"}])
    monkeypatch.setitem(__import__("sys").modules, "datasets", hub)
    assert list(hub_examples(TASKS["summarize"], Path("/c"), 3)) == [Example("a", "h")]
    assert hub.asked == {
        "names": ("abisee/cnn_dailymail", "3.0.0"),
        "split": "test",
        "cache_dir": "/c",
        "seed": 3,
    }
    hub.rows = None
    with pytest.raises(
        DataError, match=r"cannot be had from the hub \(ConnectionError: no route\)"
    ):
        list(hub_examples(TASKS["summarize"], None, 0))


def test_the_demo_set_is_of_the_demo_models_subjects() -> None:
    answers = {pair.question: pair.answer for pair in PAIRS}
    examples = list(read_examples(DEMO, QA))
    assert len({example.text for example in examples}) == len(examples) == 32
    known = [example for example in examples if example.text in answers]
    assert [answers[example.text] for example in known] == [e.reference for e in known]
    # The others ask in other words, to some of which the model has no answer.
    assert len(known) == 24
    assert {example.reference for example in examples} <= set(answers.values())


# Prompts


def test_the_prompt_of_a_summary(tokenizer: Tokenizer) -> None:
    for task, text, prompt in (
        (TASKS["summarize"], " It was n't so. ", "It wasn't so.  TL;DR:"),
        (QA, " q ", "q"),
    ):
        example = Example(text, "")
        (found,) = prepared([example], task, tokenizer, longest=100, shortest=0)
        assert found.text == prompt


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=st.text(max_size=60), limit=st.integers(1, 20))
def test_a_shortened_text_has_no_more_tokens(tokenizer: Tokenizer, text: str, limit: int) -> None:
    found = shortened(text, tokenizer, limit)
    assert len(tokenizer(found).input_ids) <= max(limit, len(tokenizer("").input_ids))
    if len(tokenizer(text).input_ids) <= limit:
        assert found == text


def test_a_shortened_text_is_a_beginning(tokenizer: Tokenizer) -> None:
    text = PAIRS[0].answer
    found = shortened(text, tokenizer, 20)
    assert text.startswith(found)
    assert len(tokenizer(found).input_ids) == 20


def test_short_texts_are_left_out(tokenizer: Tokenizer) -> None:
    examples = [Example("", "0"), Example("a", "1"), Example(PAIRS[0].answer, "2")]
    kept = list(prepared(examples, QA, tokenizer, longest=30, shortest=5))
    assert [example.reference for example in kept] == ["2"]
    assert len(tokenizer(kept[0].text).input_ids) == 30


# Figures


def test_rouge() -> None:
    same = rouge(["The cat sat. It slept."], ["the cat sat it slept"])
    assert same == pytest.approx(dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 100))
    # 2 of 3 words, both ways; then a mean of the two.
    found = rouge(["a cat slept", "x"], ["a cat sat", "y"])
    assert found["rouge1"] == pytest.approx(100 * (2 / 3) / 2)
    assert found["rouge2"] == pytest.approx(100 * (1 / 2) / 2)
    assert rouge(["机器学习"], ["机器学习"])["rouge1"] == 0


def test_agreement() -> None:
    assert leading([1, 2, 3], [1, 2, 4]) == 2
    assert leading([1, 2], [1, 2, 4]) == 2
    assert leading([], [1]) == 0
    first = Answer((1, 2), "a"), Answer((1, 2, 3), "b"), Answer((), "")
    second = Answer((1, 2), "a"), Answer((1, 9), "c"), Answer((), "")
    assert agreement(Answers(first, 1.0), Answers(second, 1.0)) == {
        "outputs": 3,
        "same_ids": 2,
        "same_texts": 2,
        "leading_tokens": 3,
        "tokens": 5,
        "leading_share": 0.6,
        "ids_of_text": False,
    }
    assert agreement(Answers(first[2:], 1.0), Answers(second[2:], 1.0))["leading_share"] == 1


def test_ids_end_at_the_end_token() -> None:
    assert until_end([5, 2, 0, 0], 2) == (5,)
    assert until_end([5, 6], 2) == (5, 6)
    assert until_end([5, 2], None) == (5, 2)


FIGURES = {"rouge2": 10.0, "rougeL": 30.0, "rougeLsum": 31.25, "log_prob_per_token": -0.5}
FIGURES |= {"output_tokens": 10, "tokens_per_second": 2.5}


@pytest.mark.parametrize(
    ("rouge1", "least", "share", "failures"),
    [
        (20.0, None, None, []),
        (20.0, 19.9, 0.9, []),
        (20.0, 20.0, None, ["ROUGE-1 of the engine is 20.00, not greater than 20"]),
        (20.0, None, 0.95, ["the share of equal leading tokens is 0.9000, less than 0.95"]),
        (math.nan, 0.0, None, ["ROUGE-1 of the engine is nan, not greater than 0"]),
    ],
)
def test_thresholds(
    rouge1: float, least: float | None, share: float | None, failures: list[str]
) -> None:
    limits = {"rouge1": least, "leading_share": share}
    assert compare.failures({"rouge1": rouge1}, {"leading_share": 0.9}, limits) == failures


def test_the_table() -> None:
    agreed = {"outputs": 1, "same_ids": 0, "same_texts": 0, "leading_tokens": 9, "tokens": 10}
    report: dict[str, Any] = {
        "examples": 1,
        ENGINE: {"rouge1": 20.0, **FIGURES},
        HUGGING_FACE: {"rouge1": 40.0, **FIGURES},
        "agreement": {**agreed, "leading_share": 0.9, "ids_of_text": False},
    }
    assert compare.table(report).splitlines() == [
        "1 examples",
        "                           engine  Hugging Face",
        "rouge1                      20.00         40.00",
        "rouge2                      10.00         10.00",
        "rougeL                      30.00         30.00",
        "rougeLsum                   31.25         31.25",
        "log probability per token    -0.5          -0.5",
        "output tokens                  10            10",
        "output tokens/s               2.5           2.5",
        "same token ids: 0 of 1 outputs, same text: 0; equal leading tokens: 9 of 10 (90.00 %)",
    ]
    report |= {HUGGING_FACE: None, "agreement": None}
    report[ENGINE]["log_prob_per_token"] = None
    assert "log probability per token       -" in compare.table(report)


# The command line


def test_the_guides_command() -> None:
    found = options(
        *("--engine_dir", "./phi-engine", "--hf_model_dir", "./Phi-3-mini-4k-instruct"),
        *("--batch_size", "1", "--test_trt_llm", "--test_hf", "--data_type", "fp16"),
        *("--check_accuracy", "--tensorrt_llm_rouge1_threshold=20"),
    )
    assert (found.engine_dir, found.eval_task) == ("./phi-engine", "summarize")
    assert (found.test_trt_llm, found.test_hf, found.starts_engine) == (True, True, True)
    assert (found.data_type, found.batch_size, found.max_ite) == ("float16", 1, 20)
    assert (found.output_len, found.max_input_length, found.min_input_length) == (100, 923, 0)
    assert (found.check_accuracy, found.tensorrt_llm_rouge1_threshold) == (True, 20)


def commands(page: str) -> list[list[str]]:
    """The arguments of summarize.py in a page's console blocks."""
    text = "\n".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if "scripts/summarize.py" in line]
    return [line[line.index("scripts/summarize.py") + 1 :] for line in lines]


def test_the_commands_of_the_page_are_valid() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    found = commands(page)
    assert len(found) == 5
    for arguments in found:
        compare.parse(arguments)
    for name in TASKS:
        assert f"| `{name}` |" in page


def test_both_sides_are_tested_unless_one_is_named() -> None:
    for flags, sides in (
        ([], (True, True)),
        (["--test_hf"], (False, True)),
        (["--test_engine"], (True, False)),
    ):
        found = options(*flags)
        assert (found.test_trt_llm, found.test_hf) == sides
    assert not options("--test_hf").starts_engine
    assert not options("--url=http://x").starts_engine


def test_columns_can_be_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = written(tmp_path / "a.jsonl", {"q": "text", "a": "reference"})
    flags = ("--eval_task=question_answering", "--input_key=q", "--output_key=a")
    found = compare.read_examples(options(*flags, f"--dataset_dir={file}"), tokenizer)
    assert found == [Example("text", "reference")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url=u", "--grpc-url=g"], "give one of --url, --grpc-url and --http-url"),
        (["--url=u", "--settings", "A=B"], "are for an engine to start, and one runs"),
        (["--http-url=u", "--engine_dir=e"], "are for an engine to start, and one runs"),
        (["--test_hf", "--check_accuracy"], "--test_hf alone tests no engine"),
        (["--test_hf", "--engine_dir=e"], "--test_hf alone tests no engine"),
        (["--test_engine", "--leading_threshold=1"], "--leading_threshold compares both sides"),
        (["--leading_threshold=2"], "2 is not between 0 and 1"),
        (["--batch_size=0"], "0 is not at least 1"),
        (["--settings", "ENGINE"], "'ENGINE' is not KEY=VALUE"),
        (["--num_beams=2"], "unrecognized arguments: --num_beams=2"),
        (["--eval_task=eval_context_ppl"], "invalid choice: 'eval_context_ppl'"),
    ],
)
def test_options_that_contradict(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *flags)


def test_an_engine_that_is_started_gets_the_options() -> None:
    given = options("--engine_dir=e", "--tokenizer_dir=t", "--settings", "DTYPE=float32", "MODEL=o")
    assert compare.engine_environment(given, "/m", {"PATH": "p", "MODEL": "x"}) == {
        "PATH": "p",
        "MODEL": "o",
        "TOKENIZER": "t",
        "ENGINE_DIR": "e",
        "DTYPE": "float32",
    }
    assert compare.engine_environment(options(), "/m", {"ENGINE_DIR": "e"}) == {
        "MODEL": "/m",
        "ENGINE_DIR": "e",
    }


def test_what_is_missing_ends_the_script_with_2(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(summarize.signal, "signal", lambda *_: None)  # type: ignore[attr-defined]
    model = f"--hf_model_dir={demo_model}"
    assert summarize.main([model, f"--dataset_dir={tmp_path}/absent"]) == 2
    assert "absent: there is no such file or directory" in capsys.readouterr().err
    assert summarize.main([model, f"--dataset_dir={DEMO}"]) == 2
    assert "no column 'article', but answer, question" in capsys.readouterr().err
    assert summarize.main([f"--hf_model_dir={tmp_path}/no/model", f"--dataset_dir={DEMO}"]) == 2
    assert f"{tmp_path}/no/model does not exist" in capsys.readouterr().err
    long = ["--eval_task=question_answering", "--min_input_length=1000"]
    assert summarize.main([model, f"--dataset_dir={DEMO}", *long]) == 2
    assert "no text of more than 1000 tokens" in capsys.readouterr().err


def test_a_missing_library_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'cog-triton\[eval\]'"):
        compare.compare(options(), {})


# The engine's side


class Parrot:
    """Answers with the prompt; notes how many prompts it has at once."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.at_once: list[int] = []
        self.running = 0

    async def __call__(self, prompt: str) -> Answer:
        self.prompts.append(prompt)
        self.running += 1
        self.at_once.append(self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if prompt == "fail":
            raise TritonUnavailable("gone")
        return Answer((1, 2), prompt)


def test_prompts_are_completed_in_batches_after_a_warm_up() -> None:
    engine, seen = Parrot(), list[int]()
    found = asyncio.run(in_batches(at_once(engine), ["a", "b", "c"], 2, seen.append))
    assert [answer.text for answer in found.answers] == ["a", "b", "c"]
    assert found.tokens == 6
    assert engine.prompts == ["a", "a", "b", "c"]
    assert engine.at_once == [1, 1, 2, 1]
    assert seen == [2, 1]


def test_a_failed_request_ends_the_comparison() -> None:
    with pytest.raises(TritonUnavailable):
        asyncio.run(in_batches(at_once(Parrot()), ["a", "fail"], 2, lambda _: None))


def ask(tokenizer: Tokenizer, reply: httpx.Response) -> tuple[Answer, dict[str, Any]]:
    """The answer of a Cog server that replies so, and the inputs that it got."""
    asked: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return reply

    client = httpx.AsyncClient(base_url="http://cog", transport=httpx.MockTransport(take))
    answer = asyncio.run(ask_cog(client, tokenizer, 9, "p"))
    return answer, json.loads(asked[0].content)["input"]


def test_cogs_answer(tokenizer: Tokenizer) -> None:
    body = {"status": "succeeded", "output": ["A to", "ken"]}
    found, inputs = ask(tokenizer, httpx.Response(200, json=body))
    assert found.text == "A token"
    assert tokenizer.decode(list(found.ids)) == "A token"
    assert inputs == {
        "prompt": "p",
        "prompt_template": "{prompt}",
        "stop_sequences": "",
        "seed": 0,
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 1.0,
    }


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (
            httpx.Response(200, json={"status": "failed", "error": "E1002 too long"}),
            TritonUnknownError,
            "HTTP 200: E1002 too long",
        ),
        (httpx.Response(422, json={"detail": "no prompt"}), TritonUnknownError, "422: no prompt"),
        (
            httpx.Response(409, json={"error": "At capacity"}),
            TritonUnknownError,
            "409: At capacity",
        ),
        (httpx.Response(502, text="<html>"), TritonMalformedJSON, "HTTP 502: <html>"),
    ],
)
def test_cogs_errors(
    tokenizer: Tokenizer, reply: httpx.Response, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(tokenizer, reply)


# All of it


def test_ids_of_texts_are_compared_when_one_side_has_no_others(tokenizer: Tokenizer) -> None:
    """Two ways to spell a text in tokens are the same text, and Cog's side gives no ids."""
    text = "A token."
    whole = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    single = tuple(
        token for letter in text for token in tokenizer(letter, add_special_tokens=False).input_ids
    )
    assert whole != single
    made = {
        ENGINE: Answers((Answer(whole, text),), 1.0),
        HUGGING_FACE: Answers((Answer(single, text),), 1.0),
    }
    again = {name: compare.with_ids_of_texts(side, tokenizer) for name, side in made.items()}
    for sides, same in ((again, 1), (made, 0)):
        found = agreement(sides[ENGINE], sides[HUGGING_FACE])
        assert (found["same_ids"], found["same_texts"]) == (same, 1)


def test_outputs_are_written(tmp_path: Path) -> None:
    made = {HUGGING_FACE: Answers((Answer((1,), "é"),), 1.0)}
    compare.write_outputs(tmp_path / "new", [Example("p", "r")], made)
    assert (tmp_path / "new" / "outputs.jsonl").read_text(encoding="utf-8") == (
        '{"prompt": "p", "reference": "r", "hugging_face": "é", "hugging_face_ids": [1]}\n'
    )


def test_no_other_module_needs_the_comparison() -> None:
    """What serves must not depend on it, nor on its libraries."""
    for file in (ROOT / "cog_triton").rglob("*.py"):
        if file.parent.name != "accuracy":
            assert "tools.accuracy" not in file.read_text(encoding="utf-8"), file


def test_the_version_of_the_librarys_hint_is_a_range() -> None:
    from packaging.requirements import Requirement

    assert Requirement(texts.DATASETS).specifier.contains("5.2.0")
