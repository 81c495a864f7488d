"""Tokenizers that have only a SentencePiece model, and other files that a tokenizer may have."""

import codecs
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def sentencepiece_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of the kind of Llama 2's, with a tokenizer.model and no tokenizer.json."""
    sentencepiece = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("model")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the quick brown fox jumps over lazy dog {i}" for i in range(50)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "LlamaTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_sentencepiece_model_is_read(sentencepiece_only: Path) -> None:
    tokenizer = load_tokenizer(str(sentencepiece_only))
    ids = tokenizer("the quick fox é", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == "the quick fox é"
    assert len(ids) < 12


def test_sentencepiece_is_named(sentencepiece_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "sentencepiece":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigurationError, match=r"has a tokenizer\.model") as caught:
        load_tokenizer(str(sentencepiece_only))
    assert "import of sentencepiece halted" in str(caught.value)
    assert "pip install 'sentencepiece>=0.2,<0.2.2' 'protobuf>=4.25'" in str(caught.value)


def test_a_damaged_model_is_not_blamed_on_sentencepiece(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e\x01not a model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match="no tokenizer could be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_with_a_byte_order_mark_is_named(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / file, tmp_path)
    marked = tmp_path / name
    marked.write_bytes(codecs.BOM_UTF8 + marked.read_bytes())
    with pytest.raises(ConfigurationError, match=f"{name} begins with a byte order mark"):
        load_tokenizer(str(tmp_path))


def test_a_special_token_that_is_no_text(demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": 2}))
    with pytest.raises(ConfigurationError, match="Special token eos_token has to be"):
        load_tokenizer(str(tmp_path))
