"""Prompts and words to ids, and back; refusals are in tests/integration/test_malformed_requests.py."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cog_triton.errors import InvalidParameter
from cog_triton.models import preprocessing, stops, stub
from cog_triton.models.postprocessing import decoded
from cog_triton.models.preprocessing import (
    FEW_WORDS,
    LONG_BYTES,
    Preprocessor,
    TritonPythonModel,
    word_lists,
)
from cog_triton.models.stub import Array
from cog_triton.models.tensors import words_from_list
from cog_triton.protocol.names import (
    ADD_SPECIAL_TOKENS,
    CONTINUED,
    LOGIT_BIAS,
    PREPROCESSING,
    PROMPT_IDS,
)
from cog_triton.protocol.parameters import ids_text
from cog_triton.request.limits import WORD_IDS
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.text.words import WordTokenizer
from tests.support import wait_until
from tests.unit.models.support import WORD_LISTS, PbUtils, Sender
from tests.unit.models.support import request as stub_request


@pytest.fixture(scope="module")
def preprocessor(tokenizer: Tokenizer) -> Preprocessor:
    return Preprocessor(tokenizer)


def texts(*rows: str | list[str]) -> Array:
    """A text tensor: one row per prompt, of one text or a list of them."""
    values = [[row] if isinstance(row, str) else row for row in rows]
    return np.array([[value.encode() for value in row] for row in values], np.object_)


def inputs(*prompts: str, **values: Array) -> dict[str, Array]:
    length = np.full((len(prompts), 1), 20, np.int32)
    return {"QUERY": texts(*prompts), "REQUEST_OUTPUT_LEN": length, **values}


def word_ids(tokenizer: Tokenizer, *words: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokenizer(word, add_special_tokens=False).input_ids) for word in words)


def test_one_prompt(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    outputs = preprocessor(inputs("What is a token?"))
    ids = tokenizer("What is a token?").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert {name: array.tolist() for name, array in outputs.items()} == {
        "INPUT_ID": [ids],
        "REQUEST_INPUT_LEN": [[len(ids)]],
        "REQUEST_OUTPUT_LEN": [[20]],
        "OUT_PAD_ID": [[tokenizer.pad_token_id]],
        "OUT_END_ID": [[tokenizer.eos_token_id]],
        # As NVIDIA's sends it when there is no text for a decoder.
        "DECODER_INPUT_ID": [[tokenizer.pad_token_id]],
        "REQUEST_DECODER_INPUT_LEN": [[1]],
    }
    given = inputs("x", END_ID=np.array([[0]], np.int32))
    assert preprocessor(given)["OUT_END_ID"].tolist() == [[0]]


def test_prompts_are_padded(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    prompts = ["one", "and a longer one", "", "日本語 🚀"]
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    padded = [row + [77] * (max(map(len, rows)) - len(row)) for row in rows]
    pad_ids = np.full((4, 1), 77, np.int32)
    outputs = preprocessor(inputs(*prompts, DECODER_QUERY=texts(*prompts), PAD_ID=pad_ids))
    assert outputs["INPUT_ID"].tolist() == outputs["DECODER_INPUT_ID"].tolist() == padded
    lengths = [[len(row)] for row in rows]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == lengths
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == lengths
    assert outputs["OUT_PAD_ID"].tolist() == [[77]] * 4


@pytest.mark.parametrize(
    ("eos", "pad", "end_id", "pad_id"), [(2, 0, 2, 0), (2, None, 2, 2), (None, None, -1, -1)]
)
def test_ids_that_the_tokenizer_does_not_name(eos: Any, pad: Any, end_id: int, pad_id: int) -> None:
    class Tokenizer:
        eos_token_id, pad_token_id = eos, pad

        def __call__(self, *_: object, **__: object) -> Any:
            return SimpleNamespace(input_ids=[5])

    outputs = Preprocessor(Tokenizer())(inputs("x"))
    assert outputs["OUT_END_ID"].tolist() == [[end_id]]
    assert outputs["OUT_PAD_ID"].tolist() == [[pad_id]]


@pytest.mark.parametrize(("after_space", "handed_on"), [("true", True), ("false", False)])
def test_stop_words_are_handed_on_as_texts(
    tokenizer: Tokenizer, after_space: str, handed_on: bool
) -> None:
    preprocessor = Preprocessor(tokenizer, {"words_after_space": after_space})
    outputs = preprocessor(inputs("x", STOP_WORDS_DICT=texts(["is", ""])))
    assert ("STOP_WORDS_TEXT" in outputs) is handed_on
    if handed_on:
        assert outputs["STOP_WORDS_TEXT"].tolist() == [[b"is", b""]]
    assert "STOP_WORDS_TEXT" not in preprocessor(inputs("x", STOP_WORDS_DICT=texts("")))


def test_outputs_end_at_the_length_that_the_engine_is_not_told() -> None:
    class Tokenizer:
        eos_token_id = pad_token_id = 0

        def __call__(self, text: str, **_: object) -> Any:
            return SimpleNamespace(input_ids=[5] * len(text))

        def get_vocab(self) -> dict[str, int]:
            return {"x" * 10: 5}

    limited = Preprocessor(Tokenizer(), {"max_seq_len": "8", "ends_at_max_seq_len": "true"})
    free = Preprocessor(Tokenizer(), {"max_seq_len": "8"})
    long = np.array([[100], [2]], np.int32)
    batch = inputs("xxx", "xxxxx", REQUEST_OUTPUT_LEN=long)
    assert limited(batch)["REQUEST_OUTPUT_LEN"].tolist() == [[5], [2]]
    assert free(batch)["REQUEST_OUTPUT_LEN"].tolist() == [[100], [2]]
    assert limited(inputs("x" * 7))["REQUEST_OUTPUT_LEN"].tolist() == [[1]]
    with pytest.raises(InvalidParameter, match=r"Prompt length \(8\) .* input length \(7\)"):
        limited(inputs("x" * 8))


# End tokens


def stop_words(outputs: Any) -> list[list[int]]:
    return outputs["STOP_WORDS_IDS"].tolist()[0] if "STOP_WORDS_IDS" in outputs else []


def test_end_tokens_but_the_first_are_stop_words(tokenizer: Tokenizer) -> None:
    """Every backend understands stop words, and has room for one end_id."""
    preprocessor = Preprocessor(tokenizer, {"end_ids": "2,6,20", "words_after_space": "false"})
    outputs = preprocessor(inputs("x"))
    assert outputs["OUT_END_ID"].tolist() == [[2]]
    assert stop_words(outputs) == [[6, 20], [1, 2]]
    assert outputs["OUT_OTHER_END_IDS"].tolist() == [[6, 20]]
    given = preprocessor(inputs("x", STOP_WORDS_DICT=texts("is")))
    words = words_from_list(given["STOP_WORDS_IDS"][0])
    assert words[:2] == ((6,), (20,))
    assert "is" in [tokenizer.decode(word).strip() for word in words[2:]]


@pytest.mark.parametrize("end_id", [2, 7, -1])
def test_a_request_with_an_end_of_its_own_has_no_others(tokenizer: Tokenizer, end_id: int) -> None:
    preprocessor = Preprocessor(tokenizer, {"end_ids": "2,6"})
    outputs = preprocessor(inputs("x", END_ID=np.array([[end_id]], np.int32)))
    assert outputs["OUT_END_ID"].tolist() == [[end_id]]
    assert stop_words(outputs) == []
    assert "OUT_OTHER_END_IDS" not in outputs


def test_every_prompt_of_a_batch_has_the_end_tokens(tokenizer: Tokenizer) -> None:
    outputs = Preprocessor(tokenizer, {"end_ids": "2,6"})(inputs("x", "y"))
    assert outputs["STOP_WORDS_IDS"].tolist() == [[[6], [1]]] * 2


def test_without_a_configuration_the_files_beside_the_tokenizer_count(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 2, 1024]}')
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    outputs = Preprocessor(tokenizer, {"tokenizer_dir": str(tmp_path)})(inputs("x"))
    assert outputs["OUT_END_ID"].tolist() == [[2]]
    assert stop_words(outputs) == [[6], [1]]


# Parameters of a request


def test_a_prompt_of_token_ids(preprocessor: Preprocessor) -> None:
    """The text is not read, nothing is added to the ids, and what was delivered follows them."""
    given = {PROMPT_IDS: ids_text([7, 8, 9]), CONTINUED: ids_text([5])}
    assert preprocessor(inputs("not read"), given)["INPUT_ID"].tolist() == [[7, 8, 9, 5]]
    with pytest.raises(InvalidParameter, match="does not support a batch"):
        preprocessor(inputs("a", "b"), given)


@pytest.mark.parametrize("configured", ["true", "false"])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_a_request_says_whether_special_tokens_are_added(
    tokenizer: Tokenizer, configured: str, wanted: bool | None
) -> None:
    """A rendered chat template has them: with the tokenizer's there would be two."""
    preprocessor = Preprocessor(tokenizer, {"add_special_tokens": configured})
    parameters = {} if wanted is None else {ADD_SPECIAL_TOKENS: wanted}
    ids = preprocessor(inputs("<s><|user|>Hi<|end|>"), parameters)["INPUT_ID"][0].tolist()
    adds = configured == "true" if wanted is None else wanted
    assert ids.count(tokenizer.bos_token_id) == (2 if adds else 1)


