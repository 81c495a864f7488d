"""Frames: every one comes back as it was, and nothing else is taken for one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import InvalidParameter, TritonMalformedEvent
from cog_triton.protocol.frames import (
    MARK,
    Frame,
    FrameAddress,
    decode_frames,
    encode_frames,
)
from cog_triton.protocol.log_probs import TokenLogProb

IDS = st.integers(0, 2**31 - 1)
NUMBERS = st.integers(1, 2**31 - 1)
LOG_PROBS = st.floats(-1e4, 0, width=32)
TOKENS = st.builds(
    TokenLogProb,
    IDS,
    LOG_PROBS,
    st.lists(st.tuples(IDS, LOG_PROBS), max_size=4).map(tuple),
)


@st.composite
def frames(draw: Any) -> Frame:
    ids = draw(st.lists(IDS, max_size=5))
    log_probs: list[TokenLogProb] = []
    prompt: list[TokenLogProb] = []
    if ids and draw(st.booleans()):
        log_probs = [replace(draw(TOKENS), id=token) for token in ids]
        prompt = draw(st.lists(TOKENS, max_size=3))
    return Frame(
        sequence=draw(NUMBERS),
        start=draw(st.integers(0, 2**20)),
        ids=ids,
        input_tokens=draw(st.integers(0, 2**20)),
        final=draw(st.booleans()),
        log_probs=log_probs,
        prompt_log_probs=prompt,
    )


def values_of(*sent: Frame) -> list[int]:
    values: list[int] = encode_frames(sent).tolist()
    return values


@given(st.lists(frames(), max_size=4))
def test_frames_come_back_as_they_were(sent: list[Frame]) -> None:
    received = decode_frames(values_of(*sent))
    for frame in received:
        frame.log_probs = list(frame.log_probs)
        frame.prompt_log_probs = list(frame.prompt_log_probs)
    assert received == sent


@given(st.lists(frames(), max_size=3))
def test_the_tensor_has_32_bit_integers(sent: list[Frame]) -> None:
    tensor = encode_frames(sent)
    assert tensor.dtype.name == "int32"
    assert tensor.ndim == 1


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
@pytest.mark.parametrize("marked", [False, True], ids=["any list", "behind the mark"])
def test_no_other_list_is_taken_for_frames(marked: bool, values: list[int]) -> None:
    """Even a list that begins with the mark is refused, unless it is exactly the encoding of frames."""
    if marked:
        values = [MARK, *values]
    try:
        received = decode_frames(values)
    except TritonMalformedEvent:
        return
    assert marked
    assert values_of(*received) == values


@pytest.mark.parametrize("values", [[], [2, 2, 7, 8], [~3, 9], [2, 9, 5, 6]])
def test_lists_of_ids_are_not_taken_for_frames(values: list[int]) -> None:
    with pytest.raises(TritonMalformedEvent, match="frames of another format"):
        decode_frames(values)


FRAME = Frame(
    sequence=1,
    start=0,
    ids=[5, 6],
    input_tokens=3,
    final=False,
    log_probs=[TokenLogProb(5, -0.5, ((5, -0.5), (9, -1.5))), TokenLogProb(6, -2.0)],
    prompt_log_probs=[TokenLogProb(4, 0.0), TokenLogProb(2**24 + 1, -3.0, ((7, -0.25),))],
)


@pytest.mark.parametrize("length", range(1, len(values_of(FRAME))))
def test_frames_that_are_cut_off_are_refused(length: int) -> None:
    values = values_of(FRAME)[:length]
    if length == 1:
        assert decode_frames(values) == []
    else:
        with pytest.raises(TritonMalformedEvent, match="frames that cannot be read"):
            decode_frames(values)


@pytest.mark.parametrize(
    ("field", "value"),
    [(1, 0), (2, -1), (3, -1), (3, 2**30), (4, -1), (5, 2), (6, -2), (6, 2**30), (7, -1)],
)
def test_headers_with_impossible_values_are_refused(field: int, value: int) -> None:
    values = values_of(FRAME)
    values[field] = value
    with pytest.raises(TritonMalformedEvent):
        decode_frames(values)


@given(st.from_regex("[0-9a-f]{32}", fullmatch=True), NUMBERS)
def test_addresses_come_back_as_they_were(reader: str, sequence: int) -> None:
    address = FrameAddress(reader, sequence)
    assert FrameAddress.parse(address.parameter()) == address


@pytest.mark.parametrize("value", ["", 7, f"{'a' * 32}/0", f"{'a' * 32}/{2**31}", f"{'g' * 32}/1"])
def test_other_values_are_no_addresses(value: object) -> None:
    with pytest.raises(InvalidParameter, match="frames_for must be 32 hexadecimal digits"):
        FrameAddress.parse(value)
