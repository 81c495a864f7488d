"""Where a build happens: its working directory, its log, its output."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TextIO
from urllib.parse import urlsplit

from cog_triton.errors import CogTritonError, ConfigurationError
from cog_triton.processes import locked
from tools.engine_builder import package
from tools.engine_builder.redaction import Redactor

MARKER = ".cog-triton-engine-build"


@contextmanager
def working_directory(directory: Path) -> Iterator[TextIO]:
    """An empty place for the steps' results, held by this build alone; gives its log.

    Raises:
        ConfigurationError: the directory is another's, or another build is running in it.
    """
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ConfigurationError(
            f"{directory} is not empty, and not of an earlier build: name another --workdir"
        )
    directory.mkdir(parents=True, exist_ok=True)

    def refuse() -> None:
        raise ConfigurationError(f"another build is running in {directory}")

    with locked(directory, waiting=refuse):
        (directory / MARKER).touch()
        for name in ("checkpoint", package.ENGINE):
            # An earlier build with more ranks left more of them.
            shutil.rmtree(directory / name, ignore_errors=True)
        with (directory / package.LOG).open("w", encoding="utf-8") as log:
            yield log


@contextmanager
def logged(log: TextIO, hide: Redactor) -> Iterator[None]:
    """Writes the error that ends a build to its log as well."""
    try:
        yield
    except CogTritonError as error:
        print(hide(str(error)), file=log)
        raise


def local_directory(source: str) -> Path | None:
    """The directory that a model's source is, None if it is to be fetched."""
    path = Path(source.removeprefix("file://")).expanduser()
    return path.absolute() if path.is_dir() else None


def linked(source: str, workdir: Path) -> Path:
    """Where a fetched model gets its name: that of the repository or the tar file."""
    name = PurePosixPath(urlsplit(source).path).name.partition("@")[0]
    name = re.sub(r"\.(tar|tgz)(\.\w+)?$", "", name)
    return workdir / "models" / (re.sub(r"[^\w.-]", "_", name) or "model")


def check_output(output: Path) -> None:
    """Makes the directory of the tar.

    Raises:
        ConfigurationError: the tar cannot be written there.
    """
    if output.suffix != ".tar":
        raise ConfigurationError(f"{output.name}: the output is a tar, and must end in .tar")
    if output.is_dir():
        raise ConfigurationError(f"{output} is a directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise ConfigurationError(f"{output.parent} cannot be written to")