# Words


@pytest.mark.parametrize(
    ("words", "texts_of_rows"),
    [
        pytest.param([[""]], None, id="no word"),
        pytest.param([["", ""]], None, id="no words"),
        pytest.param([["neural network"]], [["neural network", " neural network"]], id="one"),
        pytest.param([["end", "", "no"]], [["end", " end", "no", " no"]], id="several"),
        pytest.param([["end"], [""], ["no"]], [["end", " end"], [], ["no", " no"]], id="batch"),
        pytest.param(["end"], [["end", " end"]], id="of shape [batch]"),
    ],
)
def test_words_match_as_they_stand_and_after_a_space(
    preprocessor: Preprocessor,
    tokenizer: Tokenizer,
    words: list[Any],
    texts_of_rows: list[list[str]] | None,
) -> None:
    given = np.char.encode(words).astype(object)
    for_each_prompt = inputs(*"x" * len(words), STOP_WORDS_DICT=given)
    found = preprocessor(for_each_prompt).get("STOP_WORDS_IDS")
    if texts_of_rows is None:
        assert found is None
        return
    assert found is not None
    for row, expected in zip(map(words_from_list, found), texts_of_rows, strict=True):
        spellings = word_ids(tokenizer, *expected)
        assert set(spellings) <= set(row)
        # What else there is are spellings that share a token with other text.
        for ids in row:
            assert any(text.strip() in tokenizer.decode(list(ids)) for text in expected)


