"""The list of transformers' models is kept, and made again when the package changes."""

import json
import os
from pathlib import Path

import pytest

from cog_triton.text.transformers_import import Listing, models_listing

LISTING: Listing = {
    frozenset(): {"llama.configuration_llama": {"LlamaConfig"}},
    frozenset(("torch", "vision")): {"llama.modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
}


class Reader:
    """Reads a directory as transformers does, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: Path) -> Listing:
        self.calls += 1
        return LISTING


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tmp_path / "site-packages" / "transformers" / "models"
    (directory / "llama").mkdir(parents=True)
    return directory


def test_a_second_import_reads_the_kept_list(models: Path, tmp_path: Path) -> None:
    read = Reader()
    cache = tmp_path / "cache"
    assert models_listing(models, read, cache) == LISTING
    assert models_listing(models, read, cache) == LISTING
    assert read.calls == 1


def test_what_the_caller_adds_is_not_kept(models: Path, tmp_path: Path) -> None:
    read = Reader()
    models_listing(models, read, tmp_path)
    models_listing(models, read, tmp_path)[frozenset()]["new"] = set()
    assert models_listing(models, read, tmp_path) == LISTING


def test_an_installation_is_noticed(models: Path, tmp_path: Path) -> None:
    read = Reader()
    models_listing(models, read, tmp_path / "cache")
    os.utime(models / "llama", (1, 1))  # older than before, as files of an archive are
    models_listing(models, read, tmp_path / "cache")
    (models / "qwen").mkdir()
    models_listing(models, read, tmp_path / "cache")
    assert read.calls == 3


@pytest.mark.parametrize("content", ["", "{", "[]", "null", json.dumps({"state": ""})])
def test_a_damaged_file_is_replaced(content: str, models: Path, tmp_path: Path) -> None:
    read = Reader()
    cache = tmp_path / "cache"
    models_listing(models, read, cache)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert models_listing(models, read, cache) == LISTING
    assert models_listing(models, read, cache) == LISTING
    assert read.calls == 2


def test_a_cache_that_cannot_be_written(models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.write_text("")
    assert models_listing(models, Reader(), cache) == LISTING


def test_a_checkout_is_read_each_time(tmp_path: Path) -> None:
    read = Reader()
    cache = tmp_path / "cache"
    directory = tmp_path / "src" / "transformers" / "models"
    directory.mkdir(parents=True)
    models_listing(directory, read, cache)
    models_listing(directory, read, cache)
    assert read.calls == 2
    assert not cache.exists()
