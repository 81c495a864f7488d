"""What the model before TensorRT-LLM's C++ backend adds to its responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cog_triton.models.context import ContextRelay
from cog_triton.models.model_calls import Llm, ModelError
from cog_triton.models.postprocessing import Postprocessor
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.tokenizer import load_tokenizer
from tools.demo_model.corpus import PAIRS

Array = npt.NDArray[Any]

TEXTS = [pair.answer for pair in PAIRS if not pair.answer.isascii()]


class Backend:
    """TensorRT-LLM's: ids and lengths, and no word on which response is the last."""

    def __init__(self, replies: list[dict[str, Array] | ModelError]) -> None:
        self._replies = replies
        self.stopped: list[str] = []

    def call(self, model: str, request_id: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise AssertionError(f"{model} is not called for one response: {request_id}, {[*inputs]}")

    def stream(
        self, model: str, request_id: str, inputs: Mapping[str, Array]
    ) -> Iterator[dict[str, Array] | ModelError]:
        assert model == "tensorrt_llm"
        if "stop" in inputs:
            self.stopped.append(request_id)
            return iter(())
        assert inputs["input_lengths"].shape == (1, 1)
        return iter(self._replies)


def reply(*beams: list[int], **tensors: int) -> dict[str, Array]:
    width = max(map(len, beams))
    rows = [ids + [-1] * (width - len(ids)) for ids in beams]
    return {
        "output_ids": np.array([rows], np.int32).reshape(1, len(beams), width),
        "sequence_length": np.array([[len(ids) for ids in beams]], np.int32),
        **{name: np.array([[value]], np.int32) for name, value in tensors.items()},
    }


def inputs(*, streaming: bool = True) -> dict[str, Array]:
    return {
        "input_ids": np.array([[1, 2]], np.int32),
        "input_lengths": np.array([2], np.int32),
        "streaming": np.array([streaming]),
    }


def answer(
    replies: list[dict[str, Array] | ModelError], *, streaming: bool = True
) -> list[tuple[dict[str, Array], bool]]:
    relay = ContextRelay(Llm(Backend(replies), "tensorrt_llm"))
    return list(relay.answer("7", inputs(streaming=streaming)))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


def texts(responses: list[dict[str, Array]], postprocessor: Postprocessor) -> str:
    names = {
        "output_ids": "TOKENS_BATCH",
        "sequence_length": "SEQUENCE_LENGTH",
        "context_ids": "CONTEXT_IDS",
        "is_final": "IS_FINAL",
    }
    given = ({new: tensors[old] for old, new in names.items()} for tensors in responses)
    return "".join(text.decode() for each in given for text in postprocessor(each))


@pytest.mark.parametrize("text", TEXTS[:4])
def test_a_stream_of_single_tokens_joins_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = answer([reply([token]) for token in ids])
    assert texts([tensors for tensors, _ in found], Postprocessor(tokenizer)) == text
    assert [last for _, last in found] == [False] * len(ids) + [True]
    assert all(tensors["context_ids"].size <= CONTEXT_TOKENS for tensors, _ in found)
    assert found[-1][0]["sequence_length"].tolist() == [[0]]


def test_a_text_that_ends_within_a_character_is_whole(tokenizer: Any) -> None:
    ids = tokenizer("日", add_special_tokens=False).input_ids[:1]
    found = [tensors for tensors, _ in answer([reply(ids)])]
    assert texts(found, Postprocessor(tokenizer)) == "\ufffd"


def test_sequences_of_a_batch_are_kept_apart(tokenizer: Any) -> None:
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS[:2]]
    replies: list[dict[str, Array] | ModelError] = [
        reply([row[i]], batch_index=number)
        for i in range(min(map(len, rows)))
        for number, row in enumerate(rows)
    ]
    found = answer(replies)
    for number, row in enumerate(rows):
        own = [tensors for tensors, _ in found if tensors["batch_index"].item() == number]
        whole = tokenizer.decode(row[: min(map(len, rows))])
        assert texts(own, Postprocessor(tokenizer)) == whole
    assert [last for _, last in found][-2:] == [False, True]


def test_a_whole_answer_passes_as_it_is() -> None:
    ((tensors, last),) = answer([reply([5, 6])], streaming=False)
    assert last
    assert tensors["is_final"].all()
    assert tensors["context_ids"].shape == (1, 0)


def test_streamed_beams_hold_all_their_ids() -> None:
    found = answer([reply([5], [6]), reply([5, 7], [6])])
    assert [last for _, last in found] == [False, True]
    assert all(tensors["is_final"].all() for tensors, _ in found)
    assert found[-1][0]["sequence_length"].tolist() == [[2, 1]]


def test_a_stream_that_was_stopped_before_its_first_token_ends_with_data() -> None:
    ((tensors, last),) = answer([])
    assert last
    assert tensors["output_ids"].shape == (1, 1, 0)


def test_an_error_is_the_backends_own_and_stops_the_rest() -> None:
    backend = Backend([reply([5]), ModelError("out of memory")])
    responses = ContextRelay(Llm(backend, "tensorrt_llm")).answer("7", inputs())
    next(responses)
    with pytest.raises(ModelError, match="out of memory"):
        next(responses)


def test_who_goes_away_stops_the_request() -> None:
    backend = Backend([reply([5]), reply([6])])
    responses = ContextRelay(Llm(backend, "tensorrt_llm")).answer("7", inputs())
    next(responses)
    responses.close()
    assert backend.stopped == ["7"]
