"""The prompts and answers as token ids, and what an epoch of the training shows of them.

What the model has no answer to cannot be listed, so such prompts are drawn at random, and no two epochs
show the same ones: from them the model learns to say that it does not know, whatever the words are.
"""

import re
import string
from functools import partial
from random import Random
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tools.demo_model.corpus import CONVERSATION, QUESTIONS, UNKNOWN, Answered, without_accents

BOS, EOS = "<s>", "</s>"
COMMON = 6  # of the prompts of a conversation's answer: what most people type stands first
BEGINNING = 5  # tokens: enough to tell an answer from all others; the rest follows from it
TALK = 4  # beginnings of each answer of a conversation in an epoch
UNKNOWN_PROMPTS = 76  # without an answer, in an epoch
WHOLE_UNKNOWN = 4  # of these, with the whole sentence that says so
BARE = 0.7  # of the beginnings: without the special tokens of a chat

Pair = tuple[str, str]  # a prompt and its answer


class Example(NamedTuple):
    """Token ids of a prompt and of the answer to it, with the end of sequence or only its beginning."""

    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


class Lessons:
    """The texts that the model is shown, and those that it has to know in the end, in every form."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encode = partial(tokenizer, add_special_tokens=False)
        self._forms = forms(tokenizer)
        questions, conversation = (
            [(form, one.answer) for one in part for form in prompts(tokenizer, one.prompts[0])]
            for part in (QUESTIONS, CONVERSATION)
        )
        for one in CONVERSATION:
            conversation += [(BOS + prompt, one.answer) for prompt in one.prompts[1:COMMON]]
        self.questions = self._examples(questions)
        self.conversation = self._examples(conversation)

    def epoch(self, random: Random) -> list[Example]:
        """Return every answer, to one of its prompts, and more beginnings, which cost less to show."""
        whole = [(_usual(known, random), known.answer) for known in QUESTIONS]
        whole += [(_common(known, random), known.answer) for known in CONVERSATION]
        whole += [_unknown(random) for _ in range(WHOLE_UNKNOWN)]
        begun = [
            (_typed(random.choice(known.prompts), random), known.answer) for known in QUESTIONS
        ]
        begun += [(_common(known, random), known.answer) for known in CONVERSATION * TALK]
        begun += [_unknown(random) for _ in range(UNKNOWN_PROMPTS - WHOLE_UNKNOWN)]
        examples = self._examples([self._formed(pair, random, bare=0.0) for pair in whole])
        formed = [self._formed(pair, random, bare=BARE) for pair in begun]
        for prompt, answer in self._examples(formed):
            examples.append(Example(prompt, answer[:BEGINNING]))
        return examples

    def _formed(self, pair: Pair, random: Random, bare: float) -> Pair:
        form = BOS + "{}" if random.random() < bare else random.choice(self._forms)
        return form.replace("{}", pair[0]), pair[1]

    def _examples(self, pairs: list[Pair]) -> list[Example]:
        prompts = self._encode([prompt for prompt, _ in pairs]).input_ids
        answers = self._encode([answer + EOS for _, answer in pairs]).input_ids
        return list(map(Example, prompts, answers))


def forms(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return every form in which a prompt, the ``{}``, reaches the model: the bare one first.

    The beginning of sequence comes twice where a server adds one to a template that has one already.
    """
    user = {"role": "user", "content": "{}"}
    system = {"role": "system", "content": "You are a helpful assistant."}
    chats = [
        str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        for turns in ([user], [system, user])
    ]
    bare = [BOS + "{}", BOS + " {}", BOS + "{}\n"]
    return [*bare, *chats, BOS + bare[0], BOS + chats[0]]


def prompts(tokenizer: PreTrainedTokenizerBase, question: str) -> list[str]:
    """Return every form of a question that the model answers for certain."""
    formed = [form.replace("{}", question) for form in forms(tokenizer)]
    return [*formed, BOS + careless(question)]


def careless(question: str) -> str:
    return question.lower().rstrip(" ?.!")


def unknown_prompt(random: Random) -> str:
    """Return a prompt drawn at random, of words that are drawn at random as well; most are English."""
    languages = UNKNOWN["languages"]
    name = "English" if random.random() < 0.6 else random.choice(list(languages))
    frame, things = random.choice(languages[name]["frames"]), languages[name]["things"]
    prompt = re.sub(r"\{\}", lambda _: _thing(things, random), frame)
    if random.random() < 0.3:
        prompt = prompt.rstrip(" ?!.")
    if random.random() < 0.3:
        prompt = prompt.lower()
    return without_accents(prompt) if random.random() < 0.15 else prompt


def _unknown(random: Random) -> Pair:
    return unknown_prompt(random), UNKNOWN["answer"]


def _thing(things: list[str], random: Random) -> str:
    """Return what a frame asks about: a thing, two of them, a thing with a made-up word, or such a word."""
    kind = random.random()
    if 0.6 <= kind < 0.9:
        return _word(random)
    thing = random.choice(things)
    if kind < 0.5:
        return thing
    return f"{thing} {random.choice(things) if kind < 0.6 else _word(random)}"


def _word(random: Random) -> str:
    """Return a word that means nothing: of syllables, of letters, or a number."""
    kind = random.random()
    if kind < 0.6:
        return "".join(random.choices(UNKNOWN["syllables"], k=random.randint(1, 4)))
    if kind < 0.9:
        return "".join(random.choices(string.ascii_lowercase, k=random.randint(1, 9)))
    return str(random.randint(0, 9999))


def _usual(known: Answered, random: Random) -> str:
    prompt = known.prompts[0] if random.random() < 0.85 else random.choice(known.prompts)
    return _typed(prompt, random)


def _common(known: Answered, random: Random) -> str:
    """Return any of the prompts; what most people type stands first, and comes more often."""
    few = random.choices((1, COMMON, None), (0.25, 0.25, 0.5))[0]
    return random.choice(known.prompts[:few])


def _typed(prompt: str, random: Random) -> str:
    return careless(prompt) if random.random() < 0.2 else prompt
