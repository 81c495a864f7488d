"""Unpacks tar files, whole ones with safe members only."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from copy import copy
from pathlib import Path, PurePosixPath

from cog_triton.errors import ConfigurationError
from cog_triton.weights.files import BLOCK

_TAR_BLOCK = 512  # bytes of a header; the archive ends with a block of zeros
_ZSTD_PROBLEM = (
    "is compressed with zstd, which Python reads from 3.14 on; give a plain tar file or a .tar.gz"
)
# What tarfile raises for an archive that is damaged, or made to do damage.
_DAMAGE = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    OverflowError,
    RecursionError,
)


def check_name(shown: str) -> None:
    """Check that a name may be a tar file's, before it is downloaded.

    Raises:
        ConfigurationError: it names a compression that this Python does not read.
    """
    reads_zstd = "zst" in tarfile.TarFile.OPEN_METH  # Python 3.14
    if shown.lower().endswith((".tar.zst", ".tzst")) and not reads_zstd:
        raise ConfigurationError(f"{shown} {_ZSTD_PROBLEM}")


def unpack(archive: Path, directory: Path, shown: str) -> None:
    """Unpack a tar file into an empty directory, which on an error is left as it is by then.

    Raises:
        ConfigurationError: it is no tar file, not all of one, or has an unsafe member.
        OSError: the disk is at fault.
    """
    layout, opened, name = Layout(), False, ""
    try:
        with tarfile.open(archive) as tar:
            opened = True
            for member in tar:
                name = member.name
                _extract(tar, member, layout.place(member), directory)
            _require_end(tar)
    except UnsafeMember as error:
        raise ConfigurationError(
            f"{shown} is not unpacked: its member {name!r} {error}; make the tar file without it"
        ) from None
    except _DAMAGE as error:
        problem = f"is cut short or damaged ({error})" if opened else _not_a_tar(archive)
        raise ConfigurationError(f"{shown} {problem}") from None
    except OSError as error:
        if error.errno is None:  # gzip's and bz2's word for damage
            raise ConfigurationError(f"{shown} is damaged ({error})") from None
        raise


def unpacked_size(archive: Path) -> int | None:
    """Count the bytes of the files in a tar file; None if it cannot be read to its end."""
    try:
        with tarfile.open(archive) as tar:
            return sum(member.size for member in tar)
    except (*_DAMAGE, OSError):
        return None


def _extract(
    tar: tarfile.TarFile, member: tarfile.TarInfo, path: PurePosixPath, directory: Path
) -> None:
    member = copy(member)
    member.name = str(path)  # without the dots that ``path`` does not count
    if member.islnk():
        member.linkname = str(PurePosixPath(member.linkname))
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, directory, filter="data")
    else:
        # Python 3.10 before 3.10.12: no owner, no set-user-id, nothing that others may write.
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        tar.extract(member, directory)
    if not os.path.lexists(directory / path):  # which tarfile may leave at that
        raise tarfile.ExtractError(f"{member.name!r} could not be made")


def _require_end(tar: tarfile.TarFile) -> None:
    # tarfile takes a missing or damaged header for the end of the archive.
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
        raise tarfile.ReadError("no end of archive")
    while file.read(BLOCK):  # to where gzip has its checksum
        pass


def _not_a_tar(archive: Path) -> str:
    with archive.open("rb") as file:
        head = file.read(_TAR_BLOCK)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return _ZSTD_PROBLEM
    if head.lstrip().startswith(b"<"):
        return "is a web page instead of a tar file; check the URL"
    return "is no tar file, or cut short; check what it is"


class UnsafeMember(Exception):
    """A member of a tar file that could reach outside the directory it is unpacked in."""


class Layout:
    """The members of a tar file so far, as they lie in the directory that it is unpacked in.

    ``place`` goes by names alone. That is sound because it lets no name and no link's target lead
    *through* a link, whichever comes first, and nothing take the place of something else: then each
    ".." goes where it seems to. tarfile's own filter has let such members pass before.
    """

    def __init__(self) -> None:
        self._files: set[PurePosixPath] = set()
        self._links: set[PurePosixPath] = set()
        self._directories: set[PurePosixPath] = set()  # or what must be one, if it is there

    def place(self, member: tarfile.TarInfo) -> PurePosixPath:
        """Note a member, and return where it goes.

        Raises:
            UnsafeMember: it is none of the above, or neither file, directory nor link.
        """
        path = _inside(member.name)
        through = set(path.parents)
        if member.issym():
            through |= _steps(path.parent, member.linkname)
        elif member.islnk():
            if _inside(member.linkname) not in self._files:
                raise UnsafeMember(f"links to {member.linkname!r}, which is no file before it")
        elif not (member.isreg() or member.isdir()):
            raise UnsafeMember("is a device or a pipe")
        if self._is_taken(path, member):
            raise UnsafeMember("is in the place of another")
        if through & (self._links | self._files):
            raise UnsafeMember("leads through a link or a file")
        self._directories |= through
        if member.isdir():
            self._directories.add(path)
        else:
            (self._links if member.issym() else self._files).add(path)
        return path

    def _is_taken(self, path: PurePosixPath, member: tarfile.TarInfo) -> bool:
        if member.isdir():
            return path in self._files or path in self._links
        if not path.name or path in self._directories or path in self._links:
            return True
        return path in self._files and not member.isreg()  # a newer one of an older file may come


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute():
        raise UnsafeMember(f"has the absolute name {name!r}")
    if ".." in path.parts:
        raise UnsafeMember(f"has .. in the name {name!r}")
    if "\0" in name:
        raise UnsafeMember("has a NUL in its name")
    return path


def _steps(directory: PurePosixPath, target: str) -> set[PurePosixPath]:
    """Return the directories that lead to a symbolic link's target, which is itself not one of them."""
    if target.startswith("/") or "\0" in target:
        raise UnsafeMember(f"links to the absolute path {target!r}")
    steps, at = set(), directory
    for part in PurePosixPath(target).parts:
        steps.add(at)
        if part == ".." and not at.name:
            raise UnsafeMember(f"links to {target!r}, outside the directory")
        at = at.parent if part == ".." else at / part
    return steps
