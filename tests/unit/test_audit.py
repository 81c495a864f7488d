"""scripts/audit.py, with the real pip-audit and a source of data on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import audit
import pytest

from tests.support import QuietHandler, free_port, http_server

LOCK = "".join(
    f"{name}==1.0 --hash=sha256:{'0' * 64}\n" for name in ("sound-package", "hurt-package")
)


@pytest.fixture
def osv() -> Iterator[str]:
    """A source in the form of osv.dev, which knows of one package."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            package = {"name": "hurt-package", "ecosystem": "PyPI"}
            versions = [{"introduced": "0"}, {"fixed": "1.1"}]
            affected = {"package": package, "ranges": [{"type": "ECOSYSTEM", "events": versions}]}
            known = {
                "id": "GHSA-1",
                "aliases": ["CVE-1"],
                "details": "It lets everybody in.",
                "affected": [affected],
            }
            body = {"vulns": [known]} if asked["package"]["name"] == "hurt-package" else {}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with http_server(Handler) as url:
        yield f"{url}/v1/query"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    lock, allowed = tmp_path / "lock.txt", tmp_path / "allowed.yaml"
    lock.write_text(LOCK)
    allowed.write_text("{}")
    return [f"--requirements={lock}", f"--allowed={allowed}"]


@pytest.mark.slow
def test_a_vulnerability_fails_unless_it_is_allowed(
    osv: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*files, f"--osv-url={osv}"]
    assert audit.main(arguments) == 1
    assert capsys.readouterr().out == (
        "hurt-package 1.0: CVE-1, fixed in 1.1\n2 packages audited\n"
    )
    (tmp_path / "allowed.yaml").write_text("CVE-1: Nobody is out.\nCVE-2: Long gone.\n")
    assert audit.main(arguments) == 0
    assert capsys.readouterr().out == (
        "CVE-2 is allowed, and not found any more\n2 packages audited\n"
    )


@pytest.mark.slow
def test_data_that_cannot_be_had_is_named(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1/query"
    assert audit.main([*files, f"--osv-url={url}"]) == 0
    assert capsys.readouterr().out.startswith("not audited, the data on vulnerabilities cannot")


def test_an_index_that_knows_no_vulnerabilities_is_no_clean_bill() -> None:
    skipped = {"name": "a", "skip_reason": "Dependency not found on PyPI: a (1)"}
    sound = {"name": "b", "version": "1", "vulns": []}
    assert audit.unaudited([skipped, skipped]) == "Dependency not found on PyPI: a (1)"
    assert audit.unaudited([skipped, sound]) == ""
    assert audit.notes([skipped, sound], {}) == [skipped["skip_reason"], "1 packages audited"]


@pytest.mark.slow
def test_a_file_that_cannot_be_read_fails(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock.txt").write_text("hurt-package\n")
    assert audit.main(files) == 1
    assert "hurt-package" in capsys.readouterr().err
