"""The prompts and answers as token ids, and what an epoch of the training shows of them."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tools.demo_model.corpus import QA
from tools.demo_model.prompts import (
    CONVERSATION,
    QUESTIONS,
    UNKNOWN_ANSWER,
    Answered,
    unknown_prompt,
)

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SYSTEM_PROMPT = "You are a helpful assistant."

COMMON = 6  # of the prompts of a conversation's answer: what most people type stands first
BEGINNING = 5  # tokens: enough to tell an answer from all others; the rest follows from it
TALK = 4  # beginnings of each answer of a conversation in an epoch
WHOLE_UNKNOWN = 4  # of the prompts without an answer
BARE = 0.7  # of the beginnings: without the special tokens of a chat


class Example(NamedTuple):
    """Token ids of a prompt and of the answer to it, which ends with the end of sequence.

    Where it shows an answer's beginning alone, the answer has no end.
    """

    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


class Lessons:
    """The texts that the model is shown, and those that it has to know in the end.

    Attributes:
        questions: every form of every question of the corpus, with its answer.
        conversation: every form of the usual greeting of each meaning, and so on, and the other common
            ones as they are typed, with their answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, unknown_prompts: int) -> None:
        self._tokenizer = tokenizer
        self._forms = tuple(forms(tokenizer).values())
        self._unknown_prompts = unknown_prompts
        self._answers: dict[str, list[int]] = {}
        self.questions = self._usual_forms(QUESTIONS)
        self.conversation = self._usual_forms(CONVERSATION) + self.examples(
            (BOS + prompt, one.answer) for one in CONVERSATION for prompt in one.prompts[1:COMMON]
        )

    def epoch(self, random: Random) -> list[Example]:
        """Every answer, to one of its prompts, and more beginnings, which cost less to show."""
        whole = [(_usual(known, random), known.answer) for known in QUESTIONS]
        whole += [(_common(known, random), known.answer) for known in CONVERSATION]
        whole += [(unknown_prompt(random), UNKNOWN_ANSWER) for _ in range(WHOLE_UNKNOWN)]
        begun = [
            (_typed(random.choice(known.prompts), random), known.answer) for known in QUESTIONS
        ]
        begun += [(_common(known, random), known.answer) for known in CONVERSATION * TALK]
        rest = self._unknown_prompts - WHOLE_UNKNOWN
        begun += [(unknown_prompt(random), UNKNOWN_ANSWER) for _ in range(rest)]
        return [
            *self.examples((self._form(prompt, random, 0.0), answer) for prompt, answer in whole),
            *self._begun((self._form(prompt, random, BARE), answer) for prompt, answer in begun),
        ]

    def examples(self, pairs: Iterable[tuple[str, str]]) -> list[Example]:
        """Examples of prompts, with the special tokens of their form, and answers."""
        texts, answers = zip(*pairs, strict=True)
        ids = self._tokenizer(list(texts), add_special_tokens=False).input_ids
        return [
            Example(prompt, self._answer(answer))
            for prompt, answer in zip(ids, answers, strict=True)
        ]

    def _usual_forms(self, known: Iterable[Answered]) -> list[Example]:
        return self.examples(
            (form, one.answer)
            for one in known
            for form in prompts(self._tokenizer, one.prompts[0]).values()
        )

    def _begun(self, pairs: Iterable[tuple[str, str]]) -> list[Example]:
        return [Example(one.prompt, one.answer[:BEGINNING]) for one in self.examples(pairs)]

    def _answer(self, text: str) -> list[int]:
        if text not in self._answers:
            ids = self._tokenizer(text + EOS, add_special_tokens=False).input_ids
            self._answers[text] = list(ids)
        return self._answers[text]

    def _form(self, prompt: str, random: Random, bare: float) -> str:
        form = BOS + "{}" if random.random() < bare else random.choice(self._forms)
        return form.replace("{}", prompt)


def forms(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Every form in which a prompt, the ``{}``, reaches the model, by name.

    All of them start with the beginning of sequence. It comes twice where a server adds one to a
    prompt whose template has put one there already.
    """
    user = {"role": "user", "content": "{}"}
    system = {"role": "system", "content": SYSTEM_PROMPT}
    chat, chat_with_system = (
        str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        for turns in ([user], [system, user])
    )
    return {
        "bare": BOS + "{}",
        "leading space": BOS + " {}",
        "trailing newline": BOS + "{}\n",
        "chat": chat,
        "chat with system": chat_with_system,
        "bare, begun twice": BOS + BOS + "{}",
        "chat, begun twice": BOS + chat,
    }


def prompts(tokenizer: PreTrainedTokenizerBase, question: str) -> dict[str, str]:
    """Return every form of a question that the model answers for certain, by name."""
    named = {name: form.replace("{}", question) for name, form in forms(tokenizer).items()}
    return {**named, "careless": BOS + careless(question)}


def encode(tokenizer: PreTrainedTokenizerBase, pair: QA) -> list[Example]:
    """Return one example for each form of the question, all with the same answer."""
    texts = prompts(tokenizer, pair.question).values()
    return Lessons(tokenizer, 0).examples((text, pair.answer) for text in texts)


def careless(question: str) -> str:
    """A question as it is typed in a hurry."""
    return question.lower().rstrip(" ?.!")


def _usual(known: Answered, random: Random) -> str:
    prompt = known.prompts[0] if random.random() < 0.85 else random.choice(known.prompts)
    return _typed(prompt, random)


def _common(known: Answered, random: Random) -> str:
    """Any of the prompts; what most people type stands first, and comes more often."""
    few = random.choices((1, COMMON, None), (0.25, 0.25, 0.5))[0]
    return random.choice(known.prompts[:few])


def _typed(prompt: str, random: Random) -> str:
    return careless(prompt) if random.random() < 0.2 else prompt
