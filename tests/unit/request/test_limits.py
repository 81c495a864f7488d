from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidParameter, PromptTooLong
from cog_triton.request.limits import MOST_CHARACTERS, UNKNOWN_CHARACTERS, parse_list, parse_object
from cog_triton.text.tokenizer import load_tokenizer, text_limits


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


def test_the_limit_is_what_the_context_can_stand_for(tokenizer: Any) -> None:
    limits = text_limits(tokenizer, 2048)
    assert limits.characters == 2048 * max(map(len, tokenizer.get_vocab()))
    limits.check("the prompt", limits.characters)
    with pytest.raises(PromptTooLong, match=r"^E1002 .*the prompt has 99999 .* 2048 tokens can"):
        limits.check("the prompt", 99_999)


@pytest.mark.parametrize(
    ("context_length", "characters", "why"),
    [
        (None, UNKNOWN_CHARACTERS, "are the most without MAX_SEQUENCE_LENGTH"),
        (2**31, MOST_CHARACTERS, "are the most$"),
    ],
)
def test_there_is_a_limit_where_no_context_sets_one(
    tokenizer: Any, context_length: int | None, characters: int, why: str
) -> None:
    limits = text_limits(tokenizer, context_length)
    limits.check("the prompt", characters)
    with pytest.raises(PromptTooLong, match=f"; {characters} {why}"):
        limits.check("the prompt", characters + 1)


def test_inputs_that_are_json_have_a_bound() -> None:
    with pytest.raises(InvalidParameter, match="messages must have at most 131072 strings"):
        parse_list("messages", '[{"role": "user"}' + ', {"role": "user"}' * 70_000 + "]")
    with pytest.raises(InvalidParameter, match="kwargs must have at most 128 levels"):
        parse_object("kwargs", '{"a":' * 200)
