from __future__ import annotations

import errno
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.download import UNUSED_FORMATS
from tests.unit.weights.support import ROOT


@dataclass
class Hub:
    """Stands in for ``snapshot_download``."""

    found: Path
    error: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").touch()
    hub = Hub(tmp_path / "snapshot")
    signature = inspect.signature(huggingface_hub.snapshot_download)

    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        hub.calls.append(dict(signature.bind(*args, **kwargs).arguments))
        if hub.error:
            raise hub.error
        return str(hub.found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/na.me-1_b@main", "org/na.me-1_b", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_a_hub_id(source: str, name: str, revision: str | None, hub: Hub, cache: Path) -> None:
    assert fetch(source, cache=cache, token="hf_secret") == hub.found
    assert hub.calls == [
        {
            "repo_id": name,
            "revision": revision,
            "token": "hf_secret",
            "ignore_patterns": list(UNUSED_FORMATS),
        }
    ]
    assert not cache.exists()


HTTP_LIBRARY = sys.modules[hub_errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
BEFORE_1 = HTTP_LIBRARY.__name__ == "requests"  # of huggingface_hub


def response(status: int) -> Any:
    """What the library's errors hold: a response of the HTTP library it uses."""
    request = HTTP_LIBRARY.Request("GET", "https://huggingface.co/x?hf_secret")
    if not BEFORE_1:
        return HTTP_LIBRARY.Response(status, request=request)
    response = HTTP_LIBRARY.Response()
    response.status_code, response.request = status, request.prepare()
    return response


def connection_error() -> Exception:
    kind = HTTP_LIBRARY.ConnectionError if BEFORE_1 else HTTP_LIBRARY.ConnectError
    error: Exception = kind("no route, hf_secret")
    return error


HUB_ERRORS: list[tuple[Callable[[], Exception], str]] = [
    (lambda: hub_errors.GatedRepoError("hf_secret", response=response(403)), "is gated: accept"),
    (
        lambda: hub_errors.RepositoryNotFoundError("hf_secret", response=response(401)),
        "no directory that exists here, and Hugging Face has no such repository",
    ),
    (
        lambda: hub_errors.RevisionNotFoundError("hf_secret", response=response(404)),
        "has no such revision",
    ),
    (lambda: hub_errors.HfHubHTTPError("hf_secret", response=response(401)), "check the token"),
    (lambda: hub_errors.HfHubHTTPError("hf_secret", response=response(503)), "answered HTTP 503"),
    (lambda: hub_errors.LocalEntryNotFoundError("hf_secret"), "cannot be reached or is turned off"),
    (lambda: hub_errors.OfflineModeIsEnabled("hf_secret"), "cannot be reached or is turned off"),
    (lambda: hub_errors.HFValidationError("hf_secret"), "no valid Hugging Face id"),
    (connection_error, "could not be fetched from Hugging Face: Connect(ion)?Error"),
    (lambda: OSError(errno.ENOSPC, "hf_secret"), "no space left .* HF_HOME"),
    (lambda: OSError("hf_secret"), "could not be fetched from Hugging Face: OSError"),
    (lambda: ValueError("hf_secret"), "could not be fetched from Hugging Face: ValueError"),
]


@pytest.mark.parametrize(("make", "problem"), HUB_ERRORS, ids=[p for _, p in HUB_ERRORS])
def test_errors_of_the_hub(
    make: Callable[[], Exception],
    problem: str,
    hub: Hub,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.error = make()
    with pytest.raises(ConfigurationError, match=problem) as error:
        fetch("org/name@main", cache=cache, token="hf_secret")
    assert "org/name@main" in str(error.value)
    assert "hf_secret" not in str(error.value)
    assert error.value.__suppress_context__
    assert error.value.__cause__ is None
    assert "hf_secret" not in caplog.text


def test_an_empty_snapshot_is_an_error(hub: Hub, cache: Path) -> None:
    (hub.found / "config.json").unlink()
    with pytest.raises(ConfigurationError, match="is empty"):
        fetch("org/name", cache=cache)


def test_the_hub_itself_when_it_is_off(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real library, which is told to stay offline, with its real cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigurationError, match="cannot be reached or is turned off"):
        fetch("org/name", cache=cache, token="hf_secret")
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert fetch(f"org/name@{commit}", cache=cache) == snapshot


def test_importing_it_imports_no_hub() -> None:
    code = "import sys, cog_triton.weights; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
