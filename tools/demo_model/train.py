"""Trains the demo model: a byte-level BPE tokenizer and a two-layer Llama that knows its corpus.

The model overfits on purpose. Training goes on until every token of every answer leads its closest
rival by a margin of logits too wide for another kernel, batch shape or 16-bit format to turn
around. From then on greedy decoding gives the answers word for word, since it picks those tokens.
Other words for the same question, and that there is no answer, it has learned from examples.

The text that a completion decodes to is the answer itself: no space before it, nothing after it but
the end-of-sequence token, which ``skip_special_tokens`` removes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from tools.demo_model import DemoModelError, fingerprint
from tools.demo_model.corpus import PAIRS, QA
from tools.demo_model.lessons import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    PAD,
    SYSTEM,
    USER,
    Example,
    Lessons,
)

# An answer ends with the one end-of-sequence token here too, so that END need not be a second one.
# It takes tools, in Hermes' format, though the model has learned of none: so that they can be tried.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|><tools>' + tools | tojson + '</tools><|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' }}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token if message['role'] == 'assistant' else '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_IGNORED = -100


@dataclass(frozen=True)
class TrainConfig:
    """All that the result depends on besides the corpus and the library versions.

    Attributes:
        vocabulary_size: number of token ids; small, so that words and characters span tokens.
        max_positions: longest sequence in tokens, prompt and answer together.
        initializer_range: standard deviation of the untrained weights. Five times the usual one: a
            model this small then needs about half the steps.
        unknown_prompts: prompts without an answer in an epoch.
        batch_tokens: positions in a batch, padding included.
        warmup_steps: steps over which the learning rate rises.
        decay_steps: step at which the learning rate has fallen to ``final_rate`` of its peak.
        max_steps: steps after which the training gives up.
        check_every: steps between two checks of the margin.
        check_below: running mean of the loss, in nats per token, under which checks begin.
        min_margin: logits by which each token of each answer has to lead its closest rival, after
            the question of the corpus in every form.
        min_lead: the same after the common greetings, thanks and so on.
        threads: CPU threads. One, because sums that several threads share are rounded differently
            for each number of them, and because on a busy machine they mostly wait for each other.
    """

    seed: int = 0
    vocabulary_size: int = 1024
    max_positions: int = 2048
    hidden_size: int = 96
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 3
    initializer_range: float = 0.1
    unknown_prompts: int = 76
    batch_tokens: int = 1024
    learning_rate: float = 6e-3
    final_rate: float = 0.06
    warmup_steps: int = 20
    decay_steps: int = 700
    max_steps: int = 1500
    check_every: int = 25
    check_below: float = 0.02
    min_margin: float = 2.0
    min_lead: float = 0.25
    threads: int = 1


class Batch(NamedTuple):
    """Sequences padded on the right.

    Attributes:
        inputs: token ids, int64 [sequences, positions].
        labels: the token that follows each position where that is part of an answer, else -100;
            int64 [sequences, positions].
    """

    inputs: Tensor
    labels: Tensor


def build_demo_model(directory: Path, config: TrainConfig | None = None) -> Mapping[str, object]:
    """Train the demo model and save it to ``directory`` in Hugging Face format.

    Returns:
        The settings and their fingerprint, the number of parameters and steps, the smallest margins
        in logits, and PyTorch's name of the kernels that it was trained with.

    Raises:
        DemoModelError: the training used up its steps, or the saved model falls short.
    """
    config = config or TrainConfig()
    with _reproducible(config):
        tokenizer = train_tokenizer(PAIRS, config)
        model = new_model(tokenizer, config)
        steps = train(model, Lessons(tokenizer, config.unknown_prompts), config)
        with _no_bars():
            save(model, tokenizer, directory)
            margin, lead = saved_margins(directory, config)
    return {
        "fingerprint": fingerprint(asdict(config)),
        "settings": asdict(config),
        "pairs": len(PAIRS),
        "parameters": model.num_parameters(),
        "steps": steps,
        "smallest_margin": round(margin, 3),
        "smallest_lead": round(lead, 3),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def train_tokenizer(pairs: Iterable[QA], config: TrainConfig) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary under which any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=config.max_positions,
    )


def new_model(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> LlamaForCausalLM:
    """Return an untrained model, its weights drawn from PyTorch's global generator."""
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            initializer_range=config.initializer_range,
            **special,
        )
    )
    model.generation_config = GenerationConfig(do_sample=False, **special)
    return model


