"""The command cog-triton, in processes of its own: it runs files as their main module."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.cli import COMMANDS, SCRIPTS, summary
from tests.support import ROOT

FOR_DEVELOPERS = {
    "audit.py",
    "check_bounds.py",
    "image_additions.py",
    "make_docs.py",
    "setup_environment.py",
}
NAMED = ("bench", "summarize")  # whose usage has the name of their file


def cog_triton(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cog_triton.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def test_each_script_is_a_command() -> None:
    files = {file.name for file in SCRIPTS.glob("*.py") if not file.name.startswith("_")}
    assert {*COMMANDS.values()} == files - FOR_DEVELOPERS


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_has_a_line_for_each_command(arguments: tuple[str, ...]) -> None:
    done = cog_triton(*arguments)
    assert done.returncode == 0
    for name, file in COMMANDS.items():
        assert f"\n  {name:17}  {summary(SCRIPTS / file)}\n" in done.stdout


def test_help_imports_nothing_that_takes_time() -> None:
    program = "import sys; from cog_triton.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    modules = done.stdout.splitlines()[-1].split()
    assert not {"numpy", "grpc", "transformers", "torch", "argparse"} & {*modules}


def test_an_unknown_command_is_one_line_that_names_the_others() -> None:
    done = cog_triton("nothing")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"cog-triton: no command 'nothing'; it is one of {', '.join(COMMANDS)}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_takes_its_files_options(command: str) -> None:
    if command == "image-constraints":
        pytest.skip("has no options")
    done = cog_triton(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: cog-triton {command} ") or command in NAMED


def test_a_commands_exit_status_and_output_are_its_files(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    shutil.copy(ROOT / "triton_model_repo" / "ensemble" / "config.pbtxt", file)
    done = cog_triton("fill-template", str(file), "triton_max_batch_size:7")
    assert done.returncode == 0
    assert "max_batch_size: 7" in done.stdout
    done = cog_triton("fill-template", str(file), "no_such:1")
    assert done.returncode == 2
    assert "no_such" in done.stderr


def test_without_the_checkout_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "cog_triton").mkdir()
    for name in ("__init__.py", "cli.py"):
        shutil.copy(ROOT / "cog_triton" / name, tmp_path / "cog_triton")
    for arguments in ((), ("serve",)):
        done = cog_triton(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert f"there is no {tmp_path / 'scripts'}" in line


def test_a_python_without_the_packages_is_told_what_to_do() -> None:
    script = str(SCRIPTS / "fill_template.py")
    done = subprocess.run(  # -S: without the environment's packages
        [sys.executable, "-S", script, "x", "y"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "has no package" in line
    assert ".venv/bin/activate" in line
