"""What names weights: paths, tar files here, ids of Hugging Face, and what is none of these."""

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from cog_triton.errors import ConfigurationError
from cog_triton.weights.cache import display_url, fetch, local_path
from cog_triton.weights.hub import UNUSED_FORMATS
from tests.support import load_cases
from tests.unit.weights.support import FILES, OTHER, contents, refused, tar

CASES = load_cases(__file__, "sources.yaml")


@pytest.mark.parametrize("case", CASES["paths"])
def test_paths(case: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert local_path(case["source"]) == Path(case["path"])


@pytest.mark.parametrize(
    "case", [*CASES["refused"], {"source": "x" * 5000, "problem": "File name too long"}]
)
def test_what_is_no_source(
    case: dict[str, str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with refused(case["problem"]):
        fetch(case["source"], cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("case", CASES["checksums"])
def test_a_checksum_that_is_none_or_has_no_file(case: dict[str, str], cache: Path) -> None:
    with refused(case["problem"]):
        fetch(case["source"], cache=cache, checksum=case["checksum"])


@pytest.mark.parametrize("case", CASES["shown"])
def test_a_url_is_shown_without_its_secrets(case: dict[str, str]) -> None:
    assert display_url(case["url"]) == case["shown"]


def test_a_directory_is_returned_as_it_is_and_comes_before_a_hub_id(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "org" / "name"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert fetch(str(directory), cache=cache) == directory
    assert fetch(directory.as_uri(), cache=cache) == directory
    assert fetch("org/name", cache=cache) == Path("org/name")
    assert not cache.exists()


# Local tar files


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
def test_a_local_tar_file_is_unpacked(
    compress: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "with space.tar"
    file.write_bytes(compress(tar()))
    monkeypatch.chdir(tmp_path)
    found = fetch(file.name, cache=Path("cache"))
    assert contents(found) == FILES
    assert found.is_absolute()
    assert fetch(file.as_uri(), cache=Path("cache")) == found
    assert file.exists()


def test_a_local_tar_file_that_changes_and_is_checked(tmp_path: Path, cache: Path) -> None:
    file, digest = tmp_path / "m.tar", hashlib.sha256(tar()).hexdigest()
    file.write_bytes(tar())
    with refused(f"has the SHA-256 checksum {digest}, not 000"):
        fetch(str(file), cache=cache, checksum="0" * 64)
    found = fetch(str(file), cache=cache, checksum=f" SHA256:{digest.upper()}\n")
    assert contents(found) == FILES
    file.unlink()
    file.write_bytes(tar(OTHER))
    # The checksum names the content, so the copy will do.
    assert fetch(str(file), cache=cache, checksum=digest) == found
    assert contents(fetch(str(file), cache=cache)) == OTHER
    assert not found.exists()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar())
    cache.touch()
    with refused(r"cache.*: (Not a directory|File exists)"):
        fetch(str(tmp_path / "m.tar"), cache=cache)


# Hugging Face


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for ``snapshot_download``."""
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").touch()
    download: Mock = create_autospec(huggingface_hub.snapshot_download)
    download.return_value = str(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


@pytest.mark.parametrize("case", CASES["ids"])
def test_a_hub_id(case: dict[str, Any], hub: Mock, cache: Path) -> None:
    assert str(fetch(case["source"], cache=cache, token="hf_secret")) == hub.return_value
    given = {"revision": case["revision"], "token": "hf_secret"}
    hub.assert_called_once_with(case["name"], **given, ignore_patterns=[*UNUSED_FORMATS])
    assert not cache.exists()


def hub_error(case: dict[str, Any]) -> tuple[Exception, str]:
    response = Mock(status_code=case.get("status"), headers={})
    given = {"response": response} if "status" in case else {}
    return getattr(hub_errors, case["error"])("hf_secret", **given), case["problem"]


# The HTTP library of huggingface_hub is another from its release 1 on.
HTTP_LIBRARY = sys.modules[hub_errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
NO_ROUTE = getattr(HTTP_LIBRARY, "ConnectError", None) or HTTP_LIBRARY.ConnectionError
HUB_ERRORS = [
    *map(hub_error, CASES["hub"]),
    (NO_ROUTE("hf_secret"), "could not be fetched from Hugging Face: Connect(ion)?Error"),
    (OSError(errno.ENOSPC, "hf_secret"), "not enough disk space .* HF_HOME"),
    (OSError("hf_secret"), "could not be fetched from Hugging Face: OSError"),
    (ValueError("hf_secret"), "could not be fetched from Hugging Face: ValueError"),
]


@pytest.mark.parametrize(("raised", "problem"), HUB_ERRORS)
def test_errors_of_the_hub(
    raised: Exception, problem: str, hub: Mock, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.side_effect = raised
    with pytest.raises(ConfigurationError, match=problem) as error:
        fetch("org/name@main", cache=cache, token="hf_secret")
    assert "org/name@main" in str(error.value)
    assert "hf_secret" not in str(error.value) + caplog.text
    assert error.value.__suppress_context__
    assert error.value.__cause__ is None


def test_the_real_hub_is_off(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, which is told to stay offline, with its real cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused("is unreachable or turned off"):
        fetch("org/name", cache=cache, token="hf_secret")
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert fetch(f"org/name@{commit}", cache=cache) == snapshot
