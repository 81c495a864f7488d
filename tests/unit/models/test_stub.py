"""Requests, responses and errors of Triton's stub, and the ids before each response."""

import gc
import os
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cog_triton import errors
from cog_triton.engines.serving import Output
from cog_triton.models import stub
from cog_triton.models.engine import Peers
from cog_triton.models.responses import Responses
from cog_triton.models.stops import StopSocket
from cog_triton.models.stub import Contexts, Tensors
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from tests.support import ROOT
from tests.unit.models.support import FAILED, REFUSED, PbUtils, Sender, request

LENGTHS = {"input_lengths": np.array([3, 3])}  # of the prompts


@pytest.fixture(autouse=True)
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub, "pb_utils", PbUtils())


def test_what_was_not_foreseen_keeps_its_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    try:
        Path("/secret/file").read_text()
    except OSError as cause:
        message = stub.failure("preprocessing", cause).error().message()
    assert message == "model 'preprocessing' failed: FileNotFoundError; see the server's log"
    assert isinstance(errors.error_from_text(message), errors.TritonTokenizerError)
    assert "/secret/file" in caplog.text


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidParameter, REFUSED),
        (errors.EngineError, REFUSED),
        (errors.EngineUnavailable, FAILED),
        (errors.TritonUnavailable, FAILED),
    ],
)
def test_errors_for_a_client_are_cut_and_say_whose_fault_it_is(
    kind: type[Exception], code: int, caplog: pytest.LogCaptureFixture
) -> None:
    error = stub.failure("preprocessing", kind("x" * 9999)).error()
    assert (len(error.message()), error.code()) == (errors.LONGEST, code)
    assert not caplog.text


def test_triton_is_not_asked_about_a_request_that_is_over() -> None:
    sender = Sender()
    sender.cancelled = True
    client = stub.Client(request({}, (), sender))
    client.send("a", last=False)
    assert client.gone()
    client.send(last=True)
    client.fail("preprocessing", KeyError())
    assert client.closed
    assert not client.gone()
    assert [sender.sent.get(), sender.sent.get()] == [("a", False), (None, True)]
    assert sender.sent.empty()


def test_an_error_that_cannot_be_sent_is_logged_and_ends_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = Mock(send=Mock(side_effect=MemoryError("no room in the shared memory")))
    client = stub.Client(request({}, (), sender))
    client.fail("preprocessing", KeyError("the cause"))
    assert "an error could not be sent: 'the cause'" in caplog.text
    assert not client.closed


def test_a_request_that_has_ended_holds_nothing_of_tritons() -> None:
    """Without the help of the garbage collector: it is the stub's shared memory."""
    sender = Sender()
    sent, gone = sender.sent, weakref.ref(sender)
    client = stub.Client(SimpleNamespace(get_response_sender=lambda only=[sender]: only.pop()))
    responses = Responses(client, LENGTHS, frozenset({"output_ids"}), 2)
    responses.stops = [lambda: responses.send, lambda: responses.send]
    del sender
    gc.disable()
    try:
        for index, final in ((0, False), (0, True), (1, True)):
            assert gone() is not None
            responses.send(index, Output([5], finished=final))
        assert gone() is None
    finally:
        gc.enable()
    assert [sent.get()[1] for _ in range(3)] == [False, False, True]


def test_the_last_response_does_not_overtake_another_sequences() -> None:
    held: list[bool] = []
    client: Any = SimpleNamespace(send=lambda _, **__: held.append(responses.lock.locked()))
    responses: Responses = Responses(client, LENGTHS, frozenset(), 2)
    for index in range(2):
        responses.send(index, Output([5], finished=True))
    assert held == [True, True]


