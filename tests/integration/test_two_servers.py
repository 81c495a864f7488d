"""Two servers on one machine, as docs/production.md starts them; but all of their ports are free ones."""

from __future__ import annotations

import re
from pathlib import Path

from cog_triton.settings import read_settings
from tests.support import ROOT, CogServer


def second_servers_environment() -> dict[str, str]:
    """What docs/production.md sets for the second server's Triton."""
    page = (ROOT / "docs" / "production.md").read_text()
    (command,) = re.findall(r"^\$ (TRITON_.*) make serve PORT=5001$", page, re.MULTILINE)
    return dict(item.split("=") for item in command.split())


def test_the_second_server_takes_ports_that_are_free() -> None:
    settings = read_settings(second_servers_environment())
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (0, 0, 0)


def test_each_answers_and_the_end_of_one_leaves_the_other_alone(
    demo_model: Path, tmp_path: Path
) -> None:
    environment = {"MODEL": str(demo_model), "ENGINE": "simulated"}
    of_second = {**environment, **second_servers_environment()}
    with (
        CogServer(environment, tmp_path / "first") as first,
        CogServer(of_second, tmp_path / "second") as second,
    ):
        for server in (first, second):
            assert server.wait_until_set_up()["status"] == "READY", server.log.read_text()

        def answer(server: CogServer) -> str:
            return "".join(server.predict(prompt="Hi", max_tokens=5)["output"])

        answers = [answer(server) for server in (first, second)]
        assert answers[0] == answers[1]
        assert first.stop() == 0
        assert answer(second) == answers[1]
        assert second.stop() == 0
