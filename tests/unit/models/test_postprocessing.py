"""The tokenizer of postprocessing is loaded when it is needed, and not while an engine starts."""

import threading
from pathlib import Path

import pytest

from cog_triton.models.postprocessing import LateTokenizer, is_checked_by_preprocessing
from cog_triton.repository.fill import fill_repository
from tests.support import ROOT


def test_the_first_response_loads_it_and_the_next_do_not() -> None:
    loads: list[int] = []

    def load() -> str:
        loads.append(1)
        return "a tokenizer"

    late = LateTokenizer(load, seconds=3600)
    assert loads == []
    assert late.get() == late.get() == "a tokenizer"
    assert loads == [1]
    late.close()


def test_after_a_while_it_is_loaded_without_a_request() -> None:
    loaded = threading.Event()
    late = LateTokenizer(loaded.set, seconds=0)
    assert loaded.wait(30)
    late.close()


def test_a_request_gets_the_error_of_a_load_and_the_next_tries_again() -> None:
    answers = [ValueError("no tokenizer"), None]

    def load() -> str:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return "a tokenizer"

    late = LateTokenizer(load, seconds=3600)
    with pytest.raises(ValueError, match="no tokenizer"):
        late.get()
    assert late.get() == "a tokenizer"
    late.close()


def test_it_waits_only_where_preprocessing_has_checked_the_same_tokenizer(tmp_path: Path) -> None:
    values: dict[str, dict[str, object]] = {
        "preprocessing": {"tokenizer_dir": "/models/llama"},
        "postprocessing": {"tokenizer_dir": "/models/llama"},
        "tensorrt_llm": {"model": "/models/llama"},
    }
    fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", values)
    model = tmp_path / "filled" / "postprocessing"
    same = {"tokenizer_dir": "/models/llama"}
    assert is_checked_by_preprocessing(model, same)
    assert not is_checked_by_preprocessing(model, same | {"tokenizer_dir": "/models/other"})
    assert not is_checked_by_preprocessing(model, same | {"trust_remote_code": "true"})
    assert not is_checked_by_preprocessing(tmp_path / "alone", same)