def test_a_response_that_was_not_delivered_ends_no_sequence_and_its_error_does() -> None:
    sent: list[bool] = []

    def send(_: Any, last: bool) -> None:
        sent.append(last)
        if len(sent) == 1:
            raise RuntimeError("no room")

    client: Any = SimpleNamespace(send=send)
    responses = Responses(client, LENGTHS, frozenset(), 2)
    with pytest.raises(RuntimeError):
        responses.send(0, Output([5], finished=True))
    responses.send(0, Output([], finished=True, error=errors.EngineError("not delivered")))
    responses.send(1, Output([5], finished=True))
    assert sent == [False, False, True]


def test_an_instance_listens_on_after_a_stop_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ended(Exception):
        """In place of the end of the process."""

    def end(status: int) -> None:
        raise Ended(status)

    stopped: list[str] = []

    def stop(request_id: str) -> None:
        stopped.append(request_id)
        if request_id == "first":
            raise RuntimeError("the loop is closed")

    monkeypatch.setattr(os, "_exit", end)
    ours, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    peers = object.__new__(Peers)
    peers._socket = object.__new__(StopSocket)
    peers._socket._socket = ours
    for message in (b"while it loads", b"first", b"\xff second", b""):
        others.send(message)
    received = iter([None, stop, stop])

    class Model:
        @property
        def _serving(self) -> Any:
            function = next(received)
            return None if function is None else SimpleNamespace(stop=function)

    with ours, others, pytest.raises(Ended):
        peers.listen(Model())
    assert stopped == ["first", "\ufffd second"]
    assert "request first could not be stopped" in caplog.text


# The ids before each response of TensorRT-LLM's C++ backend


def reply(*beams: list[int], **tensors: float) -> Tensors:
    width = max(map(len, beams))
    rows = [ids + [-1] * (width - len(ids)) for ids in beams]
    return {
        "output_ids": np.array([rows], np.int32).reshape(1, len(beams), width),
        "sequence_length": np.array([[len(ids) for ids in beams]], np.int32),
        **{name: np.array([[value]]) for name, value in tensors.items()},
    }


MORE, LAST = False, True
BATCH = [reply([5], batch_index=0), reply([6], batch_index=1), reply([7], batch_index=0)]
BEAMS = [reply([5], [6]), reply([5, 7], [6])]


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (
            [reply([5]), reply([6, 7]), reply([8])],
            [([[5]], [], MORE), ([[6, 7]], [5], MORE), ([[8]], [5, 6, 7], LAST)],
        ),
        # The end comes without ids, without tensors, and before the first token.
        ([reply([5]), reply([])], [([[5]], [], MORE), ([[]], [5], LAST)]),
        ([reply([5]), {}], [([[5]], [], MORE), ([[]], [5], LAST)]),
        ([{}], [([[]], [], LAST)]),
        # Each sequence of a batch has its own ids and an end.
        (BATCH, [([[5]], [], MORE), ([[6]], [], MORE), ([[7]], [5], LAST), ([[]], [6], LAST)]),
        # Streamed beams have all ids so far.
        (BEAMS, [([[5], [6]], [], LAST), ([[5, 7], [6]], [], LAST)]),
    ],
)
def test_each_response_has_the_ids_before_it(replies: list[Tensors], expected: Any) -> None:
    contexts, last = Contexts(streaming=True), len(replies) - 1
    sent = [r for i, tensors in enumerate(replies) for r in contexts.add(tensors, last=i == last)]
    assert [shown(tensors) for tensors in sent] == expected


def shown(tensors: Tensors) -> tuple[list[list[int]], list[int], bool]:
    """The ids of a response, those before it, and whether it is the last one."""
    (beams,), (lengths,) = tensors["output_ids"].tolist(), tensors["sequence_length"].tolist()
    ids = [beam[:length] for beam, length in zip(beams, lengths, strict=True)]
    return ids, tensors["context_ids"][0].tolist(), bool(tensors["is_final"].all())


def test_the_ids_before_a_response_do_not_grow() -> None:
    contexts = Contexts(streaming=True)
    responses = [response for i in range(99) for response in contexts.add(reply([i]), last=False)]
    assert shown(responses[-1])[1] == [*range(98 - CONTEXT_TOKENS, 98)]


