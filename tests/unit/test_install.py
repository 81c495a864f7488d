"""scripts/install.sh: pip's configuration in uv's variables, and PyTorch's build for CPUs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


def install(
    directory: Path,
    *,
    version: str = "3.10",
    pip: int = 0,
    index: int = 0,
    reads_configuration: bool = False,
    **given: str,
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script; return that, and the calls of Python.

    A real pip reads its configuration on demand only, as that takes a moment.
    """
    python = shutil.copy(Path(__file__).with_name("install_python.sh"), directory / "python")
    calls = directory / "calls"
    hidden = {n: v for n, v in os.environ.items() if not n.startswith(("PIP_", "UV_"))}
    own = {"PATH": f"{directory}:/usr/bin:/bin", "PYTHON": str(python), "CALLS": str(calls)}
    own["REAL_PYTHON"] = sys.executable if reads_configuration else ""
    statuses = {"VERSION": version, "PIP": str(pip), "INDEX": str(index)}
    configuration = {"PIP_CONFIG_FILE": str(Path(__file__).with_name("pip.conf"))}
    environment = {**hidden, **own, **statuses, **configuration, **given}
    command = [f"{ROOT}/scripts/install.sh", f"{directory}/venv", "--editable", ".[local]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done, calls.read_text().splitlines()


def test_uv_is_given_the_configuration_of_pip(tmp_path: Path) -> None:
    given = {
        "UV_DEFAULT_INDEX=https://packages.example/simple",
        "UV_INDEX=https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS=/wheels,/more-wheels",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    }
    done, _ = install(tmp_path, reads_configuration=True)
    assert given <= {*done.stdout.splitlines()}
    done, _ = install(
        tmp_path,
        reads_configuration=True,
        PIP_INDEX_URL="https://c.example/simple",
        UV_FIND_LINKS="/own",
    )
    given = {"UV_DEFAULT_INDEX=https://c.example/simple", "UV_FIND_LINKS=/own"}
    assert given <= {*done.stdout.splitlines()}


@pytest.mark.parametrize(("gpu", "index"), [(True, 0), (False, 0), (False, 1)])
def test_pytorch_for_cpus_is_taken_without_a_gpu(gpu: bool, index: int, tmp_path: Path) -> None:
    if gpu:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    elif Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    done, calls = install(tmp_path, index=index)
    assert done.returncode == 0, done.stderr
    backend = [call.split()[-1] for call in calls if "--torch-backend" in call]
    pinned = re.findall(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert backend == ([] if gpu else pinned)
    assert calls[-1].endswith("--editable .[local]")
    assert ("cannot be reached" in done.stderr) is bool(index)
    # Each step is announced, on standard error.
    steps = [line for line in done.stderr.splitlines() if line.startswith("setup: ")]
    assert steps[0].startswith(f"setup: creating the environment {tmp_path}/venv")
    assert steps[-1] == "setup: installing the other packages"
    assert "setup:" not in done.stdout


def test_an_old_python_and_a_failed_step_end_it(tmp_path: Path) -> None:
    assert install(tmp_path, pip=3)[0].returncode == 3
    done, _ = install(tmp_path, version="3.9")
    assert done.returncode == 1
    text = "setup: Python 3.10 or later is needed, not 3.9: make setup PYTHON=python3.12\n"
    assert done.stderr == text
