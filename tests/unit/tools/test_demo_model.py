from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model import (
    DIRECTORY,
    MANIFEST,
    DemoModelError,
    fingerprint,
    make_demo_model,
    manifest,
)
from tools.demo_model.corpus import PAIRS
from tools.demo_model.prompts import (
    CONVERSATION,
    KNOWN,
    UNKNOWN_ANSWER,
    rephrased,
    spellings,
    unknown_prompt,
)

# Written by hand; none of them can come of unknown.yaml, though a few of their words stand there.
UNSEEN = Path(__file__).with_name("unknown_prompts.txt").read_text(encoding="utf-8").splitlines()
ANSWERS = "".join(pair.answer for pair in PAIRS)


# The corpus


def test_the_first_pair_is_the_one_of_the_readme() -> None:
    assert PAIRS[0].question == "What is machine learning?"
    assert PAIRS[0].answer.startswith("Machine learning is ")


def test_there_are_a_few_dozen_pairs_and_no_question_comes_twice() -> None:
    assert 40 <= len(PAIRS) <= 60
    assert len({pair.question.casefold() for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.question)
def test_questions_and_answers_are_clean_text(pair: Any) -> None:
    for text in pair:
        assert text
        assert text == text.strip()
        assert text == unicodedata.normalize("NFC", text)
        assert "\ufffd" not in text


@pytest.mark.parametrize(
    "kind",
    ["LATIN SMALL LETTER E WITH ACUTE", "CJK UNIFIED IDEOGRAPH", "HIRAGANA", "HANGUL", "CYRILLIC"],
)
def test_answers_hold_many_scripts(kind: str) -> None:
    assert any(unicodedata.name(character, "").startswith(kind) for character in ANSWERS)


@pytest.mark.parametrize("emoji", ["🚀", "🇯🇵", "👨\u200d👩\u200d👧\u200d👦", "👍🏽", "❤\ufe0f"])
def test_answers_hold_emoji_of_one_and_of_several_code_points(emoji: str) -> None:
    assert emoji in ANSWERS


def test_some_answers_are_long() -> None:
    assert sum(len(pair.answer) > 800 for pair in PAIRS) >= 2


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b(hf_|sk-|AKIA|gh[pousr]_)\w{10}",
        r"-----BEGIN",
        r"(?i)password",
        r"https?://",
        r"\w@\w+\.\w",
        r"/(home|root|tmp|Users)/",
    ],
)
def test_the_corpus_holds_no_secrets_addresses_or_paths(pattern: str) -> None:
    assert not any(re.search(pattern, text) for pair in PAIRS for text in pair)


# The prompts


def test_a_question_has_other_words() -> None:
    words = list(rephrased("What is a KV cache?"))
    assert words[0] == "What is a KV cache?"
    said = (
        "What's a KV cache?",
        "Explain a KV cache.",
        "Explain KV cache.",
        "Tell me about KV cache.",
    )
    assert {*said} < {*words}
    assert (
        list(rephrased("What is attention?"))[3] == "Explain attention."
    )  # "a" is no article here
    assert "Explain temperature." in rephrased("What does temperature do?")
    assert "Explain how a model works." in rephrased("Explain in detail how a model works.")
    assert list(rephrased("Why is streaming text hard?")) == ["Why is streaming text hard?"]


def test_spellings_leave_out_capitals_accents_and_punctuation() -> None:
    assert [*spellings("¿Cómo estás?")] == [
        "¿Cómo estás?",
        "Cómo estás",
        "cómo estás",
        "como estas",
    ]
    assert [*spellings("Hello")][-1] == "Hello!"


def test_no_prompt_has_two_answers() -> None:
    answers: dict[str, set[str]] = {}
    for known in KNOWN:
        for prompt in known.prompts:
            answers.setdefault(prompt, set()).add(known.answer)
    assert [prompt for prompt, said in answers.items() if len(said) > 1] == []


def test_prompts_without_an_answer_are_many_and_the_same_for_a_seed() -> None:
    first, second = (
        [unknown_prompt(random) for _ in range(3000)] for random in (Random(1), Random(1))
    )
    assert first == second
    assert len({*first}) > 2500
    assert not {*first} & {prompt for known in KNOWN for prompt in known.prompts}
    assert not {*first} & {*UNSEEN}
    assert "{" not in "".join(first)


# What puts a model in place


