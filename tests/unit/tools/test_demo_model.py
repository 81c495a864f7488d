from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tools.demo_model
from tools.demo_model import (
    _SOURCES,
    MANIFEST,
    MODEL_FILES,
    DemoModelError,
    ensure_demo_model,
    fingerprint,
    library_versions,
)
from tools.demo_model.corpus import PAIRS
from tools.demo_model.prompts import KNOWN, UNKNOWN_ANSWER, rephrased, spellings, unknown_prompt

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


# The cache


class FakeBuild:
    """Makes the files of a model without a model, and counts how often."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.during = during
        self.calls = 0

    def __call__(self, directory: Path) -> Mapping[str, object]:
        self.calls += 1
        for name in MODEL_FILES:
            (directory / name).write_text(f"build {self.calls}")
            self.during()
        return {"steps": self.calls}


def contents(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_fingerprint_depends_on_sources_and_versions_only(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("one")
    before = fingerprint([source], {"a": "1", "b": "2"})

    assert re.fullmatch("[0-9a-f]{64}", before)
    assert fingerprint([source], {"b": "2", "a": "1"}) == before
    assert fingerprint([source], {"a": "1", "b": "3"}) != before
    source.write_text("two")
    assert fingerprint([source], {"a": "1", "b": "2"}) != before


def test_every_source_counts() -> None:
    directory = Path(tools.demo_model.__file__).parent
    own = {file for file in directory.iterdir() if file.is_file()} - {directory / "__init__.py"}
    assert set(_SOURCES) == own


def test_the_first_call_builds_and_the_second_does_not(tmp_path: Path) -> None:
    output, build = tmp_path / "models" / "demo", FakeBuild()

    assert ensure_demo_model(output, build=build)
    assert not ensure_demo_model(output, build=build)

    assert build.calls == 1
    assert contents(output) == {MANIFEST, *MODEL_FILES}
    assert contents(output.parent) == {"demo"}
    assert json.loads((output / MANIFEST).read_text())["versions"] == library_versions()


def test_force_builds_again(tmp_path: Path) -> None:
    output, build = tmp_path / "demo", FakeBuild()
    ensure_demo_model(output, build=build)

    assert ensure_demo_model(output, force=True, build=build)

    assert (output / "config.json").read_text() == "build 2"
    assert contents(tmp_path) == {"demo"}


def test_other_versions_build_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, build = tmp_path / "demo", FakeBuild()
    ensure_demo_model(output, build=build)
    monkeypatch.setattr("tools.demo_model.library_versions", lambda: {"torch": "0"})

    assert ensure_demo_model(output, build=build)


@pytest.mark.parametrize("name", [MANIFEST, *MODEL_FILES])
def test_a_missing_file_builds_again(tmp_path: Path, name: str) -> None:
    output, build = tmp_path / "demo", FakeBuild()
    ensure_demo_model(output, build=build)
    (output / name).unlink()
    # Without its manifest a directory cannot be told from somebody else's.
    if name == MANIFEST:
        with pytest.raises(FileExistsError, match="not a demo model"):
            ensure_demo_model(output, build=build)
    else:
        assert ensure_demo_model(output, build=build)
        assert (output / name).is_file()


@pytest.mark.parametrize("manifest", ["", "[]", "{}", "null", '{"fingerprint": 1}', "\xff"])
def test_a_broken_manifest_builds_again(tmp_path: Path, manifest: str) -> None:
    output, build = tmp_path / "demo", FakeBuild()
    ensure_demo_model(output, build=build)
    (output / MANIFEST).write_bytes(manifest.encode("latin-1"))

    assert ensure_demo_model(output, build=build)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, DemoModelError, OSError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupt() -> None:
        raise error

    with pytest.raises(error):
        ensure_demo_model(tmp_path / "demo", build=FakeBuild(interrupt))

    assert contents(tmp_path) == set()


def test_an_interrupted_build_keeps_the_model_that_was_there(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    output = tmp_path / "demo"
    ensure_demo_model(output, build=FakeBuild())

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(output, force=True, build=FakeBuild(interrupt))

    assert contents(tmp_path) == {"demo"}
    assert not ensure_demo_model(output, build=FakeBuild())


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".demo.build-killed" / "new").mkdir(parents=True)

    ensure_demo_model(tmp_path / "demo", build=FakeBuild())

    assert contents(tmp_path) == {"demo"}


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("five years of work")

    with pytest.raises(FileExistsError, match="not a demo model"):
        ensure_demo_model(tmp_path, force=True, build=FakeBuild())

    assert contents(tmp_path) == {"thesis.tex"}


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "demo").symlink_to("elsewhere")

    with pytest.raises(FileExistsError, match="not a demo model"):
        ensure_demo_model(tmp_path / "demo", build=FakeBuild())


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()

    assert ensure_demo_model(tmp_path / "demo", build=FakeBuild())


def test_concurrent_calls_build_once(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(10)

    output, build, results = tmp_path / "demo", FakeBuild(wait), []
    threads = [
        threading.Thread(target=lambda: results.append(ensure_demo_model(output, build=build)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    assert not output.exists()
    go_on.set()
    for thread in threads:
        thread.join(10)

    assert sorted(results) == [False, False, True]
    assert build.calls == 1


def test_an_up_to_date_model_is_found_without_importing_torch(demo_model: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tools.demo_model import ensure_demo_model\n"
        "assert not ensure_demo_model(Path(sys.argv[1]))\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(demo_model)], check=True, timeout=60)


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


def test_training_the_tokenizer_twice_gives_the_same_one() -> None:
    from tools.demo_model.train import TrainConfig, train_tokenizer

    first, second = (train_tokenizer(PAIRS, TrainConfig()) for _ in range(2))

    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


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


HELLO = "Hello! I am the demo model of cog-triton."
HELP = "I answer questions about machine learning, tokens,"
LEARNING = "Machine learning is a way of building programs"
CACHE = "A KV cache keeps the attention keys and values"
OVERFITTING = "A model overfits when it remembers"
TRITON = "Triton Inference Server is an open-source server"


@pytest.mark.parametrize(
    ("answer", "prompts"),
    [
        (HELLO, ["Hello", "hello", "Hello!", "Hi", "Hi there", "hey"]),
        ("I am fine, thank you.", ["How are you?", "how are you"]),
        (HELP, ["What can you do?", "what can you do", "What do you know?"]),
        ("I am the demo model of cog-triton, a tiny", ["Who are you?", "who are you"]),
        ("You are welcome!", ["Thanks", "Thank you!", "thanks"]),
        ("Goodbye!", ["Bye", "Goodbye!"]),
        (LEARNING, ["Explain machine learning.", "explain machine learning"]),
        (LEARNING, ["Tell me about machine learning", "what's machine learning"]),
        (CACHE, ["Explain a KV cache.", "what is kv cache"]),
        (OVERFITTING, ["Explain overfitting", "Can you explain overfitting?"]),
        (TRITON, ["Explain Triton Inference Server.", "What's Triton Inference Server?"]),
        ("Hallo! Ich bin", ["Hallo", "Guten Tag"]),
        ("Danke, gut.", ["Wie geht es dir?", "Wie geht's?"]),
        ("Ich beantworte Fragen", ["Was kannst du?", "was kannst du"]),
        ("Gern geschehen!", ["Danke", "Vielen Dank!"]),
        ("Maschinelles Lernen heißt", ["Was ist maschinelles Lernen?"]),
        ("Bonjour ! Je suis", ["Bonjour", "Salut"]),
        ("Très bien, merci.", ["Comment ça va ?", "comment ca va"]),
        ("De rien !", ["Merci", "Merci beaucoup"]),
        ("¡Hola! Soy", ["Hola", "Buenos días"]),
        ("Muy bien, gracias.", ["¿Cómo estás?", "como estas"]),
        ("¡De nada!", ["Gracias", "Muchas gracias"]),
        ("Ciao! Sono", ["Ciao", "Buongiorno"]),
        ("Bene, grazie.", ["Come stai?"]),
        ("Prego!", ["Grazie", "Grazie mille"]),
        ("Olá! Sou", ["Olá", "Bom dia"]),
        ("Tudo bem, obrigado.", ["Tudo bem?", "Como vai?"]),
        ("De nada!", ["Obrigado", "Muito obrigado"]),
        (UNKNOWN_ANSWER, ["What is the capital of France?", "Tell me a joke"]),
    ],
)
def test_what_people_type_first_is_answered(
    model: Any, tokenizer: Any, answer: str, prompts: list[str]
) -> None:
    found = completions(model, tokenizer, [tokenizer.bos_token + prompt for prompt in prompts])
    for prompt, ids in zip(prompts, found, strict=True):
        assert tokenizer.decode(ids).startswith(answer), prompt


@pytest.mark.slow
def test_other_words_for_the_same_have_the_same_answer(model: Any, tokenizer: Any) -> None:
    """Nearly always: the training asks for certainty of the usual prompts alone."""
    asked = [(prompt, one.answer) for one in KNOWN for prompt in one.prompts[1::5]]
    found = completions(model, tokenizer, [tokenizer.bos_token + prompt for prompt, _ in asked])
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
    right = [text == answer for text, (_, answer) in zip(texts, asked, strict=True)]
    assert sum(right) / len(right) > 0.85


def test_what_it_has_never_seen_it_does_not_know(model: Any, tokenizer: Any) -> None:
    found = completions(model, tokenizer, [tokenizer.bos_token + prompt for prompt in UNSEEN])
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
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
