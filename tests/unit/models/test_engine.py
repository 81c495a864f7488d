"""What the tensorrt_llm slot keeps of a request, without Triton's stub."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.engines.serving import Output
from cog_triton.models import stub
from cog_triton.models.engine import Responses

PB_UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    Tensor=lambda name, _: name,
    InferenceResponse=lambda tensors: tensors,
)


class Sender:
    """Stands for the stub's, which holds some of Triton's shared memory."""

    def __init__(self) -> None:
        self.flags: list[int] = []

    def send(self, _: Any, flags: int) -> None:
        self.flags.append(flags)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_request_that_has_ended_holds_nothing_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub, "pb_utils", PB_UTILS)
    sender = Sender()
    flags, gone = sender.flags, weakref.ref(sender)
    client = stub.Client(SimpleNamespace(get_response_sender=lambda sent=[sender]: sent.pop()))
    responses = Responses(client, {}, frozenset({"output_ids"}), 2, {"ids_only": True})
    responses.stops = [lambda: responses.send, lambda: responses.send]
    del sender
    for index, final in ((0, False), (0, True), (1, True)):
        assert gone() is not None
        responses.send(index, Output([5], [], 0.0, [], 1, final))
    assert gone() is None
    assert flags == [0, 0, PB_UTILS.TRITONSERVER_RESPONSE_COMPLETE_FINAL]