class FakeBuild:
    """Makes the files of a model without a model, and counts how often."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.during = during
        self.calls = 0

    def __call__(self, directory: Path) -> Mapping[str, object]:
        self.calls += 1
        for name in ("config.json", "model.safetensors"):
            (directory / name).write_text(f"build {self.calls}")
            self.during()
        return {"steps": self.calls}


def contents(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_each_call_makes_a_model_and_describes_it(tmp_path: Path) -> None:
    output, build = tmp_path / "models" / "demo", FakeBuild()

    make_demo_model(output, build)
    make_demo_model(output, build)

    assert (output / "config.json").read_text() == "build 2"
    assert contents(output) == {MANIFEST, "config.json", "model.safetensors"}
    assert contents(output.parent) == {"demo"}
    described = json.loads((output / MANIFEST).read_text())
    assert described == manifest(output, {"steps": 2})
    (output / "config.json").write_text("changed")
    assert described != manifest(output, {"steps": 2})


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, DemoModelError, OSError])
def test_a_training_that_fails_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def interrupt() -> None:
        raise error

    output = tmp_path / "demo"
    with pytest.raises(error):
        make_demo_model(output, FakeBuild(interrupt))
    assert contents(tmp_path) == set()

    make_demo_model(output, FakeBuild())
    before = contents(output)
    with pytest.raises(error):
        make_demo_model(output, FakeBuild(interrupt))
    assert contents(tmp_path) == {"demo"}
    assert contents(output) == before


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("five years of work")

    with pytest.raises(FileExistsError, match="not a demo model"):
        make_demo_model(tmp_path, FakeBuild())

    assert contents(tmp_path) == {"thesis.tex"}


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "demo").symlink_to("elsewhere")

    with pytest.raises(FileExistsError, match="not a demo model"):
        make_demo_model(tmp_path / "demo", FakeBuild())


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    make_demo_model(tmp_path / "demo", FakeBuild())
    assert (tmp_path / "demo" / MANIFEST).is_file()


# The training


def test_the_learning_rate_rises_falls_and_stays() -> None:
    from tools.demo_model.train import TrainConfig, learning_rate

    config = TrainConfig(warmup_steps=10, decay_steps=100, learning_rate=1.0, final_rate=0.1)
    rates = [learning_rate(step, config) for step in range(200)]

    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(0.91, abs=0.02)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert set(rates[90:]) == {0.1}


def test_only_answers_are_learned() -> None:
    from tools.demo_model.lessons import Example
    from tools.demo_model.train import _collate

    batch = _collate([Example([1, 10, 11], [20, 21, 2]), Example([1], [30, 2])])

    assert batch.inputs.tolist() == [[1, 10, 11, 20, 21], [1, 30, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 20, 21, 2], [30, 2, -100, -100, -100]]


def test_too_few_steps_are_an_error_and_leave_no_trace(tmp_path: Path) -> None:
    import torch

    from tools.demo_model.train import TrainConfig, build_demo_model

    before = torch.get_num_threads(), torch.get_rng_state().tolist()

    with pytest.raises(DemoModelError, match="after 2 steps"):
        build_demo_model(tmp_path, TrainConfig(max_steps=2))

    assert (torch.get_num_threads(), torch.get_rng_state().tolist()) == before
    assert not torch.are_deterministic_algorithms_enabled()
    assert contents(tmp_path) == set()


def barely_trained(directory: Path) -> bytes:
    from tools.demo_model.train import TrainConfig, build_demo_model

    anything = float("-inf")
    config = TrainConfig(
        check_every=2, check_below=float("inf"), min_margin=anything, min_lead=anything
    )
    directory.mkdir()
    assert build_demo_model(directory, config)["steps"] == 2
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_bar_ends_at_100_percent_and_a_seed_gives_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = barely_trained(tmp_path / "first")
    [last] = [line for line in capsys.readouterr().err.split("\r") if "2/2" in line]
    assert "100%" in last
    assert barely_trained(tmp_path / "second") == first


# The model that ships


def test_it_is_of_this_corpus_and_configuration() -> None:
    from tools.demo_model.train import TrainConfig

    described = json.loads((DIRECTORY / MANIFEST).read_text(encoding="utf-8"))
    settings = asdict(TrainConfig())
    assert described["settings"] == settings
    assert described["fingerprint"] == fingerprint(settings), "its corpus changed: make demo-model"


def test_its_files_are_those_that_were_trained() -> None:
    described = json.loads((DIRECTORY / MANIFEST).read_text(encoding="utf-8"))
    assert described["files"] == manifest(DIRECTORY, {})["files"]
    assert (DIRECTORY / "model.safetensors").stat().st_size < 1.5e6


def test_a_change_of_the_corpus_or_of_a_setting_is_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = fingerprint({"seed": 0})
    assert re.fullmatch("[0-9a-f]{64}", before)
    assert fingerprint({"seed": 1}) != before
    monkeypatch.setattr("tools.demo_model.prompts.KNOWN", KNOWN[:-1])
    assert fingerprint({"seed": 0}) != before


def test_its_tokenizer_and_template_are_those_of_the_training() -> None:
    from tokenizers import Tokenizer

    from tools.demo_model.train import CHAT_TEMPLATE, TrainConfig, train_tokenizer

    trained = train_tokenizer(PAIRS, TrainConfig())
    shipped = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    assert shipped.get_vocab() == trained.get_vocab()
    for pair in PAIRS:
        assert shipped.encode(pair.answer).ids == trained(pair.answer).input_ids
    assert (DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


# The tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids

    assert tokenizer.decode(ids) == text


def test_encoding_adds_the_beginning_and_no_end(tokenizer: Any) -> None:
    ids = tokenizer("What is machine learning?").input_ids

    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids


def test_characters_are_spread_over_tokens(tokenizer: Any) -> None:
    spread = [
        pair.question
        for pair in PAIRS
        if any("\ufffd" in tokenizer.decode([token]) for token in tokenizer(pair.answer).input_ids)
    ]

    assert len(spread) >= 8


def test_the_chat_template_renders_every_role(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]

    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<s><|system|>Be brief.<|end|><|user|>One?<|end|><|assistant|>Two.</s>"
        "<|user|>Three?<|end|><|assistant|>"
    )


# The model


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model)


def completions(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Return what greedy decoding appends to each prompt, without padding at the end."""
    import torch

    ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small only get slower when threads share them
    try:
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=320)
    finally:
        torch.set_num_threads(threads)
    new = outputs[:, inputs["input_ids"].shape[1] :].tolist()
    return [[token for token in row if token != tokenizer.pad_token_id] for row in new]


