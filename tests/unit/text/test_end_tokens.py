"""Which tokens end an output, by a model's files, its tokenizer and the settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.text.end_tokens import (
    EndTokens,
    declared_end_ids,
    end_ids,
    tokenizer_end_id,
)
from cog_triton.text.tokenizer import load_tokenizer
from tests.unit.text.test_detokenizer import byte_fallback, byte_level


def model(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"generation_config": {"eos_token_id": 7}}, (2, 7), id="one number"),
        pytest.param({"generation_config": {"eos_token_id": [1, 106]}}, (2, 1, 106), id="a list"),
        pytest.param({"config": {"eos_token_id": 9}}, (2, 9), id="config"),
        pytest.param({"config": {"text_config": {"eos_token_id": [9]}}}, (2, 9), id="nested"),
        pytest.param(
            {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [2, 6]}},
            (2, 6, 5),
            id="both, and the tokenizer's once",
        ),
        pytest.param({"generation_config": {"eos_token_id": None}}, (2,), id="null"),
        pytest.param(
            {"generation_config": {"eos_token_id": [3, "4", -1, True]}}, (2, 3), id="wrong"
        ),
        pytest.param({"generation_config": [1]}, (2,), id="not an object"),
        pytest.param({}, (2,), id="no files"),
    ],
)
def test_all_that_are_named_anywhere(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert end_ids((), [model(tmp_path, **files)], eos_token_id=2) == expected


def test_configured_ones_replace_the_others(tmp_path: Path) -> None:
    directory = model(tmp_path, generation_config={"eos_token_id": [5, 6]})
    assert end_ids((1, 106, 1), [directory], eos_token_id=2, vocabulary=200) == (1, 106)
    with pytest.raises(ConfigurationError, match="END_ID: 106 is not a token id of the model"):
        end_ids((1, 106), [directory], eos_token_id=2, vocabulary=106)


def test_ids_beyond_the_vocabulary_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model(tmp_path, generation_config={"eos_token_id": [5, 100, 99]})
    assert end_ids((), [directory], eos_token_id=2, vocabulary=100) == (2, 5, 99)
    assert "end token 100 is ignored" in caplog.text


def test_a_file_that_cannot_be_read_is_named_and_the_others_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_bytes(b'{"eos_token_id": \xff')
    assert end_ids((), [model(tmp_path, config={"eos_token_id": 9})], eos_token_id=None) == (9,)
    assert "generation_config.json cannot be read" in caplog.text


def test_without_any_a_warning_says_what_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert end_ids((), [tmp_path / "missing"], eos_token_id=None) == ()
    assert "set END_ID" in caplog.text


@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=["byte level", "byte fallback"])
def test_files_say_what_the_loaded_tokenizer_says(tmp_path: Path, kind: Any) -> None:
    kind().tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if "eos_token" in config:
        assert tokenizer_end_id(tmp_path) == loaded.eos_token_id
    else:
        with pytest.raises(LookupError):
            tokenizer_end_id(tmp_path)


def test_the_demo_tokenizer(demo_model: Path) -> None:
    assert tokenizer_end_id(demo_model) == 2


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({"eos_token": None}, None, id="none"),
        pytest.param({"eos_token": {"content": "<|end|>"}}, 6, id="an object"),
        pytest.param({"eos_token": "Ġthe"}, "vocabulary", id="a word of the vocabulary"),
        pytest.param(
            {"eos_token": "x", "added_tokens_decoder": {"77": {"content": "x"}}}, 77, id="added"
        ),
        pytest.param({"eos_token": "no such token"}, LookupError, id="unknown"),
    ],
)
def test_forms_of_the_end_of_sequence(
    tmp_path: Path, demo_model: Path, changed: dict[str, Any], expected: Any
) -> None:
    shutil.copytree(demo_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    if expected is LookupError:
        with pytest.raises(LookupError):
            tokenizer_end_id(tmp_path)
        return
    if expected == "vocabulary":
        expected = load_tokenizer(str(demo_model)).get_vocab()["Ġthe"]
    assert tokenizer_end_id(tmp_path) == expected


def test_a_tokenizer_that_does_not_name_its_end_has_to_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        tokenizer_end_id(tmp_path)


def test_a_tokenizer_whose_model_is_no_object_has_to_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "tokenizer.json").write_text('{"model": ["</s>"]}')
    with pytest.raises(TypeError, match="not an object"):
        tokenizer_end_id(tmp_path)


def test_a_request_may_have_an_end_of_its_own() -> None:
    ends = EndTokens((2, 6))
    assert (ends.first, ends.for_request(None)) == (2, (2, 6))
    assert (ends.for_request(2), ends.for_request(7), ends.for_request(-1)) == ((2,), (7,), ())
    named = EndTokens((2, 6), named_in_requests=True)
    assert (named.for_request(2), named.for_request(6)) == ((2, 6), (6,))
    assert EndTokens().first is None


def test_declared_in_each_file(tmp_path: Path) -> None:
    directory = model(tmp_path, generation_config={"eos_token_id": [4]}, config={"eos_token_id": 4})
    assert declared_end_ids(directory) == [4, 4]
