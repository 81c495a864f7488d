"""A download under way, in two files that a later process continues."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cog_triton.weights.files import hash_of, read_record, size_text, write_record
from cog_triton.weights.version import Version


class Unreachable(Exception):
    """The server did not answer; the text is a message for the user."""


class Interrupted(Exception):
    """A request came to nothing, and another may not."""


class Notes(BaseModel):
    """The record of a download under way."""

    model_config = ConfigDict(frozen=True)

    version: Version
    complete: bool


class Partial:
    """A file that is being downloaded, as far as it has come: in this process or one before it."""

    def __init__(self, entry: Path) -> None:
        self.path = entry / "download.tar"
        self._notes = entry / "download.json"
        notes = read_record(Notes, self._notes) if self.path.is_file() else None
        self.version = notes.version if notes else Version()
        self.size = self.path.stat().st_size if notes else 0
        whole = self.version.size in (None, self.size)
        self.complete = notes is not None and notes.complete and whole
        self._digest: hashlib._Hash | None = None

    def restart(self, version: Version) -> None:
        """Begin anew, with the first byte of ``version``."""
        self.discard()
        self.path.touch()
        self.version = version
        self._note()

    def receive(self, chunks: Iterable[bytes]) -> None:
        """Append what comes; what came before an error stays.

        Raises:
            Interrupted: that was not all.
        """
        self._digest = self._digest or hash_of(self.path)
        with self.path.open("ab") as file:
            for chunk in chunks:
                file.write(chunk)
                self._digest.update(chunk)
                self.size += len(chunk)
        self._finish()

    def adopt(self, file: Path, version: Version) -> None:
        """Take a whole file that something else has downloaded.

        Raises:
            Interrupted: it is not whole.
        """
        self.restart(version)
        file.replace(self.path)
        self.size = self.path.stat().st_size
        self._finish()

    def sha256(self) -> str:
        """Return the SHA-256 of what has come so far, in hexadecimal."""
        self._digest = self._digest or hash_of(self.path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)
        self.version, self.size, self.complete, self._digest = Version(), 0, False, None

    def _finish(self) -> None:
        if self.version.size not in (None, self.size):
            expected = self.version.size
            problem = f"{size_text(self.size)} of {size_text(expected or 0)} came"
            if self.size > (expected or 0):
                self.discard()
            raise Interrupted(problem)
        self.complete = True
        self._note()

    def _note(self) -> None:
        write_record(self._notes, Notes(version=self.version, complete=self.complete))
