"""The demo model's files and its tokenizer."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model import DIRECTORY, MANIFEST, checksums, make_demo_model

# What puts a model in place


def fake_build(directory: Path) -> Mapping[str, object]:
    """Make the files of a model without a model."""
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("built")
    return {"steps": 1}


def test_a_model_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> Mapping[str, object]:
        fake_build(directory)
        raise KeyboardInterrupt

    output = tmp_path / "demo"
    for build in (interrupted, fake_build, interrupted, fake_build):
        with contextlib.suppress(KeyboardInterrupt):
            make_demo_model(output, build)
        assert {*tmp_path.iterdir()} <= {output}
    described = json.loads((output / MANIFEST).read_text())
    assert (described["steps"], described["files"]) == (1, checksums(output))
    (tmp_path / "link").symlink_to("demo")
    for other in (tmp_path, tmp_path / "link"):
        with pytest.raises(FileExistsError, match="not a demo model"):
            make_demo_model(other, fake_build)
    assert checksums(output) == described["files"]


# The tokenizer; its chat template is in tests/unit/text/test_chat.py


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


# The model that ships


def test_its_files_are_those_that_were_trained() -> None:
    described = json.loads((DIRECTORY / MANIFEST).read_text(encoding="utf-8"))
    assert described["files"] == checksums(DIRECTORY)
    assert (DIRECTORY / "model.safetensors").stat().st_size < 1.5e6
