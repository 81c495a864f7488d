"""What the model before TensorRT-LLM's C++ backend adds to its responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cog_triton.models.context import Contexts, Tensors
from cog_triton.models.postprocessing import decoded
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.tokenizer import load_tokenizer
from tools.demo_model.corpus import PAIRS

TEXTS = [pair.answer for pair in PAIRS if not pair.answer.isascii()]


def reply(*beams: list[int], **tensors: float) -> Tensors:
    width = max(map(len, beams))
    rows = [ids + [-1] * (width - len(ids)) for ids in beams]
    return {
        "output_ids": np.array([rows], np.int32).reshape(1, len(beams), width),
        "sequence_length": np.array([[len(ids) for ids in beams]], np.int32),
        **{name: np.array([[value]]) for name, value in tensors.items()},
    }


def answer(replies: Sequence[Tensors], *, streaming: bool = True) -> list[Tensors]:
    """All that is sent for a request, of whose replies the last one is marked as such."""
    contexts = Contexts(streaming=streaming)
    last = len(replies) - 1
    return [
        response
        for i, tensors in enumerate(replies)
        for response in contexts.add(tensors, last=i == last)
    ]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


def text(responses: list[Tensors], tokenizer: Any) -> str:
    names = {
        "output_ids": "TOKENS_BATCH",
        "sequence_length": "SEQUENCE_LENGTH",
        "context_ids": "CONTEXT_IDS",
        "is_final": "IS_FINAL",
    }
    given = ({new: tensors[old] for old, new in names.items()} for tensors in responses)
    return "".join(piece.decode() for each in given for piece in decoded(tokenizer, each))


@pytest.mark.parametrize("ending", ["with the last id", "without ids", "without tensors"])
@pytest.mark.parametrize("whole", TEXTS[:4])
def test_a_stream_of_single_ids_joins_to_the_text(tokenizer: Any, whole: str, ending: str) -> None:
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    ends: dict[str, list[Tensors]] = {"without ids": [reply([])], "without tensors": [{}]}
    responses = answer([*(reply([token]) for token in ids), *ends.get(ending, [])])
    assert text(responses, tokenizer) == whole
    assert [bool(tensors["is_final"].all()) for tensors in responses][-2:] == [False, True]
    assert all(tensors["context_ids"].size <= CONTEXT_TOKENS for tensors in responses)


def test_a_text_that_ends_within_a_character_is_whole(tokenizer: Any) -> None:
    ids = tokenizer("日", add_special_tokens=False).input_ids[:1]
    assert text(answer([reply(ids)]), tokenizer) == "\ufffd"
    assert text(answer([reply(ids), {}]), tokenizer) == "\ufffd"


def test_sequences_of_a_batch_are_kept_apart(tokenizer: Any) -> None:
    rows = [tokenizer(whole, add_special_tokens=False).input_ids for whole in TEXTS[:2]]
    count = min(map(len, rows))
    responses = answer(
        [
            reply([row[i]], batch_index=number)
            for i in range(count)
            for number, row in enumerate(rows)
        ]
    )
    for number, row in enumerate(rows):
        own = [tensors for tensors in responses if tensors["batch_index"].item() == number]
        assert text(own, tokenizer) == tokenizer.decode(row[:count])
        assert own[-1]["is_final"].all()


def test_a_whole_answer_passes_as_it_is() -> None:
    (tensors,) = answer([reply([5, 6])], streaming=False)
    assert tensors["is_final"].all()
    assert tensors["context_ids"].shape == (1, 0)


def test_streamed_beams_hold_all_their_ids() -> None:
    responses = answer([reply([5], [6]), reply([5, 7], [6])])
    assert all(tensors["is_final"].all() for tensors in responses)
    assert responses[-1]["sequence_length"].tolist() == [[2, 1]]


def test_a_stream_that_was_stopped_before_its_first_token_ends_with_data() -> None:
    (tensors,) = answer([{}])
    assert tensors["output_ids"].shape == (1, 1, 0)