def test_a_list_of_words_has_no_more_ids_than_engines_take(tokenizer: Tokenizer) -> None:
    words = [f"{place:04d}" for place in range(1024)]
    given = inputs("x", STOP_WORDS_DICT=texts(words))
    found = Preprocessor(tokenizer)(given)["STOP_WORDS_IDS"]
    assert found.shape[-1] <= WORD_IDS
    assert set(word_ids(tokenizer, *words)) <= set(words_from_list(found[0]))


def test_the_bias_is_as_long_as_the_models_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    padded = len(tokenizer) + 64
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": padded}}))
    for given in ({"tokenizer_dir": str(tmp_path)}, {"vocab_size": str(padded)}):
        preprocessor = Preprocessor(tokenizer, given)
        bias = preprocessor(inputs("x"), {LOGIT_BIAS: json.dumps({padded - 1: -5})})
        assert bias["EMBEDDING_BIAS"].shape == (1, padded)
        assert bias["EMBEDDING_BIAS"][0, -1] == -5
        with pytest.raises(InvalidParameter, match=f"between 0 and {padded - 1}, not {padded}"):
            preprocessor(inputs("x"), {LOGIT_BIAS: json.dumps({padded: -5})})


def test_words_may_match_alone_as_at_nvidia(tokenizer: Tokenizer) -> None:
    alone = Preprocessor(tokenizer, {"words_after_space": "false"})
    found = alone(inputs("x", STOP_WORDS_DICT=texts(["rules", "", "two words"])))["STOP_WORDS_IDS"]
    assert words_from_list(found[0]) == word_ids(tokenizer, "rules", "two words")


@pytest.mark.parametrize(("expected", "words"), WORD_LISTS)
def test_word_lists_are_tensorrt_llms(expected: list[list[int]], words: list[list[int]]) -> None:
    (found,) = word_lists([words])
    assert (found.tolist(), found.dtype) == (expected, np.int32)


