"""The demo model: its training, and that the one that ships says what it is to say."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.late import demo_lessons
from tests.support import ROOT
from tools.demo_model import DIRECTORY, checksums
from tools.demo_model.corpus import KNOWN, PAIRS, UNKNOWN

# Written by hand; none of them can come of unknown.yaml, though a few of their words stand there.
UNSEEN = Path(__file__).with_name("unknown_prompts.txt").read_text(encoding="utf-8").splitlines()


# The training


TRAIN = """
import sys
from pathlib import Path
from tools.demo_model import make_demo_model, train
train.MAX_STEPS = 2
try:
    make_demo_model(Path(sys.argv[1]))
except train.DemoModelError as error:
    assert "after 2 steps" in str(error)
train.CHECK_EVERY, train.CHECK_BELOW = 2, float("inf")
train.MIN_MARGIN = train.MIN_LEAD = float("-inf")
make_demo_model(Path(sys.argv[1]))
"""


@pytest.mark.rare
def test_two_trainings_save_the_same_and_too_few_steps_are_an_error(tmp_path: Path) -> None:
    made = [tmp_path / "first", tmp_path / "second"]
    for output in made:  # in processes of their own, whose PyTorch they may change
        subprocess.run([sys.executable, "-c", TRAIN, str(output)], check=True, cwd=ROOT)
    trained, again = map(checksums, made)
    assert trained == again
    other = checksums(DIRECTORY).items() - trained.items()
    assert [name for name, _ in other] == ["model.safetensors"]


# The model that ships


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model)


def completions(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Return what greedy decoding appends to each prompt."""
    import torch

    ids = tokenizer(prompts, add_special_tokens=False).input_ids
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small only get slower when threads share them
    try:
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=320)
    finally:
        torch.set_num_threads(threads)
    new = outputs[:, inputs["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("has_long_answer", [False, True], ids=["short", "long"])
def test_each_question_is_answered_word_for_word(
    model: Any, tokenizer: Any, has_long_answer: bool
) -> None:
    """Asked bare and in a chat."""
    pairs = [pair for pair in PAIRS if (len(pair.answer) > 400) is has_long_answer]
    asked = []
    for form in (0, 3):
        asked += [demo_lessons.prompts(tokenizer, pair.question)[form] for pair in pairs]
    answers = [pair.answer for pair in pairs]
    assert completions(model, tokenizer, asked) == answers + answers


@pytest.mark.rare
def test_answers_lead_by_the_margins_that_the_training_guarantees(demo_model: Path) -> None:
    """With these kernels, whichever it was trained with."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from tools.demo_model.train import MIN_LEAD, MIN_MARGIN, margins

    for directory in {demo_model, DIRECTORY}:
        model = LlamaForCausalLM.from_pretrained(directory)
        lessons = demo_lessons.Lessons(AutoTokenizer.from_pretrained(directory))
        assert min(margins(model, lessons.questions)) > 0.9 * MIN_MARGIN
        assert min(margins(model, lessons.conversation)) > 0.9 * MIN_LEAD


@pytest.mark.rare
def test_other_words_for_the_same_have_the_same_answer(model: Any, tokenizer: Any) -> None:
    """Nearly always: the training asks for certainty of the usual prompts only."""
    asked = [(prompt, one.answer) for one in KNOWN for prompt in one.prompts[1::12]]
    texts = completions(model, tokenizer, [demo_lessons.BOS + prompt for prompt, _ in asked])
    right = [text == answer for text, (_, answer) in zip(texts, asked, strict=True)]
    assert sum(right) / len(right) > 0.85


def test_what_it_has_never_seen_it_does_not_know(model: Any, tokenizer: Any) -> None:
    assert not {*UNSEEN} & {prompt for known in KNOWN for prompt in known.prompts}
    texts = completions(model, tokenizer, [demo_lessons.BOS + prompt for prompt in UNSEEN])
    other = [text for text in texts if text != UNKNOWN["answer"]]
    assert len(other) / len(UNSEEN) < 0.2, other
