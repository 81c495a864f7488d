"""Repositories of Hugging Face with GGUF files: the real library, on a hub of the test's own."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import constants

from cog_triton.deployment.model_files import with_files
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.weights import gguf
from cog_triton.weights.hub import choose_gguf, fetch_from_hub
from tests.support import QuietHandler, http_server

COMMIT = "5" * 40
SEVERAL = ("a-Q8_0.gguf", "a-IQ4_XS.gguf", "a-q4_k_m.gguf", "mmproj-a-f16.gguf", "README.md")


@dataclass
class Hub:
    """A hub with one repository, org/name; a file's content is its name."""

    names: tuple[str, ...] = ()
    fetched: list[str] = field(default_factory=list)

    def fetch(self, source: str) -> str:
        """Return what is found, relative to its snapshot."""
        found = fetch_from_hub(source, None)
        return str(found)[str(found).index(COMMIT) + len(COMMIT) + 1 :]


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    # The library remembers by the name of the directory which files a revision has.
    cache = tmp_path_factory.mktemp("hub")

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, *, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            file = path.partition("/resolve/")[2].partition("/")[2]
            status = 200
            body = b""
            if path.startswith("/api/models/org/name/tree/"):
                files = [
                    {"type": "file", "path": name, "size": len(name), "oid": "0"}
                    for name in hub.names
                ]
                body = json.dumps(files).encode()
            elif path.startswith("/api/models/org/name"):
                siblings = [{"rfilename": name} for name in hub.names]
                body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
            elif file in hub.names:
                body = file.encode()
                if has_body:
                    hub.fetched.append(file)
            else:
                status = 404
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.end_headers()
            if has_body:
                self.wfile.write(body)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with http_server(Handler) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        files = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}{files}")
        yield hub


@pytest.mark.parametrize(
    ("names", "source", "found"),
    [
        (("a.gguf", "README.md"), "org/name", "a.gguf"),
        (("a.gguf", "config.json"), "org/name", "a.gguf"),
        (SEVERAL, "org/name", "a-q4_k_m.gguf"),
        (SEVERAL, "hf.co/org/name:Q8_0", "a-Q8_0.gguf"),
        (SEVERAL, "org/name:iq4_xs@main", "a-IQ4_XS.gguf"),
        (SEVERAL, "org/name/a-Q8_0.gguf", "a-Q8_0.gguf"),
        (("Q8_0/a.gguf", "F16/a.gguf"), "org/name:F16", "F16/a.gguf"),
        (("model.safetensors", "a-Q8_0.gguf"), "org/name", ""),
        (("model.safetensors", "a-Q8_0.gguf"), "org/name:Q8_0", "a-Q8_0.gguf"),
    ],
)
def test_the_file_of_a_repository(
    names: tuple[str, ...], source: str, found: str, hub: Hub
) -> None:
    hub.names = names
    assert hub.fetch(source) == found
    fetched = {name for name in hub.fetched if name.endswith((".gguf", ".safetensors"))}
    assert fetched == {found or "model.safetensors"}


def test_a_file_in_the_cache_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.names = SEVERAL
    for source in ("org/name:Q8_0", "org/name"):
        hub.fetch(source)
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch("org/name:Q8_0") == "a-Q8_0.gguf"
    assert hub.fetch("org/name") == "a-q4_k_m.gguf"
    with pytest.raises(ConfigurationError, match=r"org/name:IQ4_XS matches no GGUF file"):
        hub.fetch("org/name:IQ4_XS")
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("names", "source", "problem"),
    [
        (
            ("a-Q8_0.gguf", "a-Q5_0.gguf"),
            "org/name",
            "org/name has several GGUF files, but no single Q4_K_M file; "
            "use org/name/FILE, where FILE is one of a-Q5_0.gguf, a-Q8_0.gguf",
        ),
        (
            ("a-Q8_0.gguf", "a-Q5_0.gguf"),
            "org/name:Q2_K@main",
            "org/name:Q2_K@main matches no GGUF file; use org/name/FILE, where FILE is one of "
            "a-Q5_0.gguf, a-Q8_0.gguf",
        ),
        (
            ("x/a-Q8_0.gguf", "x/b-Q8_0.gguf"),
            "org/name:Q8_0",
            "org/name:Q8_0 matches several GGUF files; use org/name/FILE, where FILE is one of "
            "x/a-Q8_0.gguf, x/b-Q8_0.gguf",
        ),
        (
            ("a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"),
            "org/name",
            "a-Q8_0-00001-of-00002.gguf is one part of a split GGUF model",
        ),
        (("model.safetensors",), "org/name:Q8_0", "org/name:Q8_0 contains no GGUF file of a model"),
        (("mmproj.gguf",), "org/name", "org/name contains no GGUF file of a model"),
    ],
)
def test_a_repository_without_one_file_to_take(
    names: tuple[str, ...], source: str, problem: str, hub: Hub
) -> None:
    hub.names = names
    with pytest.raises(ConfigurationError) as error:
        hub.fetch(source)
    assert problem in str(error.value)
    assert not [name for name in hub.fetched if name.endswith(".gguf")]


def test_a_quantization_is_a_whole_word() -> None:
    files = ["a-IQ4_K_M.gguf", "a-Q4_K_M_L.gguf", "a.Q4_K_M.gguf"]
    assert choose_gguf("org/name", files, "Q4_K_M") == "a.Q4_K_M.gguf"


def test_the_model_of_the_settings_is_the_converted_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.names = SEVERAL
    model = tmp_path / "converted"
    model.mkdir()
    converted: list[str] = []

    def convert(file: Path, _cache: Path, _dtype: str) -> Path:
        converted.append(file.name)
        return model

    monkeypatch.setattr(gguf, "converted", convert)
    for source in ("org/name:Q8_0", "org/name/a-IQ4_XS.gguf"):
        settings = with_files(read_settings({"MODEL": source}))
        assert settings.model == str(model)
    assert converted == ["a-Q8_0.gguf", "a-IQ4_XS.gguf"]
