"""A tritonserver on this machine: where it is, and what makes it run with this Python."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings

CONTAINER_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]

_SECRET = re.compile(r"(_TOKEN|_KEYS?|_SECRET|PASSWORD)$", re.IGNORECASE)
_ADDRESS = re.compile(r"_(URL|DSN)$", re.IGNORECASE)
_PASSWORD = re.compile(r"(//|^)[^/@\s:]*:[^/@\s]+@|\bpassword=", re.IGNORECASE)
_NEEDED = "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"  # between TensorRT-LLM's own processes
_SOURCES = ("COG_WEIGHTS", "MODEL", "TOKENIZER")  # a URL has a signature or a password at times


@dataclass(frozen=True)
class Installation:
    """A tritonserver found on this machine.

    Attributes:
        server: the binary.
        backends: directory with one directory per backend.
        stub: the Python backend's stub for the running Python; None means the backend's own.
        libraries: directories that the server's shared libraries are in.
    """

    server: Path
    backends: Path
    stub: Path | None = None
    libraries: tuple[Path, ...] = ()


def locate(settings: Settings, container_root: Path = CONTAINER_ROOT) -> Installation:
    """The server to run: the one named by TRITONSERVER, else the container's, else the wheel's.

    Raises:
        ConfigurationError: there is none, or it has no Python backend for this Python.
    """
    wheel = _wheel()
    if settings.tritonserver:
        server = settings.tritonserver.resolve()
        if not server.is_file():
            raise ConfigurationError(f"TRITONSERVER={settings.tritonserver} is no file")
        if wheel and server == wheel.server.resolve():
            installation = wheel
        else:
            installation = Installation(server, server.parent.parent / "backends")
    elif (container_root / "bin" / "tritonserver").is_file():
        installation = Installation(
            container_root / "bin" / "tritonserver", container_root / "backends"
        )
    elif wheel:
        installation = wheel
    else:
        raise ConfigurationError(
            "no tritonserver found: set TRITONSERVER, run in NVIDIA's Triton container, or "
            "pip install nvidia-pytriton"
        )
    if settings.backend_directory:
        installation = Installation(
            installation.server,
            settings.backend_directory,
            installation.stub,
            installation.libraries,
        )
    if not (installation.backends / "python").is_dir():
        raise ConfigurationError(f"no Python backend in {installation.backends}")
    return installation


def _wheel() -> Installation | None:
    # Found, not imported: importing pytriton takes most of a second and everything it depends on.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    stubs = root / "python_backend_stubs"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = stubs / version / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in stubs.iterdir()))
        raise ConfigurationError(
            f"the tritonserver wheel has no Python backend stub for Python {version}, only for {known}"
        )
    return Installation(
        root / "bin" / "tritonserver",
        root / "backends",
        stub,
        (package.parent / "nvidia_pytriton.libs",),
    )


def assemble(installation: Installation, directory: Path) -> tuple[Path, Path]:
    """Makes what can be executed: the server binary and a backend directory for the running Python.

    The wheel's files may lack the executable bit, and its directory may be read-only.

    Returns:
        The binary and the backend directory.
    """
    backends = directory / "backends"
    backends.mkdir(parents=True)
    for backend in installation.backends.iterdir():
        if backend.name != "python" or installation.stub is None:
            (backends / backend.name).symlink_to(backend)
    if installation.stub is not None:
        _assemble_python_backend(installation, backends / "python")
    return _executable(installation.server, directory / "tritonserver"), backends


def _assemble_python_backend(installation: Installation, destination: Path) -> None:
    assert installation.stub is not None
    destination.mkdir()
    for part in (installation.backends / "python").iterdir():
        if part.name not in (STUB, "__pycache__"):
            (destination / part.name).symlink_to(part)
    shutil.copyfile(installation.stub, destination / STUB)
    (destination / STUB).chmod(0o755)


def _executable(binary: Path, copy: Path) -> Path:
    if os.access(binary, os.X_OK):
        return binary
    shutil.copyfile(binary, copy)
    copy.chmod(0o755)
    return copy


def environment(
    installation: Installation, environ: Mapping[str, str], passed_on: Collection[str] = ()
) -> dict[str, str]:
    """The environment of tritonserver, of its Python stubs and of all that starts them; without secrets.

    The stubs embed an isolated libpython: they ignore PYTHONPATH, and find the packages of a virtual
    environment only by the ``python3`` that comes first in PATH.

    Args:
        passed_on: names of secrets that they get all the same.
    """
    library_path = [
        *map(str, installation.libraries),
        *filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)),
        # Last: a system's Python has its library where other versions of CUDA's and MPI's are.
        str(sysconfig.get_config_var("LIBDIR")),
    ]
    path = [
        str(Path(sys.executable).parent),
        *filter(None, environ.get("PATH", "").split(os.pathsep)),
    ]
    return {
        **{n: v for n, v in environ.items() if n in passed_on or not is_secret(n, v)},
        "LD_LIBRARY_PATH": os.pathsep.join(library_path),
        "PATH": os.pathsep.join(path),
    }


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable is kept from tritonserver, which needs none: files are here."""
    return (
        (bool(_SECRET.search(name)) and name != _NEEDED)
        or (bool(_ADDRESS.search(name)) and bool(_PASSWORD.search(value)))
        or (name in _SOURCES and "://" in value)
    )
