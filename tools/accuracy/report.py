"""What a comparison found: as a table, as JSON, and as the reasons why it is not good enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.accuracy.metrics import ROUGE, Agreement

ENGINE = "engine"
HUGGING_FACE = "Hugging Face"


@dataclass(frozen=True)
class Side:
    """The figures of one side.

    Attributes:
        rouge: F-measures times 100, by the names in ``metrics.ROUGE``.
        output_tokens: without end tokens.
        seconds: that all batches took together.
        log_prob: mean natural logarithm, per output token, of the probability that the Hugging Face
            model gives it; None if that was not loaded, or there is no token.
    """

    rouge: Mapping[str, float]
    output_tokens: int
    seconds: float
    log_prob: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Limits:
    """The least that a comparison must reach; None sets no limit.

    Attributes:
        rouge1: the engine's ROUGE-1 must be greater, 0 to 100.
        leading_share: the share of equal leading tokens must be no less, 0 to 1.
    """

    rouge1: float | None = None
    leading_share: float | None = None


@dataclass(frozen=True)
class Report:
    """The result of a comparison.

    Attributes:
        sides: by name, ``ENGINE`` or ``HUGGING_FACE`` or both.
        agreement: None unless there are both.
        ids_of_text: whether the ids compared are those of the texts, encoded again.
        details: what was compared, and where.
    """

    examples: int
    sides: Mapping[str, Side]
    agreement: Agreement | None
    ids_of_text: bool = False
    limits: Limits = Limits()
    details: Mapping[str, Any] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Return the reasons why the engine is not good enough; empty if it is."""
        notes = []
        engine, limits = self.sides.get(ENGINE), self.limits
        if limits.rouge1 is not None and engine and not engine.rouge["rouge1"] > limits.rouge1:
            notes.append(
                f"ROUGE-1 of the engine is {engine.rouge['rouge1']:.2f}, not greater than {limits.rouge1:g}"
            )
        if limits.leading_share is not None and self.agreement:
            share = self.agreement.leading_share
            if share < limits.leading_share:
                notes.append(
                    f"the share of equal leading tokens is {share:.4f}, less than {limits.leading_share:g}"
                )
        return notes

    def as_json(self) -> dict[str, Any]:
        """All of it, to be written as JSON."""
        return {
            **self.details,
            "examples": self.examples,
            **{key: _side(self.sides.get(name)) for key, name in _KEYS.items()},
            "agreement": self.agreement and _agreement(self.agreement, self.ids_of_text),
            "limits": {"rouge1": self.limits.rouge1, "leading_share": self.limits.leading_share},
            "failures": self.failures(),
        }

    def table(self) -> str:
        """All of it, to be read."""
        rows = [["", *self.sides]]
        sides = self.sides.values()
        rows += [[name, *(f"{side.rouge[name]:.2f}" for side in sides)] for name in ROUGE]
        rows += [
            ["log probability per token", *(_number(side.log_prob) for side in sides)],
            ["output tokens", *(str(side.output_tokens) for side in sides)],
            ["output tokens/s", *(_number(side.tokens_per_second) for side in sides)],
        ]
        lines = [f"{self.examples} examples", *_aligned(rows)]
        if self.agreement is not None:
            lines.append(_sentence(self.agreement, self.ids_of_text))
        return "\n".join(lines)


_KEYS = {"engine": ENGINE, "hugging_face": HUGGING_FACE}


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        **side.rouge,
        "log_prob_per_token": side.log_prob,
        "output_tokens": side.output_tokens,
        "seconds": side.seconds,
        "tokens_per_second": side.tokens_per_second,
    }


def _agreement(agreement: Agreement, ids_of_text: bool) -> dict[str, Any]:
    return {
        "outputs": agreement.outputs,
        "same_ids": agreement.same_ids,
        "same_texts": agreement.same_texts,
        "leading_tokens": agreement.leading_tokens,
        "tokens": agreement.tokens,
        "leading_share": agreement.leading_share,
        "ids_of_text": ids_of_text,
    }


def _sentence(agreement: Agreement, ids_of_text: bool) -> str:
    kind = "token ids of the text" if ids_of_text else "token ids"
    return (
        f"same {kind}: {agreement.same_ids} of {agreement.outputs} outputs, same text: "
        f"{agreement.same_texts}; equal leading tokens: {agreement.leading_tokens} of "
        f"{agreement.tokens} ({100 * agreement.leading_share:.2f} %)"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
