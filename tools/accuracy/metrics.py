"""Figures of texts and token ids. Pure: nothing here knows where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")

Ids = Sequence[int]


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F-measures, times 100, without stemming.

    The tokenizer is that of rouge-score: letters a to z and digits, in lower case. Anything else
    separates words, so a text without them scores 0.

    Raises:
        ImportError: rouge-score is not installed.
    """
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped, unused-ignore]

    scorer = RougeScorer(list(ROUGE), use_stemmer=False)
    scores = [scorer.score(ref, text) for text, ref in zip(texts, references, strict=True)]
    return {name: 100 * fmean(score[name].fmeasure for score in scores) for name in ROUGE}


@dataclass(frozen=True)
class Agreement:
    """Agreement of two sides' outputs.

    Attributes:
        outputs: how many each side has.
        same_ids, same_texts: outputs that are equal as a whole.
        leading_tokens: tokens before the first difference, of all outputs.
        tokens: of the longer of both outputs, of all outputs.
    """

    outputs: int
    same_ids: int
    same_texts: int
    leading_tokens: int
    tokens: int

    @property
    def leading_share(self) -> float:
        """The share of equal leading tokens, 0 to 1. Two empty outputs agree."""
        return self.leading_tokens / self.tokens if self.tokens else 1.0


def leading(first: Ids, second: Ids) -> int:
    """Return the number of equal ids before the first difference."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def agreement(
    first: Sequence[Ids],
    second: Sequence[Ids],
    first_texts: Sequence[str],
    second_texts: Sequence[str],
) -> Agreement:
    """The agreement of two sides, output by output."""
    pairs = [(list(a), list(b)) for a, b in zip(first, second, strict=True)]
    return Agreement(
        outputs=len(pairs),
        same_ids=sum(a == b for a, b in pairs),
        same_texts=sum(a == b for a, b in zip(first_texts, second_texts, strict=True)),
        leading_tokens=sum(leading(a, b) for a, b in pairs),
        tokens=sum(max(len(a), len(b)) for a, b in pairs),
    )


def until_end(ids: Ids, end_id: int | None) -> tuple[int, ...]:
    """The ids before the end token. Some engines send it, and others do not."""
    for position, token in enumerate(ids):
        if token == end_id:
            return tuple(ids[:position])
    return tuple(ids)