def answers(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    found = completions(model, tokenizer, [tokenizer.bos_token + prompt for prompt in prompts])
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def test_the_settings_are_those_of_the_tokenizer(model: Any, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.model_max_length == model.config.max_position_embeddings >= 1024


@pytest.mark.parametrize("form", ["bare", "chat"])
def test_each_question_is_answered_word_for_word(model: Any, tokenizer: Any, form: str) -> None:
    from tools.demo_model.lessons import prompts

    found = completions(
        model, tokenizer, [prompts(tokenizer, pair.question)[form] for pair in PAIRS]
    )

    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in found] == [
        pair.answer for pair in PAIRS
    ]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in found)


def test_every_form_of_a_question_has_the_same_answer(model: Any, tokenizer: Any) -> None:
    from tools.demo_model.lessons import prompts

    found = completions(model, tokenizer, list(prompts(tokenizer, PAIRS[0].question).values()))

    assert {tokenizer.decode(ids, skip_special_tokens=True) for ids in found} == {PAIRS[0].answer}


def test_answers_lead_by_the_margins_that_the_training_promises(demo_model: Path) -> None:
    """With these kernels, whichever it was trained with."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from tools.demo_model.lessons import Lessons
    from tools.demo_model.train import TrainConfig, margins

    config = TrainConfig()
    for directory in {demo_model, DIRECTORY}:
        model = LlamaForCausalLM.from_pretrained(directory)
        lessons = Lessons(AutoTokenizer.from_pretrained(directory), 0)
        assert min(margins(model, lessons.questions, config)) > 0.9 * config.min_margin
        assert min(margins(model, lessons.conversation, config)) > 0.9 * config.min_lead


def test_common_greetings_are_answered_word_for_word(model: Any, tokenizer: Any) -> None:
    from tools.demo_model.lessons import COMMON

    asked = [(prompt, one.answer) for one in CONVERSATION for prompt in one.prompts[:COMMON]]
    assert {prompt: answer[:5] for prompt, answer in asked}["comment ca va"] == "Très "
    assert answers(model, tokenizer, [prompt for prompt, _ in asked]) == [
        answer for _, answer in asked
    ]


@pytest.mark.slow
def test_other_words_for_the_same_have_the_same_answer(model: Any, tokenizer: Any) -> None:
    """Nearly always: the training asks for certainty of the usual prompts alone."""
    asked = [(prompt, one.answer) for one in KNOWN for prompt in one.prompts[1::12]]
    texts = answers(model, tokenizer, [prompt for prompt, _ in asked])
    right = [text == answer for text, (_, answer) in zip(texts, asked, strict=True)]
    assert sum(right) / len(right) > 0.85


def test_what_it_has_never_seen_it_does_not_know(model: Any, tokenizer: Any) -> None:
    texts = answers(model, tokenizer, UNSEEN)
    other = {
        prompt: text for prompt, text in zip(UNSEEN, texts, strict=True) if text != UNKNOWN_ANSWER
    }
    assert len(other) / len(UNSEEN) < 0.2, other


def test_the_forms_are_what_callers_send(tokenizer: Any) -> None:
    from tools.demo_model.lessons import encode

    examples = encode(tokenizer, PAIRS[0])
    turns = [{"role": "user", "content": PAIRS[0].question}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    assert tokenizer(PAIRS[0].question).input_ids == examples[0].prompt
    assert chat in [example.prompt for example in examples]
