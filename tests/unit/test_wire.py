from dataclasses import replace

import pytest

from cog_triton import wire
from cog_triton.errors import InvalidParameter
from cog_triton.wire import CONTINUED, TokenLogProb, adapter_task_id, ids_parameter, ids_text

LIKELY = [
    TokenLogProb(5, -0.5, ((5, -0.5), (2**24, -1.25))),
    TokenLogProb(7, -3.0, ((1, -0.25),)),
    TokenLogProb(8, 0.0),
]
IDS = [token.id for token in LIKELY]


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [2**31 - 1, 128_000]])
def test_ids_in_a_parameter_come_back(ids: list[int]) -> None:
    assert ids_parameter({CONTINUED: ids_text(ids), "other": 1}, CONTINUED) == ids
    assert ids_parameter({"other": CONTINUED}, CONTINUED) == []


@pytest.mark.parametrize("value", ["!", "AAA=", 7, None, {"a": 1}, "\ud800", ids_text([5, -1])])
def test_what_is_no_list_of_ids_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameter, match=f"{CONTINUED} must be"):
        ids_parameter({CONTINUED: value}, CONTINUED)


@pytest.mark.parametrize("value", ["", 7, f"{'a' * 32}/0", f"{'a' * 32}/{2**31}", f"{'g' * 32}/1"])
def test_what_is_no_channel_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameter, match="channel must be 32 hexadecimal digits"):
        wire.reader_and_number(value)


@pytest.mark.parametrize("top", [0, 1, 2, 5])
@pytest.mark.parametrize("generated", [0, 3])
def test_log_probabilities_come_back_behind_the_prompts(top: int, generated: int) -> None:
    likely = [replace(token, top=token.top[:top]) for token in LIKELY]
    prompt, others = [TokenLogProb(4, 0.0), *likely], likely[:generated]
    values = wire.packed_log_probs(LIKELY[:generated], top, prompt)
    assert wire.unpacked_log_probs(IDS[:generated], values, top) == others
    assert wire.unpacked_prompt_log_probs(values, generated, top) == prompt
    without = wire.packed_log_probs(LIKELY[:generated], top)
    assert wire.unpacked_log_probs(IDS[:generated], without, top) == others
    assert wire.unpacked_prompt_log_probs(without, generated, top) == []
    with pytest.raises(ValueError, match="reshape"):
        wire.unpacked_prompt_log_probs(values[1:], generated, top)


def test_without_alternatives_log_probabilities_are_in_tensorrt_llms_form() -> None:
    """Its C++ backend sends those of all tokens so far with each response."""
    values = wire.packed_log_probs(LIKELY, 0)
    assert values.tolist() == [-0.5, -3.0, 0.0]
    assert wire.unpacked_log_probs([8], values, 0) == [TokenLogProb(8, 0.0)]
    assert wire.unpacked_log_probs([], values, 0) == []
    with pytest.raises(ValueError, match="reshape"):
        wire.unpacked_log_probs([7], values[:1], 1)


def test_an_adapters_number_is_the_same_everywhere() -> None:
    """The value is fixed: a client and a server of different versions must agree."""
    assert adapter_task_id("fr") == 487058246
    assert [adapter_task_id(name) for name in ("1", "2147483647")] == [1, 2**31 - 1]
    others = ("007", "0", "2147483648", "9" * 40, "٣", "-1", *(f"adapter-{i}" for i in range(1000)))
    numbers = {adapter_task_id(name) for name in others}
    assert len(numbers) == len(others)
    assert all(0 < number < 2**31 for number in numbers)
