"""The stand-in for TensorRT-LLM's backend does what that does; see tests/stand_in/README.md.

In a real tritonserver. Prompts are chosen so that their echo is the case wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cog_triton.models.preprocessing import word_lists
from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import make_server, running, settings_for
from tests.stand_in.servers import environment, ids, stream, tensors

pytestmark = pytest.mark.rare
PROMPT = [5, 6, 7, 8]
END = 9


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("backend")
    settings = settings_for(demo_model, **environment(directory))
    with running(make_server(settings, directory)) as server:
        yield server


def one(value: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value]], dtype)


@pytest.mark.parametrize(
    ("inputs", "made"),
    [
        ({}, [[5], [6], [7]]),
        ({"seed": one(3, np.uint64)}, [[8], [5], [6]]),  # where in the prompt its ids begin
        # The end id waits for min_tokens; -1 is none.
        (
            {"prompt": [5, END], "max_tokens": 9, "end_id": one(END), "min_tokens": one(3)},
            [[5], [5], [5], []],
        ),
        ({"prompt": [5, END], "end_id": one(-1)}, [[5], [9], [5]]),
        # Stop words stay in the output, bad words are left out.
        ({"max_tokens": 9, "stop_words_list": word_lists([[[7, 8], [6, 7]]])}, [[5], [6], [7]]),
        ({"max_tokens": 4, "bad_words_list": word_lists([[[6, 7], [5]]])}, [[6], [8], [6], [8]]),
        ({"exclude_input_in_output": one(False, np.bool_)}, [[5], [6], [7]]),  # never in a stream
    ],
)
def test_a_stream(server: TritonServer, inputs: dict[str, Any], made: list[list[int]]) -> None:
    asked = tensors(**{"prompt": PROMPT, "max_tokens": 3, **inputs})
    assert ids(stream(server, asked)) == made
