"""Which tests a run has."""

import pytest

from tests.conftest import leaves_out_rare_tests
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
