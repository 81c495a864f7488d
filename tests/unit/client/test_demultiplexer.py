"""From messages to requests: in any order, however they are cut into messages, whatever is lost."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from cog_triton.client.demultiplexer import GAP_SECONDS, Demultiplexer
from cog_triton.errors import TritonMalformedEvent
from cog_triton.protocol.frames import Frame, encode_frames
from cog_triton.protocol.names import ENGINE, FRAMES, IDS_ENSEMBLE, OUTPUTS

REQUESTS = 4


def message(*frames: Frame) -> bytes:
    return response({FRAMES: encode_frames(frames)}, model=IDS_ENSEMBLE, request_id="any")


def response(outputs: dict[str, Any], *, model: str, request_id: str, final: bool = False) -> bytes:
    infer = service_pb2.ModelInferResponse(model_name=model, id=request_id)
    infer.parameters["triton_final_response"].bool_param = final
    for name, values in outputs.items():
        infer.outputs.add(name=name)
        infer.raw_output_contents.append(np.array(values, np.int32).tobytes())
    answer = service_pb2.ModelStreamInferResponse(infer_response=infer)
    return bytes(answer.SerializeToString())


def error(text: str, request_id: str) -> bytes:
    """As Triton 2.51 writes one: with the id of its request, and no model."""
    answer = service_pb2.ModelStreamInferResponse(error_message=text)
    answer.infer_response.id = request_id
    return bytes(answer.SerializeToString())


def frames_of_sequence(sequence: int, sizes: Sequence[int]) -> list[Frame]:
    """Frames of a sequence whose ids count up; the last one is final, and may have no ids."""
    frames = []
    place = 0
    for index, size in enumerate(sizes):
        is_last = index == len(sizes) - 1
        ids = list(range(place, place + (size if is_last else max(1, size))))
        frames.append(Frame(sequence, place, ids, 9, is_last))
        place += len(ids)
    return frames


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@st.composite
def traffic(draw: Any) -> tuple[list[list[Frame]], list[list[Frame]]]:
    """The frames of each sequence, and all of them in any order, cut into messages anywhere."""
    sequences = [
        frames_of_sequence(number, draw(SIZES)) for number in range(1, draw(st.integers(1, 4)) + 1)
    ]
    frames = draw(st.permutations([frame for frames in sequences for frame in frames]))
    messages: list[list[Frame]] = [[]]
    for frame in frames:
        messages[-1].append(frame)
        if draw(st.booleans()):
            messages.append([])
    return sequences, messages


def expect(made: Demultiplexer, model: str, request_id: str) -> int:
    sequence = made.new_sequence()
    made.expect(sequence, model, request_id)
    return sequence


def demultiplexer() -> Demultiplexer:
    made = Demultiplexer()
    assert [expect(made, IDS_ENSEMBLE, str(n)) for n in range(REQUESTS)] == [1, 2, 3, 4]
    return made


def deliver(made: Demultiplexer, messages: Iterable[Sequence[Frame]]) -> dict[int, list[Frame]]:
    """Return what each sequence got; the last delivery must be the only one that says so."""
    delivered: dict[int, list[Any]] = defaultdict(list)
    ended = set()
    for frames in messages:
        for delivery in made.receive(message(*frames), now=0.0):
            assert delivery.sequence not in ended
            delivered[delivery.sequence].append(delivery.item)
            if delivery.last:
                ended.add(delivery.sequence)
    assert ended == {n for n, items in delivered.items() if any(item.final for item in items)}
    return delivered


@given(traffic())
def test_in_any_order_and_cut_anywhere_each_request_gets_its_frames(
    sent: tuple[list[list[Frame]], list[list[Frame]]],
) -> None:
    sequences, messages = sent
    made = demultiplexer()
    delivered = deliver(made, messages)
    assert delivered == {frames[0].sequence: frames for frames in sequences}
    assert not made.has_gaps
    assert made.overdue(now=1e9) == {}


@given(traffic(), st.data())
def test_whatever_is_lost_requests_get_what_came_before_it_and_only_theirs_is_named(
    sent: tuple[list[list[Frame]], list[list[Frame]]], data: st.DataObject
) -> None:
    sequences, messages = sent
    lost = data.draw(st.sets(st.sampled_from(range(len(messages)))))
    dropped = {(f.sequence, f.start, f.final) for n in lost for f in messages[n]}
    made = demultiplexer()
    delivered = deliver(made, [frames for n, frames in enumerate(messages) if n not in lost])
    overdue = made.overdue(now=GAP_SECONDS)
    for frames in sequences:
        kept = [(f.sequence, f.start, f.final) not in dropped for f in frames]
        whole = frames[: kept.index(False)] if False in kept else frames
        assert delivered.get(frames[0].sequence, []) == whole
        is_noticed = any(kept[len(whole) :])
        assert (frames[0].sequence in overdue) is is_noticed
        if is_noticed:
            assert overdue[frames[0].sequence] == sum(len(frame.ids) for frame in whole)


@given(traffic())
def test_frames_that_come_twice_are_delivered_once(
    sent: tuple[list[list[Frame]], list[list[Frame]]],
) -> None:
    sequences, messages = sent
    twice = [frames for frames in messages for _ in range(2)]
    delivered = deliver(demultiplexer(), twice)
    assert delivered == {frames[0].sequence: frames for frames in sequences}


def test_a_gap_is_a_loss_after_a_time_and_not_before() -> None:
    made = demultiplexer()
    first, second, last = frames_of_sequence(1, [1, 1, 0])
    assert made.receive(message(second), now=5.0) == []
    assert made.has_gaps
    assert made.receive(message(last), now=5.5) == []
    assert made.has_early_end(1)
    assert made.overdue(now=5.0 + GAP_SECONDS - 0.01) == {}
    assert made.overdue(now=5.0 + GAP_SECONDS) == {1: 0}
    assert not made.has_gaps
    assert made.receive(message(first), now=6.5) == []  # too late


def test_what_belongs_to_nobody_is_dropped() -> None:
    made = demultiplexer()
    made.forget(1)
    made.forget(1)
    (frame,) = frames_of_sequence(1, [2])
    (other,) = frames_of_sequence(2, [2])
    (unknown,) = frames_of_sequence(99, [2])
    (delivery,) = made.receive(message(frame, unknown, other), now=0.0)
    assert (delivery.sequence, delivery.last) == (2, True)
    assert made.receive(error("no", "0"), now=0.0) == []


IDS = {name: [1, 2, 3, 9] for name in OUTPUTS}


def test_responses_without_frames_are_told_apart_by_model_and_id() -> None:
    """TensorRT-LLM's C++ backend knows no frames; a stop has the id of the request that it stops."""
    made = demultiplexer()
    stop = expect(made, ENGINE, "1")
    received = made.receive(response(IDS, model=IDS_ENSEMBLE, request_id="1"), now=0.0)
    assert [(each.sequence, each.last) for each in received] == [(2, False)]
    received = made.receive(response({}, model=ENGINE, request_id="1", final=True), now=0.0)
    assert [(each.sequence, each.last) for each in received] == [(stop, True)]
    received = made.receive(response({}, model=IDS_ENSEMBLE, request_id="1", final=True), now=0.0)
    assert [(each.sequence, each.last) for each in received] == [(2, True)]


