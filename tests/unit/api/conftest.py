"""The applications of both ports, for the tests of a module."""

import contextlib
from collections.abc import Iterator

import pytest

from cog_triton.api.cog import predictions as module
from cog_triton.api.cog.messages import VARIABLE
from cog_triton.api.openai.storage import journal
from tests.unit.api.ports import CogPort, OpenAIPort


@pytest.fixture(scope="session", autouse=True)
def _transactions_without_pauses() -> Iterator[None]:
    """Let no write wait for others to share its transaction: the tests wait for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "GROUP_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def openai_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIPort]:
    port = OpenAIPort(tmp_path_factory.mktemp("journal"))
    with contextlib.closing(port):
        yield port
        port.run(port.served.storage.journal.close())


@pytest.fixture(scope="module")
def cog_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CogPort]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        patch.setattr(module, "REMOVE_SECONDS", 0.0)
        patch.setattr(module, "DIRECTORY", tmp_path_factory.mktemp("cog") / "predictions")
        with contextlib.closing(CogPort()) as port:
            yield port
