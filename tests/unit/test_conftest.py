"""Which tests a run has, and in how many processes."""

import argparse
import os
from typing import Any

import pytest

from tests.conftest import leaves_out_rare_tests, uses_all_cores
from tests.support import ROOT

DIRECTORY = str(ROOT / "tests/unit")
FILE = f"{DIRECTORY}/test_helm.py"


@pytest.mark.parametrize(
    ("arguments", "is_chosen", "leaves_out"),
    [
        pytest.param([DIRECTORY], False, True, id="a directory"),
        pytest.param([DIRECTORY, FILE], False, False, id="a file"),
        pytest.param([f"{FILE}::test_it_passes_lint"], False, False, id="a test"),
        pytest.param([DIRECTORY], True, False, id="a directory, with -m or -k"),
    ],
)
def test_a_run_of_directories_leaves_out_the_rare_tests(
    arguments: list[str], is_chosen: bool, leaves_out: bool
) -> None:
    assert leaves_out_rare_tests(arguments, is_chosen=is_chosen) is leaves_out


@pytest.mark.parametrize(
    ("arguments", "options", "cores", "uses_all"),
    [
        pytest.param([DIRECTORY], {}, 2, True, id="all unit tests"),
        pytest.param([f"{DIRECTORY}/text"], {}, 2, False, id="a package"),
        pytest.param([DIRECTORY, FILE], {}, 2, False, id="more than the directory"),
        pytest.param([], {}, 2, False, id="all tests"),
        pytest.param([DIRECTORY], {"numprocesses": 0}, 2, False, id="-n 0"),
        pytest.param([DIRECTORY], {"usepdb": True}, 2, False, id="--pdb"),
        pytest.param([DIRECTORY], {"capture": "no"}, 2, False, id="-s"),
        pytest.param([DIRECTORY], {"collectonly": True}, 2, False, id="--collect-only"),
        pytest.param([DIRECTORY], {}, 1, False, id="one core"),
    ],
)
def test_a_run_of_all_unit_tests_uses_all_cores(
    arguments: list[str],
    options: dict[str, Any],
    cores: int,
    uses_all: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_itself = {"numprocesses": None, "usepdb": False, "capture": "fd", "collectonly": False}
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert uses_all_cores(arguments, argparse.Namespace(**{**by_itself, **options})) is uses_all
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert not uses_all_cores(arguments, argparse.Namespace(**{**by_itself, **options}))
