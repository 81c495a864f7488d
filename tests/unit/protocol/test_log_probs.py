from dataclasses import replace

import pytest

from cog_triton.protocol.log_probs import TokenLogProb, packed_log_probs, unpacked_log_probs

LIKELY = [
    TokenLogProb(5, -0.5, ((5, -0.5), (2**24, -1.25))),
    TokenLogProb(7, -3.0, ((1, -0.25),)),
    TokenLogProb(8, 0.0),
]
IDS = [token.id for token in LIKELY]


@pytest.mark.parametrize("top", [0, 1, 2, 5])
@pytest.mark.parametrize("generated", [0, 3])
def test_log_probabilities_come_back_behind_the_prompts(top: int, generated: int) -> None:
    likely = [replace(token, top=token.top[:top]) for token in LIKELY]
    prompt = [TokenLogProb(4, 0.0), *likely]
    values = packed_log_probs(LIKELY[:generated], top, prompt)
    assert unpacked_log_probs(IDS[:generated], values, top) == likely[:generated]
    before = values[: len(values) - generated * (1 + 2 * top)].reshape(-1, 3 + 2 * top)
    assert [int(row[1]) for row in before] == [4, *IDS]
    own = unpacked_log_probs([4, *IDS], before.ravel(), 1 + top)
    assert [token.log_prob for token in own] == [token.log_prob for token in prompt]
    assert [token.top[1:] for token in own] == [token.top for token in prompt]


def test_without_alternatives_log_probabilities_are_in_tensorrt_llms_form() -> None:
    """Its C++ backend sends those of all tokens so far with each response."""
    values = packed_log_probs(LIKELY, 0)
    assert values.tolist() == [-0.5, -3.0, 0.0]
    assert unpacked_log_probs([8], values, 0) == [TokenLogProb(8, 0.0)]
    assert unpacked_log_probs([], values, 0) == []
    with pytest.raises(ValueError, match="reshape"):
        unpacked_log_probs([7], values[:1], 1)
