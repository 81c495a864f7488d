"""What the tensorrt_llm slot keeps of a request, without Triton's stub."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cog_triton.engines.serving import Output
from tests.support import ROOT

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

    def is_cancelled(self) -> bool:
        return False


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", PB_UTILS)
    file = ROOT / "triton_model_repo" / "tensorrt_llm" / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("slot", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_request_that_has_ended_holds_nothing_of_tritons(model: ModuleType) -> None:
    sender = Sender()
    flags, gone = sender.flags, weakref.ref(sender)
    names = frozenset({"output_ids"})
    responses = model.Responses(sender, {}, names, 2, {"ids_only": True}, {})
    responses.stops = [lambda: responses.send, lambda: responses.send]
    del sender
    for index, final in ((0, False), (0, True), (1, True)):
        assert gone() is not None
        responses.send(index, Output([5], [], 0.0, [], 1, final))
    assert gone() is None
    assert flags == [0, 0, PB_UTILS.TRITONSERVER_RESPONSE_COMPLETE_FINAL]
