"""A directory at a path that all users of the machine know, used only while nobody else can change it.

Another user may have made ``/tmp/coglet`` first, with links in it to files of ours. Everything is therefore
reached from descriptors of directories that were opened without following links and then checked. A path
could lead elsewhere a moment after its check.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT_USER = 0


class UnsafeDirectory(Exception):
    """Another user could change what is in the directory."""


@dataclass(frozen=True)
class Opened:
    """Descriptors of the directory and of the one that it is in."""

    parent: int
    directory: int


class PrivateDirectory:
    """The directory of a path, and that path's parent; what is missing is made for this user alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Yield descriptors of both, or raise UnsafeDirectory, or OSError if they cannot be made."""
        with (
            _private(self._path.parent) as parent,
            _private(self._path, name=self._path.name, within=parent) as directory,
        ):
            yield Opened(parent, directory)

    def problem(self) -> str:
        """Return why nothing may be made here; empty if something may, or if the system has no room."""
        try:
            with self.opened():
                return ""
        except UnsafeDirectory as error:
            return str(error)
        except OSError:
            return ""

    def make(self, name: str, mark: str) -> None:
        """Make a directory with an empty file in it; raise UnsafeDirectory if there is another's entry."""
        with (
            self.opened() as opened,
            _private(self._path / name, name=name, within=opened.directory) as made,
        ):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(mark, flags, 0o600, dir_fd=made))

    def remove(self, name: str) -> None:
        """Remove a directory of this user and all that is in it; links are removed, not followed."""
        with contextlib.suppress(OSError, UnsafeDirectory), self.opened() as opened:
            _remove_tree(name, opened.directory)

    def remove_marked(self, mark: str) -> None:
        """Remove all directories that have this mark."""
        with contextlib.suppress(OSError, UnsafeDirectory), self.opened() as opened:
            for name in os.listdir(opened.directory):
                with contextlib.suppress(OSError):
                    inside = os.open(name, _DIRECTORY, dir_fd=opened.directory)
                    try:
                        # Raises where there is no mark.
                        os.stat(mark, dir_fd=inside, follow_symlinks=False)
                    finally:
                        os.close(inside)
                    _remove_tree(name, opened.directory)


@contextlib.contextmanager
def _private(path: Path, *, name: str = "", within: int | None = None) -> Iterator[int]:
    """Make a directory if it is missing; yield its descriptor, or raise UnsafeDirectory."""
    relative = name or str(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(relative, 0o700, dir_fd=within)
    try:
        descriptor = os.open(relative, _DIRECTORY, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafeDirectory(f"{path} is a link or a file, not a directory") from None
        raise
    try:
        _check(path, os.fstat(descriptor), descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, descriptor: int) -> None:
    """Make a directory of this user's private; raise UnsafeDirectory if another user could change it."""
    if status.st_uid == os.geteuid():
        if status.st_mode & _OTHERS_WRITE:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    elif status.st_uid != ROOT_USER:
        raise UnsafeDirectory(f"{path} belongs to another user (uid {status.st_uid})")
    elif status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise UnsafeDirectory(f"{path} is writable by other users and has no sticky bit")


def _remove_tree(name: str, within: int) -> None:
    """Remove a directory, unless it is another user's or a link."""
    status = os.stat(name, dir_fd=within, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    # Without following links, and each directory is compared with what was seen before it was opened.
    for _, directories, files, inside in os.fwalk(name, topdown=False, dir_fd=within):
        for file in files:
            os.unlink(file, dir_fd=inside)
        for directory in directories:
            try:
                os.rmdir(directory, dir_fd=inside)
            except NotADirectoryError:
                # It is a link to a directory.
                os.unlink(directory, dir_fd=inside)
    os.rmdir(name, dir_fd=within)
