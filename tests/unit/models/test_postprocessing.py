from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.models.postprocessing import decoded
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.tokenizer import load_tokenizer
from tools.demo_model.corpus import PAIRS

Array = npt.NDArray[Any]

TEXTS = [pair.answer for pair in PAIRS if not pair.answer.isascii()]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


def inputs(
    *beams: list[int], context: list[int] | None = None, final: bool | None = None
) -> dict[str, Array]:
    """A response of one prompt: its beams, filled up with -1 as TensorRT-LLM does."""
    width = max(map(len, beams))
    rows = [ids + [-1] * (width - len(ids)) for ids in beams]
    tensors = {
        "TOKENS_BATCH": np.array([rows], np.int32).reshape(1, len(beams), width),
        "SEQUENCE_LENGTH": np.array([[len(ids) for ids in beams]], np.int32),
    }
    if context is not None:
        tensors["CONTEXT_IDS"] = np.array([context], np.int32).reshape(1, -1)
    if final is not None:
        tensors["IS_FINAL"] = np.array([[final]])
    return tensors


def streamed(tokenizer: Any, ids: list[int], sizes: list[int]) -> list[str]:
    """The texts of the responses that hold the ids in pieces of these sizes."""
    texts: list[str] = []
    begin = 0
    while begin < len(ids):
        end = begin + sizes[len(texts) % len(sizes)]
        context = ids[:begin][-CONTEXT_TOKENS:]
        response = inputs(ids[begin:end], context=context, final=end >= len(ids))
        (text,) = decoded(tokenizer, response)
        texts.append(text.decode())
        begin = end
    return texts


def test_one_token_at_a_time(tokenizer: Any) -> None:
    held_back = 0
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        pieces = streamed(tokenizer, ids, [1])
        assert "".join(pieces) == text
        silent = [i for i, piece in enumerate(pieces) if piece == ""]
        # Nothing is held back but a part of a character.
        assert all(tokenizer.decode(ids[: i + 1]).endswith("\ufffd") for i in silent)
        held_back += len(silent)
    assert held_back > 0


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_pieces_join_to_the_whole(tokenizer: Any, text: str, sizes: list[int]) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(streamed(tokenizer, ids, sizes)) == whole


def test_the_last_response_may_be_empty(tokenizer: Any) -> None:
    ids = tokenizer("日", add_special_tokens=False).input_ids
    assert len(ids) > 1
    assert decoded(tokenizer, inputs(ids[:1], context=[], final=False)).tolist() == [b""]
    # Half a character is all there is: it is not dropped.
    assert decoded(tokenizer, inputs([], context=ids[:1], final=True)).tolist() == [
        "\ufffd".encode()
    ]
    assert decoded(tokenizer, inputs([], context=ids, final=True)).tolist() == [b""]


@pytest.mark.parametrize("text", TEXTS[:5])
def test_without_context_a_response_is_decoded_whole(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert decoded(tokenizer, inputs(ids)).tolist() == [text.encode()]
    half = tokenizer("日", add_special_tokens=False).input_ids[:1]
    assert decoded(tokenizer, inputs(half)).tolist() == ["\ufffd".encode()]


def test_beams_and_padding(tokenizer: Any) -> None:
    beams = [
        tokenizer(text, add_special_tokens=False).input_ids for text in ("a long one", "短い", "")
    ]
    assert decoded(tokenizer, inputs(*beams)).tolist() == [b"a long one", "短い".encode(), b""]


def test_a_batch(tokenizer: Any) -> None:
    first, second = (
        tokenizer(text, add_special_tokens=False).input_ids for text in ("Grüß Gott", "日本")
    )
    width = max(len(first), len(second))
    tokens = [[ids + [-1] * (width - len(ids))] for ids in (first, second)]
    texts = decoded(
        tokenizer,
        {
            "TOKENS_BATCH": np.array(tokens, np.int32),
            "SEQUENCE_LENGTH": np.array([[len(first)], [len(second)]], np.int32),
            "CONTEXT_IDS": np.zeros((2, 0), np.int32),
            "IS_FINAL": np.array([[True], [True]]),
        },
    )
    assert texts.tolist() == ["Grüß Gott".encode(), "日本".encode()]


def test_special_tokens(tokenizer: Any) -> None:
    ids = [*tokenizer("done", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert decoded(tokenizer, inputs(ids)).tolist() == [b"done"]
    kept = decoded(tokenizer, inputs(ids), skip_special_tokens=False)
    assert kept.tolist() == [b"done</s>"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SEQUENCE_LENGTH": [[-1]]}, "SEQUENCE_LENGTH must be at least 0, not -1"),
        ({"SEQUENCE_LENGTH": [[1, 1]]}, r"must be of shape \[1, 1\], not \[1, 2\]"),
        ({"TOKENS_BATCH": [[[-5]]]}, "token ids must be at least 0"),
        ({"CONTEXT_IDS": [[-5]]}, "token ids must be at least 0"),
    ],
)
def test_what_no_engine_sends_is_refused(
    tokenizer: Any, changes: dict[str, Any], text: str
) -> None:
    given = {**inputs([5]), **{name: np.array(value) for name, value in changes.items()}}
    with pytest.raises(ValueError, match=text):
        decoded(tokenizer, given)
