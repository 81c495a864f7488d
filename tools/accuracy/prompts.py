"""What the model is given: a task's prompts, cut to a number of tokens, as text.

Both sides get the same text, because an engine behind its tokenizer takes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cog_triton.text.tokenizer import Tokenizer
from tools.accuracy.data import Example, Task


def prompt_of(text: str, task: Task) -> str:
    """A text with the task's suffix; as in TensorRT-LLM's summarize.py, stripped and ``n't`` joined."""
    return (text + task.suffix).strip().replace(" n't", "n't")


def shortened(text: str, tokenizer: Tokenizer, limit: int) -> str:
    """The beginning of a text that has at most ``limit`` tokens, special tokens included.

    The beginning of the token ids need not be the ids of the text that they decode to, so one more is
    dropped until they are no more than the limit.
    """
    ids = tokenizer(text).input_ids
    for kept in range(limit, 0, -1):
        if len(ids) <= limit:
            return text
        # A character whose bytes are cut through decodes to U+FFFD.
        text = tokenizer.decode(ids[:kept], skip_special_tokens=True).rstrip("\ufffd")
        ids = tokenizer(text).input_ids
    return text


def prepared(
    examples: Iterable[Example], task: Task, tokenizer: Tokenizer, *, longest: int, shortest: int
) -> Iterator[Example]:
    """The examples with prompts for texts; those of no more than ``shortest`` tokens are left out.

    Args:
        longest: tokens that a prompt is cut to.
    """
    for example in examples:
        prompt = shortened(prompt_of(example.text, task), tokenizer, longest)
        if prompt and len(tokenizer(prompt).input_ids) > shortest:
            yield Example(prompt, example.reference)
