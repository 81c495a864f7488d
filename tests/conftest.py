from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.support import regions_left, wait_until
from tools.demo_model import DIRECTORY

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # predict.py and scripts/ are no packages
sys.path.insert(0, str(ROOT / "scripts"))

# Machines are shared: no example fails for the time that it takes.
with contextlib.suppress(ImportError):  # the environment of ENGINE=vllm has no Hypothesis
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

REGIONS_BEFORE = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[REGIONS_BEFORE] = regions_left()


@pytest.hookimpl(trylast=True)  # after the fixtures have stopped their servers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a server of it left shared memory."""
    if hasattr(session.config, "workerinput"):  # the process that started the workers looks
        return
    before = session.config.stash[REGIONS_BEFORE]
    try:
        # The guard of a server that was killed a moment ago may still be clearing up.
        wait_until(lambda: not regions_left() - before, 10, "the removal of shared memory")
    except AssertionError as error:
        print(f"\n{error}: {sorted(regions_left() - before)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """The demo model that ships, or another one that is as good."""
    return Path(pytestconfig.getoption("--demo-model"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine", default="auto", help="ENGINE of the servers with the demo model (auto)"
    )
    parser.addoption(
        "--demo-model", default=DIRECTORY, help="directory of the demo model (cog_triton/demo)"
    )
    parser.addoption(
        "--cancels", type=int, default=60, help="cancels by each door in test_cancels.py (60)"
    )


@pytest.fixture(scope="session")
def cancels(request: pytest.FixtureRequest) -> int:
    """The number of cancels of a storm: --cancels."""
    return int(request.config.getoption("--cancels"))
