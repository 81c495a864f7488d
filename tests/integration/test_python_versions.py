"""Some of these tests again, on the other Python versions that are on this machine.

Each gets an environment of its own, ``.venv-3.12`` say, without PyTorch: the simulated engine needs none,
and the demo model is the main environment's. It is kept, ignored by git, and removed by ``make clean``.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import ROOT

VERSIONS = ("3.10", "3.13")  # the oldest and the newest: each takes more than a minute
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
# Tests that run on the simulated engine alone.
SUBSET = (
    "tests/integration/test_simulated.py",
    "tests/integration/test_outputs.py",
    "--engine=simulated",  # these environments have no PyTorch
)
NOT_NEEDED = {"torch", "peft"}  # the second brings the first
# There is no wheel of NumPy 1 for Python 3.13. Compiled like this it takes minutes, and else several times
# as many: only where COMPILE_NUMPY is set, and where it was done before.
COMPILED = ("3.13",)
QUICKLY = tuple(
    f"--config-settings=setup-args=-D{option}"
    for option in ("optimization=0", "disable-optimization=true", "blas=none", "lapack=none")
)
INSTALL_SECONDS = 900
RUN_SECONDS = 600
VARIABLES = ("VERSION", "Py_ENABLE_SHARED")
PROBE = f"import ensurepip, sysconfig, venv; print(*sysconfig.get_config_vars{VARIABLES})"


def interpreter(version: str) -> Path:
    """A Python of that version, on PATH or of pyenv, whose shared library tritonserver's stubs need."""
    on_path = shutil.which(f"python{version}")
    of_pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
    for candidate in [*([Path(on_path)] if on_path else []), *sorted(of_pyenv)]:
        probed = subprocess.run([candidate, "-c", PROBE], capture_output=True, text=True)
        # A shim of pyenv's is on PATH for every version, and works for those that are switched on.
        if probed.stdout.split() == [version, "1"]:
            return candidate
    pytest.skip(f"no Python {version} with a shared library on PATH or under ~/.pyenv/versions")


def requirements() -> list[str]:
    """What the project and its extra ``local`` ask for, but for what the simulated engine can spare."""
    named = map(Requirement, importlib.metadata.requires("cog-triton") or ())
    asked = [r for r in named if r.marker is None or r.marker.evaluate({"extra": "local"})]
    return sorted(
        {f"{r.name}[{','.join(r.extras)}]{r.specifier}" for r in asked if r.name not in NOT_NEEDED}
    )


def environment(version: str, base: Path) -> Path:
    """The Python of an environment that has the requirements; one that is there is used again."""
    directory = ROOT / f".venv-{version}"
    stamp, wanted = directory / ".installed", "\n".join([*requirements(), "pytest"])
    python = directory / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([base, "-m", "venv", directory], check=True)
    if version in COMPILED:
        if "COMPILE_NUMPY" not in os.environ or shutil.which("cc") is None:
            text = f"NumPy 1 has no wheel for Python {version}: set COMPILE_NUMPY to compile it"
            pytest.skip(text)
        install(python, *QUICKLY, *(r for r in wanted.splitlines() if r.startswith("numpy[")))
    install(python, *wanted.splitlines())
    stamp.write_text(wanted)
    return python


def install(python: Path, *arguments: str) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True, timeout=INSTALL_SECONDS)


@pytest.mark.rare
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != RUNNING])
def test_the_simulated_engine_on_another_python(version: str) -> None:
    python = environment(version, interpreter(version))
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUBSET],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout
