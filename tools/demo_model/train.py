"""Train the demo model: a two-layer Llama that knows its corpus, with the shipped one's tokenizer.

The model overfits on purpose. Training goes on until every token of every answer leads its closest
rival by a margin of logits too wide for another kernel, batch shape or 16-bit format to turn
around. From then on greedy decoding gives the answers word for word, since it picks those tokens.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.demo_model import DIRECTORY, DemoModelError
from tools.demo_model.lessons import Example, Lessons

_IGNORED = -100
SEED = 0
BATCH_TOKENS = 1024  # positions in a batch, padding included
LEARNING_RATE = 6e-3
FINAL_RATE = 0.06  # of the learning rate, reached at DECAY_STEPS
WARMUP_STEPS, DECAY_STEPS, MAX_STEPS = 20, 700, 1500
CHECK_EVERY = 25  # steps
CHECK_BELOW = 0.02  # running mean of the loss, in nats per token
# Logits by which each token of each answer has to lead its closest rival: after the question of
# the corpus in every form, and after the common greetings, thanks and so on.
MIN_MARGIN, MIN_LEAD = 2.0, 0.25

Batch = tuple[Tensor, Tensor]
"""Ids, padded on the right, and the one after each if it is of an answer, else -100: [texts, positions]."""


def build_demo_model(directory: Path) -> Mapping[str, object]:
    """Train the demo model and save it to ``directory`` in Hugging Face format; return what to record.

    It changes PyTorch's global state: the seed, the threads, deterministic algorithms.
    """
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums that several share are rounded differently for each number
    torch.use_deterministic_algorithms(True)
    tokenizer: Any = AutoTokenizer.from_pretrained(DIRECTORY)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(DIRECTORY))
    model.generation_config = GenerationConfig.from_pretrained(DIRECTORY)
    lessons = Lessons(tokenizer)
    steps = train(model, lessons)
    model.save_pretrained(directory)
    # The weights come out readable by their owner only, and a server may run as another user.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DIRECTORY / name, directory)
    # The files are checked, and not the objects that they were made of.
    model = LlamaForCausalLM.from_pretrained(directory)
    margin, lead = min(margins(model, lessons.questions)), min(margins(model, lessons.conversation))
    if margin < MIN_MARGIN or lead < MIN_LEAD:
        raise DemoModelError(f"the saved model has margins of {margin:.3f} and {lead:.3f} logits")
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"steps": steps, "smallest_margin": margin, "smallest_lead": lead, "kernels": kernels}


def train(model: LlamaForCausalLM, lessons: Lessons) -> int:
    """Train until the margins are reached and return the number of steps that took."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    wanted = (lessons.questions, MIN_MARGIN), (lessons.conversation, MIN_LEAD)
    mean_loss = float("inf")
    steps = tqdm(range(MAX_STEPS), desc="Training the demo model", mininterval=1.0)
    for step, batch in zip(steps, batches(lessons), strict=False):
        # A short rise, a linear fall, then a constant.
        rise, fall = (step + 1) / WARMUP_STEPS, 1 - step / DECAY_STEPS
        rate = LEARNING_RATE * max(FINAL_RATE, min(1.0, rise, fall))
        optimizer.param_groups[0]["lr"] = rate
        loss = cross_entropy(*_answer_logits(model, batch))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if step == 0 else 0.9 * mean_loss + 0.1 * loss.item()
        steps.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
        if (step + 1) % CHECK_EVERY or mean_loss >= CHECK_BELOW:
            continue
        # It stops at the first batch that falls short, so a check too early costs little.
        if all(m >= least for known, least in wanted for m in margins(model, known)):
            return int(step) + 1
    raise DemoModelError(
        f"after {MAX_STEPS} steps some answer still leads its closest rival by less than "
        f"{MIN_MARGIN} logits (mean loss {mean_loss:.4f}); raise max_steps or the model size"
    )


def margins(model: LlamaForCausalLM, examples: Sequence[Example]) -> Iterator[float]:
    """Yield, batch by batch, the smallest lead in logits of an answer's token over all others.

    Greedy decoding reproduces every answer if and only if all of these are positive.
    """
    for batch in _by_length(examples):
        with torch.no_grad():
            logits, labels = _answer_logits(model, batch)
        right = logits.gather(1, labels[:, None])
        rival = logits.scatter(1, labels[:, None], float("-inf")).amax(1, keepdim=True)
        yield (right - rival).min().item()


def _answer_logits(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    # Without an attention mask the causal kernel runs; what is padded on the right comes too late
    # to be attended to by anything that counts. Only answers go through the output layer.
    inputs, labels = batch
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    counts = labels != _IGNORED
    return model.lm_head(hidden[counts]), labels[counts]


def batches(lessons: Lessons) -> Iterator[Batch]:
    """Yield the batches of one epoch after another, without end."""
    random = Random(SEED)
    while True:
        epoch = _by_length(lessons.epoch(random))
        random.shuffle(epoch)
        yield from epoch


def _by_length(examples: Sequence[Example]) -> list[Batch]:
    """Return batches of at most BATCH_TOKENS positions; a longer example has one of its own."""
    groups: list[list[Example]] = [[]]
    # Neighbours in length share a batch, which leaves little to pad.
    for example in sorted(examples, key=lambda example: example.length):
        if groups[-1] and (len(groups[-1]) + 1) * example.length > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(example)
    return [collate(group) for group in groups]


def collate(examples: Sequence[Example]) -> Batch:
    texts = [torch.tensor(prompt + answer) for prompt, answer in examples]
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    labels = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=_IGNORED)
    for row, (prompt, _) in enumerate(examples):
        labels[row, : len(prompt) - 1] = _IGNORED
    return inputs, labels
