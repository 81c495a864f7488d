"""Unpack tar files: whole ones, whose members stay inside the directory."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from cog_triton.errors import ConfigurationError

ZSTD = (
    "is compressed with zstd, which Python reads from 3.14 on; give a plain tar file or a .tar.gz"
)
# tarfile raises these for an archive that is damaged, or made to do damage.
_DAMAGE = (
    *(tarfile.TarError, EOFError, zlib.error, lzma.LZMAError),
    *(ValueError, LookupError, OverflowError, RecursionError),
)
_BLOCK = 512  # bytes of a header; the archive ends with a block of zeros


def unpack(archive: Path, directory: Path, shown: str) -> None:
    """Unpack a tar file into an empty directory.

    Raises:
        ConfigurationError: it is not a tar file, not all of one, or has an unsafe member.
        OSError: a file cannot be written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ConfigurationError(
            "tar files need Python 3.10.12, 3.11.4 or later, which filters them"
        )
    opened = False
    try:
        with tarfile.open(archive, errorlevel=2) as tar:
            opened = True
            tar.extractall(directory, members=_members(tar), filter="data")
            _require_end(tar)
        root = os.path.realpath(directory)
        for path in directory.rglob("*"):  # the filter saw a link before those that came after it
            if path.is_symlink() and not os.path.realpath(path).startswith(root + os.sep):
                raise tarfile.FilterError(f"{path.name!r} is a link that leads outside")
    except tarfile.FilterError as error:
        raise ConfigurationError(
            f"{shown} is not unpacked: its member {error}; make the tar file without it"
        ) from None
    except _DAMAGE as error:
        problem = f"is cut short or damaged ({error})" if opened else _not_a_tar(archive)
        raise ConfigurationError(f"{shown} {problem}") from None
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damage so
            raise ConfigurationError(f"{shown} is damaged ({error})") from None
        raise


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    # Nothing is written through a link: the filter itself once let that pass (CVE-2025-4517).
    links: set[PurePosixPath] = set()
    for member in tar:
        for name in (member.name, member.linkname if member.islnk() else ""):
            path = PurePosixPath(name)
            if ".." in path.parts or links & {path, *path.parents}:
                raise tarfile.FilterError(f"{member.name!r} leads through a link or through ..")
        if member.issym():
            # The filter takes "a/" for a directory, and its link's target for relative to it.
            member.name = member.name.rstrip("/")
            links.add(PurePosixPath(member.name))
        yield member


def _require_end(tar: tarfile.TarFile) -> None:
    # tarfile takes a missing or damaged header for the end of the archive.
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError("no end of archive")
    while file.read(1 << 20):  # to gzip's checksum
        pass


def _not_a_tar(archive: Path) -> str:
    with archive.open("rb") as file:
        head = file.read(_BLOCK)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return ZSTD
    if head.lstrip().startswith(b"<"):
        return "is a web page instead of a tar file; check the URL"
    return "is not a tar file, or cut short; check its contents"
