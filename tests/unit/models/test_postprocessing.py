import numpy as np

from cog_triton.models.postprocessing import decoded
from cog_triton.models.stub import Array
from cog_triton.text.tokenizer import Tokenizer


def inputs(*prompts: list[list[int]]) -> dict[str, Array]:
    """A response of prompts and their beams, filled up with -1 as TensorRT-LLM does."""
    width = max(len(ids) for beams in prompts for ids in beams)
    rows = [[ids + [-1] * (width - len(ids)) for ids in beams] for beams in prompts]
    return {
        "TOKENS_BATCH": np.array(rows, np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids) for ids in beams] for beams in prompts], np.int32),
    }


def test_batches_and_beams(tokenizer: Tokenizer) -> None:
    texts = ["a long one", "短い", "", "Grüß Gott"]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    found = decoded(tokenizer, inputs(ids[:2], ids[2:]))
    assert found.tolist() == [text.encode() for text in texts]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    given = inputs([[*tokenizer("done", add_special_tokens=False).input_ids, 2]])
    assert tokenizer.eos_token_id == 2
    assert decoded(tokenizer, given).tolist() == [b"done"]
    assert decoded(tokenizer, given, skip_special_tokens=False).tolist() == [b"done</s>"]
