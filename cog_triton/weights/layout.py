"""Which members of a tar file stay in the directory that it is unpacked in."""

from __future__ import annotations

import tarfile
from pathlib import PurePosixPath


class UnsafeMember(Exception):
    """A member of a tar file that could reach outside the directory it is unpacked in."""


class Layout:
    """What the members of a tar file, one after the other, make of a directory.

    ``place`` goes by names alone. That is sound because it lets no name and no link's target lead
    *through* a link, whichever comes first, and nothing take the place of something else: then each
    ".." goes where it seems to. tarfile's own filter has let such members pass before.
    """

    def __init__(self) -> None:
        self._files: set[PurePosixPath] = set()
        self._links: set[PurePosixPath] = set()
        self._directories: set[PurePosixPath] = set()  # or what must be one, if it is there

    def place(self, member: tarfile.TarInfo) -> PurePosixPath:
        """Takes note of a member, and returns where it goes.

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
    """The directories that lead to a symbolic link's target, which is itself not one of them."""
    if target.startswith("/") or "\0" in target:
        raise UnsafeMember(f"links to the absolute path {target!r}")
    steps, at = set(), directory
    for part in PurePosixPath(target).parts:
        steps.add(at)
        if part == ".." and not at.name:
            raise UnsafeMember(f"links to {target!r}, outside the directory")
        at = at.parent if part == ".." else at / part
    return steps