def test_a_bias_of_words_and_of_ids(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    words = texts(["a", "neural network"], ["b", ""])
    weights = np.array([[1.5, -2.0], [4.0, 9.0]], np.float32)
    given = inputs("x", "y", EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    ((a,), (b,)) = word_ids(tokenizer, "a", "b")
    tokens_of = WordTokenizer(tokenizer).tokens_of
    wanted = np.zeros((2, len(tokenizer)), np.float32)
    of_a, of_b, of_network = tokens_of(["a", "b", "neural network"])
    assert (a in of_a, b in of_b) == (True, True)
    wanted[0, of_a] = 1.5
    wanted[1, of_b] = 4.0
    wanted[0, of_network] -= 2
    found = preprocessor(given)["EMBEDDING_BIAS"]
    assert np.array_equal(found, wanted)
    assert found.dtype == np.float32
    wanted[:, a] += 1.0
    both = preprocessor(given, {LOGIT_BIAS: json.dumps({a: 1.0})})["EMBEDDING_BIAS"]
    assert np.array_equal(both, wanted)
    (only,) = preprocessor(inputs("x"), {LOGIT_BIAS: json.dumps({a: 1.0})})["EMBEDDING_BIAS"]
    assert np.flatnonzero(only).tolist() == [a]
    assert "EMBEDDING_BIAS" not in preprocessor(inputs("x", EMBEDDING_BIAS_WORDS=texts("")))
    with pytest.raises(InvalidParameter, match="logit_bias must be at least 0"):
        preprocessor(inputs("x"), {LOGIT_BIAS: '{"-1": 2}'})


def response(*prompts: list[list[int]]) -> dict[str, Array]:
    """A response of prompts and their beams, filled up with -1 as TensorRT-LLM does."""
    width = max(len(ids) for beams in prompts for ids in beams)
    rows = [[ids + [-1] * (width - len(ids)) for ids in beams] for beams in prompts]
    return {
        "TOKENS_BATCH": np.array(rows, np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids) for ids in beams] for beams in prompts], np.int32),
    }


def test_the_text_of_batches_and_beams(tokenizer: Tokenizer) -> None:
    texts = ["a long one", "短い", "", "Grüß Gott"]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    found = decoded(tokenizer, response(ids[:2], ids[2:]))
    assert found.tolist() == [text.encode() for text in texts]


def test_special_tokens_in_a_text(tokenizer: Tokenizer) -> None:
    given = response([[*tokenizer("done", add_special_tokens=False).input_ids, 2]])
    assert tokenizer.eos_token_id == 2
    assert decoded(tokenizer, given).tolist() == [b"done"]
    assert decoded(tokenizer, given, skip_special_tokens=False).tolist() == [b"done</s>"]


WORDS = [f"w{number}" for number in range(FEW_WORDS + 1)]
SLOW_REQUESTS = {
    "a long prompt": inputs("x" * (LONG_BYTES + 1)),
    "bad words": inputs("x", BAD_WORDS_DICT=texts(WORDS)),
    "stop words": inputs("x", STOP_WORDS_DICT=texts(WORDS)),
    "biased words": inputs("x", EMBEDDING_BIAS_WORDS=texts(WORDS)),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((first, "a short prompt") for first in SLOW_REQUESTS),
        ("a long prompt", "bad words"),
        ("bad words", "a long prompt"),
    ],
)
def test_a_request_that_takes_long_does_not_delay_others(
    monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    slow = SLOW_REQUESTS[first]
    next_one = SLOW_REQUESTS.get(second) or inputs("y")
    released = threading.Event()

    def preprocess(given: dict[str, Array], _: Any) -> dict[str, Array]:
        if given["REQUEST_OUTPUT_LEN"] is slow["REQUEST_OUTPUT_LEN"]:
            assert released.wait(30)
        return {}

    monkeypatch.setattr(stub, "pb_utils", PbUtils, raising=False)
    monkeypatch.setattr(stub, "begin", lambda _: ({}, {}))
    monkeypatch.setattr(stub, "tokenizer", lambda _: None)
    monkeypatch.setattr(preprocessing, "Preprocessor", lambda *_: preprocess)
    model = TritonPythonModel()
    model.initialize({})
    try:
        waiting, answered = Sender(), Sender()
        assert model.execute([stub_request(slow, [], waiting)]) == [None]
        (response,) = model.execute([stub_request(next_one, [], answered)])
        if response is None:
            response, _ = answered.sent.get(timeout=30)
        assert not response.has_error()
        assert waiting.sent.empty()
    finally:
        released.set()
        model.finalize()
    assert not waiting.sent.get(timeout=30)[0].has_error()


@pytest.fixture
def slow_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TritonPythonModel, list[Any]]]:
    """The model with a preprocessor that only notes its requests, and what it noted."""
    noted: list[Any] = []

    def preprocess(inputs: dict[str, Array], _: Any) -> dict[str, Array]:
        noted.append(inputs)
        return {"INPUT_ID": inputs["REQUEST_OUTPUT_LEN"]}

    monkeypatch.setattr(stub, "pb_utils", PbUtils, raising=False)
    monkeypatch.setattr(stub, "begin", lambda _: ({}, {}))
    monkeypatch.setattr(stub, "tokenizer", lambda _: None)
    monkeypatch.setattr(preprocessing, "Preprocessor", lambda *_: preprocess)
    model = TritonPythonModel()
    model.initialize({})
    yield model, noted
    model.finalize()