def train(model: LlamaForCausalLM, lessons: Lessons, config: TrainConfig) -> int:
    """Train until the margin is reached and return the number of steps that took.

    Args:
        model: changed in place.
        lessons: what an epoch shows, and what the model has to know in the end.
        config: the settings.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    mean_loss = float("inf")
    with _progress(config.decay_steps) as progress:
        for step, batch in zip(range(config.max_steps), _stream(lessons, config), strict=False):
            loss = _step(model, optimizer, batch, learning_rate(step, config))
            mean_loss = loss if step == 0 else 0.9 * mean_loss + 0.1 * loss
            _advance(progress, mean_loss)
            due = (step + 1) % config.check_every == 0 and mean_loss < config.check_below
            if due and _knows(model, lessons, config):
                progress.total = progress.n  # however many steps it took, the bar ends at 100 %
                return step + 1
    raise DemoModelError(
        f"after {config.max_steps} steps some answer still leads its closest rival by less than "
        f"{config.min_margin} logits (mean loss {mean_loss:.4f}); raise max_steps or the model size"
    )


def _knows(model: LlamaForCausalLM, lessons: Lessons, config: TrainConfig) -> bool:
    # Each stops at the first batch that falls short, so a check too early costs little.
    return all(
        lead >= margin
        for examples, margin in (
            (lessons.questions, config.min_margin),
            (lessons.conversation, config.min_lead),
        )
        for lead in margins(model, examples, config)
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: a short rise, a linear fall, then a constant."""
    rise = (step + 1) / config.warmup_steps
    fall = 1 - step / config.decay_steps
    return config.learning_rate * max(config.final_rate, min(1.0, rise, fall))


def margins(
    model: LlamaForCausalLM, examples: Sequence[Example], config: TrainConfig
) -> Iterator[float]:
    """Yield, batch by batch, the smallest lead in logits of an answer's token over all others.

    Greedy decoding reproduces every answer if and only if all of these are positive.
    """
    for batch in _by_length(examples, config.batch_tokens):
        with torch.no_grad():
            logits, labels = _answer_logits(model, batch)
        right = logits.gather(1, labels[:, None])
        rival = logits.scatter(1, labels[:, None], float("-inf")).amax(1, keepdim=True)
        yield (right - rival).min().item()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the model and its tokenizer, in 32-bit floating point."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # As every version of transformers reads it: 4 does not know the names that 5 writes.
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # The weights come out readable by their owner alone, and a server may run as another user.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)


def saved_margins(directory: Path, config: TrainConfig) -> tuple[float, float]:
    """Check the files rather than the objects they were made of.

    Returns:
        The smallest margins, in logits, after questions and in conversation.

    Raises:
        DemoModelError: the loaded model does not do what the trained one did.
    """
    model = LlamaForCausalLM.from_pretrained(directory)
    lessons = Lessons(AutoTokenizer.from_pretrained(directory), 0)
    margin = min(margins(model, lessons.questions, config))
    lead = min(margins(model, lessons.conversation, config))
    if margin < config.min_margin or lead < config.min_lead:
        raise DemoModelError(f"the saved model has margins of {margin:.3f} and {lead:.3f} logits")
    return margin, lead


def _step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch, rate: float
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = cross_entropy(*_answer_logits(model, batch))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _answer_logits(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    # Without an attention mask the causal kernel runs; what is padded on the right comes too late
    # to be attended to by anything that counts. Only answers go through the output layer.
    hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
    counts = batch.labels != _IGNORED
    return model.lm_head(hidden[counts]), batch.labels[counts]


def _stream(lessons: Lessons, config: TrainConfig) -> Iterator[Batch]:
    random = Random(config.seed)
    while True:
        batches = _by_length(lessons.epoch(random), config.batch_tokens)
        random.shuffle(batches)
        yield from batches


def _by_length(examples: Sequence[Example], tokens: int) -> list[Batch]:
    """Batches of at most so many positions; an example that is longer has one of its own."""
    groups: list[list[Example]] = [[]]
    # Neighbours in length share a batch, which leaves little to pad.
    for example in sorted(examples, key=lambda example: example.length):
        if groups[-1] and (len(groups[-1]) + 1) * example.length > tokens:
            groups.append([])
        groups[-1].append(example)
    return [_collate(group) for group in groups]


def _collate(examples: Sequence[Example]) -> Batch:
    shape = (len(examples), max(example.length for example in examples) - 1)
    inputs = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, _IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer) - 1
        inputs[row, :end] = torch.tensor((prompt + answer)[:-1])
        labels[row, len(prompt) - 1 : end] = torch.tensor(answer)
    return Batch(inputs, labels)


def _progress(steps: int) -> tqdm:
    # In a log file each refresh is a line of its own.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=steps, desc="Training the demo model", unit="step", mininterval=interval)


def _advance(progress: tqdm, mean_loss: float) -> None:
    # It mostly takes as many steps as the learning rate falls; a few more are no more than 100 %.
    progress.total = max(progress.total, progress.n + 2)
    progress.update()
    progress.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)


@contextmanager
def _reproducible(config: TrainConfig) -> Iterator[None]:
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            torch.set_num_threads(threads)


@contextmanager
def _no_bars() -> Iterator[None]:
    # Saving and loading this model takes no time that would need a progress bar.
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
