"""Frames: how the embedded engines send new tokens to this package's client.

Each response that passes through Triton has a cost, and so has each of its tensors. Therefore the tokens
that an engine has ready for several requests of one client leave together, in one response with one
tensor. A *frame* is what such a response has for one request:

    request 7 ──┐                      ┌─────────────────────────┐
    request 8 ──┼──▶ a step of     ──▶ │ frame 7 frame 8 frame 9 │ ──▶ client
    request 9 ──┘    the engine        └─────────────────────────┘
                                       a response to request 7, 8 or 9

A client asks for frames by the parameter ``frames_for`` of its request, which is a ``FrameAddress``: the
client's name, and a number that it gives to the request's sequence of tokens. All sequences of one client
may share responses. The tensor has a name that nothing else has, ``frames``, so ids in any other output are
never taken for frames. (Other clients do not ask for frames. They get TensorRT-LLM's tensors, as all do
from its C++ backend.)

The tensor is a list of 32-bit integers: a mark with the version of this format, and then the frames.

    ┌──────┬─────────┬─────────┬───
    │ MARK │ a frame │ a frame │ …
    └──────┴─────────┴─────────┴───

A frame has a header of seven integers, and then what the header counts:

    ┌──────────┬───────┬───────┬──────────────┬───────┬──────────────┬────────┐
    │ sequence │ start │ count │ input_tokens │ final │ alternatives │ prompt │
    └──────────┴───────┴───────┴──────────────┴───────┴──────────────┴────────┘
    ┌────────────┬──────────────────────────────────────┬───────────────────────────────────────┐
    │ ids: count │ log probabilities of ids: count rows │ of the prompt's tokens: "prompt" rows │
    └────────────┴──────────────────────────────────────┴───────────────────────────────────────┘

- ``sequence`` is the number that the client chose. ``start`` counts the ids of the sequence before those of
  the frame, so that a receiver can put frames in order and notice that one is missing. ``input_tokens``
  counts the prompt's. ``final`` is 1 in the last frame of a sequence, which may have no ids.
- ``alternatives`` is -1 where log probabilities were not asked for. Otherwise there is a row for each id:
  its log probability, ``alternatives`` ids, and their log probabilities. A row that has fewer is filled up
  with ids of -1. Log probabilities are 32-bit floats, and each stands here as the integer with its bits.
- ``prompt`` is the number of the prompt's tokens that have log probabilities here, in the first frame of a
  sequence if they were asked for. Their rows have the token's id before all else.

The last frame of a sequence that left with another request's response comes once more, without ids, to its
own request, because Triton needs a last response to each.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.errors import InvalidParameter, TritonMalformedEvent
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.protocol.names import FRAMES_FOR

Array = npt.NDArray[Any]

# The last character is the version.
MARK = int.from_bytes(b"FRM1", "big")
# Of a sequence's number.
LARGEST_NUMBER = 2**31 - 1
_HEADER_LENGTH = 7
# In place of the number of alternatives.
_NO_LOG_PROBS = -1
_NO_ID = -1


@dataclass(slots=True)
class Frame:
    """New tokens of one sequence."""

    sequence: int
    # Number of the sequence's ids before these.
    start: int
    ids: list[int]
    input_tokens: int
    final: bool
    # One for each id, or none.
    log_probs: Sequence[TokenLogProb] = ()
    prompt_log_probs: Sequence[TokenLogProb] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class FrameAddress:
    """Where frames of a sequence go: to a reader, under a number that the reader chose."""

    # 32 hexadecimal digits.
    reader: str
    # 1 to LARGEST_NUMBER.
    sequence: int

    def parameter(self) -> str:
        """Write it as the value of ``FRAMES_FOR``."""
        return f"{self.reader}/{self.sequence}"

    @classmethod
    def parse(cls, value: Any) -> "FrameAddress":
        """Read the value of ``FRAMES_FOR``, or raise InvalidParameter."""
        found = re.fullmatch("([0-9a-f]{32})/([1-9][0-9]{0,9})", str(value))
        if found is None or int(found[2]) > LARGEST_NUMBER:
            raise InvalidParameter(
                f"{FRAMES_FOR} must be 32 hexadecimal digits, a slash and a number below 2**31"
            )
        return cls(found[1], int(found[2]))


def encode_frames(frames: Iterable[Frame]) -> Array:
    """Return the tensor of the frames, without a batch dimension.

    A frame with another number of log probabilities than ids is sent without any, so that its reader
    complains, and not those of the other frames.
    """
    values = [MARK]
    for frame in frames:
        log_probs = frame.log_probs
        prompt_log_probs = frame.prompt_log_probs
        alternatives = _NO_LOG_PROBS
        # Also where none were asked for: there are ids, and no log probabilities.
        if len(log_probs) != len(frame.ids):
            prompt_log_probs = ()
        elif log_probs or prompt_log_probs:
            alternatives = max(len(token.top) for token in (*log_probs, *prompt_log_probs))
        values += (
            frame.sequence,
            frame.start,
            len(frame.ids),
            frame.input_tokens,
            int(frame.final),
            alternatives,
            len(prompt_log_probs),
        )
        values += frame.ids
        if alternatives != _NO_LOG_PROBS:
            values += _rows(log_probs, alternatives).ravel().tolist()
            prompt_ids = np.array([token.id for token in prompt_log_probs], np.int32)
            prompt_rows = _rows(prompt_log_probs, alternatives)
            values += np.column_stack([prompt_ids, prompt_rows]).ravel().tolist()
    return np.array(values, np.int32)


def decode_frames(values: Sequence[int]) -> list[Frame]:
    """Read the values of the tensor, or raise TritonMalformedEvent if they are anything else."""
    if not values or values[0] != MARK:
        raise TritonMalformedEvent("a response has frames of another format")
    frames = []
    at = 1
    while at < len(values):
        header = values[at : at + _HEADER_LENGTH]
        if len(header) < _HEADER_LENGTH:
            raise _unreadable(at)
        sequence, start, count, input_tokens, final, alternatives, prompt_count = header
        first_id = at + _HEADER_LENGTH
        ids_end = first_id + count
        if (
            sequence < 1
            or start < 0
            or count < 0
            or input_tokens < 0
            or final not in (0, 1)
            or ids_end > len(values)
        ):
            raise _unreadable(at)
        frame = Frame(sequence, start, list(values[first_id:ids_end]), input_tokens, final == 1)
        if alternatives == _NO_LOG_PROBS and prompt_count == 0:
            at = ids_end
        else:
            at = _read_log_probs(frame, values, ids_end, alternatives, prompt_count)
        frames.append(frame)
    return frames


def _read_log_probs(
    frame: Frame, values: Sequence[int], begin: int, alternatives: int, prompt_count: int
) -> int:
    """Add the rows that begin at a place to a frame; return the place behind them."""
    if alternatives < 0 or prompt_count < 0:
        raise _unreadable(begin)
    width = 1 + 2 * alternatives
    prompt_begin = begin + len(frame.ids) * width
    end = prompt_begin + prompt_count * (1 + width)
    if end > len(values):
        raise _unreadable(begin)
    rows = np.array(values[begin:prompt_begin], np.int32).reshape(-1, width)
    frame.log_probs = _tokens(frame.ids, rows, alternatives)
    prompt_rows = np.array(values[prompt_begin:end], np.int32).reshape(-1, 1 + width)
    frame.prompt_log_probs = _tokens(prompt_rows[:, 0].tolist(), prompt_rows[:, 1:], alternatives)
    return end


def _unreadable(place: int) -> TritonMalformedEvent:
    return TritonMalformedEvent(f"a response has frames that cannot be read, at value {place}")


def _rows(tokens: Sequence[TokenLogProb], alternatives: int) -> Array:
    """Return a row for each token: int32, [tokens, 1 + 2 * alternatives]."""
    chosen = np.array([token.log_prob for token in tokens], np.float32)
    ids = np.full((len(tokens), alternatives), _NO_ID, np.int32)
    log_probs = np.zeros((len(tokens), alternatives), np.float32)
    for place, token in enumerate(tokens):
        for rank, (token_id, log_prob) in enumerate(token.top):
            ids[place, rank] = token_id
            log_probs[place, rank] = log_prob
    return np.column_stack([chosen.view(np.int32), ids, log_probs.view(np.int32)])


def _tokens(ids: Sequence[int], rows: Array, alternatives: int) -> list[TokenLogProb]:
    """Return a token for each id and its row."""
    floats = np.ascontiguousarray(rows).view(np.float32)
    chosen = floats[:, 0].tolist()
    other_ids = rows[:, 1 : 1 + alternatives].tolist()
    other_log_probs = floats[:, 1 + alternatives :].tolist()
    tokens = []
    for token, log_prob, others, their_log_probs in zip(
        ids, chosen, other_ids, other_log_probs, strict=True
    ):
        top = tuple(
            (other, value)
            for other, value in zip(others, their_log_probs, strict=True)
            if other != _NO_ID
        )
        tokens.append(TokenLogProb(token, log_prob, top))
    return tokens
