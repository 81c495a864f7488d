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
from unittest.mock import Mock, create_autospec

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from cog_triton.errors import ConfigurationError
from cog_triton.weights.cache import display_url, fetch, local_path
from cog_triton.weights.hub import UNUSED_FORMATS
from tests.unit.weights.support import FILES, OTHER, contents, refused, tar


@pytest.mark.parametrize(
    ("source", "path"),
    [
        pytest.param("/a/b", "/a/b", id="absolute path"),
        pytest.param("a/b", "a/b", id="relative path"),
        pytest.param("file:///a/b%20c", "/a/b c", id="URL of a file, escaped"),
        pytest.param("file://localhost/a", "/a", id="URL of a file, of this machine"),
        pytest.param("FILE:/a", "/a", id="URL of a file, in short"),
        pytest.param("~/a", "/h/a", id="home directory"),
        pytest.param("~no-such-user-xyz/a", "~no-such-user-xyz/a", id="home directory of nobody"),
    ],
)
def test_paths(source: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert local_path(source) == Path(path)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param(
            "s3://bucket/m.tar",
            r"cannot be fetched from s3:// URLs; use an https:// URL \(for a bucket",
            id="S3",
        ),
        pytest.param("ftp://u:secret@h/m.tar", "fetched from ftp://", id="FTP"),
        pytest.param("file://other/m.tar", "another machine", id="file of another machine"),
        pytest.param("http://", "malformed", id="no host"),
        pytest.param("https:///m.tar?secret", "malformed", id="no host, but a path"),
        pytest.param("http://h:secret/m.tar", "malformed", id="password for a port"),
        pytest.param("http://[secret/m.tar", "malformed", id="bracket that is not closed"),
        pytest.param("no such thing", "a URL, or a Hugging Face id", id="words"),
        pytest.param("a/b/c", "a URL, or a Hugging Face id", id="path that is not there"),
        pytest.param("gpt2", "a URL, or a Hugging Face id", id="id without an organization"),
        pytest.param("empty", "is empty", id="empty directory"),
        pytest.param("pipe", "neither a file nor a directory", id="pipe"),
        pytest.param("x" * 5000, "File name too long", id="too long a name"),
    ],
)
def test_what_is_no_source(
    source: str, problem: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors show no secret."""
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with refused(problem):
        fetch(source, cache=cache)
    assert not cache.exists()


ZEROS = "0" * 64


@pytest.mark.parametrize(
    ("source", "checksum", "problem"),
    [
        pytest.param("m.tar", "aaaaaaaaaaaaaaaa", "64 hexadecimal digits", id="too short"),
        pytest.param("m.tar", "g" + "0" * 63, "64 hexadecimal digits", id="other letters"),
        pytest.param("m.tar", "sha256:", "64 hexadecimal digits", id="only its kind"),
        pytest.param(".", ZEROS, "is not a tar file", id="directory"),
        pytest.param("org/name", ZEROS, "is not a tar file", id="Hugging Face id"),
    ],
)
def test_a_checksum_that_is_none_or_has_no_file(
    source: str, checksum: str, problem: str, cache: Path
) -> None:
    with refused(problem):
        fetch(source, cache=cache, checksum=checksum)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        pytest.param("https://h/a/m.tar", "https://h/a/m.tar", id="no secrets"),
        pytest.param(
            "https://user:pass@h:1/m.tar?X-Amz-Signature=s#f",
            "https://h:1/m.tar",
            id="user, query and fragment",
        ),
        pytest.param("https://user:p@ss@h/m.tar", "https://h/m.tar", id="password with an at sign"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert display_url(url) == shown


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
    # Without weights, the hub would be asked for its GGUF files.
    (tmp_path / "snapshot" / "model.safetensors").touch()
    download: Mock = create_autospec(huggingface_hub.snapshot_download)
    download.return_value = str(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        pytest.param("org/name", "org/name", None, id="name"),
        pytest.param("org/na.me-1_b@main", "org/na.me-1_b", "main", id="name with a branch"),
        pytest.param("org/name@refs/pr/1", "org/name", "refs/pr/1", id="name with a pull request"),
    ],
)
def test_a_hub_id(source: str, name: str, revision: str | None, hub: Mock, cache: Path) -> None:
    assert str(fetch(source, cache=cache, token="hf_secret")) == hub.return_value
    hub.assert_called_once_with(
        name,
        revision=revision,
        token="hf_secret",
        allow_patterns=None,
        ignore_patterns=[*UNUSED_FORMATS],
    )
    assert not cache.exists()


def hub_error(kind: type[Exception], status: int | None = None) -> Exception:
    """An error of huggingface_hub, which has a response where it has a status."""
    if status is None:
        return kind("hf_secret")
    response_error: Callable[..., Exception] = kind
    return response_error("hf_secret", response=Mock(status_code=status, headers={}))


# The HTTP library of huggingface_hub is another from its release 1 on.
HTTP_LIBRARY = sys.modules[hub_errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
NO_ROUTE = getattr(HTTP_LIBRARY, "ConnectError", None) or HTTP_LIBRARY.ConnectionError
HUB_ERRORS = [
    pytest.param(hub_error(hub_errors.GatedRepoError, 403), "is gated: accept", id="gated"),
    pytest.param(
        hub_error(hub_errors.RepositoryNotFoundError, 401),
        "not a local directory, and its Hugging Face repository does not exist",
        id="no repository",
    ),
    pytest.param(
        hub_error(hub_errors.RevisionNotFoundError, 404), "has no such revision", id="no revision"
    ),
    pytest.param(hub_error(hub_errors.HfHubHTTPError, 401), "check the token", id="no access"),
    pytest.param(hub_error(hub_errors.HfHubHTTPError, 503), "answered HTTP 503", id="status 503"),
    pytest.param(
        hub_error(hub_errors.LocalEntryNotFoundError),
        "is unreachable or turned off",
        id="not in the cache",
    ),
    pytest.param(
        hub_error(hub_errors.OfflineModeIsEnabled), "is unreachable or turned off", id="offline"
    ),
    pytest.param(
        hub_error(hub_errors.HFValidationError), "not a valid Hugging Face id", id="no id"
    ),
    pytest.param(
        NO_ROUTE("hf_secret"),
        "could not be fetched from Hugging Face: Connect(ion)?Error",
        id="no route",
    ),
    pytest.param(
        OSError(errno.ENOSPC, "hf_secret"), "not enough disk space .* HF_HOME", id="full disk"
    ),
    pytest.param(
        OSError("hf_secret"),
        "could not be fetched from Hugging Face: OSError",
        id="other error of the system",
    ),
    pytest.param(
        ValueError("hf_secret"),
        "could not be fetched from Hugging Face: ValueError",
        id="other error",
    ),
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
