"""The records of a background response: what its process has written, in order.

The events that a client gets follow from these records, so every process makes the same events of them.
They are stored as JSON with a format version: ``{"format": 1, "records": [{"kind": "chunk", …}, …]}``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import orjson
from pydantic import Field, TypeAdapter

from cog_triton.generation import Chunk, FinishReason
from cog_triton.protocol.log_probs import TokenLogProb

FORMAT: Literal[1] = 1
LEAST_LOG_PROB = -9999.0  # stands for the logarithm of 0, which JSON has no number for


@dataclass(frozen=True)
class ChunkRecord:
    """A piece of the answer; the fields are those of ``Chunk``."""

    text: str
    output_tokens: int
    input_tokens: int | None
    finish_reason: FinishReason | None
    ids: tuple[int, ...]
    log_probs: tuple[TokenLogProb, ...]
    kind: Literal["chunk"] = "chunk"

    @classmethod
    def of_chunk(cls, chunk: Chunk) -> "ChunkRecord":
        return cls(
            text=chunk.text,
            output_tokens=chunk.output_tokens,
            input_tokens=chunk.input_tokens,
            finish_reason=chunk.finish_reason,
            ids=chunk.ids,
            log_probs=tuple(_finite(token) for token in chunk.log_probs),
        )

    def chunk(self) -> Chunk:
        return Chunk(
            text=self.text,
            output_tokens=self.output_tokens,
            input_tokens=self.input_tokens,
            finish_reason=self.finish_reason,
            ids=self.ids,
            log_probs=self.log_probs,
        )


@dataclass(frozen=True)
class FailedRecord:
    """The end of an answer that failed, with the error as a client reads it."""

    status: int
    code: str | None
    message: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True)
class CancelledRecord:
    """The end of an answer that a client cancelled."""

    kind: Literal["cancelled"] = "cancelled"


Record = ChunkRecord | FailedRecord | CancelledRecord


@dataclass(frozen=True)
class RecordList:
    """Records as they are stored."""

    records: list[Annotated[Record, Field(discriminator="kind")]]
    format: Literal[1] = FORMAT


_RECORD_LIST = TypeAdapter(RecordList)


def encode(records: Sequence[Record]) -> bytes:
    """Return records as they are stored."""
    return orjson.dumps(RecordList(list(records)))


def decode(stored: bytes) -> list[Record]:
    """Return stored records, or raise ValueError for those of another format."""
    return list(_RECORD_LIST.validate_json(stored).records)


def _finite(token: TokenLogProb) -> TokenLogProb:
    top = tuple((id, _finite_number(log_prob)) for id, log_prob in token.top)
    return TokenLogProb(token.id, _finite_number(token.log_prob), top)


def _finite_number(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else LEAST_LOG_PROB
