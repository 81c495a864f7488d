"""Each cell of the table of clients in docs/openai/agents.md names a test that exists."""

import subprocess
import sys

import _clients  # type: ignore[import-not-found, unused-ignore]
import pytest

from tests.pages import names_a_test
from tests.support import ROOT

CLIENTS: dict[str, dict[str, str]] = _clients.load()
EVIDENCE = sorted(
    {
        evidence
        for columns in CLIENTS.values()
        for evidence in columns.values()
        if evidence not in _clients.SHOWN
    }
)


@pytest.mark.parametrize("columns", CLIENTS.values(), ids=CLIENTS)
def test_a_client_has_every_column(columns: dict[str, str]) -> None:
    assert tuple(columns) == _clients.COLUMNS


def test_the_function_behind_a_cell_exists() -> None:
    assert [evidence for evidence in EVIDENCE if not names_a_test(evidence)] == []


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """The ids of the tests in the files that the table names."""
    files = sorted({evidence.partition("::")[0] for evidence in EVIDENCE})
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return set(listed.stdout.splitlines())


@pytest.mark.rare
@pytest.mark.parametrize("evidence", EVIDENCE)
def test_the_case_behind_a_cell_exists(evidence: str, collected: set[str]) -> None:
    file = evidence.partition("::")[0]
    if not any(name.startswith(f"{file}::") for name in collected):
        pytest.skip("the file needs a package that is not installed, and so has no cases here")
    assert evidence in collected
