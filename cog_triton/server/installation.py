"""A tritonserver on this machine: its place, and what makes it run with this Python."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.server.guard import STUB
from cog_triton.settings import Settings

CONTAINER_ROOT = Path("/opt/tritonserver")
PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# A variable that holds a secret, as NAME=value: by its name, a password in an address, or the URL of a
# model, which may have a signature or a password. TensorRT-LLM's own processes need the key between them.
_SECRET = re.compile(
    r"(?!TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY=)[^=]*(_TOKEN|_KEYS?|_SECRET|PASSWORD)="
    r"|[^=]*_(URL|DSN)=(.*//)?[^/@\s:]*:[^/@\s]+@|[^=]*_(URL|DSN)=.*\bpassword="
    r"|(COG_WEIGHTS|MODEL|TOKENIZER)=.*://",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Installation:
    """A tritonserver found on this machine.

    Attributes:
        backends: directory with one directory per backend.
        stub: the Python backend's stub for the running Python; None means the backend's own.
        libraries: directory of the server's shared libraries, if they are beside it.
    """

    server: Path
    backends: Path
    stub: Path | None = None
    libraries: str = ""


def locate(settings: Settings, container_root: Path = CONTAINER_ROOT) -> Installation:
    """Return the server to run: the one named by TRITONSERVER, else the container's, else the wheel's.

    Raises:
        ConfigurationError: there is none, or it has no Python backend for this Python.
    """
    server = container_root / "bin" / "tritonserver"
    if settings.tritonserver:
        server = settings.tritonserver.resolve()
        if not server.is_file():
            raise ConfigurationError(f"TRITONSERVER={settings.tritonserver} is no file")
    found = _wheel()
    if found is None or (server.is_file() and server != found.server.resolve()):
        found = Installation(server, server.parent.parent / "backends")
    if not found.server.is_file():
        raise ConfigurationError(
            "no tritonserver found: set TRITONSERVER, run in NVIDIA's Triton container, or "
            "pip install nvidia-pytriton"
        )
    found = replace(found, backends=settings.backend_directory or found.backends)
    if not (found.backends / "python").is_dir():
        raise ConfigurationError(f"no Python backend in {found.backends}")
    return found


def _wheel() -> Installation | None:
    # Found, not imported: importing pytriton takes most of a second and everything it depends on.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    root, libraries = package / "tritonserver", package.parent / "nvidia_pytriton.libs"
    stubs = root / "python_backend_stubs"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = stubs / version / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in stubs.iterdir()))
        raise ConfigurationError(
            f"the tritonserver wheel has no Python backend stub for Python {version}, only for {known}"
        )
    return Installation(root / "bin" / "tritonserver", root / "backends", stub, str(libraries))


def assemble(installation: Installation, directory: Path) -> tuple[Path, Path]:
    """Return the server binary and a backend directory for the running Python, made in ``directory``.

    The wheel's files may lack the executable bit, and its directory may be read-only.
    """
    server, backends = installation.server, directory / "backends"
    python = backends / "python"
    backends.mkdir(parents=True)
    python.mkdir()
    for backend in installation.backends.iterdir():
        if backend.name != "python":
            (backends / backend.name).symlink_to(backend)
    for part in (installation.backends / "python").iterdir():
        if part.name != "__pycache__" and (part.name != STUB or installation.stub is None):
            (python / part.name).symlink_to(part)
    copies = {} if installation.stub is None else {installation.stub: python / STUB}
    if not os.access(server, os.X_OK):
        copies[server] = directory / "tritonserver"
    for file, copy in copies.items():
        shutil.copyfile(file, copy)
        copy.chmod(0o755)
    return copies.get(server, server), backends


def environment(
    installation: Installation, environ: Mapping[str, str], passed_on: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment of tritonserver and of its Python stubs, without secrets.

    The stubs embed an isolated libpython: they ignore PYTHONPATH, and find the packages of a virtual
    environment only by the ``python3`` that comes first in PATH.

    Args:
        passed_on: names of secrets that they get all the same.
    """
    kept = {n: v for n, v in environ.items() if n in passed_on or not _SECRET.match(f"{n}={v}")}
    # Python's is the last: a system's has its library where other versions of CUDA's and MPI's are.
    libraries = (installation.libraries, environ.get("LD_LIBRARY_PATH", ""))
    lists = {
        "LD_LIBRARY_PATH": (*libraries, str(sysconfig.get_config_var("LIBDIR"))),
        "PATH": (str(Path(sys.executable).parent), environ.get("PATH", "")),
    }
    # An empty directory would mean the current one.
    return kept | {n: ":".join(filter(None, ":".join(v).split(":"))) for n, v in lists.items()}
