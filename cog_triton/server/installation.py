"""A tritonserver on this machine: its place, and what makes it run with this Python."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.redaction import is_secret
from cog_triton.server.guard import STUB
from cog_triton.settings import Settings

CONTAINER_ROOT = Path("/opt/tritonserver")
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installation:
    """A tritonserver found on this machine."""

    server: Path
    # Has a directory for each backend.
    backends: Path
    # Of the Python backend for this Python; None for the backend's own.
    stub: Path | None = None
    # The directory of the server's shared libraries, if they are beside it.
    libraries: str = ""


def locate(settings: Settings, container_root: Path = CONTAINER_ROOT) -> Installation:
    """Return the server to run: the one named by TRITONSERVER, else the container's, else the wheel's."""
    server = container_root / "bin" / "tritonserver"
    if settings.tritonserver:
        server = settings.tritonserver.resolve()
        if not server.is_file():
            raise ConfigurationError(f"TRITONSERVER={settings.tritonserver} is not a file")
    # If the server is the wheel's, it comes with a stub and libraries.
    found = _wheel()
    if found is None or (server.is_file() and server != found.server.resolve()):
        found = Installation(server, server.parent.parent / "backends")
    if not found.server.is_file():
        raise ConfigurationError(
            "no tritonserver found: set TRITONSERVER, run in NVIDIA's Triton container, or pip install "
            "nvidia-pytriton"
        )
    found = replace(found, backends=settings.backend_directory or found.backends)
    if not (found.backends / "python").is_dir():
        raise ConfigurationError(
            f"{found.backends} contains no Python backend; set TRITONSERVER_BACKEND_DIR"
        )
    return found


def _wheel() -> Installation | None:
    """Return the server of the wheel nvidia-pytriton; None without it.

    It is found and not imported: that takes most of a second, and everything it depends on.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    libraries = package.parent / "nvidia_pytriton.libs"
    version = sysconfig.get_python_version()
    stub = root / "python_backend_stubs" / version / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise ConfigurationError(
            f"the tritonserver wheel does not support Python {version}; use one of {known}"
        )
    return Installation(root / "bin" / "tritonserver", root / "backends", stub, str(libraries))


def assemble(installation: Installation, directory: Path) -> tuple[Path, Path]:
    """Return the server and a backend directory for this Python, made without a change to the wheel."""
    server = installation.server
    source = installation.backends
    backends = directory / "backends"
    (backends / "python").mkdir(parents=True)
    for part in (*source.iterdir(), *(source / "python").iterdir()):
        link = backends / part.relative_to(source)
        if part.name != "__pycache__" and not link.exists():
            link.symlink_to(part)
    if installation.stub is not None:
        _copy_program(installation.stub, backends / "python" / STUB)
    if not os.access(server, os.X_OK):
        server = _copy_program(server, directory / "tritonserver")
    return server, backends


def _copy_program(file: Path, copy: Path) -> Path:
    # There may be a link.
    copy.unlink(missing_ok=True)
    shutil.copyfile(file, copy)
    copy.chmod(0o755)
    return copy


def environment(
    installation: Installation, environ: Mapping[str, str], passed_on: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment of tritonserver and of its Python stubs, without secrets.

    They get those that ``passed_on`` names. The stubs embed an isolated libpython: they ignore PYTHONPATH,
    and find the packages of a virtual environment only by the ``python3`` that comes first in PATH.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in passed_on or not is_secret(name, value)
    }
    kept["LD_LIBRARY_PATH"] = _path_list(
        installation.libraries,
        environ.get("LD_LIBRARY_PATH", ""),
        # The last: a system's Python has its library where other versions of CUDA's and MPI's are.
        str(sysconfig.get_config_var("LIBDIR")),
    )
    kept["PATH"] = _path_list(str(Path(sys.executable).parent), environ.get("PATH", ""))
    return kept


def _path_list(*lists: str) -> str:
    """Join lists of directories. An empty directory would mean the current one, and is left out."""
    directories = ":".join(lists).split(":")
    return ":".join(directory for directory in directories if directory)