def test_without_streaming_a_response_is_whole() -> None:
    (whole,) = Contexts(streaming=False).add(reply([5, 6]), last=True)
    assert shown(whole) == ([[5, 6]], [], LAST)


def test_an_error_with_any_characters_can_be_printed(tmp_path: Path) -> None:
    """By a stub, whose Python takes the locale C for ASCII and no notice of the environment."""
    code = "from cog_triton.models import stub; stub.print_any_text(); print('no caf\\xe9 \\udce9')"
    command = [sys.executable, "-X", "utf8=0", "-c", code]
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert printed.stdout == "no café \\udce9\n".encode()


# End tokens that TensorRT-LLM's C++ backend has as stop words

WORDS = np.array([[[6, 6, 7, 20, 9], [1, 3, 4, 5, -1]]], np.int32)  # 6; 6 7; 20; 9


@pytest.mark.parametrize(
    ("inputs", "end_ids", "found"),
    [
        pytest.param({"stop_words_list": WORDS}, (2, 6, 20), {6, 20}, id="single words"),
        pytest.param({"stop_words_list": WORDS}, (7,), set(), id="part of a word"),
        pytest.param({"stop_words_list": WORDS}, (), set(), id="no end tokens"),
        pytest.param({}, (2, 6), set(), id="no words"),
        pytest.param({"stop_words_list": np.zeros((1, 2, 0), np.int32)}, (2,), set(), id="empty"),
    ],
)
def test_end_stop_words(inputs: Tensors, end_ids: tuple[int, ...], found: set[int]) -> None:
    assert stub.end_stop_words(inputs, end_ids) == found


@pytest.mark.parametrize(
    ("ids", "lengths", "kept", "kept_lengths"),
    [
        pytest.param([[[5, 6]]], [[2]], [[[5]]], [[1]], id="last"),
        pytest.param([[[6]]], [[1]], [[[]]], [[0]], id="alone"),
        pytest.param([[[6, 5]]], [[2]], [[[6, 5]]], [[2]], id="not last"),
        pytest.param([[[5, -1]]], [[1]], [[[5]]], [[1]], id="padded"),
        pytest.param([[[]]], [[0]], [[[]]], [[0]], id="empty"),
        pytest.param([[[5, 6], [7, 8]]], [[2, 2]], [[[5, -1], [7, 8]]], [[1, 2]], id="of a beam"),
    ],
)
def test_a_response_without_its_end_token(
    ids: list[Any], lengths: list[Any], kept: list[Any], kept_lengths: list[Any]
) -> None:
    tensors = {
        "output_ids": np.array(ids, np.int32),
        "sequence_length": np.array(lengths, np.int32),
    }
    found = stub.without_end_token(tensors, {6})
    assert found["output_ids"].tolist() == kept
    assert found["sequence_length"].tolist() == kept_lengths
    assert stub.without_end_token(tensors, ()) is tensors
    assert stub.without_end_token({}, {6}) == {}


@pytest.mark.parametrize(
    ("elapsed", "used", "imports", "ends"),
    [
        pytest.param(1.2, 0.1, False, True, id="it stood still"),
        pytest.param(1.2, 1.1, False, False, id="it was at work"),
        pytest.param(0.7, 0.0, False, False, id="not for long"),
        pytest.param(1.2, 0.1, True, False, id="it waited for a disk"),
    ],
)
def test_a_process_that_stood_still_while_it_made_responses_ends(
    elapsed: float, used: float, imports: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that was paused: Triton would take them for those to the next requests."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    clock = iter([100.0, 100.0 + elapsed])
    processor = iter([5.0, 5.0 + used])
    monkeypatch.setattr(time, "clock_gettime", lambda _: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: next(processor))
    with stub.ends_after_standstill():
        if imports:
            monkeypatch.setitem(sys.modules, "read_from_a_slow_disk", stub)
    assert statuses == ([stub.STANDSTILL_STATUS] if ends else [])
