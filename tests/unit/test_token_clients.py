from __future__ import annotations

import numpy as np
import pytest
from _token_clients import Batch, _tokens, random_prompts

from cog_triton.client.grpc_transport import Message
from cog_triton.client.http_transport import json_value
from cog_triton.errors import TritonMalformedEvent


def test_the_inputs_of_a_batch() -> None:
    inputs = Batch(((5, 6, 7), (8, 9, 10)), 20).inputs()
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 10]],
        "input_lengths": [[3], [3]],
        "request_output_len": [[20], [20]],
        "runtime_top_k": [[1], [1]],
        "streaming": [[False], [False]],
        "exclude_input_in_output": [[True], [True]],
    }
    assert {str(inputs[name].dtype) for name in ("input_ids", "input_lengths")} == {"int32"}


def test_what_changes_something_is_sent_too() -> None:
    batch = Batch(((5,),), 1, top_p=0.5, beam_width=2, end_id=0, pad_id=3, streaming=True)
    inputs = batch.inputs()
    sent = {name: inputs[name].item() for name in ("runtime_top_p", "beam_width", "end_id")}
    assert sent == {"runtime_top_p": 0.5, "beam_width": 2, "end_id": 0}
    assert inputs["pad_id"].item() == 3
    assert inputs["streaming"].item() is True
    assert str(inputs["runtime_top_p"].dtype) == "float32"


def test_random_prompts_come_again_with_their_seed() -> None:
    prompts = random_prompts(3, 40, 10, seed=1)
    assert prompts == random_prompts(3, 40, 10, seed=1) != random_prompts(3, 40, 10, seed=2)
    assert {len(prompt) for prompt in prompts} == {40}
    assert {token for prompt in prompts for token in prompt} == set(range(10))


def test_a_response_says_which_sequence_it_is_of() -> None:
    ids = np.array([[[5, 6, -1], [7, 8, 9]]], np.int32)  # two beams, the first one shorter
    length = np.array([[2, 3]], np.int32)
    tensors = {"output_ids": ids, "sequence_length": length, "batch_index": np.array([[4]])}
    assert _tokens(Message(tensors, final=False)) == (4, [5, 6])
    del tensors["batch_index"]
    assert _tokens(Message(tensors, final=False)) == (0, [5, 6])


def test_a_response_without_ids_is_malformed() -> None:
    with pytest.raises(TritonMalformedEvent, match="output_ids"):
        _tokens(Message({"batch_index": np.array([[0]])}, final=True))


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (np.array([[5]], np.int32), 5),
        (np.array([[5, 6]], np.int32), [5, 6]),
        (np.array([[True]]), True),
        (np.array([[b"a"]], np.object_), "a"),
        (np.array([[b"a", "ä".encode()]], np.object_), ["a", "ä"]),
    ],
)
def test_tensors_as_the_generate_endpoint_takes_them(tensor: object, value: object) -> None:
    assert json_value(tensor) == value  # type: ignore[arg-type]