def test_ids_that_look_like_frames_are_no_frames() -> None:
    made = demultiplexer()
    values = encode_frames(frames_of_sequence(3, [2])).tolist()
    outputs = {"output_ids": values}
    (delivery,) = made.receive(response(outputs, model=IDS_ENSEMBLE, request_id="0"), now=0.0)
    assert delivery.sequence == 1
    assert not isinstance(delivery.item, Frame)


def test_an_error_ends_the_request_that_it_names_and_a_stop_before_it() -> None:
    made = demultiplexer()
    (delivery,) = made.receive(error("no", "0"), now=0.0)
    assert (delivery.sequence, delivery.last) == (1, True)
    stop = expect(made, ENGINE, "1")
    assert [each.sequence for each in made.receive(error("no", "1"), now=0.0)] == [stop]
    assert [each.sequence for each in made.receive(error("no", "1"), now=0.0)] == [2]
    assert made.receive(error("no", "1"), now=0.0) == []


def test_a_later_request_with_the_same_id_is_not_forgotten_with_the_first() -> None:
    made = demultiplexer()
    again = expect(made, IDS_ENSEMBLE, "0")
    made.forget(1)
    (delivery,) = made.receive(error("no", "0"), now=0.0)
    assert delivery.sequence == again


def test_frames_that_cannot_be_read_fail_the_request_that_has_the_response() -> None:
    made = demultiplexer()
    outputs = {FRAMES: [2, 2, 7, 8]}
    (delivery,) = made.receive(response(outputs, model=IDS_ENSEMBLE, request_id="2"), now=0.0)
    assert (delivery.sequence, delivery.last) == (3, True)
    assert isinstance(delivery.item, TritonMalformedEvent)
    assert made.receive(message(*frames_of_sequence(1, [1])), now=0.0)


def test_frames_without_content_fail_the_request_that_has_the_response() -> None:
    infer = service_pb2.ModelInferResponse(model_name=IDS_ENSEMBLE, id="2")
    infer.outputs.add(name=FRAMES)
    answer = service_pb2.ModelStreamInferResponse(infer_response=infer)
    (delivery,) = demultiplexer().receive(bytes(answer.SerializeToString()), now=0.0)
    assert (delivery.sequence, delivery.last) == (3, True)
    assert isinstance(delivery.item, TritonMalformedEvent)


def test_a_message_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(TritonMalformedEvent, match="message that cannot be read"):
        demultiplexer().receive(b"unreadable", now=0.0)