def test_a_batch_on_a_busy_machine_is_no_standstill(
    slow_model: tuple[TritonPythonModel, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request waits for the processor, none for as long as Triton would mind."""
    model, noted = slow_model
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(time, "clock_gettime", lambda _: 0.5 * len(noted))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    responses = model.execute([stub_request(inputs("y"), ["INPUT_ID"], Sender()) for _ in range(8)])
    assert not any(response.has_error() for response in responses)
    assert len(noted) == 8
    assert statuses == []


@pytest.mark.parametrize("kind", SLOW_REQUESTS)
def test_no_work_is_done_for_a_client_that_has_left(
    slow_model: tuple[TritonPythonModel, list[Any]], kind: str
) -> None:
    model, noted = slow_model
    sender = Sender()
    sender.cancelled = True
    assert model.execute([stub_request(SLOW_REQUESTS[kind], [], sender)]) == [None]
    response, is_last = sender.sent.get(timeout=30)
    assert response.error().message() == "the request was cancelled"
    assert is_last
    assert noted == []


@pytest.mark.parametrize("place", ["while it waits", "while the thread works on it"])
def test_a_stop_drops_a_request_that_takes_long(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    began = threading.Event()
    released = threading.Event()

    def preprocess(inputs: dict[str, Array], _: Any) -> dict[str, Array]:
        noted.append(len(inputs["QUERY"].flat[0]))
        began.set()
        assert released.wait(30)
        return {"INPUT_ID": inputs["REQUEST_OUTPUT_LEN"]}

    monkeypatch.setattr(stub, "pb_utils", PbUtils, raising=False)
    monkeypatch.setattr(stub, "begin", lambda _: ({}, {}))
    monkeypatch.setattr(stub, "tokenizer", lambda _: None)
    monkeypatch.setattr(preprocessing, "Preprocessor", lambda *_: preprocess)
    monkeypatch.setattr(stops, "server_path", lambda: f"{tmp_path}/")
    model = TritonPythonModel()
    model.initialize({"model_instance_name": "preprocessing_0_0"})
    names = ["first", "second", "third"]
    senders = {name: Sender() for name in names}
    lengths = {name: LONG_BYTES + number for number, name in enumerate(names, 1)}
    try:
        for name in names:
            given = inputs("x" * lengths[name])
            model.execute([stub_request(given, ["INPUT_ID"], senders[name], name)])
        assert began.wait(30)
        stopped = "second" if place == "while it waits" else "first"
        stops.tell_all(PREPROCESSING, stopped)
        waiting = model._long_prompts._waiting
        wait_until(lambda: any(slow.is_stopped for slow in waiting.copy()), 30, "the stop")
    finally:
        released.set()
        model.finalize()
    for name in names:
        response, is_last = senders[name].sent.get(timeout=30)
        assert is_last
        assert response.has_error() == (name == stopped)
    begun = ["first", "third"] if place == "while it waits" else names
    assert noted == [lengths[name] for name in begun]


def test_a_stop_finds_all_instances_and_passes_over_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "server_path", lambda: f"{tmp_path}/")
    stops.tell_all(PREPROCESSING, "nobody listens")
    sockets = [stops.StopSocket(PREPROCESSING, index) for index in range(3)]
    stops.tell_all(PREPROCESSING, "a request")
    assert [each.receive() for each in sockets] == ["a request"] * 3
    with pytest.raises(OSError, match="in use"):
        stops.StopSocket(PREPROCESSING, 0)
    for each in sockets:
        each.close()


@pytest.mark.parametrize("place", ["while the response is made", "while it is sent"])
def test_a_request_that_takes_long_is_answered_whatever_fails(
    slow_model: tuple[TritonPythonModel, list[Any]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = slow_model
    sender = Sender()
    failures = [MemoryError("no room in the shared memory")]

    def fail(*_: Any, **__: Any) -> Any:
        if failures:
            raise failures.pop()

    if place == "while the response is made":
        monkeypatch.setattr(PbUtils, "Tensor", fail)
    else:
        send = sender.send
        monkeypatch.setattr(sender, "send", lambda *args, **kwargs: (fail(), send(*args, **kwargs)))
    model.execute([stub_request(SLOW_REQUESTS["a long prompt"], ["INPUT_ID"], sender)])
    response, is_last = sender.sent.get(timeout=30)
    assert "model 'preprocessing' failed: MemoryError" in response.error().message()
    assert is_last
